"""Chunkwise linear attention in Triton, for any decay: none, per head, per token, per channel.

`prepare` turns a chunk's queries and keys into what no longer knows of gates or decays:

    reading  = scale read_gate q exp(b)            what a query reads the chunk's first state with
    writing  = write_gate k exp(b_C - b)           what a key writes to the chunk's last state
    scores   = (scale read_gate q)(write_gate k)^T ⊙ D, below and on the diagonal
    whole    = b_C                                 the log-decay of the state over the chunk

with b the running sum of log-decays. All else is matrix products: S' = exp(whole) S + writing^T v and o = reading S + scores v, and
the same backwards; the gradients of reading, writing and scores go back to q, k, gates and decays in the kernel that makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.packing import CHUNK, Packing
from headmax.ops.triton_channel import channel_score_gradients, channel_scores, channel_sums, is_mild
from headmax.ops.triton_common import (
    Layout,
    block,
    check_kernel_limits,
    chunk_span,
    decay_matrix,
    dot_precision,
    row_values,
    sequence_span,
    state_tile,
    tile,
)


@triton.jit
def prepare_kernel(
    q, k, log_decay, read_gate, write_gate, reading, writing, scores, whole, mild, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of a chunk that depends on gates and decays. EXACT does the scores over again where a channel's decay was not mild."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    index = chunk.to(tl.int64) * H + head
    if EXACT:
        if tl.load(mild + index) != 0:
            return
    rows = tl.arange(0, C)
    read = row_values(read_gate, first, count, head, H, C, READ)[:, None] * scale
    write = row_values(write_gate, first, count, head, H, C, WRITE)[:, None]
    sums, all_mild = tl.zeros([C, C], tl.float32), 1
    if DECAY != "channel":
        d, from_start, to_end, total = decay_matrix(log_decay, first, count, head, H, C, DECAY)
        tl.store(whole + index, total)
    for k_start in range(0, K, BK):
        p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
        gated_q, gated_k = t_q.to(tl.float32) * read, t_k.to(tl.float32) * write
        if DECAY == "channel":
            step, before, after = channel_sums(log_decay, first, count, head, k_start, H, K, C, BK)
            sums += channel_scores(gated_q.to(t_q.dtype), gated_k.to(t_k.dtype), step, before, count, C, BK, EXACT, PRECISION)
            if not EXACT:
                total_channel = tl.sum(step, 0)
                columns = k_start + tl.arange(0, BK)
                tl.store(whole + index * K + columns, total_channel, mask=columns < K)
                all_mild = all_mild * is_mild(total_channel).to(tl.int32)
                gated_q *= tl.exp(before)
                gated_k *= tl.exp(after)
        else:
            sums += tl.dot(gated_q.to(t_q.dtype), tl.trans(gated_k.to(t_k.dtype)), input_precision=PRECISION)
            gated_q *= from_start[:, None]
            gated_k *= to_end[:, None]
        if not EXACT:
            p_r, in_r = tile(reading, first, count, head, k_start, H, K, C, BK)
            p_w, in_w = tile(writing, first, count, head, k_start, H, K, C, BK)
            tl.store(p_r, gated_q.to(reading.dtype.element_ty), mask=inside)
            tl.store(p_w, gated_k.to(writing.dtype.element_ty), mask=inside)
    if DECAY == "channel":
        sums = tl.where((rows[:, None] >= rows[None, :]) & (rows[:, None] < count), sums, 0.0)
        if not EXACT:
            tl.store(mild + index, all_mild)
    else:
        sums *= d
    p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
    tl.store(p_a, sums.to(scores.dtype.element_ty), mask=in_a)


@triton.jit
def decay_state(state, whole, index, k_start, K: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr):
    """exp(whole) state"""
    if CHANNEL:
        channels = k_start + tl.arange(0, BK)
        return state * tl.exp(tl.load(whole + index * K + channels, mask=channels < K, other=0.0))[:, None]
    else:
        return state * tl.exp(tl.load(whole + index))


@triton.jit
def states_kernel(
    writing, v, whole, initial, states, final, table, starts, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr,
    PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S' = exp(whole) S + writing^T v, one block of the state through a whole sequence; writes the state before each chunk."""
    k_start, v_start = tl.program_id(0) * BK, tl.program_id(1) * BV
    sequence, head = tl.program_id(2) // H, tl.program_id(2) % H
    first_chunk, chunks, token, end = sequence_span(sequence, table, starts, T, C, PACKED)
    state = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        p_initial, in_initial = state_tile(initial, (sequence * H + head).to(tl.int64), k_start, v_start, K, V, BK, BV)
        state += tl.load(p_initial, mask=in_initial, other=0.0).to(tl.float32)
    for n in range(chunks):
        count = tl.minimum(C, end - token).to(tl.int32)
        index = (first_chunk + n).to(tl.int64) * H + head
        p_s, in_s = state_tile(states, index, k_start, v_start, K, V, BK, BV)
        tl.store(p_s, state.to(states.dtype.element_ty), mask=in_s)
        p_w, in_w = tile(writing, token, count, head, k_start, H, K, C, BK)
        p_v, in_v = tile(v, token, count, head, v_start, H, V, C, BV)
        t_w, t_v = tl.load(p_w, mask=in_w, other=0.0), tl.load(p_v, mask=in_v, other=0.0)
        state = decay_state(state, whole, index, k_start, K, BK, CHANNEL) + tl.dot(tl.trans(t_w), t_v, input_precision=PRECISION)
        token += C
    p_final, in_final = state_tile(final, (sequence * H + head).to(tl.int64), k_start, v_start, K, V, BK, BV)
    tl.store(p_final, state, mask=in_final)


