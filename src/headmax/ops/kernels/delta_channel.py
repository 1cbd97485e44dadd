"""The delta rule's writes with a decay per key channel (KDA), on what channel.py makes of decays.

Keys that erase are one more reader of the states, with beta for a gate: with `reading`, `writing` and `scores` of theirs,

    erasing = β k exp(b - half) = reading,     L = β (K K^T ⊙ D) = scores below the diagonal,
    u = (I + L)^-1 (β write_gate v - erasing 2^half S) = fresh - erase 2^half S,

and what comes back to them is what comes back to queries that see only earlier tokens, from d(erasing S + L u) = -(I + L)^-T dU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import Layout, chunk_span, row_values, tile, unit_lower_inverse
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.scalar import Prepared, query_key_gradients
from headmax.ops.kernels.scan import shape_arguments
from headmax.ops.kernels.tiles import tile_arguments


@triton.jit
def channel_writes_kernel(
    erasing, scores, v, beta, write_gate, inverse, erase, fresh, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WRITE: tl.constexpr,
    PACKED: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """erase = (I + L)^-1 erasing [C, K] and fresh = (I + L)^-1 β write_gate v [C, V]; makes the inverse [C, C] unless KNOWN."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    rows = tl.arange(0, C)
    p_i, in_i = tile(inverse, first, count, head, 0, H, C, C, C)
    if KNOWN:
        t_i = tl.load(p_i, mask=in_i, other=0.0)  # [C, C]
    else:
        p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
        lower = tl.where(rows[:, None] > rows[None, :], tl.load(p_a, mask=in_a, other=0.0), 0.0)  # [C, C]
        t_i = unit_lower_inverse(lower, C, PRECISION)
        tl.store(p_i, t_i, mask=in_i)
    strength = row_values(beta, first, count, head, H, C, True) * row_values(write_gate, first, count, head, H, C, WRITE)  # [C]
    of_keys, of_values = t_i.to(erasing.dtype.element_ty), (t_i * strength[None, :]).to(v.dtype.element_ty)
    for k_start in range(0, K, BK):
        p_k, in_k = tile(erasing, first, count, head, k_start, H, K, C, BK)
        p_e, in_e = tile(erase, first, count, head, k_start, H, K, C, BK)
        t_e = tl.dot(of_keys, tl.load(p_k, mask=in_k, other=0.0), input_precision=PRECISION)  # [C, BK]
        tl.store(p_e, t_e.to(erase.dtype.element_ty), mask=in_e)
    for v_start in range(0, V, BV):
        p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
        p_f, in_f = tile(fresh, first, count, head, v_start, H, V, C, BV)
        t_f = tl.dot(of_values, tl.load(p_v, mask=in_v, other=0.0), input_precision=PRECISION)  # [C, BV]
        tl.store(p_f, t_f.to(fresh.dtype.element_ty), mask=in_f)


@triton.jit
def channel_write_gradients_kernel(
    v, beta, write_gate, inverse, d_u, d_v, d_beta, d_write, d_erased, table, T,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, WRITE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """With G = (I + L)^-T dU [C, V]: d_v = β write_gate G, d_erased = -G; and of beta and the gate what comes through β write_gate v."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    rows = tl.arange(0, C)
    strength = row_values(beta, first, count, head, H, C, True)
    write = row_values(write_gate, first, count, head, H, C, WRITE)
    p_i, in_i = tile(inverse, first, count, head, 0, H, C, C, C)
    back = tl.trans(tl.load(p_i, mask=in_i, other=0.0).to(v.dtype.element_ty))  # [C, C]
    along = tl.zeros([C], tl.float32)
    for v_start in range(0, V, BV):
        p_u, in_v = tile(d_u, first, count, head, v_start, H, V, C, BV)
        p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
        t_u, t_v = tl.load(p_u, mask=in_v, other=0.0), tl.load(p_v, mask=in_v, other=0.0)  # [C, BV]
        g = tl.dot(back, t_u, input_precision=PRECISION)  # [C, BV]
        along += tl.sum(g * t_v.to(tl.float32), 1)
        p_dv, in_dv = tile(d_v, first, count, head, v_start, H, V, C, BV)
        p_e, in_e = tile(d_erased, first, count, head, v_start, H, V, C, BV)
        tl.store(p_dv, (g * (strength * write)[:, None]).to(d_v.dtype.element_ty), mask=in_dv)
        tl.store(p_e, (-g).to(d_erased.dtype.element_ty), mask=in_e)
    at = (first + rows) * H + head
    tl.store(d_beta + at, along * write, mask=rows < count)
    if WRITE:
        tl.store(d_write + at, along * strength, mask=rows < count)


def channel_writes(
    erasing: Prepared, v: Tensor, beta: Tensor, write_gate: Tensor | None, layout: Layout, inverse: Tensor, known: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(I + L)^-1 of every chunk, filled in unless `known`, what is erased with [B,T,H,K] and what is written afresh [B,T,H,V]."""
    erase, fresh, (_, _, heads, key) = torch.empty_like(erasing.reading), torch.empty_like(v), erasing.reading.shape
    launch(
        channel_writes_kernel, (layout.chunks, heads),
        (erasing.reading, erasing.scores, v, beta, write_gate, inverse, erase, fresh, layout.table, layout.length),
        {**shape_arguments(erasing.reading, layout), "V": v.shape[3], "WRITE": write_gate is not None, "KNOWN": known,
         **tile_arguments("delta_writes", v, key, v.shape[3])},
    )  # fmt: skip
    return inverse, erase, fresh


def channel_write_gradients(
    erasing: Prepared, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, write_gate: Tensor | None, inverse: Tensor, states: Tensor,
    u: Tensor, d_u: Tensor, layout: Layout,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of v, beta and write_gate, empty if there is none; and what erasing adds to those of k and log_decay."""
    d_v, d_erased, d_beta = torch.empty_like(v), torch.empty_like(v), torch.empty_like(beta, dtype=torch.float32)
    d_write = v.new_empty(0 if write_gate is None else write_gate.shape, dtype=torch.float32)
    shape, tiles = shape_arguments(k, layout), tile_arguments("delta_write_gradients", v, k.shape[3], v.shape[3])
    launch(
        channel_write_gradients_kernel, (layout.chunks, v.shape[2]),
        (v, beta, write_gate, inverse, d_u, d_v, d_beta, d_write, d_erased, layout.table, layout.length),
        {name: x for name, x in {**shape, "V": v.shape[3], "WRITE": write_gate is not None, **tiles}.items() if name not in ("K", "BK")},
    )  # fmt: skip
    d_eraser, d_key, d_decay, d_strength = query_key_gradients(
        k, k, u, d_erased, log_decay, beta, None, 1.0, erasing, states, None, layout, decay_gradient=True
    )
    return d_v, d_beta + d_strength[0], d_write, d_eraser + d_key, d_decay
