"""Which backends exist, which can run here, and which one "auto" takes."""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

logger = logging.getLogger("headmax")

AUTO_ORDER = ("chunkwise", "reference")
"""What "auto" tries, fastest first."""

_announced: set[tuple[str, str, str]] = set()


def select(op: str, table: Mapping[str, Callable[..., Any]], backend: str, device: torch.device) -> Callable[..., Any]:
    """The implementation of `op` to run: the named one or an error, and for "auto" the first that can run on `device`."""
    if backend != "auto":
        if backend not in table:
            raise ValueError(f"{op}: unknown backend {backend!r}{suggest(backend, [*table, 'auto'])}")
        return table[backend]
    name = next(name for name in AUTO_ORDER if name in table)
    if not torch.compiler.is_compiling() and (op, name, device.type) not in _announced:
        _announced.add((op, name, device.type))
        logger.info("%s: backend %r on %s", op, name, device.type)
    return table[name]


def suggest(name: object, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, or all of them."""
    options = list(known)
    close = difflib.get_close_matches(str(name), options, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(map(repr, options))}"


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Ops choose their own precision: float32 sums must not become bfloat16 products because autocast is on."""
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()
