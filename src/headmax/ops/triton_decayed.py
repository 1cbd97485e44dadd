"""Chunkwise linear attention in Triton, for any decay: none, per head, per token, per channel.

`prepare` turns a chunk's queries and keys into what no longer knows of gates or decays:

    reading  = scale read_gate q exp(b - half)       what a query reads the chunk's first state with
    writing  = write_gate k exp(b_C - b - half)      what a key writes to the chunk's last state
    scores   = (scale read_gate q)(write_gate k)^T ⊙ D, below and on the diagonal
    whole    = b_C                                   the log-decay of the state over the chunk

with b the running sum of log-decays, which kernels keep as powers of two; `half` is 0 but for decays per channel (triton_channel.py).
All else is matrix products, forwards

    S' = exp(whole) S + exp(half) writing^T v        `scan`, which keeps exp(half) S for every chunk
    o  = reading exp(half) S + scores v              `combine`

and backwards the same two with (reading, dO) for (writing, v) and scores^T for scores; the gradients of reading, writing and scores
go back to q, k, gates and decays in the kernel that makes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.packing import CHUNK, Packing
from headmax.ops.triton_channel import (
    add_exact_score_gradients,
    channel_exponents,
    exact_scores,
    sums_from_the_end,
    sums_kernel,
)
from headmax.ops.triton_common import (
    Layout,
    causal_mask,
    channel_block,
    check_kernel_limits,
    chunk_span,
    decay_matrix,
    decay_rows,
    decay_sums,
    dot_precision,
    laid_like,
    nth,
    on_its_device,
    row_values,
    segment_span,
    settled,
    state_block,
    state_tile,
    tile,
    values_at,
)
from headmax.ops.triton_tiles import chunk_length, processors, tile_arguments

SHORT = tl.constexpr(CHUNK)
"""Tokens of a chunk that is not long."""


@triton.jit
def prepare_kernel(
    q, k, log_decay, sums, read_gate, write_gate, reading, writing, scores, whole, mild, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of a chunk that depends on gates and decays. Chunks with decays per channel that are not mild are left to EXACT."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    index = chunk.to(tl.int64) * H + head
    if EXACT:  # most have nothing to do
        if tl.load(mild + index) != 0:
            return
    read = row_values(read_gate, first, count, head, H, C, READ) * scale
    write = row_values(write_gate, first, count, head, H, C, WRITE)
    if DECAY == "channel" and not EXACT:  # gates are on their way while it is looked up
        if tl.load(mild + index) == 0:
            return
    products = tl.zeros([C, C], tl.float32)
    if DECAY != "channel":
        b, left, total = decay_sums(log_decay, first, count, head, H, C, DECAY)
        from_start, to_end = decay_rows(b, count, C) * read, decay_rows(left, count, C) * write
        tl.store(whole + index, total.to(tl.float32))
    for k_start in range(0, K, BK):
        p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
        if DECAY == "channel":
            reads, writes = channel_exponents(sums, first, count, head, k_start, H, K, C, BK, EXACT)
            gated_q, gated_k = t_q.to(tl.float32) * read[:, None] * tl.exp2(reads), t_k.to(tl.float32) * write[:, None] * tl.exp2(writes)
        else:
            gated_q, gated_k = t_q.to(tl.float32) * from_start[:, None], t_k.to(tl.float32) * to_end[:, None]
        gated_q, gated_k = gated_q.to(t_q.dtype), gated_k.to(t_k.dtype)
        p_r, in_r = tile(reading, first, count, head, k_start, H, K, C, BK)
        p_w, in_w = tile(writing, first, count, head, k_start, H, K, C, BK)
        tl.store(p_r, gated_q, mask=inside)
        tl.store(p_w, gated_k, mask=inside)
        if EXACT:
            products += exact_scores(q, k, read[:, None], write[:, None], sums, first, count, head, k_start, H, K, C, BK, PRECISION)
        elif DECAY == "channel":
            products += tl.dot(gated_q, tl.trans(gated_k), input_precision=PRECISION)
        else:
            if K > BK:
                products = settled(products, count)
            products += tl.dot(t_q, tl.trans(t_k), input_precision=PRECISION)
    if DECAY == "channel":
        products = tl.where(causal_mask(count, C), products, 0.0)
    else:
        products = products * read[:, None] * write[None, :] * decay_matrix(b, log_decay, count, head, C, DECAY)
    p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
    tl.store(p_a, products.to(scores.dtype.element_ty), mask=in_a)


@triton.jit
def load_decays(decays, index, k_start, K: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr):
    """Log-decays of a [BK, ...] block of state number `index`: [BK], or one for all."""
    if CHANNEL:
        channels = k_start + tl.arange(0, BK)
        return tl.load(decays + index * K + channels, mask=channels < K, other=0.0)
    else:
        return tl.load(decays + index)


@triton.jit
def scaled(state, log_factor, CHANNEL: tl.constexpr):
    """2^log_factor state"""
    if CHANNEL:
        return state * tl.exp2(log_factor)[:, None]
    else:
        return state * tl.exp2(log_factor)


@triton.jit
def scan_kernel(
    keys, values, whole, mild, initial, states, final, decays, table, starts, segments, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, STORE: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S' = 2^whole S + 2^half keys^T values, one block of the state through one segment of a sequence, backwards if REVERSE.

    STORE keeps 2^half S for each chunk, LAST the state at the end; where nothing is stored, `decays` is the log-decay of the segment.
    """
    k_start, v_start, run, head = state_block(H, K, V, BK, BV)
    first_chunk, chunks, token, end = segment_span(run, segments, table, starts, T, C, PACKED)
    place = run.to(tl.int64) * H + head
    state = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        p_initial, in_initial = state_tile(initial, place, k_start, v_start, K, V, BK, BV)
        state += tl.load(p_initial, mask=in_initial, other=0.0).to(tl.float32)
    if CHANNEL:
        total = tl.zeros([BK], tl.float32)
    else:
        total = 0.0
    for i in range(chunks):
        n = nth(i, chunks, REVERSE)
        at = token + n * C
        count = tl.minimum(C, end - at).to(tl.int32)
        index = (first_chunk + n).to(tl.int64) * H + head
        p_k, in_k = tile(keys, at, count, head, k_start, H, K, C, BK)
        p_v, in_v = tile(values, at, count, head, v_start, H, V, C, BV)
        t_k, t_v = tl.load(p_k, mask=in_k, other=0.0), tl.load(p_v, mask=in_v, other=0.0)
        decay = load_decays(whole, index, k_start, K, BK, CHANNEL)
        added = tl.dot(tl.trans(t_k), t_v, input_precision=PRECISION)
        if CHANNEL:
            part = tl.where(tl.load(mild + index) != 0, 0.5 * decay, 0.0)
            added = scaled(added, part, CHANNEL)
        if STORE:
            p_s, in_s = state_tile(states, index, k_start, v_start, K, V, BK, BV)
            if CHANNEL:
                tl.store(p_s, scaled(state, part, CHANNEL).to(states.dtype.element_ty), mask=in_s)
            else:
                tl.store(p_s, state.to(states.dtype.element_ty), mask=in_s)
        else:
            total += decay
        state = scaled(state, decay, CHANNEL) + added
    if LAST:
        p_final, in_final = state_tile(final, place, k_start, v_start, K, V, BK, BV)
        tl.store(p_final, state, mask=in_final)
    if not STORE:
        if CHANNEL:
            channels = k_start + tl.arange(0, BK)
            tl.store(decays + place * K + channels, total, mask=channels < K)
        else:
            tl.store(decays + place, total)


