"""Linear attention with a decay per head or per token, or none: what a chunk's gates and decays are folded into, and back.

Forwards, with b the running sums of a chunk's log-decays (as powers of two) and D_ij = 2^(b_i - b_j) on and below the diagonal,

    scaled_q = scale read_gate q 2^b           what a query reads the chunk's first state with
    scaled_k = write_gate k 2^(b_C - b)        what a key writes to the chunk's last state
    scores   = (scale read_gate q)(write_gate k)^T ⊙ D

and all else is matrix products (scan.py): S' = 2^(b_C) S + scaled_k^T v and o = scaled_q S + scores v. Backwards these are the same two
with (scaled_q, dO) for (scaled_k, v) and scores^T for scores. Nothing but inputs is saved: the backward pass prepares again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import (
    Layout,
    Prepared,
    chunk_span,
    decay_factors,
    decay_matrix,
    decay_sums,
    load_chunk_gate,
    load_gate,
    shape_arguments,
    tile,
    wait_for_dot,
)
from headmax.ops.kernels.gradients import score_gradients, state_gradients
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import tile_arguments
from headmax.ops.packing import CHUNK

SHORT = tl.constexpr(CHUNK)
"""Tokens of a chunk that is not long."""


@triton.jit
def prepare_kernel(
    q, k, log_decay, read_gate, write_gate, scaled_q, scaled_k, scores, chunk_decay, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """scaled_q, scaled_k [B,T,H,K], scores [B,T,H,C] and chunk_decay = b_C [chunks, H] of a chunk and head, see the top of the file.

    In: q, k [B,T,H,K], log_decay None, [H] or [B,T,H], gates None or [B,T,H]. For the BACKWARD pass scores are stored transposed.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C)
    b_read = load_chunk_gate(read_gate, first, count, head, H, C) * scale  # [C]
    b_write = load_chunk_gate(write_gate, first, count, head, H, C)  # [C]
    b_a = tl.zeros([C, C], tl.float32)
    b_cum, b_rest, total = decay_sums(log_decay, first, count, head, H, C, DECAY)
    b_from_start, b_to_end = decay_factors(b_cum, count, C) * b_read, decay_factors(b_rest, count, C) * b_write
    tl.store(chunk_decay + chunk.to(tl.int64) * H + head, total.to(tl.float32))
    for k_start in range(0, K, BK):
        p_q, m_q = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
        b_q, b_k = tl.load(p_q, mask=m_q, other=0.0), tl.load(p_k, mask=m_k, other=0.0)  # [C, BK]
        p_sq, m_sq = tile(scaled_q, first, count, head, k_start, H, K, C, BK)
        p_sk, m_sk = tile(scaled_k, first, count, head, k_start, H, K, C, BK)
        tl.store(p_sq, (b_q.to(tl.float32) * b_from_start[:, None]).to(b_q.dtype), mask=m_sq)
        tl.store(p_sk, (b_k.to(tl.float32) * b_to_end[:, None]).to(b_k.dtype), mask=m_sk)
        if K > BK:
            b_a = wait_for_dot(b_a, count)
        b_a += tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_a = b_a * b_read[:, None] * b_write[None, :] * decay_matrix(b_cum, log_decay, count, head, C, DECAY)
    b_a = b_a.to(scores.dtype.element_ty)
    p_a, m_a = tile(scores, first, count, head, 0, H, C, C, C)
    tl.store(p_a, tl.trans(b_a) if BACKWARD else b_a, mask=m_a)


