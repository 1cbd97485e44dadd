"""Chunkwise linear attention in Triton, for any decay (none, per head, per token, per channel): two kernels forward, four backward.

Gates and decays act on tiles already in registers.

The state before every chunk is written once; all else is parallel over chunks. A chunk's tokens see each other through
D_ij = exp(b_i - b_j), b the running sum of log-decays, kept in float64 so that the difference of two long sums stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.packing import CHUNK, Packing
from headmax.ops.triton_channel import channel_score_gradients, channel_scores, channel_sums
from headmax.ops.triton_common import Layout, block, check_kernel_limits, chunk_span, dot_precision, sequence_span


@triton.jit
def decay_sums(log_decay, first, count, head, H: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """The running sum b [C] in float64 and its last value; empty slots add nothing."""
    rows = tl.arange(0, C)
    if DECAY == "token":
        step = tl.load(log_decay + (first + rows) * H + head, mask=rows < count, other=0.0).to(tl.float64)
        b = tl.cumsum(step, 0)
        total = tl.sum(step, 0)
    else:
        step = tl.load(log_decay + head).to(tl.float64)
        b = (rows + 1).to(tl.float64) * step
        total = count.to(tl.float64) * step
    return b, total


@triton.jit
def row_values(gate, first, count, head, H: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr):
    """A gate's value for each token of the chunk, 1 without a gate."""
    rows = tl.arange(0, C)
    if GATED:
        return tl.load(gate + (first + rows) * H + head, mask=rows < count, other=0.0).to(tl.float32)
    else:
        return tl.full([C], 1.0, tl.float32)


