"""Which backends exist, which can run here, and which one "auto" takes."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

logger = logging.getLogger("headmax")

BACKENDS = ("auto", "reference", "chunkwise", "triton")
"""All names an op's `backend` may have; not every op has every backend."""
AUTO_ORDER = ("chunkwise", "reference")
"""What "auto" tries, fastest first."""

_announced: set[tuple[str, str, str]] = set()


class Lazy:
    """A backend whose module is imported on its first call: `Lazy("headmax.ops.gla.triton_chunk", "gla", needs="triton")`."""

    def __init__(self, module: str, name: str, needs: str) -> None:
        self.module, self.name, self.needs = module, name, needs
        self.function: Callable[..., Any] | None = None

    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run on `device`, or None."""
        if importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"needs a CUDA device, got {device.type}"
        return None

    def load(self) -> Callable[..., Any]:
        if self.function is None:
            self.function = getattr(importlib.import_module(self.module), self.name)
        return self.function


Table = Mapping[str, Callable[..., Any] | Lazy]


def select(op: str, table: Table, backend: str, device: torch.device) -> Callable[..., Any]:
    """The implementation of `op` to run: the named one or an error, and for "auto" the first that can run on `device`."""
    if backend == "auto":
        backend = next(name for name in AUTO_ORDER if name in table and _unavailable(table[name], device) is None)
        if not torch.compiler.is_compiling() and (op, backend, device.type) not in _announced:
            _announced.add((op, backend, device.type))
            logger.info("%s: backend %r on %s", op, backend, device.type)
    elif backend not in table:
        raise ValueError(f"{op}: unknown backend {backend!r}{suggest(backend, [*table, 'auto'])}")
    elif (why := _unavailable(table[backend], device)) is not None:
        raise ValueError(f"{op}: backend {backend!r} cannot run here: {why}")
    chosen = table[backend]
    return chosen.load() if isinstance(chosen, Lazy) else chosen


def _unavailable(entry: Callable[..., Any] | Lazy, device: torch.device) -> str | None:
    return entry.unavailable(device) if isinstance(entry, Lazy) else None


def suggest(name: object, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, or all of them."""
    options = list(known)
    close = difflib.get_close_matches(str(name), options, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(map(repr, options))}"


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Ops choose their own precision: float32 sums must not become bfloat16 products because autocast is on."""
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()