@triton.jit
def add_decay_gradients(
    b_step, all_steps, b_dq, b_dk, b_q, b_k, b_read, b_write, b_ds, b_product, total, o_c, count, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds, for some key channels, what a step of the log-decay at each token gets [C], to be summed from the chunk's end, and what all
    get.

    A step at t scales what tokens from t on read of the state, what those before t write to it, the state, and what passes between them.
    """
    b_reads, b_writes = tl.sum(b_dq * b_q.to(tl.float32) * b_read, 1), tl.sum(b_dk * b_k.to(tl.float32) * b_write, 1)
    b_between = b_ds * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_read * tl.trans(b_write)
    # no step scales what a token has of itself or what the last one writes: both would cancel, but beside steep decays not to zero
    b_between, b_writes = tl.where(o_c[:, None] > o_c[None, :], b_between, 0.0), tl.where(o_c < count - 1, b_writes, 0.0)
    b_step += b_reads + tl.sum(b_between, 1) - tl.sum(b_between, 0) - b_writes
    all_steps += tl.sum(b_writes, 0) + tl.exp2(total.to(tl.float32)) * tl.sum(b_product)
    return b_step, all_steps


@triton.jit
def query_key_gradients_kernel(
    q, k, v, d_o, log_decay, read_gate, write_gate, states, d_states, d_q, d_k, d_read, d_write, d_decay, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """From d scores = dO V^T, d scaled_q = dO S^T and d scaled_k = V dS'^T back to q and k; the gates' gradients are row sums.

    In: states S and their gradients dS' [chunks, H, K, V]. Out: d_q, d_k [B,T,H,K], d_decay [B,T,H] or None where it is not asked for, and
    d_read, d_write [B,T,H], written where there are such gates.

    In short chunks gates multiply d scores, which queries and keys meet as they are, on their way during the products before. In LONG ones
    registers do not hold two tiles of d scores, nor shared memory queries and keys for so long: there gates multiply queries and keys.
    """
    LONG: tl.constexpr = C > SHORT
    PRECISION: tl.constexpr = "tf32x3" if q.dtype.element_ty == tl.float32 else "tf32"
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, count = chunk_span(chunk, table, T, C)
    index, o_c = chunk.to(tl.int64) * H + head, tl.arange(0, C)
    o_t, m_t = (first + o_c) * H + head, o_c < count
    # by these addresses: by those of load_chunk_gate it takes longer for RetNet's heads on an H200
    b_read, b_write = load_gate(read_gate, 0, o_t, m_t, C)[:, None], load_gate(write_gate, 0, o_t, m_t, C)[:, None]  # [C, 1]
    b_ds = score_gradients(v, d_o, first, count, head, H, V, C, BV, PRECISION)
    b_cum, b_rest, total = decay_sums(log_decay, first, count, head, H, C, DECAY)
    b_from_start, b_to_end = decay_factors(b_cum, count, C), decay_factors(b_rest, count, C)
    b_ds *= decay_matrix(b_cum, log_decay, count, head, C, DECAY) * scale
    b_ds_q, b_ds_k = b_ds, b_ds
    if not LONG:
        if write_gate is not None:
            b_ds_q = b_ds * tl.trans(b_write)
        if read_gate is not None:
            b_ds_k = b_ds * b_read
    b_ds_q, b_ds_k = b_ds_q.to(q.dtype.element_ty), b_ds_k.to(q.dtype.element_ty)
    b_d_read, b_d_write, b_step, all_steps = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), 0.0
    for k_start in tl.range(0, K, BK, num_stages=1, disable_licm=True):  # pointers made early would take up registers
        p_q, m_q = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
        if not LONG:
            b_q, b_k = tl.load(p_q, mask=m_q, other=0.0), tl.load(p_k, mask=m_k, other=0.0)  # [C, BK]
        b_dq, b_dk, b_product = state_gradients(
            v, d_o, states, d_states, first, count, head, index, k_start, H, K, V, C, BK, BV, d_decay is not None, PRECISION
        )
        if LONG:
            b_q, b_k = tl.load(p_q, mask=m_q, other=0.0), tl.load(p_k, mask=m_k, other=0.0)  # [C, BK]
        b_dq *= (b_from_start * scale)[:, None]
        b_dk *= b_to_end[:, None]
        if d_decay is not None:
            b_step, all_steps = add_decay_gradients(
                b_step, all_steps, b_dq, b_dk, b_q, b_k, b_read, b_write, b_ds, b_product, total, o_c, count, PRECISION
            )
        b_gated_q, b_gated_k = b_q, b_k
        if LONG:
            b_gated_q, b_gated_k = (b_q.to(tl.float32) * b_read).to(b_q.dtype), (b_k.to(tl.float32) * b_write).to(b_k.dtype)
        b_dq += tl.dot(b_ds_q, b_gated_k, input_precision=PRECISION)
        b_dk += tl.dot(tl.trans(b_ds_k), b_gated_q, input_precision=PRECISION)
        b_d_read += tl.sum(b_dq * b_q.to(tl.float32), 1)
        b_d_write += tl.sum(b_dk * b_k.to(tl.float32), 1)
        p_dq, m_dq = tile(d_q, first, count, head, k_start, H, K, C, BK)
        p_dk, m_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
        tl.store(p_dq, (b_dq * b_read).to(d_q.dtype.element_ty), mask=m_dq)
        tl.store(p_dk, (b_dk * b_write).to(d_k.dtype.element_ty), mask=m_dk)
    if read_gate is not None:
        tl.store(d_read + o_t, b_d_read, mask=m_t)
    if write_gate is not None:
        tl.store(d_write + o_t, b_d_write, mask=m_t)
    if d_decay is not None:
        tl.store(d_decay + o_t, tl.cumsum(b_step, 0, reverse=True) + all_steps, mask=m_t)


def decay_kind(log_decay: Tensor | None) -> str:
    return "none" if log_decay is None else {1: "head", 3: "token"}[log_decay.ndim]


def prepare(
    q: Tensor, k: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None, scale: float, layout: Layout,
    backward: bool = False,
) -> Prepared:  # fmt: skip
    """For the forward pass, or for the backward pass, which has the scores transposed."""
    batch, time, heads, key = q.shape
    scaled_q, scaled_k, scores = torch.empty_like(q), torch.empty_like(k), q.new_empty((batch, time, heads, layout.chunk))
    chunk_decay = q.new_empty((layout.chunks, heads), dtype=torch.float32)
    launch(
        prepare_kernel, (layout.chunks, heads),
        (q, k, log_decay, read_gate, write_gate, scaled_q, scaled_k, scores, chunk_decay, layout.table, scale, layout.length),
        {**shape_arguments(q, layout), "BACKWARD": backward, "DECAY": decay_kind(log_decay), **tile_arguments("prepare", q, key)},
    )  # fmt: skip
    return Prepared(scaled_q, scaled_k, scores, chunk_decay, None, None)


def query_key_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, states: Tensor, d_states: Tensor, layout: Layout, decay_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, the gradient of log_decay, empty if it has none, and those of the gates there are [gates, B, T, H]."""
    (batch, time, heads, key), value, kind = q.shape, v.shape[3], decay_kind(log_decay)
    d_q, d_k = torch.empty_like(q), torch.empty_like(k)
    d_gates = q.new_empty(((read_gate is not None) + (write_gate is not None), batch, time, heads), dtype=torch.float32)
    d_decay = q.new_empty((batch, time, heads) if decay_gradient else (0,), dtype=torch.float32)
    shape = {name: size for name, size in shape_arguments(q, layout).items() if name != "PRECISION"}
    launch(
        query_key_gradients_kernel, (layout.chunks * heads,),
        (q, k, v, d_o, log_decay, read_gate, write_gate, states, d_states, d_q, d_k, d_gates[:1], d_gates[-1:],
         d_decay if decay_gradient else None, layout.table, scale, layout.length),
        {**shape, "V": value, "DECAY": kind, **tile_arguments("query_key_gradients", q, key, value)},
    )  # fmt: skip
    return d_q, d_k, d_decay.sum((0, 1)) if decay_gradient and kind == "head" else d_decay, d_gates
