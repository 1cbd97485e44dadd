"""The delta rule's writes and states from chunk to chunk in Triton, and back; delta_writes.py says what wy_k and wy_v are.

    u  = wy_v - wy_k 2^h S                     what a chunk writes, which is known once its first state is
    S' = 2^(b_C) S + 2^h scaled_k^T u
    o  = scaled_q 2^h S + scores u             in the same kernel where the state is small enough, else by `combine` (scan.py)

As in scan.py h is half of b_C in factored chunks of a decay per channel, else 0, and what is stored is 2^h S. Backwards

    dU += scaled_k 2^h dS',   dS = 2^(b_C) dS' + 2^h (scaled_q^T dO - wy_k^T dU).

Sequences too few to keep the GPU busy are cut into segments, which run at the same time. A segment makes E + M S of a state S it begins
with. First a probe finds out both: E, with which it ends if it begins with nothing, and its transition matrix M, what becomes of the
identity if nothing is written. Then a carry hands states on from segment to segment, and all segments run at once. The first segment begins
with what is given at once, and the last, which hands nothing on, is not probed. `boundaries` [sequences * segments, H, K, V + K] has E, and
after the carry what the segment begins with, in its first V columns, and M in the others. Gradients go the other way, with M transposed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import (
    Layout,
    Prepared,
    append,
    channel_block,
    dot_precision,
    scan_index,
    segment_span,
    shape_arguments,
    state_tile,
    tile,
)
from headmax.ops.kernels.delta_writes import Writes
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.scan import decayed, load_decay, scan_tiles
from headmax.ops.kernels.tiles import cdiv, tile_arguments

NARROWEST = 32
"""Columns of a block of states: segments do half of the work over again and more, so narrow blocks come before them."""


@triton.jit
def load_columns(base, index, v_start, m_index, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """BV of the first V columns of matrix number `index` in [..., K, WIDTH], a tuple of [BK, BV]; zeros where `m_index` is off."""
    blocks = ()
    for i in tl.static_range((K + BK - 1) // BK):
        p_x, m_x = state_tile(base, index, i * BK, v_start, K, WIDTH, BK, BV)
        m_v = (v_start + tl.arange(0, BV) < V) & m_index
        blocks = append(blocks, tl.load(p_x, mask=m_x & m_v[None, :], other=0.0).to(tl.float32))  # [BK, BV]
    return blocks


@triton.jit
def store_columns(base, index, v_start, blocks, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """What `load_columns` loads."""
    for i in tl.static_range((K + BK - 1) // BK):
        p_x, m_x = state_tile(base, index, i * BK, v_start, K, WIDTH, BK, BV)
        tl.store(p_x, blocks[i], mask=m_x & (v_start + tl.arange(0, BV) < V)[None, :])


@triton.jit
def load_first_state(
    initial, boundaries, sequence, m_sequence, segment, v_start, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """Columns of what a segment begins with [BK, BV]: that of `boundaries`, or, where `m_sequence` is on, of `initial`; else zeros."""
    if boundaries is not None:
        return load_columns(boundaries, segment, v_start, True, K, V, V + K, BK, BV)[0]
    elif initial is not None:
        return load_columns(initial, sequence, v_start, m_sequence, K, V, V, BK, BV)[0]
    else:
        return tl.zeros([BK, BV], tl.float32)


@triton.jit
def load_decays(chunk_decay, factored, index, K: tl.constexpr, BK: tl.constexpr):
    """Of a decay per channel: h [BK], by which a state decays before and after the chunk's writes, and what is left between."""
    total = load_decay(chunk_decay, index, True, 0, K, BK, True)
    half = tl.where(tl.load(factored + index) != 0, 0.5 * total, 0.0)
    return half, total - 2 * half


