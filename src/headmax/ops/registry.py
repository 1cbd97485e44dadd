"""Which backends exist, which can run here, and which one "auto" takes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch

from headmax.fields import suggest

logger = logging.getLogger("headmax")

Backend = Literal["auto", "reference", "chunkwise", "triton", "fla"]
BACKENDS = get_args(Backend)
"""All names an op's `backend` may have; not every op has every backend."""
AUTO_ORDER = ("triton", "chunkwise", "reference")
"""What "auto" tries, fastest first; "fla" is for comparison and taken only by name."""

LEAST_SHARED = 99
"""KiB of shared memory a block of the kernels may need on any GPU: what consumer cards have."""

_announced: set[tuple[str, str]] = set()
"""What has been logged, by op: no message comes twice."""


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


@functools.cache
def compiles_in_16_bits() -> bool:
    """Whether Triton (3.7) makes kernels of the recurrences for this machine's GPU; it fails for compute capability 10."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10


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
_chosen: dict[tuple[str, str, str, torch.dtype, str | None], str] = {}
"""What `dispatch` has chosen, by its arguments: it decides once and then looks up."""


def register(op: str, table: Table) -> None:
    """Makes the backends of `op` known to `dispatch`; every op has a "reference" in plain PyTorch."""
    _tables[op] = table


def register_recurrence(op: str, reference: Callable[..., Any], chunkwise: Callable[..., Any], triton: str, fla: str) -> None:
    """The backends every recurrence has: two in PyTorch, and kernels, "module:function" in headmax.ops, imported when they run."""
    lazy = {}
    for name, place in (("triton", triton), ("fla", fla)):
        module, function = place.split(":")
        lazy[name] = Lazy(f"headmax.ops.{module}", function, needs=name, interpreted=name == "triton")
    register(op, {"reference": reference, "chunkwise": chunkwise, **lazy})


def dispatch(op: str, backend: str, x: torch.Tensor, obstacle: str | None = None) -> Callable[..., Any]:
    """The implementation of `op` for tensors on the device and in the dtype of x; `obstacle` says why its kernels cannot take them, if so.

    "auto" takes the fastest backend that can run. On a GPU it warns, once for each reason, when that is not the fastest there is.
    A backend asked for by name is the one that runs, or an error. Ops that are no recurrence have no "chunkwise" or "fla": where a model
    names one of those for all its ops, they run their plain PyTorch form.
    """
    if transformed():
        if backend != "reference" and backend in _tables[op]:
            raise ValueError(f"{op}: backend {backend!r} takes no transform of torch.func, such as grad or vmap; use 'reference'")
        backend = "reference" if backend == "auto" else backend
    chosen = _tables[op][_choose(op, backend, x.device.type, x.dtype, obstacle)]
    return chosen.function if isinstance(chosen, Lazy) else chosen  # type: ignore[return-value]


@torch.compiler.assume_constant_result
def transformed() -> bool:
    """Whether a transform of torch.func is under way, through which the autograd functions of the other backends do not pass."""
    return torch._C._functorch.maybe_current_level() is not None


@torch.compiler.assume_constant_result
def _choose(op: str, backend: str, device_type: str, dtype: torch.dtype, obstacle: str | None) -> str:
    """The name of the backend, loaded; a compiled graph asks once, when it is traced."""
    if not isinstance(backend, str):
        raise ValueError(f"{op}: backend must be a name, one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    key = op, backend, device_type, dtype, obstacle
    name = _chosen.get(key)
    if name is None:
        name = _chosen[key] = _decide(*key)
    return name


def _decide(op: str, backend: str, device_type: str, dtype: torch.dtype, obstacle: str | None) -> str:
    table = _tables[op]
    if backend == "auto":
        reasons = obstacles(op, device_type, dtype, obstacle)
        backend = next(name for name, reason in reasons.items() if reason is None)
        if device_type != "meta":
            _announce(op, logging.DEBUG, f"backend {backend!r} on {device_type}")
        if device_type == "cuda":
            for name, reason in itertools.takewhile(lambda item: item[1] is not None, reasons.items()):
                _announce(op, logging.WARNING, f"the faster backend {name!r} is passed over: {reason}")
    elif backend not in table:
        if backend not in BACKENDS:
            raise ValueError(f"{op}: unknown backend {backend!r}{suggest(backend, [*table, 'auto'])}")
        backend = "reference"
    elif (reason := _obstacle(op, backend, device_type, dtype, obstacle)) is not None:
        plain = "chunkwise" if "chunkwise" in table else "reference"
        raise ValueError(f"{op}: backend {backend!r} cannot run here: {reason}; use {plain!r}")
    if isinstance(chosen := table[backend], Lazy):
        chosen.load()
    return backend


def obstacles(op: str, device_type: str, dtype: torch.dtype = torch.float32, obstacle: str | None = None) -> dict[str, str | None]:
    """The backends of `op` that "auto" considers, fastest first: why each cannot be taken for such tensors, or None."""
    reasons = {name: _obstacle(op, name, device_type, dtype, obstacle) for name in AUTO_ORDER if name in _tables[op]}
    if device_type != "cuda" and "triton" in reasons:
        reasons["triton"] = reasons["triton"] or "the interpreter is for tests"
    return reasons


def _obstacle(op: str, name: str, device_type: str, dtype: torch.dtype, obstacle: str | None) -> str | None:
    """Why a backend of `op` cannot run for such tensors, or None."""
    entry = _tables[op][name]
    if isinstance(entry, Lazy) and (reason := entry.unavailable(device_type)) is not None:
        return reason
    if name != "triton":
        return None
    if dtype == torch.float64:
        return "it computes in float32, got torch.float64"
    if device_type == "cuda" and "chunkwise" in _tables[op] and dtype.itemsize == 2 and not compiles_in_16_bits():
        return f"Triton does not compile the recurrences for this GPU in {dtype}"
    return obstacle


def _announce(op: str, level: int, message: str) -> None:
    if (op, message) not in _announced:
        _announced.add((op, message))
        logger.log(level, "%s: %s", op, message)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on `device`; None where it is off."""
    known = device.type in ("cuda", "cpu", "mps", "xpu")  # asking about a device type without autocast is an error
    return torch.get_autocast_dtype(device.type) if known and torch.is_autocast_enabled(device.type) else None


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Ops choose their own precision: float32 sums must not become bfloat16 products because autocast is on."""
    return torch.autocast(device.type, enabled=False) if autocast_dtype(device) is not None else contextlib.nullcontext()
