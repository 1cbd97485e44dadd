"""What every recurrence demands of its arguments. Errors name the argument, what it got and what it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headmax.ops.packing import Packing


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """States and accumulations are float32, and float64 beside float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def beyond_kernels(q: Tensor, v: Tensor) -> str | None:
    """Why the Triton kernels cannot take these inputs, or None."""
    if q.dtype == torch.float64:
        return "q, k and v must be float32, bfloat16 or float16, got torch.float64"
    if q.shape[3] > 256 or v.shape[3] > 512:
        return f"heads are at most 256 (key) and 512 (value) wide, got {q.shape[3]} and {v.shape[3]}"
    return None


def check_shape(op: str, name: str, x: Tensor, axes: str, shape: Sequence[int]) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} must be [{axes}] = {list(shape)}, got {list(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{op}: {name} must have a floating dtype, got {x.dtype}")


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
    value_heads: bool = False,
) -> Packing | None:
    """Checks what the three recurrences share and returns the packing, built here if it came as a tensor."""
    for name, x, axes in (("q", q, "batch, time, heads, key"), ("v", v, "batch, time, heads, value")):
        if not isinstance(x, Tensor) or x.ndim != 4:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{op}: {name} must be [{axes}], got {got}")
    batch, time, heads, key = q.shape
    if 0 in (batch, time, heads, key, v.shape[3]):
        raise ValueError(f"{op}: q {list(q.shape)} and v {list(v.shape)} must have no empty axis")
    check_shape(op, "q", q, "batch, time, heads, key", (batch, time, heads, key))
    check_shape(op, "k", k, "batch, time, heads, key", (batch, time, heads, key))
    out_heads = v.shape[2]
    if value_heads and out_heads % heads:
        raise ValueError(f"{op}: v must have a multiple of q's {heads} heads, got {out_heads}")
    check_shape(op, "v", v, "batch, time, heads, value", (batch, time, out_heads if value_heads else heads, v.shape[3]))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{op}: {name} must share q's dtype {q.dtype}, got {x.dtype}")
    for name, gate in (("read_gate", read_gate), ("write_gate", write_gate)):
        if gate is not None:
            check_shape(op, name, gate, "batch, time, heads", (batch, time, out_heads))
    packing = check_packing(op, cu_seqlens, batch, time, q.device)
    if initial_state is not None:
        count, axes = (batch, "batch") if packing is None else (packing.num_sequences, "sequences")
        check_shape(op, "initial_state", initial_state, f"{axes}, heads, key, value", (count, out_heads, key, v.shape[3]))
    named = {"k": k, "v": v, "read_gate": read_gate, "write_gate": write_gate, "initial_state": initial_state}
    for name, other in named.items():
        check_device(op, name, other, q)
    return packing


def check_device(op: str, name: str, x: Tensor | None, q: Tensor) -> None:
    if x is not None and x.device != q.device:
        raise ValueError(f"{op}: {name} must be on q's device {q.device}, got {x.device}")


def check_packing(op: str, cu_seqlens: Tensor | Packing | None, batch: int, time: int, device: torch.device) -> Packing | None:
    if cu_seqlens is None:
        return None
    packing = cu_seqlens if isinstance(cu_seqlens, Packing) else Packing(cu_seqlens, device)
    if packing.cu_seqlens.device != device:
        raise ValueError(f"{op}: cu_seqlens is on {packing.cu_seqlens.device}, the inputs on {device}: use Packing.to")
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens packs sequences into batch 1, got batch {batch}")
    if packing.num_tokens != time:
        raise ValueError(f"{op}: cu_seqlens must end at time = {time}, got {packing.num_tokens}")
    return packing