@triton.jit
def carry_kernel(
    ends, decays, initial, final, segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr, REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """What each segment of a sequence would end with, had it begun with nothing, becomes what it begins with; and the last state."""
    k_start, v_start, sequence, head = state_block(H, K, V, BK, BV)
    state = tl.zeros([BK, BV], tl.float32)
    place = (sequence * H + head).to(tl.int64)
    if HAS_INITIAL:
        p_initial, in_initial = state_tile(initial, place, k_start, v_start, K, V, BK, BV)
        state += tl.load(p_initial, mask=in_initial, other=0.0).to(tl.float32)
    for i in range(segments):
        run = sequence * segments + nth(i, segments, REVERSE)
        index = run.to(tl.int64) * H + head
        p_s, in_s = state_tile(ends, index, k_start, v_start, K, V, BK, BV)
        end = tl.load(p_s, mask=in_s, other=0.0)
        tl.store(p_s, state, mask=in_s)
        state = scaled(state, load_decays(decays, index, k_start, K, BK, CHANNEL), CHANNEL) + end
    p_final, in_final = state_tile(final, place, k_start, v_start, K, V, BK, BV)
    tl.store(p_final, state, mask=in_final)


@triton.jit
def combine_kernel(
    keys, scores, values, states, result, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STATES: tl.constexpr,
    TRANSPOSED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """result = scores values + keys states, with scores^T if TRANSPOSED and the second term only if STATES."""
    v_start, chunk, head = channel_block(H, V, BV)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
    p_v, in_v = tile(values, first, count, head, v_start, H, V, C, BV)
    t_a = tl.load(p_a, mask=in_a, other=0.0)
    if TRANSPOSED:
        t_a = tl.trans(t_a)
    total = tl.dot(t_a, tl.load(p_v, mask=in_v, other=0.0), input_precision=PRECISION)
    if STATES:
        for k_start in range(0, K, BK):
            p_k, in_k = tile(keys, first, count, head, k_start, H, K, C, BK)
            p_s, in_s = state_tile(states, chunk.to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
            total += tl.dot(tl.load(p_k, mask=in_k, other=0.0), tl.load(p_s, mask=in_s, other=0.0), input_precision=PRECISION)
    p_o, in_o = tile(result, first, count, head, v_start, H, V, C, BV)
    tl.store(p_o, total.to(result.dtype.element_ty), mask=in_o)


@triton.jit
def query_key_gradients_kernel(
    q, k, v, d_o, log_decay, sums, read_gate, write_gate, reading, writing, states, d_states, whole, mild, d_q, d_k, d_read, d_write,
    d_decay, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, PACKED: tl.constexpr, DECAY_GRADIENT: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From d scores = dO V^T, d reading = dO S^T and d writing = V dS'^T back to q and k; the row sums are the gates' gradients."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, count = chunk_span(chunk, table, T, C, PACKED)
    index, rows = chunk.to(tl.int64) * H + head, tl.arange(0, C)
    at, there = (first + rows) * H + head, rows < count
    LONG: tl.constexpr = C > SHORT
    if DECAY != "channel":  # by these addresses: by those of row_values it takes longer for RetNet's heads on an H200
        read, write = values_at(read_gate, 0, at, there, C, READ)[:, None], values_at(write_gate, 0, at, there, C, WRITE)[:, None]
    else:
        if EXACT:
            if tl.load(mild + index) != 0:
                return
        read = row_values(read_gate, first, count, head, H, C, READ)[:, None]
        write = row_values(write_gate, first, count, head, H, C, WRITE)[:, None]
        if not EXACT:  # gates are on their way while it is looked up
            if tl.load(mild + index) == 0:
                return
            read *= scale
    scores = tl.zeros([C, C], tl.float32)
    for v_start in range(0, V, BV):
        p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
        p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        t_v, t_o = tl.load(p_v, mask=in_v, other=0.0), tl.load(p_o, mask=in_o, other=0.0)
        scores += tl.dot(t_o, tl.trans(t_v), input_precision=PRECISION)
    if DECAY == "channel":
        scores = tl.where(causal_mask(count, C), scores, 0.0)
    else:
        b, left, total = decay_sums(log_decay, first, count, head, H, C, DECAY)
        from_start, to_end = decay_rows(b, count, C), decay_rows(left, count, C)
        scores *= decay_matrix(b, log_decay, count, head, C, DECAY) * scale
    to_q, to_k = scores, scores
    if DECAY != "channel" and not LONG:  # registers do not hold two of a long chunk's: there queries and keys are gated
        if WRITE:
            to_q = scores * tl.trans(write)
        if READ:
            to_k = scores * read
    to_q, to_k = to_q.to(q.dtype.element_ty), to_k.to(q.dtype.element_ty)
    by_read, by_write, moves, leaves = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), 0.0
    for k_start in tl.range(0, K, BK, num_stages=1, disable_licm=True):  # pointers made early would take up registers
        g_q, g_k = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
        kept = tl.zeros([BK, BV // 8], tl.float32)  # sums of eight, which no two threads have to share
        p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        if DECAY != "channel" and not LONG:  # on their way during the products; a long chunk's would take shared memory
            t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
        for v_start in range(0, V, BV):
            p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
            p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
            p_s, in_s = state_tile(states, index, k_start, v_start, K, V, BK, BV)
            p_d, in_d = state_tile(d_states, index, k_start, v_start, K, V, BK, BV)
            t_v, t_o = tl.load(p_v, mask=in_v, other=0.0), tl.load(p_o, mask=in_o, other=0.0)
            t_s, t_d = tl.load(p_s, mask=in_s, other=0.0), tl.load(p_d, mask=in_d, other=0.0)
            g_q += tl.dot(t_o, tl.trans(t_s), input_precision=PRECISION)
            if DECAY_GRADIENT and V > BV:
                g_k = settled(g_k, count)
            g_k += tl.dot(t_v, tl.trans(t_d), input_precision=PRECISION)
            if DECAY_GRADIENT:
                kept += tl.sum(tl.reshape(t_s.to(tl.float32) * t_d.to(tl.float32), (BK, BV // 8, 8)), 2)
        if DECAY == "channel":
            p_r, in_r = tile(reading, first, count, head, k_start, H, K, C, BK)
            p_w, in_w = tile(writing, first, count, head, k_start, H, K, C, BK)
            as_read, as_written = tl.load(p_r, mask=inside, other=0.0), tl.load(p_w, mask=inside, other=0.0)
            p_g, in_g = tile(d_decay, first, count, head, k_start, H, K, C, BK)
            state_leaves = tl.sum(g_k * as_written.to(tl.float32), 0)
            if EXACT:
                state_leaves += tl.sum(kept, 1) * tl.exp2(load_decays(whole, index, k_start, K, BK, True))
                each = g_q * as_read.to(tl.float32) - g_k * as_written.to(tl.float32)
                reads, writes = channel_exponents(sums, first, count, head, k_start, H, K, C, BK, EXACT)
                g_q *= tl.exp2(reads)
                g_k *= tl.exp2(writes)
                g_q, g_k, each = add_exact_score_gradients(
                    g_q, g_k, each, scores, q, k, read * scale, write, sums, first, count, head, k_start, H, K, C, BK, PRECISION
                )
                g_q *= scale
                by_read += tl.sum(g_q * tl.load(p_q, mask=inside, other=0.0).to(tl.float32), 1)
                by_write += tl.sum(g_k * tl.load(p_k, mask=inside, other=0.0).to(tl.float32), 1)
            else:  # in `each` the scores' share nearly cancels, which needs the very same rounded factors in both its terms
                g_q += tl.dot(to_q, as_written, input_precision=PRECISION)
                g_k += tl.dot(tl.trans(to_k), as_read, input_precision=PRECISION)
                state_leaves += tl.sum(kept, 1)  # both states are scaled by 2^half already
                read_back, written_back = g_q * as_read.to(tl.float32), g_k * as_written.to(tl.float32)
                by_read += tl.sum(read_back, 1)  # times the gate; a chunk with gates near 0 is EXACT
                by_write += tl.sum(written_back, 1)
                each = read_back - written_back
            if DECAY_GRADIENT:
                tl.store(p_g, sums_from_the_end(each, C, PRECISION) + state_leaves[None, :], mask=inside)
            if not EXACT:
                reads, writes = channel_exponents(sums, first, count, head, k_start, H, K, C, BK, EXACT)
                reads = laid_like(reads, g_q)
                g_q *= tl.exp2(reads)
                g_k *= tl.exp2(-reads)
        else:
            if LONG:
                t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
            g_q *= (from_start * scale)[:, None]
            g_k *= to_end[:, None]
            if DECAY_GRADIENT:
                # a step at t scales what tokens from t on read of the state, what those before t write to it, the state, and what
                # passes between them
                reads, writes = tl.sum(g_q * t_q.to(tl.float32) * read, 1), tl.sum(g_k * t_k.to(tl.float32) * write, 1)
                between = scores * tl.dot(t_q, tl.trans(t_k), input_precision=PRECISION) * read * tl.trans(write)
                moves += reads + tl.sum(between, 1) - tl.sum(between, 0) - writes
                leaves += tl.sum(writes, 0) + tl.exp2(total.to(tl.float32)) * tl.sum(kept)
            gated_q, gated_k = t_q, t_k
            if LONG:
                gated_q, gated_k = (t_q.to(tl.float32) * read).to(t_q.dtype), (t_k.to(tl.float32) * write).to(t_k.dtype)
            g_q += tl.dot(to_q, gated_k, input_precision=PRECISION)
            g_k += tl.dot(tl.trans(to_k), gated_q, input_precision=PRECISION)
            by_read += tl.sum(g_q * t_q.to(tl.float32), 1)
            by_write += tl.sum(g_k * t_k.to(tl.float32), 1)
        p_dq, in_dq = tile(d_q, first, count, head, k_start, H, K, C, BK)
        p_dk, in_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
        tl.store(p_dq, (g_q * read).to(d_q.dtype.element_ty), mask=inside)
        tl.store(p_dk, (g_k * write).to(d_k.dtype.element_ty), mask=inside)
    if DECAY == "channel" and not EXACT:
        by_read *= scale / tl.sum(read, 1)
        by_write /= tl.sum(write, 1)
    if READ:
        tl.store(d_read + at, by_read, mask=there)
    if WRITE:
        tl.store(d_write + at, by_write, mask=there)
    if DECAY_GRADIENT and DECAY != "channel":
        tl.store(d_decay + at, tl.cumsum(moves, 0, reverse=True) + leaves, mask=there)


def decay_kind(log_decay: Tensor | None) -> str:
    return "none" if log_decay is None else {1: "head", 3: "token", 4: "channel"}[log_decay.ndim]


def chunk_tokens(q: Tensor, log_decay: Tensor | None) -> int:
    return CHUNK if decay_kind(log_decay) == "channel" else chunk_length(q, q.shape[3])


def shape_arguments(q: Tensor, layout: Layout) -> dict[str, Any]:
    """What all kernels are specialised to. Packed chunks say where they lie: a length would be one more reason to compile."""
    names = {"T": 0 if layout.packed else q.shape[1], "H": q.shape[2], "K": q.shape[3], "C": layout.chunk}
    return names | {"PACKED": layout.packed, "PRECISION": dot_precision(q.dtype)}


class Prepared(NamedTuple):
    """What `prepare_kernel` makes; see the top of this file."""

    reading: Tensor
    writing: Tensor
    scores: Tensor
    """[batch, time, heads, tokens of a chunk]"""
    whole: Tensor
    """[chunks, heads], or [chunks, heads, key] for a decay per channel."""
    mild: Tensor
    """[chunks, heads] whether decays and gates are such that one product does, for a decay per channel, else empty."""
    sums: Tensor
    """[batch, time, heads, key] running sums of each chunk's log-decays, for a decay per channel, else empty."""


def prepare(
    q: Tensor, k: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None, scale: float, layout: Layout
) -> Prepared:
    (batch, time, heads, key), channel = q.shape, decay_kind(log_decay) == "channel"
    per_chunk = (layout.chunks, heads)
    made = Prepared(
        reading=torch.empty_like(q),
        writing=torch.empty_like(k),
        scores=q.new_empty(batch, time, heads, layout.chunk),
        whole=q.new_empty((*per_chunk, key) if channel else per_chunk, dtype=torch.float32),
        mild=q.new_empty(per_chunk if channel else (0,), dtype=torch.int32),
        sums=q.new_empty(q.shape if channel else (0,), dtype=torch.float64 if q.dtype == torch.float32 else torch.float32),
    )
    shape = shape_arguments(q, layout)
    gates = {"READ": read_gate is not None, "WRITE": write_gate is not None}
    if channel:
        few = {name: shape[name] for name in ("T", "H", "K", "C", "PACKED")} | gates | {"BK": 64}
        sums_kernel[(layout.chunks * heads,)](log_decay, read_gate, write_gate, made.sums, made.whole, made.mild, layout.table, **few)
    tiles = tile_arguments("prepare_channel" if channel else "prepare", q, key)
    for exact in (False, True) if channel else (False,):
        prepare_kernel[per_chunk](
            q, k, log_decay, made.sums, read_gate, write_gate, made.reading, made.writing, made.scores, made.whole, made.mild, layout.table,
            scale, **shape, **gates, DECAY=decay_kind(log_decay), EXACT=exact, **tiles,
        )  # fmt: skip
    return made


def state_blocks(keys: Tensor, values: Tensor) -> int:
    """Into how many blocks a scan cuts the states of one sequence."""
    key, (heads, value) = keys.shape[3], values.shape[2:]
    tiles = tile_arguments("scan", keys, key, value)
    return heads * triton.cdiv(key, tiles["BK"]) * triton.cdiv(value, tiles["BV"])


def begins_shape(keys: Tensor, values: Tensor, layout: Layout) -> tuple[int, ...]:
    """What each segment of each sequence begins with, [sequences * segments, H, K, V]; empty where sequences stay whole."""
    segments = layout.segments(state_blocks(keys, values), processors(values.device))
    return (layout.sequences * segments, values.shape[2], keys.shape[3], values.shape[3]) if segments > 1 else (0,)


def scan(
    keys: Tensor, values: Tensor, whole: Tensor, mild: Tensor, initial: Tensor | None, layout: Layout, reverse: bool = False,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The state each chunk begins with (ends with, if `reverse`) [chunks, H, K, V] in the values' dtype; the last state in float32, of use
    only if no `begins` were given; and `begins`.

    Sequences too few to keep the GPU busy are cut into segments, which run at the same time: once from nothing, to know what each ends
    with, and again from what the segments before it hand on, `begins`.
    """
    heads, key, value, runs = values.shape[2], keys.shape[3], values.shape[3], layout.sequences
    states = values.new_empty(layout.chunks, heads, key, value)
    final = values.new_empty(runs, heads, key, value, dtype=torch.float32)
    known = begins is not None
    if begins is None:
        begins = final.new_empty(begins_shape(keys, values, layout))
    segments, shape = len(begins) // runs or 1, shape_arguments(keys, layout) | {"V": value, "CHANNEL": whole.ndim == 3, "REVERSE": reverse}
    tiles = tile_arguments("scan", keys, key, value)

    def launch(begin: Tensor | None, end: Tensor, decays: Tensor, store: bool, last: bool) -> None:
        scan_kernel[(runs * segments * state_blocks(keys, values),)](
            keys, values, whole, mild, begin, states, end, decays, layout.table, layout.starts, segments, **shape, **tiles,
            HAS_INITIAL=begin is not None, STORE=store, LAST=last,
        )  # fmt: skip

    if segments == 1:
        launch(initial, final, final, store=True, last=True)
        return states, final, begins
    if not known:
        decays = final.new_empty(runs * segments, heads, *whole.shape[2:])
        launch(None, begins, decays, store=False, last=True)
        few = {name: shape[name] for name in ("H", "K", "V", "CHANNEL", "REVERSE")} | {"BK": 16, "BV": 64}
        carry_kernel[(runs * heads * triton.cdiv(key, 16) * triton.cdiv(value, 64),)](
            begins, decays, initial, final, segments, **few, HAS_INITIAL=initial is not None
        )
    launch(begins, final, final, store=True, last=False)
    return states, final, begins


def combine(keys: Tensor, scores: Tensor, values: Tensor, states: Tensor | None, layout: Layout, transposed: bool = False) -> Tensor:
    """scores values + keys states for every chunk; with scores^T if `transposed`."""
    result, tiles = torch.empty_like(values), tile_arguments("combine", keys, keys.shape[3], values.shape[3])
    combine_kernel[(triton.cdiv(values.shape[3], tiles["BV"]) * layout.chunks * values.shape[2],)](
        keys, scores, values, states, result, layout.table, V=values.shape[3], STATES=states is not None, TRANSPOSED=transposed,
        **shape_arguments(keys, layout), **tiles,
    )  # fmt: skip
    return result


def query_key_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, prepared: Prepared, states: Tensor, d_states: Tensor, layout: Layout, decay_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, the gradient of log_decay, empty if it has none, and those of the gates there are [gates, B, T, H]."""
    d_q, d_k, kind = torch.empty_like(q), torch.empty_like(k), decay_kind(log_decay)
    gates = {"READ": read_gate is not None, "WRITE": write_gate is not None}
    d_gates = q.new_empty(sum(gates.values()), *q.shape[:3], dtype=torch.float32)
    d_decay = q.new_empty(q.shape[:3] if decay_gradient else (0,), dtype=torch.float32)
    if log_decay is not None and decay_gradient and kind == "channel":
        d_decay = torch.empty_like(log_decay)
    tiles = tile_arguments("query_key_gradients" + "_channel" * (kind == "channel"), q, q.shape[3], v.shape[3])
    for exact in (False, True) if kind == "channel" else (False,):
        query_key_gradients_kernel[(layout.chunks * q.shape[2],)](
            q, k, v, d_o, log_decay, prepared.sums, read_gate, write_gate, prepared.reading, prepared.writing, states, d_states,
            prepared.whole, prepared.mild, d_q, d_k, d_gates[:1], d_gates[-1:], d_decay, layout.table, scale, V=v.shape[3], DECAY=kind,
            DECAY_GRADIENT=decay_gradient, EXACT=exact, **shape_arguments(q, layout), **gates, **tiles,
        )  # fmt: skip
    return d_q, d_k, d_decay.sum((0, 1)) if decay_gradient and kind == "head" else d_decay, d_gates


@torch.library.custom_op("headmax::decayed_attention", mutates_args=())
@on_its_device
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the final state, and for the backward pass what segments begin with."""
    layout = Layout(q.shape[0], q.shape[1], table, starts, chunk_tokens(q, log_decay))
    prepared = prepare(q, k, log_decay, read_gate, write_gate, scale, layout)
    states, final, begins = scan(prepared.writing, v, prepared.whole, prepared.mild, initial, layout)
    return combine(prepared.reading, prepared.scores, v, states, layout), final, begins


@_forward.register_fake
def _(q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts):
    layout = Layout(q.shape[0], q.shape[1], table, starts, chunk_tokens(q, log_decay))
    final, begins = (q.new_empty(shape, dtype=torch.float32) for shape in (layout.states(q, v), begins_shape(q, v, layout)))
    return torch.empty_like(v), final, begins


@torch.library.custom_op("headmax::decayed_attention_backward", mutates_args=())
@on_its_device
def _backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None,
    write_gate: Tensor | None, scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None, begins: Tensor,
    decay_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay (an empty tensor if it has none), the gates there are [gates, B, T, H], initial."""
    layout, d_o = Layout(q.shape[0], q.shape[1], table, starts, chunk_tokens(q, log_decay)), d_o.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    prepared = prepare(q, k, log_decay, read_gate, write_gate, scale, layout)
    states, _, _ = scan(prepared.writing, v, prepared.whole, prepared.mild, initial, layout, begins=begins)
    d_states, d_initial, _ = scan(prepared.reading, d_o, prepared.whole, prepared.mild, d_final, layout, reverse=True)
    d_v = combine(prepared.writing, prepared.scores, d_o, d_states, layout, transposed=True)
    d_q, d_k, d_decay, d_gates = query_key_gradients(
        q, k, v, d_o, log_decay, read_gate, write_gate, scale, prepared, states, d_states, layout, decay_gradient
    )
    return [d_q, d_k, d_v, d_decay, d_gates, d_initial]


@_backward.register_fake
def _(d_o, d_final, q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts, begins, decay_gradient):
    d_gates = q.new_empty((read_gate is not None) + (write_gate is not None), *q.shape[:3], dtype=torch.float32)
    d_decay = q.new_empty(0, dtype=torch.float32)
    if decay_gradient:
        d_decay = torch.empty_like(log_decay, dtype=log_decay.dtype if log_decay.ndim == 4 else torch.float32)
    d_initial = q.new_empty(Layout(q.shape[0], q.shape[1], table, starts).states(q, v), dtype=torch.float32)
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_decay, d_gates, d_initial]


def _save(ctx, inputs, output) -> None:
    q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # or zeros would be made for what is kept
    ctx.save_for_backward(q, k, v, log_decay, read_gate, write_gate, initial, table, starts, output[2])
    ctx.scale = scale


def _gradient(ctx, d_o, d_final, _):
    q, k, v, log_decay, read_gate, write_gate, initial, table, starts, begins = ctx.saved_tensors
    decay_gradient = log_decay is not None and ctx.needs_input_grad[3]
    d_o = torch.zeros_like(v) if d_o is None else d_o
    d_q, d_k, d_v, d_decay, d_gates, d_initial = _backward(
        d_o, d_final, q, k, v, log_decay, read_gate, write_gate, ctx.scale, initial, table, starts, begins, decay_gradient
    )
    gates = iter(d_gates)
    rows = [None if x is None else next(gates).to(x.dtype) for x in (read_gate, write_gate)]
    d_decay = d_decay.to(log_decay.dtype) if decay_gradient else None
    return d_q, d_k, d_v, d_decay, *rows, None, None if initial is None else d_initial.to(initial.dtype), None, None


_forward.register_autograd(_gradient, setup_context=_save)


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial_state: Tensor | None, packing: Packing | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Linear attention with log_decay None, [H], [B,T,H] or [B,T,H,K]."""
    check_kernel_limits(q, v)
    if q.dtype == torch.float16 and decay_kind(log_decay) == "channel":  # a chunk's decays do not fit float16's range
        o, state = decayed_attention(q.float(), k.float(), v.float(), log_decay, read_gate, write_gate, scale, initial_state, packing)
        return o.half(), state
    tensors = [None if x is None else x.contiguous() for x in (q, k, v, log_decay, read_gate, write_gate)]
    table, starts = (None, None) if packing is None else packing.chunks(chunk_tokens(q, log_decay))
    o, state, _ = _forward(*tensors, scale, None if initial_state is None else initial_state.contiguous(), table, starts)
    return o, state
