"""Which backends exist, which can run here, and which one "auto" takes."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

logger = logging.getLogger("headmax")

BACKENDS = ("auto", "reference", "chunkwise", "triton", "fla")
"""All names an op's `backend` may have; not every op has every backend."""
AUTO_ORDER = ("triton", "chunkwise", "reference")
"""What "auto" tries, fastest first."""

LEAST_SHARED = 99
"""KiB of shared memory a block of the kernels may need on any GPU: what consumer cards have."""

_announced: set[tuple[str, str, str]] = set()


@functools.cache
def kernel_obstacle() -> str | None:
    """Why Triton kernels cannot run on this machine's GPU, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs"
    if not torch.cuda.is_available():
        return None  # a compiler may ask for a GPU that is elsewhere
    gpu = torch.cuda.get_device_properties()
    shared = gpu.shared_memory_per_block_optin // 1024  # type: ignore[attr-defined]
    if gpu.major < 8 or shared < LEAST_SHARED:
        return (
            f"needs compute capability 8.0 and {LEAST_SHARED} KiB of shared memory, {gpu.name} has {gpu.major}.{gpu.minor} and {shared} KiB"
        )
    return None


class Lazy:
    """A backend for CUDA devices whose module is imported on its first call: `Lazy("headmax.ops.gla.fla", "gla", needs="fla")`.

    One that is `interpreted` also runs on the CPU where TRITON_INTERPRET=1.
    """

    def __init__(self, module: str, name: str, needs: str, interpreted: bool = False) -> None:
        self.module, self.name, self.needs, self.interpreted = module, name, needs, interpreted
        self.function: Callable[..., Any] | None = None

    def unavailable(self, device_type: str) -> str | None:
        """Why it cannot run on such a device, or None."""
        if importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        if device_type != "cuda":
            interpreted = self.interpreted and os.environ.get("TRITON_INTERPRET") == "1"
            return None if interpreted else f"needs a CUDA device, got {device_type}"
        return kernel_obstacle() if self.needs == "triton" else None

    def load(self) -> None:
        if self.function is None:
            self.function = getattr(importlib.import_module(self.module), self.name)


Table = Mapping[str, Callable[..., Any] | Lazy]
_tables: dict[str, Table] = {}


def register(op: str, table: Table) -> None:
    """Makes the backends of `op` known to `select`."""
    _tables[op] = table


def register_recurrence(op: str, reference: Callable[..., Any], chunkwise: Callable[..., Any]) -> None:
    """The backends every recurrence has: two in PyTorch, and kernels in the op's own folder."""
    folder = f"headmax.ops.{op}"
    triton = Lazy(f"{folder}.triton_chunk", op, needs="triton", interpreted=True)
    register(op, {"reference": reference, "chunkwise": chunkwise, "triton": triton, "fla": Lazy(f"{folder}.fla", op, needs="fla")})


def select(op: str, backend: str, device_type: str, unfit: str | None = None) -> Callable[..., Any]:
    """The implementation of `op` to run: the named one or an error, and for "auto" the first that can run on such a device.

    `unfit` says why "auto" should not take a kernel for these inputs, if so.
    """
    chosen = _tables[op][_choose(op, backend, device_type, unfit)]
    return chosen.function if isinstance(chosen, Lazy) else chosen  # type: ignore[return-value]


@torch.compiler.assume_constant_result
def _choose(op: str, backend: str, device_type: str, unfit: str | None) -> str:
    """The name of the backend, loaded; a compiled graph asks once, when it is traced."""
    table = _tables[op]
    if backend == "auto":
        backend = next(name for name, reason in obstacles(op, device_type, unfit).items() if reason is None)
        if device_type != "meta" and (op, backend, device_type) not in _announced:
            _announced.add((op, backend, device_type))
            logger.debug("%s: backend %r on %s", op, backend, device_type)
            if device_type == "cuda" and (why := _unavailable(table.get("triton", len), device_type)) is not None:
                logger.warning("%s: the faster backend 'triton' is passed over: %s", op, why)
    elif backend not in table:
        raise ValueError(f"{op}: unknown backend {backend!r}{suggest(backend, [*table, 'auto'])}")
    elif (why := _unavailable(table[backend], device_type)) is not None:
        raise ValueError(f"{op}: backend {backend!r} cannot run here: {why}")
    if isinstance(chosen := table[backend], Lazy):
        chosen.load()
    return backend


def obstacles(op: str, device_type: str, unfit: str | None = None) -> dict[str, str | None]:
    """The backends of `op` that "auto" considers, fastest first: why each cannot be taken on such a device, or None."""
    table = _tables[op]
    reasons = {name: _unavailable(table[name], device_type) for name in AUTO_ORDER if name in table}
    if "triton" in table:
        reasons["triton"] = reasons["triton"] or unfit or ("the interpreter is for tests" if device_type != "cuda" else None)
    return reasons


def _unavailable(entry: Callable[..., Any] | Lazy, device_type: str) -> str | None:
    return entry.unavailable(device_type) if isinstance(entry, Lazy) else None


def suggest(name: object, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, or all of them."""
    options = list(known)
    close = difflib.get_close_matches(str(name), options, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(map(repr, options))}"


def beside(backend: str) -> str:
    """What the ops around a recurrence of that backend run on: kernels where it names them, else plain PyTorch, as it is itself."""
    return backend if backend in ("auto", "triton") else "reference"


def around(op: str, backend: str, x: torch.Tensor, unfit: str | None = None) -> Callable[..., Any]:
    """The implementation of an op around a recurrence of that backend, for x. Kernels compute in float32: float64 is not for them."""
    if (chosen := beside(backend)) == "triton" and x.dtype == torch.float64:
        raise ValueError(f"{op}: backend 'triton' computes in float32, got torch.float64; use 'chunkwise'")
    return select(op, chosen, x.device.type, "float64" if x.dtype == torch.float64 else unfit)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on `device`; None where it is off."""
    known = device.type in ("cuda", "cpu", "mps", "xpu")  # asking about a device type without autocast is an error
    return torch.get_autocast_dtype(device.type) if known and torch.is_autocast_enabled(device.type) else None


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Ops choose their own precision: float32 sums must not become bfloat16 products because autocast is on."""
    return torch.autocast(device.type, enabled=False) if autocast_dtype(device) is not None else contextlib.nullcontext()
