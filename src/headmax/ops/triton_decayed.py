"""Chunkwise linear attention in Triton, for any decay: none, per head, per token, per channel.

`prepare` turns a chunk's queries and keys into what no longer knows of gates or decays:

    reading  = scale read_gate q exp(b - half)       what a query reads the chunk's first state with
    writing  = write_gate k exp(b_C - b - half)      what a key writes to the chunk's last state
    scores   = (scale read_gate q)(write_gate k)^T ⊙ D, below and on the diagonal
    whole    = b_C                                   the log-decay of the state over the chunk

with b the running sum of log-decays, which kernels keep as powers of two; `half` is 0 but for decays per channel (triton_channel.py).
All else is matrix products (triton_scan.py), forwards

    S' = exp(whole) S + exp(half) writing^T v
    o  = reading exp(half) S + scores v

and backwards the same two with (reading, dO) for (writing, v) and scores^T for scores; the gradients of reading, writing and scores
go back to q, k, gates and decays in the kernel that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.launch import launch
from headmax.ops.library import define_op
from headmax.ops.packing import CHUNK, Packing
from headmax.ops.sequential import per_key_head, per_value_head
from headmax.ops.triton_channel import (
    add_exact_score_gradients,
    exact_exponents,
    prepare_channel_kernel,
    sums_at,
    sums_from_the_end,
)
from headmax.ops.triton_common import (
    Layout,
    causal_mask,
    chunk_span,
    contiguous,
    decay_matrix,
    decay_rows,
    decay_sums,
    laid_like,
    row_values,
    settled,
    state_tile,
    tile,
    values_at,
)
from headmax.ops.triton_scan import begins_shape, load_decays, scan, scan_and_read, shape_arguments
from headmax.ops.triton_tiles import chunk_length, tile_arguments

SHORT = tl.constexpr(CHUNK)
"""Tokens of a chunk that is not long."""


@triton.jit
def prepare_kernel(
    q, k, log_decay, read_gate, write_gate, reading, writing, scores, whole, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of a chunk that depends on gates and decays; scores transposed for the backward pass."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    read = row_values(read_gate, first, count, head, H, C, READ) * scale
    write = row_values(write_gate, first, count, head, H, C, WRITE)
    products = tl.zeros([C, C], tl.float32)
    b, left, total = decay_sums(log_decay, first, count, head, H, C, DECAY)
    from_start, to_end = decay_rows(b, count, C) * read, decay_rows(left, count, C) * write
    tl.store(whole + chunk.to(tl.int64) * H + head, total.to(tl.float32))
    for k_start in range(0, K, BK):
        p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
        p_r, in_r = tile(reading, first, count, head, k_start, H, K, C, BK)
        p_w, in_w = tile(writing, first, count, head, k_start, H, K, C, BK)
        tl.store(p_r, (t_q.to(tl.float32) * from_start[:, None]).to(t_q.dtype), mask=inside)
        tl.store(p_w, (t_k.to(tl.float32) * to_end[:, None]).to(t_k.dtype), mask=inside)
        if K > BK:
            products = settled(products, count)
        products += tl.dot(t_q, tl.trans(t_k), input_precision=PRECISION)
    products = products * read[:, None] * write[None, :] * decay_matrix(b, log_decay, count, head, C, DECAY)
    products = products.to(scores.dtype.element_ty)
    p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
    tl.store(p_a, tl.trans(products) if BACKWARD else products, mask=in_a)


@triton.jit
def query_key_gradients_kernel(
    q, k, v, d_o, log_decay, sums, read_gate, write_gate, reading, writing, states, d_states, whole, mild, d_q, d_k, d_read, d_write,
    d_decay, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, PACKED: tl.constexpr, DECAY_GRADIENT: tl.constexpr,
    STRICT: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From d scores = dO V^T, d reading = dO S^T and d writing = V dS'^T back to q and k; the row sums are the gates' gradients.

    STRICT, for decays per channel: tokens read only earlier ones, and nothing is written to the state.
    """
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
        if STRICT:
            scores = tl.where(rows[:, None] > rows[None, :], scores, 0.0)
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
            if DECAY_GRADIENT and V > BV and not STRICT:
                g_k = settled(g_k, count)
            if not STRICT:
                g_k += tl.dot(t_v, tl.trans(t_d), input_precision=PRECISION)
            if DECAY_GRADIENT and not STRICT:
                kept += tl.sum(tl.reshape(t_s.to(tl.float32) * t_d.to(tl.float32), (BK, BV // 8, 8)), 2)
        if DECAY == "channel":
            p_r, in_r = tile(reading, first, count, head, k_start, H, K, C, BK)
            p_w, in_w = tile(writing, first, count, head, k_start, H, K, C, BK)
            as_read, as_written = tl.load(p_r, mask=inside, other=0.0), tl.load(p_w, mask=inside, other=0.0)
            p_g, in_g = tile(d_decay, first, count, head, k_start, H, K, C, BK)
            written = g_k * as_written.to(tl.float32)
            if EXACT:
                written = tl.where((rows < count - 1)[:, None], written, 0.0)  # no step of the chunk scales what its last token writes
            state_leaves = tl.sum(written, 0)
            if EXACT:
                state_leaves += tl.sum(kept, 1) * tl.exp2(load_decays(whole, index, True, k_start, K, BK, True))
                each = g_q * as_read.to(tl.float32) - written
                reads, writes = exact_exponents(sums, first, count, head, k_start, H, K, C, BK)
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
                reads = laid_like(sums_at(sums, rows, first, count, head, k_start, H, K, BK).to(tl.float32), g_q)
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
                # no step scales what a token has of itself or the last one writes: both would cancel, but beside steep decays not to zero
                between, writes = tl.where(rows[:, None] > rows[None, :], between, 0.0), tl.where(rows < count - 1, writes, 0.0)
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


class Prepared(NamedTuple):
    """What `prepare_kernel` or `prepare_channel_kernel` makes; see the top of this file."""

    reading: Tensor
    writing: Tensor
    scores: Tensor
    """[batch, time, heads, tokens of a chunk]; transposed, a token's row has what later ones read of it."""
    whole: Tensor
    """[chunks, heads], or [chunks, heads, key] for a decay per channel."""
    mild: Tensor | None
    """[chunks, heads] whether decays and gates are such that one product does, for a decay per channel."""
    sums: Tensor | None
    """[batch, time, heads, key] for a decay per channel: the running sums of a chunk's log-decays, or, of a mild chunk, what
    its tokens read through, which only the backward pass has."""


class Reader(NamedTuple):
    """What reads the states, queries or the delta rule's keys."""

    x: Tensor
    gate: Tensor | None
    scale: float
    dtype: torch.dtype
    """Of its scores."""


def prepare_channel(
    readers: Sequence[Reader], k: Tensor, log_decay: Tensor, write_gate: Tensor | None, layout: Layout, backward: bool = False
) -> list[Prepared]:
    """`prepare` for a decay per channel, for each reader of the same keys; a chunk is mild if it is for all of them."""
    (batch, time, heads, key), per_chunk = k.shape, (layout.chunks, k.shape[2])
    writing, whole = torch.empty_like(k), k.new_empty((*per_chunk, key), dtype=torch.float32)
    sums = torch.empty_like(k, dtype=torch.float64 if k.dtype == torch.float32 else torch.float32)
    mild = [k.new_empty(per_chunk, dtype=torch.int32) for _ in readers]
    reading = [torch.empty_like(k) for _ in readers]
    scores = [k.new_empty((batch, time, heads, layout.chunk), dtype=reader.dtype) for reader in readers]
    options = shape_arguments(k, layout) | {"WRITE": write_gate is not None, "BACKWARD": backward}
    for exact in (False, True):  # float32 numbers need as much room as the exact form does
        tiles = tile_arguments("prepare_exact" if exact or k.dtype == torch.float32 else "prepare_channel", k, key)
        if exact and len(readers) > 1:
            mild = [torch.stack(mild).amin(0)] * len(readers)
        for n, reader in enumerate(readers):
            launch(
                prepare_channel_kernel, per_chunk,
                (reader.x, k, log_decay, reader.gate, write_gate, sums, reading[n], writing, scores[n], whole, mild[n], layout.table,
                 reader.scale, layout.length),
                {**options, "READ": reader.gate is not None, "EXACT": exact, **tiles},
            )  # fmt: skip
    return [Prepared(reading[n], writing, scores[n], whole, mild[n], sums) for n in range(len(readers))]


def prepare(
    q: Tensor, k: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None, scale: float, layout: Layout,
    backward: bool = False,
) -> Prepared:  # fmt: skip
    """Of a decay per head or token, for the forward pass, or for the backward pass, which has the scores transposed."""
    (batch, time, heads, key), kind = q.shape, decay_kind(log_decay)
    reading, writing, scores = torch.empty_like(q), torch.empty_like(k), q.new_empty((batch, time, heads, layout.chunk))
    whole = q.new_empty((layout.chunks, heads), dtype=torch.float32)
    options = shape_arguments(q, layout) | {"READ": read_gate is not None, "WRITE": write_gate is not None, "BACKWARD": backward}
    launch(
        prepare_kernel, (layout.chunks, heads),
        (q, k, log_decay, read_gate, write_gate, reading, writing, scores, whole, layout.table, scale, layout.length),
        {**options, "DECAY": kind, **tile_arguments("prepare", q, key)},
    )  # fmt: skip
    return Prepared(reading, writing, scores, whole, None, None)


def query_key_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, prepared: Prepared, states: Tensor, d_states: Tensor | None, layout: Layout, decay_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, the gradient of log_decay, empty if it has none, and those of the gates there are [gates, B, T, H].

    Without `d_states`, for a decay per channel: of a reader that reads earlier tokens alone and writes nothing to the states.
    """
    (batch, time, heads, key), value, kind = q.shape, v.shape[3], decay_kind(log_decay)
    read, write = read_gate is not None, write_gate is not None
    d_q, d_k = torch.empty_like(q), torch.empty_like(k)
    d_gates = q.new_empty((read + write, batch, time, heads), dtype=torch.float32)
    if log_decay is not None and decay_gradient and kind == "channel":
        d_decay = torch.empty_like(log_decay)
    else:
        d_decay = q.new_empty((batch, time, heads) if decay_gradient else (0,), dtype=torch.float32)
    args = (
        q, k, v, d_o, log_decay, prepared.sums, read_gate, write_gate, prepared.reading, prepared.writing, states,
        states if d_states is None else d_states, prepared.whole, prepared.mild, d_q, d_k, d_gates[:1], d_gates[-1:], d_decay,
        layout.table, scale, layout.length,
    )  # fmt: skip
    options = {**shape_arguments(q, layout), "V": value, "DECAY": kind, "READ": read, "WRITE": write, "DECAY_GRADIENT": decay_gradient,
               "STRICT": d_states is None}  # fmt: skip
    options |= tile_arguments("query_key_gradients_channel" if kind == "channel" else "query_key_gradients", q, key, value)
    for exact in (False, True) if kind == "channel" else (False,):
        launch(query_key_gradients_kernel, (layout.chunks * heads,), args, options | {"EXACT": exact})
    return d_q, d_k, d_decay.sum((0, 1)) if decay_gradient and kind == "head" else d_decay, d_gates


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the final state, and for the backward pass what segments begin with."""
    layout = Layout(q.shape[0], q.shape[1], table, starts, chunk_tokens(q, log_decay))
    q, k = per_value_head(q, v), per_value_head(k, v)
    if log_decay is None or log_decay.ndim < 4:
        prepared = prepare(q, k, log_decay, read_gate, write_gate, scale, layout)
    else:
        prepared = prepare_channel([Reader(q, read_gate, scale, q.dtype)], k, log_decay, write_gate, layout)[0]
    scanned = scan_and_read(prepared.writing, prepared.reading, prepared.scores, v, prepared.whole, prepared.mild, initial, layout)
    return scanned.result, scanned.final, scanned.begins


def fake_forward(q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts):
    layout = Layout(q.shape[0], q.shape[1], table, starts, chunk_tokens(q, log_decay))
    final, begins = (q.new_empty(shape, dtype=torch.float32) for shape in (layout.states(q, v), begins_shape(q, v, layout)))
    return torch.empty_like(v), final, begins


def backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None,
    write_gate: Tensor | None, scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None, begins: Tensor,
    decay_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay (an empty tensor if it has none), the gates there are [gates, B, T, H], initial."""
    layout, d_o = Layout(q.shape[0], q.shape[1], table, starts, chunk_tokens(q, log_decay)), d_o.contiguous()
    d_final, given_q, given_k = None if d_final is None else d_final.contiguous(), q, k
    q, k = per_value_head(q, v), per_value_head(k, v)
    if log_decay is None or log_decay.ndim < 4:
        prepared = prepare(q, k, log_decay, read_gate, write_gate, scale, layout, backward=True)
    else:
        prepared = prepare_channel([Reader(q, read_gate, scale, q.dtype)], k, log_decay, write_gate, layout, backward=True)[0]
    states = scan(prepared.writing, v, prepared.whole, prepared.mild, initial, layout, begins=begins).states
    back = scan_and_read(
        prepared.reading, prepared.writing, prepared.scores, d_o, prepared.whole, prepared.mild, d_final, layout, reverse=True
    )
    d_q, d_k, d_decay, d_gates = query_key_gradients(
        q, k, v, d_o, log_decay, read_gate, write_gate, scale, prepared, states, back.states, layout, decay_gradient
    )
    return [per_key_head(d_q, given_q), per_key_head(d_k, given_k), back.result, d_decay, d_gates, back.final]


def fake_backward(d_o, d_final, q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts, begins, decay_gradient):
    d_gates = q.new_empty((read_gate is not None) + (write_gate is not None), *v.shape[:3], dtype=torch.float32)
    d_decay = q.new_empty(0, dtype=torch.float32)
    if decay_gradient:
        d_decay = torch.empty_like(log_decay, dtype=log_decay.dtype if log_decay.ndim == 4 else torch.float32)
    d_initial = q.new_empty(Layout(q.shape[0], q.shape[1], table, starts).states(q, v), dtype=torch.float32)
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_decay, d_gates, d_initial]


_forward = define_op("decayed_attention", forward, fake_forward)
_backward = define_op("decayed_attention_backward", backward, fake_backward)


class DecayedAttention(torch.autograd.Function):
    """o, and the final state if `return_state`. Saves its inputs and what segments begin with."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts, return_state):
        o, final, begins = _forward(q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts)
        ctx.save_for_backward(q, k, v, log_decay, read_gate, write_gate, initial, table, starts, begins)
        ctx.scale = scale
        return (o, final) if return_state else o

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, d_final=None):
        q, k, v, log_decay, read_gate, write_gate, initial, table, starts, begins = ctx.saved_tensors
        decay_gradient = log_decay is not None and ctx.needs_input_grad[3]
        d_q, d_k, d_v, d_decay, d_gates, d_initial = _backward(
            d_o, d_final, q, k, v, log_decay, read_gate, write_gate, ctx.scale, initial, table, starts, begins, decay_gradient
        )
        d_read = None if read_gate is None else d_gates[0].to(read_gate.dtype)
        d_write = None if write_gate is None else d_gates[-1].to(write_gate.dtype)
        d_decay = d_decay.to(log_decay.dtype) if decay_gradient else None
        d_initial = None if initial is None else d_initial.to(initial.dtype)
        return d_q, d_k, d_v, d_decay, d_read, d_write, None, d_initial, None, None, None


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial_state: Tensor | None, packing: Packing | None, return_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention with log_decay None, [HV], [B,T,HV] or [B,T,H,K], where every key head has one value head."""
    if q.dtype == torch.float16 and decay_kind(log_decay) == "channel":  # a chunk's decays do not fit float16's range
        wide = q.float(), k.float(), v.float()
        o, state = decayed_attention(*wide, log_decay, read_gate, write_gate, scale, initial_state, packing, return_state)
        return o.half(), state
    *given, initial = contiguous(q, k, v, log_decay, read_gate, write_gate, initial_state)
    table, starts = (None, None) if packing is None else packing.chunks(chunk_tokens(q, log_decay))
    result = DecayedAttention.apply(*given, scale, initial, table, starts, return_state)
    return result if return_state else (result, None)