@triton.jit
def tile(base, first, count, head, start, H: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers and mask of channels start to start + BLOCK of a chunk of [tokens, heads, width]."""
    rows, columns = tl.arange(0, C), start + tl.arange(0, BLOCK)
    pointers = base + ((first + rows[:, None]) * H + head) * WIDTH + columns[None, :]
    return pointers, (rows[:, None] < count) & (columns[None, :] < WIDTH)


@triton.jit
def state_tile(base, index, k_start, v_start, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of a [BK, BV] block of state number `index` in [..., K, V]."""
    rows, columns = k_start + tl.arange(0, BK), v_start + tl.arange(0, BV)
    pointers = base + index * K * V + rows[:, None] * V + columns[None, :]
    return pointers, (rows[:, None] < K) & (columns[None, :] < V)


@triton.jit
def decayed_states_kernel(
    k, v, log_decay, write_gate, initial, states, final, table, starts, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S_{n+1} = exp(b_C) S_n + (exp(b_C - b) write_gate k)^T v, one block of the state through a whole sequence."""
    k_start, v_start = tl.program_id(0) * BK, tl.program_id(1) * BV
    sequence, head = tl.program_id(2) // H, tl.program_id(2) % H
    first_chunk, chunks, token, end = sequence_span(sequence, table, starts, T, C, PACKED)
    state = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        p_initial, in_initial = state_tile(initial, (sequence * H + head).to(tl.int64), k_start, v_start, K, V, BK, BV)
        state += tl.load(p_initial, mask=in_initial, other=0.0).to(tl.float32)
    for n in range(chunks):
        count = tl.minimum(C, end - token).to(tl.int32)
        pointers, inside = state_tile(states, (first_chunk + n).to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
        tl.store(pointers, state.to(states.dtype.element_ty), mask=inside)
        p_k, in_k = tile(k, token, count, head, k_start, H, K, C, BK)
        p_v, in_v = tile(v, token, count, head, v_start, H, V, C, BV)
        t_k, t_v = tl.load(p_k, mask=in_k, other=0.0), tl.load(p_v, mask=in_v, other=0.0)
        factor = row_values(write_gate, token, count, head, H, C, GATED)[:, None]
        if DECAY == "channel":
            step, before, after = channel_sums(log_decay, token, count, head, k_start, H, K, C, BK)
            factor = factor * tl.exp(after)
            state *= tl.exp(tl.sum(step, 0))[:, None]
        elif DECAY != "none":
            b, whole = decay_sums(log_decay, token, count, head, H, C, DECAY)
            factor *= tl.where(tl.arange(0, C) < count, tl.exp((whole - b).to(tl.float32)), 0.0)[:, None]
            state *= tl.exp(whole.to(tl.float32))
        t_k = (t_k.to(tl.float32) * factor).to(t_v.dtype)
        state += tl.dot(tl.trans(t_k), t_v, input_precision=PRECISION)
        token += C
    p_final, in_final = state_tile(final, (sequence * H + head).to(tl.int64), k_start, v_start, K, V, BK, BV)
    tl.store(p_final, state, mask=in_final)


@triton.jit
def causal_mask(count, C: tl.constexpr):
    rows = tl.arange(0, C)
    return (rows[:, None] >= rows[None, :]) & (rows[:, None] < count)


@triton.jit
def decay_matrix(log_decay, first, count, head, H: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """D [C, C] below and on the diagonal, 0 above; exp(b) and exp(b_C - b) per token; exp(b_C)."""
    rows = tl.arange(0, C)
    causal = causal_mask(count, C)
    if DECAY == "none":
        ones = tl.where(rows < count, 1.0, 0.0)
        return tl.where(causal, 1.0, 0.0), ones, ones, 1.0
    else:
        b, total = decay_sums(log_decay, first, count, head, H, C, DECAY)
        steps = tl.where(causal, b[:, None] - b[None, :], -float("inf")).to(tl.float32)
        to_end = tl.where(rows < count, tl.exp((total - b).to(tl.float32)), 0.0)
        return tl.exp(steps), tl.exp(b.to(tl.float32)), to_end, tl.exp(total.to(tl.float32))


@triton.jit
def decayed_output_kernel(
    q, k, v, log_decay, read_gate, write_gate, states, o, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = scale read_gate (exp(b) q S + (q k^T ⊙ D ⊙ write_gate) v)"""
    v_start, chunk, head = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    from_state, scores = tl.zeros([C, BV], tl.float32), tl.zeros([C, C], tl.float32)
    for k_start in range(0, K, BK):
        p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        p_s, in_s = state_tile(states, chunk.to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
        t_q, t_s = tl.load(p_q, mask=inside, other=0.0), tl.load(p_s, mask=in_s, other=0.0)
        t_k = tl.load(p_k, mask=inside, other=0.0)
        if DECAY == "channel":
            step, before, after = channel_sums(log_decay, first, count, head, k_start, H, K, C, BK)
            scores += channel_scores(t_q, t_k, step, before, count, C, BK, PRECISION)
            t_q = (t_q.to(tl.float32) * tl.exp(before)).to(t_s.dtype)
        else:
            scores += tl.dot(t_q, tl.trans(t_k), input_precision=PRECISION)
        from_state += tl.dot(t_q, t_s, input_precision=PRECISION)
    if DECAY == "channel":
        scores = tl.where(causal_mask(count, C), scores, 0.0)
    else:
        d, from_start, to_end, whole = decay_matrix(log_decay, first, count, head, H, C, DECAY)
        scores *= d
        from_state *= from_start[:, None]
    write = row_values(write_gate, first, count, head, H, C, WRITE)
    read = row_values(read_gate, first, count, head, H, C, READ) * scale
    p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
    t_v = tl.load(p_v, mask=in_v, other=0.0)
    scores = (scores * write[None, :]).to(t_v.dtype)
    result = (from_state + tl.dot(scores, t_v, input_precision=PRECISION)) * read[:, None]
    p_o, in_o = tile(o, first, count, head, v_start, H, V, C, BV)
    tl.store(p_o, result.to(o.dtype.element_ty), mask=in_o)


@triton.jit
def decayed_state_gradients_kernel(
    q, d_o, log_decay, read_gate, d_final, d_states, d_initial, table, starts, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, HAS_FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dS_n = exp(b_C) dS_{n+1} + (exp(b) scale read_gate q)^T dO, backwards; writes the gradient of the state after each chunk."""
    k_start, v_start = tl.program_id(0) * BK, tl.program_id(1) * BV
    sequence, head = tl.program_id(2) // H, tl.program_id(2) % H
    first_chunk, chunks, token, end = sequence_span(sequence, table, starts, T, C, PACKED)
    gradient = tl.zeros([BK, BV], tl.float32)
    if HAS_FINAL:
        p_d_final, in_d_final = state_tile(d_final, (sequence * H + head).to(tl.int64), k_start, v_start, K, V, BK, BV)
        gradient += tl.load(p_d_final, mask=in_d_final, other=0.0).to(tl.float32)
    for i in range(chunks):
        n = chunks - 1 - i
        first = token + n * C
        count = tl.minimum(C, end - first).to(tl.int32)
        pointers, inside = state_tile(d_states, (first_chunk + n).to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
        tl.store(pointers, gradient.to(d_states.dtype.element_ty), mask=inside)
        p_q, in_q = tile(q, first, count, head, k_start, H, K, C, BK)
        p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        t_q, t_o = tl.load(p_q, mask=in_q, other=0.0), tl.load(p_o, mask=in_o, other=0.0)
        factor = row_values(read_gate, first, count, head, H, C, GATED)[:, None] * scale
        if DECAY == "channel":
            step, before, after = channel_sums(log_decay, first, count, head, k_start, H, K, C, BK)
            factor = factor * tl.exp(before)
            gradient *= tl.exp(tl.sum(step, 0))[:, None]
        elif DECAY != "none":
            b, whole = decay_sums(log_decay, first, count, head, H, C, DECAY)
            factor *= tl.exp(b.to(tl.float32))[:, None]
            gradient *= tl.exp(whole.to(tl.float32))
        t_q = (t_q.to(tl.float32) * factor).to(t_o.dtype)
        gradient += tl.dot(tl.trans(t_q), t_o, input_precision=PRECISION)
    p_d_initial, in_d_initial = state_tile(d_initial, (sequence * H + head).to(tl.int64), k_start, v_start, K, V, BK, BV)
    tl.store(p_d_initial, gradient, mask=in_d_initial)


@triton.jit
def decayed_query_key_gradients_kernel(
    q, k, v, d_o, log_decay, read_gate, write_gate, states, d_states, d_q, d_k, d_read, d_write, d_decay, table, scale, T, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, PACKED: tl.constexpr, DECAY_GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ = exp(b) dO S^T + (dO V^T ⊙ D) K,  dK = exp(b_C - b) V dS^T + (dO V^T ⊙ D)^T Q, and the row sums that are the gates' gradients."""
    k_block, chunk, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k_start = k_block * BK
    first, count = chunk_span(chunk, table, T, C, PACKED)
    rows = tl.arange(0, C)
    from_state, from_later, scores = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, C], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for v_start in range(0, V, BV):
        p_v, inside = tile(v, first, count, head, v_start, H, V, C, BV)
        p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        p_s, in_s = state_tile(states, chunk.to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
        p_d, in_d = state_tile(d_states, chunk.to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
        t_v, t_o = tl.load(p_v, mask=inside, other=0.0), tl.load(p_o, mask=inside, other=0.0)
        t_s, t_d = tl.load(p_s, mask=in_s, other=0.0), tl.load(p_d, mask=in_s, other=0.0)
        scores += tl.dot(t_o, tl.trans(t_v), input_precision=PRECISION)
        from_state += tl.dot(t_o, tl.trans(t_s), input_precision=PRECISION)
        from_later += tl.dot(t_v, tl.trans(t_d), input_precision=PRECISION)
        if DECAY_GRADIENT:
            kept += tl.sum(t_s.to(tl.float32) * t_d.to(tl.float32), 1)
    write = row_values(write_gate, first, count, head, H, C, WRITE)[:, None]
    read = row_values(read_gate, first, count, head, H, C, READ)[:, None]
    p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
    p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
    t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
    gated_q, gated_k = t_q.to(tl.float32) * (read * scale), t_k.to(tl.float32) * write
    if DECAY == "channel":
        step, before, after = channel_sums(log_decay, first, count, head, k_start, H, K, C, BK)
        whole = tl.exp(tl.sum(step, 0))
        from_state *= tl.exp(before)
        from_later *= tl.exp(after)
        scores = tl.where(causal_mask(count, C), scores, 0.0)
        g_q, g_k = channel_score_gradients(scores, gated_q.to(t_q.dtype), gated_k.to(t_k.dtype), step, before, count, C, BK, PRECISION)
    else:
        d, from_start, to_end, whole = decay_matrix(log_decay, first, count, head, H, C, DECAY)
        scores = (scores * d).to(t_q.dtype)
        from_state *= from_start[:, None]
        from_later *= to_end[:, None]
        g_q = tl.dot(scores, gated_k.to(t_k.dtype), input_precision=PRECISION)
        g_k = tl.dot(tl.trans(scores), gated_q.to(t_q.dtype), input_precision=PRECISION)
    g_q += from_state
    g_k += from_later
    p_dq, in_dq = tile(d_q, first, count, head, k_start, H, K, C, BK)
    p_dk, in_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
    tl.store(p_dq, (g_q * (read * scale)).to(d_q.dtype.element_ty), mask=inside)
    tl.store(p_dk, (g_k * write).to(d_k.dtype.element_ty), mask=inside)
    part = (k_block.to(tl.int64) * tokens + first + rows) * H + head
    if READ:
        tl.store(d_read + part, tl.sum(g_q * t_q.to(tl.float32), 1) * scale, mask=rows < count)
    if WRITE:
        tl.store(d_write + part, tl.sum(g_k * t_k.to(tl.float32), 1), mask=rows < count)
    if DECAY_GRADIENT:
        # b_i scales what token i reads and divides what it wrote; the chunk's sum scales all that leaves it
        each, leaves = g_q * gated_q - g_k * gated_k, whole * kept + tl.sum(from_later * gated_k, 0)
        if DECAY == "channel":
            p_g, in_g = tile(d_decay, first, count, head, k_start, H, K, C, BK)
            tl.store(p_g, tl.cumsum(each, 0, reverse=True) + leaves[None, :], mask=inside)
        else:
            tl.store(d_decay + part, tl.cumsum(tl.sum(each, 1), 0, reverse=True) + tl.sum(leaves, 0), mask=rows < count)


@triton.jit
def decayed_value_gradients_kernel(
    q, k, d_o, log_decay, read_gate, write_gate, d_states, d_v, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, LATER: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV = exp(b_C - b) write_gate K dS + (scale read_gate Q K^T ⊙ D ⊙ write_gate)^T dO, without the first term unless LATER."""
    v_start, chunk, head = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    from_later, scores = tl.zeros([C, BV], tl.float32), tl.zeros([C, C], tl.float32)
    for k_start in range(0, K, BK):
        p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
        if DECAY == "channel":
            step, before, after = channel_sums(log_decay, first, count, head, k_start, H, K, C, BK)
            scores += channel_scores(t_q, t_k, step, before, count, C, BK, PRECISION)
            t_k = (t_k.to(tl.float32) * tl.exp(after)).to(t_q.dtype)
        else:
            scores += tl.dot(t_q, tl.trans(t_k), input_precision=PRECISION)
        if LATER:
            p_d, in_d = state_tile(d_states, chunk.to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
            from_later += tl.dot(t_k, tl.load(p_d, mask=in_d, other=0.0), input_precision=PRECISION)
    if DECAY == "channel":
        scores = tl.where(causal_mask(count, C), scores, 0.0)
    else:
        d, from_start, to_end, whole = decay_matrix(log_decay, first, count, head, H, C, DECAY)
        scores *= d
        from_later *= to_end[:, None]
    write = row_values(write_gate, first, count, head, H, C, WRITE)
    read = row_values(read_gate, first, count, head, H, C, READ) * scale
    p_o, inside = tile(d_o, first, count, head, v_start, H, V, C, BV)
    t_o = tl.load(p_o, mask=inside, other=0.0)
    scores = tl.trans((scores * read[:, None]).to(t_o.dtype))
    g_v = (from_later + tl.dot(scores, t_o, input_precision=PRECISION)) * write[:, None]
    p_dv, in_dv = tile(d_v, first, count, head, v_start, H, V, C, BV)
    tl.store(p_dv, g_v.to(d_v.dtype.element_ty), mask=inside)


def _decay_kind(log_decay: Tensor | None) -> str:
    return "none" if log_decay is None else {1: "head", 3: "token", 4: "channel"}[log_decay.ndim]


def shape_arguments(q: Tensor, v: Tensor, log_decay: Tensor | None, layout: Layout) -> dict[str, Any]:
    """What all kernels are specialised to."""
    return {
        "T": q.shape[1],
        "H": q.shape[2],
        "K": q.shape[3],
        "V": v.shape[3],
        "C": CHUNK,
        "DECAY": _decay_kind(log_decay),
        "PACKED": layout.packed,
        "PRECISION": dot_precision(q.dtype),
    }


@dataclass(frozen=True)
class Tiles:
    """Block shapes of a kernel (at most; narrower heads take less), and how it is compiled."""

    key: int
    value: int
    warps: int
    stages: int


TILES = {
    "states": Tiles(64, 64, 4, 3),
    "output": Tiles(64, 128, 4, 3),
    "state_gradients": Tiles(64, 64, 4, 3),
    "query_key_gradients": Tiles(64, 64, 4, 3),
    "value_gradients": Tiles(64, 128, 4, 3),
}


def tile_arguments(name: str, key: int, value: int) -> dict[str, int]:
    tiles = TILES[name]
    return {"BK": block(key, tiles.key), "BV": block(value, tiles.value), "num_warps": tiles.warps, "num_stages": tiles.stages}


def chunk_states(
    k: Tensor, v: Tensor, log_decay: Tensor | None, write_gate: Tensor | None, initial: Tensor | None, layout: Layout
) -> tuple[Tensor, Tensor]:
    """The state before every chunk [chunks, H, K, V] in k's dtype, and the last one of every sequence in float32."""
    heads, key, value = k.shape[2], k.shape[3], v.shape[3]
    states = k.new_empty(layout.chunks, heads, key, value)
    final = k.new_empty(layout.sequences, heads, key, value, dtype=torch.float32)
    tiles = tile_arguments("states", key, value)
    grid = (triton.cdiv(key, tiles["BK"]), triton.cdiv(value, tiles["BV"]), layout.sequences * heads)
    decayed_states_kernel[grid](
        k, v, log_decay, write_gate, initial, states, final, layout.table, layout.starts, **shape_arguments(k, v, log_decay, layout),
        GATED=write_gate is not None, HAS_INITIAL=initial is not None, **tiles,
    )  # fmt: skip
    return states, final


def output(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, states: Tensor, layout: Layout,
) -> Tensor:  # fmt: skip
    o, tiles = torch.empty_like(v), tile_arguments("output", q.shape[3], v.shape[3])
    decayed_output_kernel[(triton.cdiv(v.shape[3], tiles["BV"]), layout.chunks, q.shape[2])](
        q, k, v, log_decay, read_gate, write_gate, states, o, layout.table, scale, **shape_arguments(q, v, log_decay, layout),
        READ=read_gate is not None, WRITE=write_gate is not None, **tiles,
    )  # fmt: skip
    return o


def state_gradients(
    q: Tensor, v: Tensor, d_o: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, scale: float, d_final: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """The gradient of the state after every chunk in q's dtype, and of the initial states in float32."""
    heads, key, value = q.shape[2], q.shape[3], v.shape[3]
    d_states, d_initial = q.new_empty(layout.chunks, heads, key, value), torch.empty_like(d_final)
    tiles = tile_arguments("state_gradients", key, value)
    grid = (triton.cdiv(key, tiles["BK"]), triton.cdiv(value, tiles["BV"]), layout.sequences * heads)
    decayed_state_gradients_kernel[grid](
        q, d_o, log_decay, read_gate, d_final, d_states, d_initial, layout.table, layout.starts, scale,
        **shape_arguments(q, v, log_decay, layout), GATED=read_gate is not None, HAS_FINAL=True, **tiles,
    )  # fmt: skip
    return d_states, d_initial


def query_key_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, states: Tensor, d_states: Tensor, layout: Layout, decay_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, and the gradients of log_decay and the gates, empty where there is none."""
    d_q, d_k = torch.empty_like(q), torch.empty_like(k)
    shape, tiles = shape_arguments(q, v, log_decay, layout), tile_arguments("query_key_gradients", q.shape[3], v.shape[3])
    parts = triton.cdiv(q.shape[3], tiles["BK"])
    gates = {"READ": read_gate is not None, "WRITE": write_gate is not None}
    per_block, per_channel, nothing = (parts, *q.shape[:3]), (1, *q.shape), (0,)
    d_read, d_write, d_decay = (
        q.new_empty(size, dtype=torch.float32)
        for size in (
            per_block if gates["READ"] else nothing,
            per_block if gates["WRITE"] else nothing,
            (per_channel if shape["DECAY"] == "channel" else per_block) if decay_gradient else nothing,
        )
    )
    decayed_query_key_gradients_kernel[(parts, layout.chunks, q.shape[2])](
        q, k, v, d_o, log_decay, read_gate, write_gate, states, d_states, d_q, d_k, d_read, d_write, d_decay, layout.table, scale,
        tokens=q.shape[0] * q.shape[1], DECAY_GRADIENT=decay_gradient, **shape, **gates, **tiles,
    )  # fmt: skip
    d_decay, d_read, d_write = d_decay.sum(0), d_read.sum(0), d_write.sum(0)
    return d_q, d_k, d_decay.sum((0, 1)) if decay_gradient and shape["DECAY"] == "head" else d_decay, d_read, d_write


def value_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, d_states: Tensor | None, layout: Layout,
) -> Tensor:  # fmt: skip
    """d_v; without `d_states` only what comes from within each chunk."""
    d_v, tiles = torch.empty_like(v), tile_arguments("value_gradients", q.shape[3], v.shape[3])
    decayed_value_gradients_kernel[(triton.cdiv(v.shape[3], tiles["BV"]), layout.chunks, q.shape[2])](
        q, k, d_o, log_decay, read_gate, write_gate, d_states, d_v, layout.table, scale, **shape_arguments(q, v, log_decay, layout),
        READ=read_gate is not None, WRITE=write_gate is not None, LATER=d_states is not None, **tiles,
    )  # fmt: skip
    return d_v


@torch.library.custom_op("headmax::decayed_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    layout = Layout(q.shape[0], q.shape[1], table, starts)
    states, final = chunk_states(k, v, log_decay, write_gate, initial, layout)
    return output(q, k, v, log_decay, read_gate, write_gate, scale, states, layout), final


@_forward.register_fake
def _(q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts):
    sequences = q.shape[0] if starts is None else starts.shape[0] - 1
    return torch.empty_like(v), q.new_empty(sequences, q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)


@torch.library.custom_op("headmax::decayed_attention_backward", mutates_args=())
def _backward(
    d_o: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None,
    write_gate: Tensor | None, scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None, decay_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay, read_gate, write_gate, initial; an empty tensor where there is none."""
    layout, d_o = Layout(q.shape[0], q.shape[1], table, starts), d_o.contiguous()
    states, _ = chunk_states(k, v, log_decay, write_gate, initial, layout)
    d_states, d_initial = state_gradients(q, v, d_o, log_decay, read_gate, scale, d_final.contiguous(), layout)
    arguments = (q, k, v, d_o, log_decay, read_gate, write_gate, scale)
    d_q, d_k, d_decay, d_read, d_write = query_key_gradients(*arguments, states, d_states, layout, decay_gradient)
    return [d_q, d_k, value_gradients(*arguments, d_states, layout), d_decay, d_read, d_write, d_initial]


@_backward.register_fake
def _(d_o, d_final, q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts, decay_gradient):
    nothing = q.new_empty(0, dtype=torch.float32)
    rows = [torch.empty_like(x, dtype=torch.float32) if x is not None else nothing for x in (read_gate, write_gate)]
    d_decay = torch.empty_like(log_decay, dtype=torch.float32) if decay_gradient else nothing
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_decay, *rows, torch.empty_like(d_final)]


def _save(ctx, inputs, output) -> None:
    q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts = inputs
    ctx.save_for_backward(q, k, v, log_decay, read_gate, write_gate, initial, table, starts)
    ctx.scale = scale


def _gradient(ctx, d_o, d_final):
    q, k, v, log_decay, read_gate, write_gate, initial, table, starts = ctx.saved_tensors
    decay_gradient = log_decay is not None and ctx.needs_input_grad[3]
    d_q, d_k, d_v, d_decay, d_read, d_write, d_initial = _backward(
        d_o, d_final, q, k, v, log_decay, read_gate, write_gate, ctx.scale, initial, table, starts, decay_gradient
    )
    rows = [None if x is None else g.to(x.dtype) for x, g in ((read_gate, d_read), (write_gate, d_write))]
    d_decay = d_decay.to(log_decay.dtype) if decay_gradient else None
    return d_q, d_k, d_v, d_decay, *rows, None, None if initial is None else d_initial.to(initial.dtype), None, None


_forward.register_autograd(_gradient, setup_context=_save)


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial_state: Tensor | None, packing: Packing | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Linear attention with log_decay None, [H], [B,T,H] or [B,T,H,K]."""
    check_kernel_limits(q, v)
    tensors = [None if x is None else x.contiguous() for x in (q, k, v, log_decay, read_gate, write_gate)]
    table, starts = (None, None) if packing is None else (packing.chunk_table, packing.chunk_starts)
    return _forward(*tensors, scale, None if initial_state is None else initial_state.contiguous(), table, starts)