@triton.jit
def output_kernel(
    reading, scores, v, states, o, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o = reading S + scores v"""
    v_start, chunk, head = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
    p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
    result = tl.dot(tl.load(p_a, mask=in_a, other=0.0), tl.load(p_v, mask=in_v, other=0.0), input_precision=PRECISION)
    for k_start in range(0, K, BK):
        p_r, in_r = tile(reading, first, count, head, k_start, H, K, C, BK)
        p_s, in_s = state_tile(states, chunk.to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
        result += tl.dot(tl.load(p_r, mask=in_r, other=0.0), tl.load(p_s, mask=in_s, other=0.0), input_precision=PRECISION)
    p_o, in_o = tile(o, first, count, head, v_start, H, V, C, BV)
    tl.store(p_o, result.to(o.dtype.element_ty), mask=in_o)


@triton.jit
def state_gradients_kernel(
    reading, d_o, whole, d_final, d_states, d_initial, table, starts, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dS = exp(whole) dS' + reading^T dO, backwards; writes the gradient of the state after each chunk."""
    k_start, v_start = tl.program_id(0) * BK, tl.program_id(1) * BV
    sequence, head = tl.program_id(2) // H, tl.program_id(2) % H
    first_chunk, chunks, token, end = sequence_span(sequence, table, starts, T, C, PACKED)
    p_final, in_final = state_tile(d_final, (sequence * H + head).to(tl.int64), k_start, v_start, K, V, BK, BV)
    gradient = tl.load(p_final, mask=in_final, other=0.0).to(tl.float32)
    for i in range(chunks):
        n = chunks - 1 - i
        first = token + n * C
        count = tl.minimum(C, end - first).to(tl.int32)
        index = (first_chunk + n).to(tl.int64) * H + head
        p_s, in_s = state_tile(d_states, index, k_start, v_start, K, V, BK, BV)
        tl.store(p_s, gradient.to(d_states.dtype.element_ty), mask=in_s)
        p_r, in_r = tile(reading, first, count, head, k_start, H, K, C, BK)
        p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        t_r, t_o = tl.load(p_r, mask=in_r, other=0.0), tl.load(p_o, mask=in_o, other=0.0)
        gradient = decay_state(gradient, whole, index, k_start, K, BK, CHANNEL) + tl.dot(tl.trans(t_r), t_o, input_precision=PRECISION)
    p_initial, in_initial = state_tile(d_initial, (sequence * H + head).to(tl.int64), k_start, v_start, K, V, BK, BV)
    tl.store(p_initial, gradient, mask=in_initial)


@triton.jit
def value_gradients_kernel(
    writing, scores, d_o, d_states, d_v, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LATER: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV = scores^T dO + writing dS', the second term only if LATER."""
    v_start, chunk, head = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
    p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
    result = tl.dot(tl.trans(tl.load(p_a, mask=in_a, other=0.0)), tl.load(p_o, mask=in_o, other=0.0), input_precision=PRECISION)
    if LATER:
        for k_start in range(0, K, BK):
            p_w, in_w = tile(writing, first, count, head, k_start, H, K, C, BK)
            p_d, in_d = state_tile(d_states, chunk.to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
            result += tl.dot(tl.load(p_w, mask=in_w, other=0.0), tl.load(p_d, mask=in_d, other=0.0), input_precision=PRECISION)
    p_v, in_v = tile(d_v, first, count, head, v_start, H, V, C, BV)
    tl.store(p_v, result.to(d_v.dtype.element_ty), mask=in_v)


@triton.jit
def query_key_gradients_kernel(
    q, k, v, d_o, log_decay, read_gate, write_gate, states, d_states, mild, d_q, d_k, d_read, d_write, d_decay, table, scale, T, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, PACKED: tl.constexpr, DECAY_GRADIENT: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From d reading = dO S^T, d writing = V dS'^T and d scores = dO V^T back to q and k; the row sums are the gates' gradients."""
    k_block, chunk, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k_start, index = k_block * BK, chunk.to(tl.int64) * H + head
    if DECAY == "channel":
        if (tl.load(mild + index) != 0) == EXACT:
            return
    first, count = chunk_span(chunk, table, T, C, PACKED)
    rows = tl.arange(0, C)
    from_state, from_later, scores = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, C], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for v_start in range(0, V, BV):
        p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
        p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        p_s, in_s = state_tile(states, index, k_start, v_start, K, V, BK, BV)
        p_d, in_d = state_tile(d_states, index, k_start, v_start, K, V, BK, BV)
        t_v, t_o = tl.load(p_v, mask=in_v, other=0.0), tl.load(p_o, mask=in_o, other=0.0)
        t_s, t_d = tl.load(p_s, mask=in_s, other=0.0), tl.load(p_d, mask=in_d, other=0.0)
        scores += tl.dot(t_o, tl.trans(t_v), input_precision=PRECISION)
        from_state += tl.dot(t_o, tl.trans(t_s), input_precision=PRECISION)
        from_later += tl.dot(t_v, tl.trans(t_d), input_precision=PRECISION)
        if DECAY_GRADIENT:
            kept += tl.sum(t_s.to(tl.float32) * t_d.to(tl.float32), 1)
    write = row_values(write_gate, first, count, head, H, C, WRITE)[:, None]
    read = row_values(read_gate, first, count, head, H, C, READ)[:, None] * scale
    p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
    p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
    t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
    gated_q, gated_k = (t_q.to(tl.float32) * read).to(t_q.dtype), (t_k.to(tl.float32) * write).to(t_k.dtype)
    if DECAY == "channel":
        step, before, after = channel_sums(log_decay, first, count, head, k_start, H, K, C, BK)
        whole = tl.exp(tl.sum(step, 0))
        from_later *= tl.exp(after)
        scores = tl.where((rows[:, None] >= rows[None, :]) & (rows[:, None] < count), scores, 0.0)
        g_q, g_k = channel_score_gradients(scores, gated_q, gated_k, step, before, count, C, BK, EXACT, PRECISION)
        g_q += from_state * tl.exp(before)
    else:
        d, from_start, to_end, total = decay_matrix(log_decay, first, count, head, H, C, DECAY)
        whole = tl.exp(total)
        scores = scores * d
        from_later *= to_end[:, None]
        rounded = scores.to(t_q.dtype)
        g_q = from_state * from_start[:, None] + tl.dot(rounded, gated_k, input_precision=PRECISION)
        g_k = tl.dot(tl.trans(rounded), gated_q, input_precision=PRECISION)
    g_k += from_later
    p_dq, in_dq = tile(d_q, first, count, head, k_start, H, K, C, BK)
    p_dk, in_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
    tl.store(p_dq, (g_q * read).to(d_q.dtype.element_ty), mask=inside)
    tl.store(p_dk, (g_k * write).to(d_k.dtype.element_ty), mask=inside)
    part = (k_block.to(tl.int64) * tokens + first + rows) * H + head
    if READ:
        tl.store(d_read + part, tl.sum(g_q * t_q.to(tl.float32), 1) * scale, mask=rows < count)
    if WRITE:
        tl.store(d_write + part, tl.sum(g_k * t_k.to(tl.float32), 1), mask=rows < count)
    if DECAY_GRADIENT:
        # b_i scales what token i reads and divides what it wrote; the chunk's sum scales all that leaves it
        wide_q, wide_k = t_q.to(tl.float32) * read, t_k.to(tl.float32) * write
        each, leaves = g_q * wide_q - g_k * wide_k, whole * kept + tl.sum(from_later * wide_k, 0)
        if DECAY == "channel":
            p_g, in_g = tile(d_decay, first, count, head, k_start, H, K, C, BK)
            tl.store(p_g, tl.cumsum(each, 0, reverse=True) + leaves[None, :], mask=inside)
        else:
            tl.store(d_decay + part, tl.cumsum(tl.sum(each, 1), 0, reverse=True) + tl.sum(leaves, 0), mask=rows < count)


@dataclass(frozen=True)
class Tiles:
    """Block shapes of a kernel (at most; narrower heads take less), and how it is compiled."""

    key: int
    value: int
    warps: int
    stages: int


TILES = {
    "prepare": Tiles(64, 64, 4, 2),
    "states": Tiles(64, 128, 4, 3),
    "output": Tiles(64, 128, 4, 3),
    "state_gradients": Tiles(64, 128, 4, 3),
    "query_key_gradients": Tiles(64, 64, 8, 2),
    "value_gradients": Tiles(64, 128, 4, 3),
}


def tile_arguments(name: str, key: int, value: int) -> dict[str, int]:
    tiles = TILES[name]
    return {"BK": block(key, tiles.key), "BV": block(value, tiles.value), "num_warps": tiles.warps, "num_stages": tiles.stages}


def decay_kind(log_decay: Tensor | None) -> str:
    return "none" if log_decay is None else {1: "head", 3: "token", 4: "channel"}[log_decay.ndim]


def shape_arguments(q: Tensor, layout: Layout) -> dict[str, Any]:
    """What all kernels are specialised to."""
    names = {"T": q.shape[1], "H": q.shape[2], "K": q.shape[3], "C": CHUNK}
    return names | {"PACKED": layout.packed, "PRECISION": dot_precision(q.dtype)}


class Prepared(NamedTuple):
    """What `prepare_kernel` makes; see the top of this file."""

    reading: Tensor
    writing: Tensor
    scores: Tensor
    """[batch, time, heads, CHUNK]"""
    whole: Tensor
    """[chunks, heads], or [chunks, heads, key] for a decay per channel."""
    mild: Tensor
    """[chunks, heads] whether the decays were mild enough for one product; decays per channel only."""


def prepare(
    q: Tensor, k: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None, scale: float, layout: Layout
) -> Prepared:
    (batch, time, heads, key), channel = q.shape, decay_kind(log_decay) == "channel"
    made = Prepared(
        reading=torch.empty_like(q),
        writing=torch.empty_like(k),
        scores=q.new_empty(batch, time, heads, CHUNK),
        whole=q.new_empty((layout.chunks, heads, key) if channel else (layout.chunks, heads), dtype=torch.float32),
        mild=q.new_empty((layout.chunks, heads) if channel else (0,), dtype=torch.int32),
    )
    tiles = tile_arguments("prepare", key, 64)
    del tiles["BV"]
    for exact in (False, True) if channel else (False,):
        prepare_kernel[(layout.chunks, heads)](
            q, k, log_decay, read_gate, write_gate, *made, layout.table, scale, **shape_arguments(q, layout), DECAY=decay_kind(log_decay),
            READ=read_gate is not None, WRITE=write_gate is not None, EXACT=exact, **tiles,
        )  # fmt: skip
    return made


def chunk_states(prepared: Prepared, v: Tensor, initial: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
    """The state before every chunk [chunks, H, K, V] in v's dtype, and the last one of every sequence in float32."""
    heads, key, value = v.shape[2], prepared.writing.shape[3], v.shape[3]
    states = v.new_empty(layout.chunks, heads, key, value)
    final = v.new_empty(layout.sequences, heads, key, value, dtype=torch.float32)
    tiles = tile_arguments("states", key, value)
    states_kernel[(triton.cdiv(key, tiles["BK"]), triton.cdiv(value, tiles["BV"]), layout.sequences * heads)](
        prepared.writing, v, prepared.whole, initial, states, final, layout.table, layout.starts, V=value,
        CHANNEL=prepared.whole.ndim == 3, HAS_INITIAL=initial is not None, **shape_arguments(prepared.writing, layout), **tiles,
    )  # fmt: skip
    return states, final


def output(prepared: Prepared, v: Tensor, states: Tensor, layout: Layout) -> Tensor:
    o, tiles = torch.empty_like(v), tile_arguments("output", prepared.reading.shape[3], v.shape[3])
    output_kernel[(triton.cdiv(v.shape[3], tiles["BV"]), layout.chunks, v.shape[2])](
        prepared.reading, prepared.scores, v, states, o, layout.table, V=v.shape[3], **shape_arguments(prepared.reading, layout), **tiles
    )
    return o


def state_gradients(prepared: Prepared, d_o: Tensor, d_final: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The gradient of the state after every chunk in d_o's dtype, and of the initial states in float32."""
    heads, key, value = d_o.shape[2], prepared.reading.shape[3], d_o.shape[3]
    d_states, d_initial = d_o.new_empty(layout.chunks, heads, key, value), torch.empty_like(d_final)
    tiles = tile_arguments("state_gradients", key, value)
    state_gradients_kernel[(triton.cdiv(key, tiles["BK"]), triton.cdiv(value, tiles["BV"]), layout.sequences * heads)](
        prepared.reading, d_o, prepared.whole, d_final, d_states, d_initial, layout.table, layout.starts, V=value,
        CHANNEL=prepared.whole.ndim == 3, **shape_arguments(prepared.reading, layout), **tiles,
    )  # fmt: skip
    return d_states, d_initial


def value_gradients(prepared: Prepared, d_o: Tensor, d_states: Tensor | None, layout: Layout) -> Tensor:
    """d_v; without `d_states` only what comes from within each chunk."""
    d_v, tiles = torch.empty_like(d_o), tile_arguments("value_gradients", prepared.writing.shape[3], d_o.shape[3])
    value_gradients_kernel[(triton.cdiv(d_o.shape[3], tiles["BV"]), layout.chunks, d_o.shape[2])](
        prepared.writing, prepared.scores, d_o, d_states, d_v, layout.table, V=d_o.shape[3], LATER=d_states is not None,
        **shape_arguments(prepared.writing, layout), **tiles,
    )  # fmt: skip
    return d_v


def query_key_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, prepared: Prepared, states: Tensor, d_states: Tensor, layout: Layout, decay_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, and the gradients of log_decay and the gates, empty where there is none."""
    d_q, d_k = torch.empty_like(q), torch.empty_like(k)
    kind, tiles = decay_kind(log_decay), tile_arguments("query_key_gradients", q.shape[3], v.shape[3])
    parts = triton.cdiv(q.shape[3], tiles["BK"])
    gates = {"READ": read_gate is not None, "WRITE": write_gate is not None}
    per_block, per_channel, nothing = (parts, *q.shape[:3]), (1, *q.shape), (0,)
    d_read, d_write, d_decay = (
        q.new_empty(size, dtype=torch.float32)
        for size in (
            per_block if gates["READ"] else nothing,
            per_block if gates["WRITE"] else nothing,
            (per_channel if kind == "channel" else per_block) if decay_gradient else nothing,
        )
    )
    for exact in (False, True) if kind == "channel" else (False,):
        query_key_gradients_kernel[(parts, layout.chunks, q.shape[2])](
            q, k, v, d_o, log_decay, read_gate, write_gate, states, d_states, prepared.mild, d_q, d_k, d_read, d_write, d_decay,
            layout.table, scale, tokens=q.shape[0] * q.shape[1], V=v.shape[3], DECAY=kind, DECAY_GRADIENT=decay_gradient, EXACT=exact,
            **shape_arguments(q, layout), **gates, **tiles,
        )  # fmt: skip
    d_decay, d_read, d_write = d_decay.sum(0), d_read.sum(0), d_write.sum(0)
    return d_q, d_k, d_decay.sum((0, 1)) if decay_gradient and kind == "head" else d_decay, d_read, d_write


@torch.library.custom_op("headmax::decayed_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    layout = Layout(q.shape[0], q.shape[1], table, starts)
    prepared = prepare(q, k, log_decay, read_gate, write_gate, scale, layout)
    states, final = chunk_states(prepared, v, initial, layout)
    return output(prepared, v, states, layout), final


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
    prepared = prepare(q, k, log_decay, read_gate, write_gate, scale, layout)
    states, _ = chunk_states(prepared, v, initial, layout)
    d_states, d_initial = state_gradients(prepared, d_o, d_final.contiguous(), layout)
    d_v = value_gradients(prepared, d_o, d_states, layout)
    d_q, d_k, *rows = query_key_gradients(
        q, k, v, d_o, log_decay, read_gate, write_gate, scale, prepared, states, d_states, layout, decay_gradient
    )
    return [d_q, d_k, d_v, *rows, d_initial]


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
