"""Argument checks of the recurrences. Errors name the argument, what it got and what it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headmax.ops.packing import Packing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """States and accumulations are float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def too_wide(q: Tensor, v: Tensor, columns: int = 0) -> str | None:
    """Why the Triton kernels cannot take heads of these widths, v with so many columns more, or None."""
    key, value = q.shape[3], v.shape[3] + columns
    if key > 256 or value > 512:
        return f"heads are at most 256 (key) and 512 (value) wide, got {key} and {value}"
    return None


def check_dense(op: str, name: str, x: object) -> None:
    """x must be a tensor whose numbers lie in memory by strides."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        kind = "a nested tensor: pack its sequences and pass cu_seqlens" if x.is_nested else f"{x.layout}"
        raise ValueError(f"{op}: {name} must be a dense tensor, got {kind}")


def check_floating(op: str, name: str, dtype: torch.dtype) -> None:
    """Eight bits have too few digits for what the ops return in the inputs' dtype."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"{op}: {name} must be float64, float32, float16 or bfloat16, got {dtype}")


def check_shape(op: str, name: str, x: Tensor | None, axes: str, shape: Sequence[int], device: torch.device | None = None) -> None:
    """x must be a floating tensor of this shape, on the `device` of the other inputs if one is given."""
    check_dense(op, name, x)
    assert x is not None
    if x.shape != shape:
        raise ValueError(f"{op}: {name} must be [{axes}] = {list(shape)}, got {list(x.shape)}")
    check_floating(op, name, x.dtype)
    if device is not None and x.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, as the other inputs are, got {x.device}")


def check_rank(op: str, name: str, x: Tensor, axes: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: {name} must be [{axes}], got {type(x).__name__}")
    check_dense(op, name, x)
    if x.ndim != 4:
        raise ValueError(f"{op}: {name} must be [{axes}], got {list(x.shape)}")


def check_number(op: str, name: str, given: float) -> float:
    """A tensor would get no gradient, and NaN would be found far from here."""
    if not isinstance(given, Real) or not -math.inf < given < math.inf:
        raise ValueError(f"{op}: {name} must be a finite number, got {type(given).__name__ if isinstance(given, Tensor) else repr(given)}")
    return given


def check_recurrence(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    read_gate: Tensor | None,
    write_gate: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | Packing | None,
    context_group: ProcessGroup | None = None,
    value_heads: bool = False,
) -> Packing | None:
    """Checks what the recurrences share and returns the packing, built here if it came as a tensor."""
    check_rank(op, "q", q, "batch, time, heads, key")
    check_rank(op, "v", v, "batch, time, heads, value")
    (batch, time, heads, key), (_, _, out_heads, value), device = q.shape, v.shape, q.device
    if batch == 0 or time == 0 or heads == 0 or key == 0 or value == 0:
        raise ValueError(f"{op}: q {list(q.shape)} and v {list(v.shape)} must have no empty axis")
    check_shape(op, "q", q, "batch, time, heads, key", (batch, time, heads, key))
    check_shape(op, "k", k, "batch, time, heads, key", (batch, time, heads, key), device)
    if not value_heads:
        out_heads = heads
    elif out_heads == 0 or out_heads % heads:
        raise ValueError(f"{op}: v must have a multiple of q's {heads} heads, got {out_heads}")
    check_shape(op, "v", v, "batch, time, heads, value", (batch, time, out_heads, value), device)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        name, x = ("k", k) if k.dtype != q.dtype else ("v", v)
        raise ValueError(f"{op}: {name} must share q's dtype {q.dtype}, got {x.dtype}")
    if read_gate is not None:
        check_shape(op, "read_gate", read_gate, "batch, time, heads", (batch, time, out_heads), device)
    if write_gate is not None:
        check_shape(op, "write_gate", write_gate, "batch, time, heads", (batch, time, out_heads), device)
    if context_group is not None and not hasattr(context_group, "rank"):
        raise ValueError(f"{op}: context_group must be a ProcessGroup of torch.distributed, got {type(context_group).__name__}")
    if context_group is not None and isinstance(cu_seqlens, Tensor):
        raise ValueError(f"{op}: cu_seqlens must be this rank's Packing.piece where there is a context_group, got a tensor")
    packing = check_packing(op, cu_seqlens, batch, time, device)
    if initial_state is not None:
        count, axes = (batch, "batch") if packing is None else (packing.num_sequences, "sequences")
        check_shape(op, "initial_state", initial_state, f"{axes}, heads, key, value", (count, out_heads, key, value), device)
    return packing


def check_packing(op: str, cu_seqlens: Tensor | Packing | None, batch: int, time: int, device: torch.device) -> Packing | None:
    if cu_seqlens is None:
        return None
    packing = cu_seqlens if isinstance(cu_seqlens, Packing) else Packing.of(cu_seqlens, device, time)
    if packing.cu_seqlens.device != device:
        raise ValueError(f"{op}: cu_seqlens is on {packing.cu_seqlens.device}, the inputs on {device}: use Packing.to")
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens packs sequences into batch 1, got batch {batch}")
    if packing.num_tokens != time:
        raise ValueError(f"{op}: cu_seqlens must end at time = {time}, got {packing.num_tokens}")
    return packing