@triton.jit
def load_writes(
    scaled_k, wy_k, wy_v, first, count, head, v_start, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A chunk's scaled_k, wy_k [C, BK] and some columns of wy_v [C, BV]."""
    p_k, m_k = tile(scaled_k, first, count, head, 0, H, K, C, BK)
    p_w, m_w = tile(wy_k, first, count, head, 0, H, K, C, BK)
    p_v, m_v = tile(wy_v, first, count, head, v_start, H, V, C, BV)
    return tl.load(p_k, mask=m_k, other=0.0), tl.load(p_w, mask=m_w, other=0.0), tl.load(p_v, mask=m_v, other=0.0)  # [C, BK] x 2, [C, BV]


@triton.jit
def write(b_s, b_sk, b_u, chunk_decay, half, rest, index, CHANNEL: tl.constexpr, PRECISION: tl.constexpr):
    """S' of a state that h has been applied to; for a decay per channel h and `rest` are given."""
    if CHANNEL:
        b_s = decayed(b_s, rest, CHANNEL) + tl.dot(tl.trans(b_sk), b_u, input_precision=PRECISION)
        return decayed(b_s, half, CHANNEL)
    else:
        return decayed(b_s, tl.load(chunk_decay + index), CHANNEL) + tl.dot(tl.trans(b_sk), b_u, input_precision=PRECISION)


@triton.jit
def delta_scan_kernel(
    scaled_q, scaled_k, scores, wy_k, wy_v, chunk_decay, factored, initial, boundaries, states, u, out, final, table, starts, segments, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the state through a segment of a sequence, see the top of the file.

    In: scaled_q, scaled_k, wy_k [B,T,H,K], wy_v [B,T,H,V], scores [B,T,H,C]; the segments begin with `boundaries`, if there are some, or
    the sequences with `initial`. Out: `final` [sequences, H, K, V], and where they are given 2^h S `states` [chunks, H, K, V] with the
    writes u [B,T,H,V], or what is read `out` [B,T,H,V]. A block has all key channels.
    """
    CHANNEL: tl.constexpr = factored is not None
    v_start, run, head = channel_block(H, V, BV)
    sequence, segment = run // segments, run % segments
    first_chunk, chunks, token, end = segment_span(run, segments, table, starts, T, C)
    o_run, o_sequence = run.to(tl.int64) * H + head, sequence.to(tl.int64) * H + head
    b_s = load_first_state(initial, boundaries, o_sequence, segment == 0, o_run, v_start, K, V, BK, BV)
    for n in range(chunks):
        count = tl.minimum(C, end - token).to(tl.int32)
        index = (first_chunk + n).to(tl.int64) * H + head
        b_sk, b_wk, b_wv = load_writes(scaled_k, wy_k, wy_v, token, count, head, v_start, H, K, V, C, BK, BV)
        if out is not None:
            p_q, m_q = tile(scaled_q, token, count, head, 0, H, K, C, BK)
            p_a, m_a = tile(scores, token, count, head, 0, H, C, C, C)
            b_sq, b_a = tl.load(p_q, mask=m_q, other=0.0), tl.load(p_a, mask=m_a, other=0.0)  # [C, BK], [C, C]
        half, rest = 0.0, 0.0
        if CHANNEL:
            half, rest = load_decays(chunk_decay, factored, index, K, BK)
            b_s = decayed(b_s, half, CHANNEL)
        b_rounded = b_s.to(b_sk.dtype)
        b_u = (b_wv.to(tl.float32) - tl.dot(b_wk, b_rounded, input_precision=PRECISION)).to(b_sk.dtype)
        if out is not None:
            p_o, m_o = tile(out, token, count, head, v_start, H, V, C, BV)
        if states is not None:
            p_u, m_u = tile(u, token, count, head, v_start, H, V, C, BV)
            p_s, m_s = state_tile(states, index, 0, v_start, K, V, BK, BV)
            tl.store(p_s, b_rounded, mask=m_s)
            tl.store(p_u, b_u, mask=m_u)
        b_s = write(b_s, b_sk, b_u, chunk_decay, half, rest, index, CHANNEL, PRECISION)
        if out is not None:
            b_o = tl.dot(b_a, b_u, tl.dot(b_sq, b_rounded, input_precision=PRECISION), input_precision=PRECISION)
            tl.store(p_o, b_o.to(out.dtype.element_ty), mask=m_o)
        token += C
    p_f, m_f = state_tile(final, o_sequence, 0, v_start, K, V, BK, BV)
    tl.store(p_f, b_s, mask=m_f & (segment == segments - 1))


@triton.jit
def delta_probe_kernel(
    scaled_k, wy_k, wy_v, chunk_decay, factored, initial, boundaries, table, starts, segments, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fills `boundaries` with what segments end with, and with their transition matrices: blocks of columns from EDGE on have those."""
    CHANNEL: tl.constexpr = factored is not None
    EDGE: tl.constexpr = (V + BV - 1) // BV * BV
    v_start, run, head = channel_block(H, EDGE + K, BV)
    sequence, segment = run // segments, run % segments
    if (segment == segments - 1) | ((segment == 0) & (v_start >= EDGE)):
        return
    v_start = tl.where(v_start < EDGE, v_start, v_start - EDGE + V)
    first_chunk, chunks, token, end = segment_span(run, segments, table, starts, T, C)
    o_v, o_run, o_sequence = v_start + tl.arange(0, BV), run.to(tl.int64) * H + head, sequence.to(tl.int64) * H + head
    b_s = load_first_state(initial, None, o_sequence, segment == 0, o_run, v_start, K, V, BK, BV)
    b_s += tl.where(tl.arange(0, BK)[:, None] == o_v[None, :] - V, 1.0, 0.0)
    for n in range(chunks):
        count = tl.minimum(C, end - token).to(tl.int32)
        index = (first_chunk + n).to(tl.int64) * H + head
        b_sk, b_wk, b_wv = load_writes(scaled_k, wy_k, wy_v, token, count, head, v_start, H, K, V, C, BK, BV)  # wy_v: zeros from V on
        half, rest = 0.0, 0.0
        if CHANNEL:
            half, rest = load_decays(chunk_decay, factored, index, K, BK)
            b_s = decayed(b_s, half, CHANNEL)
        b_u = (b_wv.to(tl.float32) - tl.dot(b_wk, b_s.to(b_sk.dtype), input_precision=PRECISION)).to(b_sk.dtype)
        b_s = write(b_s, b_sk, b_u, chunk_decay, half, rest, index, CHANNEL, PRECISION)
        token += C
    p_e, m_e = state_tile(boundaries, o_run, 0, v_start, K, V + K, BK, BV)
    tl.store(p_e, b_s, mask=m_e & ((o_v < V) | (v_start >= V))[None, :])


@triton.jit
def delta_scan_back_kernel(
    scaled_q, scaled_k, wy_k, d_o, chunk_decay, factored, d_final, boundaries, d_ends, d_states, d_u, d_initial, table, starts, segments, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the state's gradient backwards through a segment of a sequence, see the top of the file.

    In: d_o [B,T,H,V]; the segments begin at their ends with `boundaries`, if there are some, or the sequences with `d_final`. Out, where
    `d_states` [chunks, H, K, V] is given: that, d_u [B,T,H,V] completed in place, and d_initial [sequences, H, K, V]. Else it is a probe:
    `d_ends` gets the gradients at the segments' beginnings, the first segment left out.
    A chunk's decay and what there is of its dU are fetched one chunk ahead: no step waits for them.
    """
    CHANNEL: tl.constexpr = factored is not None
    v_start, run, head = channel_block(H, V, BV)
    sequence, segment = run // segments, run % segments
    if d_states is None:
        if segment == 0:
            return
    first_chunk, chunks, token, end = segment_span(run, segments, table, starts, T, C)
    o_v, o_run, o_sequence = v_start + tl.arange(0, BV), run.to(tl.int64) * H + head, sequence.to(tl.int64) * H + head
    b_ds = load_first_state(d_final, boundaries, o_sequence, segment == segments - 1, o_run, v_start, K, V, BK, BV)
    first = token + (chunks - 1) * C
    p_u, m_u = tile(d_u, first, tl.minimum(C, end - first).to(tl.int32), head, v_start, H, V, C, BV)
    b_du = tl.load(p_u, mask=m_u & (chunks > 0), other=0.0)  # [C, BV]
    if not CHANNEL:
        decay = tl.load(chunk_decay + (first_chunk + chunks - 1).to(tl.int64) * H + head, mask=chunks > 0, other=0.0)
    for i in range(chunks):
        n = chunks - 1 - i
        first = token + n * C
        count = tl.minimum(C, end - first).to(tl.int32)
        index = (first_chunk + n).to(tl.int64) * H + head
        p_q, m_q = tile(scaled_q, first, count, head, 0, H, K, C, BK)
        p_k, m_k = tile(scaled_k, first, count, head, 0, H, K, C, BK)
        p_w, m_w = tile(wy_k, first, count, head, 0, H, K, C, BK)
        p_o, m_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        p_u, m_u = tile(d_u, first, count, head, v_start, H, V, C, BV)
        b_sq, b_sk = tl.load(p_q, mask=m_q, other=0.0), tl.load(p_k, mask=m_k, other=0.0)  # [C, BK]
        b_wk, b_do = tl.load(p_w, mask=m_w, other=0.0), tl.load(p_o, mask=m_o, other=0.0)  # [C, BK], [C, BV]
        b_next_du = tl.load(p_u - C * H * V, mask=(n > 0) & (o_v < V)[None, :], other=0.0)  # [C, BV]
        if CHANNEL:
            half, rest = load_decays(chunk_decay, factored, index, K, BK)
            b_ds = decayed(b_ds, half, CHANNEL)
        else:
            next_decay = tl.load(chunk_decay + index - H, mask=n > 0, other=0.0)
        b_rounded = b_ds.to(b_sk.dtype)
        b_du = (b_du.to(tl.float32) + tl.dot(b_sk, b_rounded, input_precision=PRECISION)).to(b_sk.dtype)
        if d_states is not None:
            p_s, m_s = state_tile(d_states, index, 0, v_start, K, V, BK, BV)
            tl.store(p_s, b_rounded, mask=m_s)
            tl.store(p_u, b_du, mask=m_u)
        if CHANNEL:
            b_ds = decayed(b_ds, rest, CHANNEL) + tl.dot(tl.trans(b_sq), b_do, input_precision=PRECISION)
        else:
            b_ds = decayed(b_ds, decay, CHANNEL) + tl.dot(tl.trans(b_sq), b_do, input_precision=PRECISION)
        b_ds -= tl.dot(tl.trans(b_wk), b_du, input_precision=PRECISION)
        b_du = b_next_du
        if CHANNEL:
            b_ds = decayed(b_ds, half, CHANNEL)
        else:
            decay = next_decay
    if d_states is not None:
        p_i, m_i = state_tile(d_initial, o_sequence, 0, v_start, K, V, BK, BV)
        tl.store(p_i, b_ds, mask=m_i & (segment == 0))
    else:
        p_e, m_e = state_tile(d_ends, o_run, 0, v_start, K, V + K, BK, BV)
        tl.store(p_e, b_ds, mask=m_e & (o_v < V)[None, :])


@triton.jit
def delta_carry_kernel(
    boundaries, initial, segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each segment ends with becomes what it begins with, S' = M S + E: the first segment has begun with `initial`, the others with
    nothing. If REVERSE the segments come from the last to the first. What one ends with is fetched while the one before is at work.
    """
    v_start, sequence, head = channel_block(H, V, BV)
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    WIDTH: tl.constexpr = V + K
    low = sequence.to(tl.int64) * segments
    o_first, o_second = (low + scan_index(0, segments, REVERSE)) * H + head, (low + scan_index(1, segments, REVERSE)) * H + head
    b_s = load_columns(boundaries, o_first, v_start, True, K, V, WIDTH, BK, BV)
    b_ends = load_columns(boundaries, o_second, v_start, segments > 2, K, V, WIDTH, BK, BV)
    if initial is not None:
        b_first = load_columns(initial, sequence.to(tl.int64) * H + head, v_start, True, K, V, V, BK, BV)
    else:
        b_first = load_columns(boundaries, sequence.to(tl.int64) * H + head, v_start, False, K, V, V, BK, BV)
    store_columns(boundaries, o_first, v_start, b_first, K, V, WIDTH, BK, BV)
    for n in range(1, segments - 1):
        index, o_next = (low + scan_index(n, segments, REVERSE)) * H + head, (low + scan_index(n + 1, segments, REVERSE)) * H + head
        b_next_ends = load_columns(boundaries, o_next, v_start, n + 2 < segments, K, V, WIDTH, BK, BV)
        store_columns(boundaries, index, v_start, b_s, K, V, WIDTH, BK, BV)
        b_handed = ()
        for i in tl.static_range(BLOCKS):
            b_sum = b_ends[i]
            for j in tl.static_range(BLOCKS):
                p_m, m_m = state_tile(boundaries, index, i * BK, V + j * BK, K, WIDTH, BK, BK)
                b_m = tl.load(p_m, mask=m_m, other=0.0)  # [BK, BK]
                b_sum += tl.dot(b_m, b_s[j], input_precision=PRECISION)
            b_handed = append(b_handed, b_sum)
        b_s, b_ends = b_handed, b_next_ends
    store_columns(boundaries, (low + scan_index(segments - 1, segments, REVERSE)) * H + head, v_start, b_s, K, V, WIDTH, BK, BV)


def carry(boundaries: Tensor, initial: Tensor | None, x: Tensor, sequences: int, reverse: bool = False) -> None:
    """Hands states on from segment to segment, as precisely as x's dtype asks."""
    _, heads, key, width = boundaries.shape
    tiles = tile_arguments("delta_carry", x, key, width - key)
    launch(
        delta_carry_kernel, (sequences * heads * cdiv(width - key, tiles["BV"]),), (boundaries, initial, boundaries.shape[0] // sequences),
        {"H": heads, "K": key, "V": width - key, "REVERSE": reverse, "PRECISION": dot_precision(x.dtype), **tiles},
    )  # fmt: skip


def delta_boundaries_shape(k: Tensor, v: Tensor, layout: Layout) -> tuple[int, ...]:
    _, segments = scan_tiles("delta_scan", k, v, layout, NARROWEST)
    return (layout.sequences * segments, v.shape[2], k.shape[3], v.shape[3] + k.shape[3]) if segments > 1 else (0,)


class DeltaScanned(NamedTuple):
    """What a scan gives."""

    states: Tensor
    """2^h times the states before every chunk [chunks, H, K, V]; None if it read out."""
    out: Tensor
    """The writes u, or what was read out [B,T,H,V]."""
    final: Tensor
    """The last states."""
    boundaries: Tensor
    """Empty for whole sequences."""


def delta_scan(
    prepared: Prepared, writes: Writes, initial: Tensor | None, layout: Layout, boundaries: Tensor | None = None, read: bool = False
) -> DeltaScanned:
    """Stores all states and writes, or, to `read`, what is read out alone."""
    key, (_, _, heads, value) = writes.wy_k.shape[3], writes.wy_v.shape
    new, sequences, known = writes.wy_v.new_empty, layout.sequences, boundaries is not None
    states, out = None if read else new((layout.chunks, heads, key, value)), torch.empty_like(writes.wy_v)
    final = new((sequences, heads, key, value), dtype=torch.float32)
    if boundaries is None:
        boundaries = new(delta_boundaries_shape(writes.wy_k, writes.wy_v, layout), dtype=torch.float32)
    segments = boundaries.shape[0] // sequences or 1
    shape = shape_arguments(writes.wy_k, layout) | {"V": value}
    span = layout.table, layout.starts, segments, layout.length
    if segments > 1 and not known:
        tiles, _ = scan_tiles("delta_scan", writes.wy_k, writes.wy_v, layout, NARROWEST)
        launch(
            delta_probe_kernel, (sequences * segments * heads * (cdiv(value, tiles["BV"]) + cdiv(key, tiles["BV"])),),
            (prepared.scaled_k, writes.wy_k, writes.wy_v, prepared.chunk_decay, prepared.factored, initial, boundaries, *span),
            shape | tiles,
        )  # fmt: skip
        carry(boundaries, initial, out, sequences)
    tiles, _ = scan_tiles("delta_read_scan" if read else "delta_scan", writes.wy_k, writes.wy_v, layout, NARROWEST)
    begins = (initial, None) if segments == 1 else (None, boundaries)
    outputs = (None, None, out, final) if read else (states, out, None, final)
    launch(
        delta_scan_kernel, (sequences * segments * heads * cdiv(value, tiles["BV"]),),
        (prepared.scaled_q, prepared.scaled_k, prepared.scores, writes.wy_k, writes.wy_v, prepared.chunk_decay, prepared.factored, *begins,
         *outputs, *span),
        shape | tiles,
    )  # fmt: skip
    return DeltaScanned(states, out, final, boundaries)  # type: ignore[arg-type]


def delta_scan_back(
    prepared: Prepared, writes: Writes, boundaries: Tensor, d_o: Tensor, d_u: Tensor, d_final: Tensor | None, layout: Layout
) -> tuple[Tensor, Tensor]:
    """The gradients of the states after every chunk and of the initial ones; completes d_u in place."""
    key, (_, _, heads, value), sequences = writes.wy_k.shape[3], d_o.shape, layout.sequences
    d_states = d_o.new_empty((layout.chunks, heads, key, value))
    d_initial = d_o.new_empty((sequences, heads, key, value), dtype=torch.float32)
    segments = boundaries.shape[0] // sequences or 1
    tiles, _ = scan_tiles("delta_scan_back", writes.wy_k, d_o, layout, NARROWEST)

    def run(*begins_and_outputs: Tensor | None) -> None:
        launch(
            delta_scan_back_kernel, (sequences * segments * heads * cdiv(value, tiles["BV"]),),
            (prepared.scaled_q, prepared.scaled_k, writes.wy_k, d_o, prepared.chunk_decay, prepared.factored, *begins_and_outputs, d_u,
             d_initial, layout.table, layout.starts, segments, layout.length),
            {**shape_arguments(writes.wy_k, layout), "V": value, **tiles},
        )  # fmt: skip

    if segments == 1:
        run(d_final, None, None, d_states)
    else:
        d_boundaries = torch.empty_like(boundaries)  # gradients take the states' place, beside the transposed matrices
        d_boundaries[..., value:] = boundaries[..., value:].mT
        run(d_final, None, d_boundaries, None)
        carry(d_boundaries, d_final, d_o, sequences, reverse=True)
        run(None, d_boundaries, None, d_states)
    return d_states, d_initial
