"""The chunkwise gated delta rule in Triton, with a decay per head or per key channel (KDA). Once the writes u are known it is linear
attention with values u, and shares its kernels.

Within a chunk (I + L) u = β (write_gate v - exp(b) k S), L the strictly lower part of β (K K^T ⊙ D): one triangular inverse per chunk,
by substitution (a power series would cancel catastrophically where keys resemble each other), and two products that wait for the state.
What depends on the kind of decay is made here for one per head, in delta_channel.py for one per channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.gated_delta_rule.reference import EPS
from headmax.ops.kernels import unit_length
from headmax.ops.kernels.common import (
    Layout,
    beside,
    channel_block,
    chunk_span,
    contiguous,
    decay_matrix,
    decay_rows,
    decay_sums,
    dot_precision,
    nth,
    row_values,
    segment_span,
    state_tile,
    tile,
    unit_lower_inverse,
)
from headmax.ops.kernels.delta_channel import channel_write_gradients, channel_writes
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.scalar import Prepared, Reader, prepare, prepare_channel, query_key_gradients
from headmax.ops.kernels.scan import combine, load_decays, scaled, shape_arguments, spread
from headmax.ops.kernels.tiles import cdiv, reads_in_scan, tile_arguments
from headmax.ops.library import define_op
from headmax.ops.packing import CHUNK, Packing
from headmax.ops.sequential import per_key_head, per_value_head

NARROWEST = 32
"""Columns of a block of states: segments do half of the work over again and more, so narrow blocks come before them."""


@triton.jit
def key_products(k, first, count, head, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """K K^T of a chunk, [C, C]."""
    products = tl.zeros([C, C], tl.float32)
    for k_start in range(0, K, BK):
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        t_k = tl.load(p_k, mask=in_k, other=0.0)
        products += tl.dot(t_k, tl.trans(t_k), input_precision=PRECISION)
    return products


@triton.jit
def delta_writes_kernel(
    k, v, log_decay, beta, write_gate, inverse, erase, fresh, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    WRITE: tl.constexpr, PACKED: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """erase = (I + L)^-1 β exp(b) k and fresh = (I + L)^-1 β write_gate v, so that u = fresh - erase S; makes the inverse unless KNOWN."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    rows = tl.arange(0, C)
    b, left, total = decay_sums(log_decay, first, count, head, H, C, DECAY)
    from_start = decay_rows(b, count, C)
    strength = row_values(beta, first, count, head, H, C, True)
    p_i, in_i = tile(inverse, first, count, head, 0, H, C, C, C)
    if KNOWN:
        t_i = tl.load(p_i, mask=in_i, other=0.0)
    else:
        lower = key_products(k, first, count, head, H, K, C, BK, PRECISION) * decay_matrix(b, log_decay, count, head, C, DECAY)
        lower *= strength[:, None]
        t_i = unit_lower_inverse(tl.where(rows[:, None] > rows[None, :], lower, 0.0), C, PRECISION)
        tl.store(p_i, t_i, mask=in_i)
    write = row_values(write_gate, first, count, head, H, C, WRITE)
    # the factors of the rows of k and v go to the inverse's columns, so that k and v go to their products as they are
    of_keys = (t_i * (strength * from_start)[None, :]).to(k.dtype.element_ty)
    of_values = (t_i * (strength * write)[None, :]).to(v.dtype.element_ty)
    for k_start in range(0, K, BK):
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        p_e, in_e = tile(erase, first, count, head, k_start, H, K, C, BK)
        t_e = tl.dot(of_keys, tl.load(p_k, mask=in_k, other=0.0), input_precision=PRECISION)
        tl.store(p_e, t_e.to(erase.dtype.element_ty), mask=in_e)
    for v_start in range(0, V, BV):
        p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
        p_f, in_f = tile(fresh, first, count, head, v_start, H, V, C, BV)
        t_f = tl.dot(of_values, tl.load(p_v, mask=in_v, other=0.0), input_precision=PRECISION)
        tl.store(p_f, t_f.to(fresh.dtype.element_ty), mask=in_f)


@triton.jit
def load_columns(base, index, v_start, there, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Some of the first V columns of matrix number `index` in [..., K, WIDTH], in blocks of BK rows; zeros unless it is `there`."""
    blocks = ()
    for i in tl.static_range((K + BK - 1) // BK):
        p_b, in_b = state_tile(base, index, i * BK, v_start, K, WIDTH, BK, BV)
        blocks = beside(blocks, tl.load(p_b, mask=in_b & ((v_start + tl.arange(0, BV) < V) & there)[None, :], other=0.0).to(tl.float32))
    return blocks


@triton.jit
def load_begin(
    begin, sequence, known, cut, run, v_start,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BEGIN: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Some columns of what a segment begins with: what `cut` has for it, or, if `known`, what `begin` has for its sequence, else zeros."""
    if CUT:
        return load_columns(cut, run, v_start, True, K, V, V + K, BK, BV)[0]
    elif BEGIN:
        return load_columns(begin, sequence, v_start, known, K, V, V, BK, BV)[0]
    else:
        return tl.zeros([BK, BV], tl.float32)


@triton.jit
def halved_decay(whole, mild, index, K: tl.constexpr, BK: tl.constexpr):
    """`half` of a chunk's decay per channel [BK], which the state meets before and after the chunk's writes, and what it meets between."""
    total = load_decays(whole, index, True, 0, K, BK, True)
    half = tl.where(tl.load(mild + index) != 0, 0.5 * total, 0.0)
    return half, total - 2 * half


@triton.jit
def delta_scan_kernel(
    reading, writing, scores, erase, fresh, whole, mild, begin, cut, states, u, end, table, starts, segments, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr,
    PACKED: tl.constexpr, BEGIN: tl.constexpr, STORE: tl.constexpr, READ: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u = fresh - erase S ;  S' = exp(whole) S + writing^T u, some columns of the state through a segment of a sequence.

    If the decay is per CHANNEL, 2^half S stands for S and 2^half writing for writing, see scan.py.
    STORE keeps S and u for each chunk, READ in the place of u what is read out, reading S + scores u; both keep the last state, and begin
    with `cut` (see below) if CUT. With neither it is to fill `cut`: a sequence's first segment begins with `begin`, the last is left out,
    and those between turn the identity too, in further columns, which nothing is written to.
    """
    PROBE: tl.constexpr = not (STORE or READ)
    EDGE: tl.constexpr = (V + BV - 1) // BV * BV
    v_start, run, head = channel_block(H, EDGE + K if PROBE else V, BV)
    sequence, segment = run // segments, run % segments
    if PROBE:
        if (segment == segments - 1) | ((segment == 0) & (v_start >= EDGE)):
            return
        v_start = tl.where(v_start < EDGE, v_start, v_start - EDGE + V)
    first_chunk, chunks, token, last = segment_span(run, segments, table, starts, T, C, PACKED)
    columns, place, whole_place = v_start + tl.arange(0, BV), run.to(tl.int64) * H + head, sequence.to(tl.int64) * H + head
    state = load_begin(begin, whole_place, segment == 0, cut, place, v_start, K, V, BK, BV, BEGIN, CUT)
    if PROBE:
        state += tl.where(tl.arange(0, BK)[:, None] == columns[None, :] - V, 1.0, 0.0)
    for n in range(chunks):
        count = tl.minimum(C, last - token).to(tl.int32)
        index = (first_chunk + n).to(tl.int64) * H + head
        p_w, in_w = tile(writing, token, count, head, 0, H, K, C, BK)
        p_e, in_e = tile(erase, token, count, head, 0, H, K, C, BK)
        p_f, in_f = tile(fresh, token, count, head, v_start, H, V, C, BV)
        t_w, t_e, t_f = tl.load(p_w, mask=in_w, other=0.0), tl.load(p_e, mask=in_e, other=0.0), tl.load(p_f, mask=in_f, other=0.0)
        if READ:
            p_r, in_r = tile(reading, token, count, head, 0, H, K, C, BK)
            p_a, in_a = tile(scores, token, count, head, 0, H, C, C, C)
            t_r, t_a = tl.load(p_r, mask=in_r, other=0.0), tl.load(p_a, mask=in_a, other=0.0)
        if CHANNEL:
            half, rest = halved_decay(whole, mild, index, K, BK)
            state = scaled(state, half, CHANNEL)
        rounded = state.to(t_w.dtype)
        t_u = (t_f.to(tl.float32) - tl.dot(t_e, rounded, input_precision=PRECISION)).to(t_w.dtype)
        p_u, in_u = tile(u, token, count, head, v_start, H, V, C, BV)
        if STORE:
            p_s, in_s = state_tile(states, index, 0, v_start, K, V, BK, BV)
            tl.store(p_s, rounded, mask=in_s)
            tl.store(p_u, t_u, mask=in_u)
        if CHANNEL:
            state = scaled(state, rest, CHANNEL) + tl.dot(tl.trans(t_w), t_u, input_precision=PRECISION)
            state = scaled(state, half, CHANNEL)
        else:
            state = scaled(state, tl.load(whole + index), CHANNEL) + tl.dot(tl.trans(t_w), t_u, input_precision=PRECISION)
        if READ:
            out = tl.dot(t_a, t_u, tl.dot(t_r, rounded, input_precision=PRECISION), input_precision=PRECISION)
            tl.store(p_u, out.to(u.dtype.element_ty), mask=in_u)
        token += C
    if PROBE:
        p_end, in_end = state_tile(cut, place, 0, v_start, K, V + K, BK, BV)
        tl.store(p_end, state, mask=in_end & ((columns < V) | (v_start >= V))[None, :])
    else:
        p_end, in_end = state_tile(end, whole_place, 0, v_start, K, V, BK, BV)
        tl.store(p_end, state, mask=in_end & (segment == segments - 1))


@triton.jit
def delta_scan_back_kernel(
    reading, writing, erase, d_o, whole, mild, begin, cut, d_states, d_u, end, table, starts, segments, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr,
    PACKED: tl.constexpr, BEGIN: tl.constexpr, STORE: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dU += writing dS' ;  dS = exp(whole) dS' + reading^T dO - erase^T dU, backwards through a segment of a sequence.

    If the decay is per CHANNEL, all but dU is 2^half times itself. Without STORE it is to fill `cut`: then the last segment begins with
    `begin`, and the first is left out.
    A chunk's decay and what there is of its dU are fetched one chunk ahead: no step waits for them.
    """
    v_start, run, head = channel_block(H, V, BV)
    sequence, segment = run // segments, run % segments
    if not STORE:
        if segment == 0:
            return
    first_chunk, chunks, token, last = segment_span(run, segments, table, starts, T, C, PACKED)
    columns, place, whole_place = v_start + tl.arange(0, BV), run.to(tl.int64) * H + head, sequence.to(tl.int64) * H + head
    gradient = load_begin(begin, whole_place, segment == segments - 1, cut, place, v_start, K, V, BK, BV, BEGIN, CUT)
    first = token + (chunks - 1) * C
    p_u, in_u = tile(d_u, first, tl.minimum(C, last - first).to(tl.int32), head, v_start, H, V, C, BV)
    t_u = tl.load(p_u, mask=in_u & (chunks > 0), other=0.0)
    if not CHANNEL:
        decay = tl.load(whole + (first_chunk + chunks - 1).to(tl.int64) * H + head, mask=chunks > 0, other=0.0)
    for i in range(chunks):
        n = chunks - 1 - i
        first = token + n * C
        count = tl.minimum(C, last - first).to(tl.int32)
        index = (first_chunk + n).to(tl.int64) * H + head
        p_r, in_r = tile(reading, first, count, head, 0, H, K, C, BK)
        p_w, in_w = tile(writing, first, count, head, 0, H, K, C, BK)
        p_e, in_e = tile(erase, first, count, head, 0, H, K, C, BK)
        p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        p_u, in_u = tile(d_u, first, count, head, v_start, H, V, C, BV)
        t_r, t_w, t_e = tl.load(p_r, mask=in_r, other=0.0), tl.load(p_w, mask=in_w, other=0.0), tl.load(p_e, mask=in_e, other=0.0)
        t_o, next_u = tl.load(p_o, mask=in_o, other=0.0), tl.load(p_u - C * H * V, mask=(n > 0) & (columns < V)[None, :], other=0.0)
        if CHANNEL:
            half, rest = halved_decay(whole, mild, index, K, BK)
            gradient = scaled(gradient, half, CHANNEL)
        else:
            next_decay = tl.load(whole + index - H, mask=n > 0, other=0.0)
        rounded = gradient.to(t_w.dtype)
        t_u = (t_u.to(tl.float32) + tl.dot(t_w, rounded, input_precision=PRECISION)).to(t_w.dtype)
        if STORE:
            p_s, in_s = state_tile(d_states, index, 0, v_start, K, V, BK, BV)
            tl.store(p_s, rounded, mask=in_s)
            tl.store(p_u, t_u, mask=in_u)
        if CHANNEL:
            gradient = scaled(gradient, rest, CHANNEL) + tl.dot(tl.trans(t_r), t_o, input_precision=PRECISION)
        else:
            gradient = scaled(gradient, decay, CHANNEL) + tl.dot(tl.trans(t_r), t_o, input_precision=PRECISION)
        gradient -= tl.dot(tl.trans(t_e), t_u, input_precision=PRECISION)
        t_u = next_u
        if CHANNEL:
            gradient = scaled(gradient, half, CHANNEL)
        else:
            decay = next_decay
    if STORE:
        p_end, in_end = state_tile(end, whole_place, 0, v_start, K, V, BK, BV)
        tl.store(p_end, gradient, mask=in_end & (segment == 0))
    else:
        p_end, in_end = state_tile(cut, place, 0, v_start, K, V + K, BK, BV)
        tl.store(p_end, gradient, mask=in_end & (columns < V)[None, :])


@triton.jit
def store_columns(base, index, v_start, blocks, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """What `load_columns` loads."""
    for i in tl.static_range((K + BK - 1) // BK):
        p_b, in_b = state_tile(base, index, i * BK, v_start, K, WIDTH, BK, BV)
        tl.store(p_b, blocks[i], mask=in_b & (v_start + tl.arange(0, BV) < V)[None, :])


@triton.jit
def delta_carry_kernel(
    cut, begin, segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BEGIN: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What each segment ends with, the first having begun with `begin` and those between with nothing, becomes what it begins with.

    If REVERSE the segments come from the last to the first. What one ends with is fetched while the one before is at work.
    """
    v_start, sequence, head = channel_block(H, V, BV)
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    WIDTH: tl.constexpr = V + K
    low = sequence.to(tl.int64) * segments
    first, second = (low + nth(0, segments, REVERSE)) * H + head, (low + nth(1, segments, REVERSE)) * H + head
    state = load_columns(cut, first, v_start, True, K, V, WIDTH, BK, BV)
    ends = load_columns(cut, second, v_start, segments > 2, K, V, WIDTH, BK, BV)
    begins = load_columns(begin, sequence.to(tl.int64) * H + head, v_start, BEGIN, K, V, V, BK, BV)
    store_columns(cut, first, v_start, begins, K, V, WIDTH, BK, BV)
    for n in range(1, segments - 1):
        index, following = (low + nth(n, segments, REVERSE)) * H + head, (low + nth(n + 1, segments, REVERSE)) * H + head
        next_ends = load_columns(cut, following, v_start, n + 2 < segments, K, V, WIDTH, BK, BV)
        store_columns(cut, index, v_start, state, K, V, WIDTH, BK, BV)
        handed = ()
        for i in tl.static_range(BLOCKS):
            total = ends[i]
            for j in tl.static_range(BLOCKS):
                p_t, in_t = state_tile(cut, index, i * BK, V + j * BK, K, WIDTH, BK, BK)
                total += tl.dot(tl.load(p_t, mask=in_t, other=0.0), state[j], input_precision=PRECISION)
            handed = beside(handed, total)
        state, ends = handed, next_ends
    store_columns(cut, (low + nth(segments - 1, segments, REVERSE)) * H + head, v_start, state, K, V, WIDTH, BK, BV)


@triton.jit
def delta_write_gradients_kernel(
    k, v, log_decay, beta, write_gate, inverse, states, d_u, d_k, d_v, d_beta, d_write, d_decay, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    WRITE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From dU back through u = (I + L)^-1 (β write_gate v - β exp(b) k S): adds to d_k and d_decay, gives d_v, d_beta, d_write.

    The inverse meets wide tiles in their own dtype. Where terms cancel, in d_beta, it stays float32: v dU^T = `met` is summed with it.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    rows = tl.arange(0, C)
    b, left, total = decay_sums(log_decay, first, count, head, H, C, DECAY)
    from_start = decay_rows(b, count, C)
    strength = row_values(beta, first, count, head, H, C, True)
    write = row_values(write_gate, first, count, head, H, C, WRITE)
    p_i, in_i = tile(inverse, first, count, head, 0, H, C, C, C)
    t_i = tl.load(p_i, mask=in_i, other=0.0)
    back = tl.trans(t_i.to(k.dtype.element_ty))
    met = tl.zeros([C, C], tl.float32)
    for v_start in range(0, V, BV):
        p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
        p_u, in_u = tile(d_u, first, count, head, v_start, H, V, C, BV)
        t_v, t_u = tl.load(p_v, mask=in_v, other=0.0), tl.load(p_u, mask=in_v, other=0.0)
        met += tl.dot(t_v, tl.trans(t_u), input_precision=PRECISION)
        p_dv, in_dv = tile(d_v, first, count, head, v_start, H, V, C, BV)
        g_v = tl.dot(back, t_u, input_precision=PRECISION) * (strength * write)[:, None]
        tl.store(p_dv, g_v.to(d_v.dtype.element_ty), mask=in_v)
    along = tl.sum(met * tl.trans(t_i), 1)
    sum_beta, sum_write = along * write, along * strength
    d_inverse = met * (strength * write)[:, None]
    met = tl.zeros([C, C], tl.float32)
    for k_start in range(0, K, BK):
        d_erase = tl.zeros([C, BK], tl.float32)
        for v_start in range(0, V, BV):
            p_u, in_v = tile(d_u, first, count, head, v_start, H, V, C, BV)
            p_s, in_s = state_tile(states, chunk.to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
            t_u, t_s = tl.load(p_u, mask=in_v, other=0.0), tl.load(p_s, mask=in_s, other=0.0)
            d_erase += tl.dot(t_u, tl.trans(t_s), input_precision=PRECISION)
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        p_dk, in_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
        rounded = (-d_erase).to(k.dtype.element_ty)
        met += tl.dot(tl.load(p_k, mask=in_k, other=0.0), tl.trans(rounded), input_precision=PRECISION)
        g_k = tl.dot(back, rounded, input_precision=PRECISION) * (strength * from_start)[:, None]
        before = tl.load(p_dk, mask=in_k, other=0.0).to(tl.float32)
        tl.store(p_dk, (before + g_k).to(d_k.dtype.element_ty), mask=in_k)
    along = tl.sum(met * tl.trans(t_i), 1) * from_start
    sum_beta += along
    sum_b = along * strength
    d_inverse += met * (strength * from_start)[:, None]
    # d(I + L)^-1 = -(I + L)^-1 dL (I + L)^-1, all of it transposed
    d_lower = -tl.trans(tl.dot(tl.dot(t_i, d_inverse, input_precision=PRECISION), t_i, input_precision=PRECISION))
    products = key_products(k, first, count, head, H, K, C, BK, PRECISION)
    d_lower *= decay_matrix(b, log_decay, count, head, C, DECAY)
    d_lower = tl.where(rows[:, None] > rows[None, :], d_lower, 0.0)
    sum_beta += tl.sum(d_lower * products, 1)
    d_lower *= strength[:, None]
    moved = d_lower * products
    sum_b += tl.sum(moved, 1) - tl.sum(moved, 0)
    both = (d_lower + tl.trans(d_lower)).to(k.dtype.element_ty)
    for k_start in range(0, K, BK):
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        p_dk, in_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
        g_k = tl.dot(both, tl.load(p_k, mask=in_k, other=0.0), input_precision=PRECISION)
        tl.store(p_dk, (tl.load(p_dk, mask=in_k, other=0.0).to(tl.float32) + g_k).to(d_k.dtype.element_ty), mask=in_k)
    at = (first + rows) * H + head
    tl.store(d_beta + at, sum_beta, mask=rows < count)
    if WRITE:
        tl.store(d_write + at, sum_write, mask=rows < count)
    earlier = tl.load(d_decay + at, mask=rows < count, other=0.0)
    tl.store(d_decay + at, earlier + tl.cumsum(sum_b, 0, reverse=True), mask=rows < count)


class Written(NamedTuple):
    """What is known of a call's writes."""

    inverse: Tensor
    """(I + L)^-1 of every chunk, [B,T,H,CHUNK]."""
    erase: Tensor
    """[B,T,H,K]"""
    fresh: Tensor
    """[B,T,H,V]"""


def empty_inverse(v: Tensor) -> Tensor:
    return v.new_empty(*v.shape[:3], CHUNK, dtype=torch.float32)


def writes(
    k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, write_gate: Tensor | None, layout: Layout, inverse: Tensor | None = None
) -> Written:
    written = Written(empty_inverse(v) if inverse is None else inverse, torch.empty_like(k), torch.empty_like(v))
    (_, _, heads, key), value = k.shape, v.shape[3]
    launch(
        delta_writes_kernel, (layout.chunks, heads), (k, v, log_decay, beta, write_gate, *written, layout.table, layout.length),
        {**shape_arguments(k, layout), "V": value, "DECAY": "token", "WRITE": write_gate is not None, "KNOWN": inverse is not None,
         **tile_arguments("delta_writes", k, key, value)},
    )  # fmt: skip
    return written


def write_gradients(
    k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, write_gate: Tensor | None, inverse: Tensor, states: Tensor, d_u: Tensor,
    d_k: Tensor, d_decay: Tensor, layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of v, beta and write_gate, empty if there is none; adds to d_k and d_decay in place."""
    d_v, d_beta = torch.empty_like(v), torch.empty_like(beta, dtype=torch.float32)
    d_write = v.new_empty(0 if write_gate is None else write_gate.shape, dtype=torch.float32)
    (_, _, heads, key), value = k.shape, v.shape[3]
    launch(
        delta_write_gradients_kernel, (layout.chunks, heads),
        (k, v, log_decay, beta, write_gate, inverse, states, d_u, d_k, d_v, d_beta, d_write, d_decay, layout.table, layout.length),
        {**shape_arguments(k, layout), "V": value, "DECAY": "token", "WRITE": write_gate is not None,
         **tile_arguments("delta_write_gradients", k, key, value)},
    )  # fmt: skip
    return d_v, d_beta, d_write


# Sequences too few to keep the GPU busy are cut into segments, which run at the same time. First to know what they do: the first segment
# begins with what is given, those between with nothing and with the identity, and the last, which hands nothing on, waits. Then all begin
# with what is handed to them. `cut` [sequences * segments, heads, key, value + key] has what segments end with, later what they begin with,
# and beside it, for those between, the matrix by which they turn any state. Gradients go the other way.


def carry(cut: Tensor, begin: Tensor | None, x: Tensor, sequences: int, reverse: bool = False) -> None:
    """Hands states on from segment to segment, as precisely as x's dtype asks."""
    _, heads, key, width = cut.shape
    tiles = tile_arguments("delta_carry", x, key, width - key)
    launch(
        delta_carry_kernel, (sequences * heads * cdiv(width - key, tiles["BV"]),),
        (cut, cut if begin is None else begin, cut.shape[0] // sequences),
        {"H": heads, "K": key, "V": width - key, "BEGIN": begin is not None, "REVERSE": reverse, "PRECISION": dot_precision(x.dtype),
         **tiles},
    )  # fmt: skip


class DeltaScanned(NamedTuple):
    """What a scan gives."""

    states: Tensor
    """The states before every chunk [chunks, H, K, V]; None if it read out."""
    u: Tensor
    """The writes, or what was read out."""
    final: Tensor
    """The last states."""
    cut: Tensor
    """Empty for whole sequences."""


def delta_scan(
    prepared: Prepared, written: Written, initial: Tensor | None, layout: Layout, cut: Tensor | None = None, read: bool = False
) -> DeltaScanned:
    """Stores all states and writes, or, to `read`, what is read out alone."""
    key, (_, _, heads, value) = written.erase.shape[3], written.fresh.shape
    new, runs, known = written.fresh.new_empty, layout.sequences, cut is not None
    states = None if read else new((layout.chunks, heads, key, value))
    u = torch.empty_like(written.fresh)
    final = new((runs, heads, key, value), dtype=torch.float32)
    if cut is None:
        cut = new(cut_shape(written.erase, written.fresh, layout), dtype=torch.float32)
    segments = cut.shape[0] // runs or 1
    shape = shape_arguments(written.erase, layout) | {"V": value, "CHANNEL": prepared.whole.ndim == 3}

    def run(kernel: str, probe: bool) -> None:
        tiles, _ = spread(kernel, written.erase, written.fresh, layout, NARROWEST)
        blocks = cdiv(value, tiles["BV"]) + cdiv(key, tiles["BV"]) * probe
        begun = not probe and segments > 1
        launch(
            delta_scan_kernel, (runs * segments * heads * blocks,),
            (prepared.reading, prepared.writing, prepared.scores, written.erase, written.fresh, prepared.whole, prepared.mild, initial, cut,
             states, u, final, layout.table, layout.starts, segments, layout.length),
            {**shape, "BEGIN": initial is not None and not begun, "STORE": not (probe or read), "READ": read and not probe, "CUT": begun,
             **tiles},
        )  # fmt: skip

    if segments > 1 and not known:
        run("delta_scan", probe=True)
        carry(cut, initial, u, runs)
    run("delta_read_scan" if read else "delta_scan", probe=False)
    return DeltaScanned(states, u, final, cut)  # type: ignore[arg-type]


def delta_scan_back(
    prepared: Prepared, written: Written, cut: Tensor, d_o: Tensor, d_u: Tensor, d_final: Tensor | None, layout: Layout
) -> tuple[Tensor, Tensor]:
    """The gradients of the states after every chunk and of the initial ones; completes d_u in place."""
    key, (_, _, heads, value), runs = written.erase.shape[3], d_o.shape, layout.sequences
    d_states = d_o.new_empty((layout.chunks, heads, key, value))
    d_initial = d_o.new_empty((runs, heads, key, value), dtype=torch.float32)
    segments = cut.shape[0] // runs or 1
    shape = shape_arguments(written.erase, layout) | {"V": value, "CHANNEL": prepared.whole.ndim == 3}
    tiles, _ = spread("delta_scan_back", written.erase, d_o, layout, NARROWEST)

    def run(cut: Tensor, probe: bool) -> None:
        begun = not probe and segments > 1
        launch(
            delta_scan_back_kernel, (runs * segments * heads * cdiv(value, tiles["BV"]),),
            (prepared.reading, prepared.writing, written.erase, d_o, prepared.whole, prepared.mild, d_final, cut, d_states, d_u,
             d_initial, layout.table, layout.starts, segments, layout.length),
            {**shape, "BEGIN": d_final is not None and not begun, "STORE": not probe, "CUT": begun, **tiles},
        )  # fmt: skip

    if segments > 1:
        turned = torch.empty_like(cut)  # gradients take the states' place, and are turned by the transposed matrices
        turned[..., value:] = cut[..., value:].mT
        run(turned, probe=True)
        carry(turned, d_final, d_o, runs, reverse=True)
        cut = turned
    run(cut, probe=False)
    return d_states, d_initial


def cut_shape(k: Tensor, v: Tensor, layout: Layout) -> tuple[int, ...]:
    _, segments = spread("delta_scan", k, v, layout, NARROWEST)
    return (layout.sequences * segments, v.shape[2], k.shape[3], v.shape[3] + k.shape[3]) if segments > 1 else (0,)


def keys_for(x: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """Queries or keys as the recurrence takes them: of unit length if `normalize`, one for each value head."""
    return per_value_head(unit_length.unit_length(x, EPS) if normalize else x, v)


def keys_gradient(d_x: Tensor, x: Tensor, normalize: bool) -> Tensor:
    """The gradient of x from that of `keys_for` of it."""
    d_x = per_key_head(d_x, x)
    return unit_length.unit_length_gradient(x, d_x, EPS) if normalize else d_x


def prepare_writes(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, read_gate: Tensor | None, write_gate: Tensor | None, scale: float,
    layout: Layout, inverse: Tensor | None = None,
) -> tuple[Prepared, Prepared | None, Written]:  # fmt: skip
    """What queries read with, what keys times β do if the decay is per channel, and the writes; for the backward pass with the inverses."""
    backward = inverse is not None
    if log_decay.ndim == 3:
        prepared = prepare(q, k, log_decay, read_gate, None, scale, layout, backward)
        return prepared, None, writes(k, v, log_decay, beta, write_gate, layout, inverse)
    readers = Reader(q, read_gate, scale, q.dtype), Reader(k, beta, 1.0, q.dtype if backward else torch.float32)  # L is inverted in float32
    prepared, erasing = prepare_channel(readers, k, log_decay, None, layout, backward)
    if inverse is None:
        return prepared, erasing, Written(*channel_writes(erasing, v, beta, write_gate, layout, empty_inverse(v), known=False))
    return prepared, erasing, Written(*channel_writes(erasing, v, beta, write_gate, layout, inverse, known=True))


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the final state, and for the backward pass the inverses and `cut`, which take longer to make than to keep."""
    layout = Layout(q.shape[0], q.shape[1], table, starts)
    q, k = keys_for(q, v, normalize), keys_for(k, v, normalize)
    prepared, _, written = prepare_writes(q, k, v, log_decay, beta, read_gate, write_gate, scale, layout)
    read = reads_in_scan(k, "delta_read_scan")
    scanned = delta_scan(prepared, written, initial, layout, read=read)
    o = scanned.u if read else combine(prepared.reading, prepared.scores, scanned.u, scanned.states, layout)
    return o, scanned.final, written.inverse, scanned.cut


def fake_forward(q, k, v, log_decay, beta, read_gate, write_gate, scale, initial, table, starts, normalize):
    layout = Layout(q.shape[0], q.shape[1], table, starts)
    final, cut = (q.new_empty(shape, dtype=torch.float32) for shape in (layout.states(q, v), cut_shape(k, v, layout)))
    return torch.empty_like(v), final, empty_inverse(v), cut


def backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, read_gate: Tensor | None,
    write_gate: Tensor | None, scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None, normalize: bool,
    inverse: Tensor, cut: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay, beta, read_gate, write_gate, initial; an empty tensor where there is none."""
    layout, d_o = Layout(q.shape[0], q.shape[1], table, starts), d_o.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    given_q, given_k = q, k
    q, k = keys_for(q, v, normalize), keys_for(k, v, normalize)
    prepared, erasing, written = prepare_writes(q, k, v, log_decay, beta, read_gate, write_gate, scale, layout, inverse)
    states, u, _, _ = delta_scan(prepared, written, initial, layout, cut)
    d_u = combine(prepared.writing, prepared.scores, d_o, None, layout)
    d_states, d_initial = delta_scan_back(prepared, written, cut, d_o, d_u, d_final, layout)
    d_q, d_k, d_decay, d_gates = query_key_gradients(
        q, k, u, d_o, log_decay, read_gate, None, scale, prepared, states, d_states, layout, decay_gradient=True
    )
    if erasing is None:
        d_v, d_beta, d_write = write_gradients(k, v, log_decay, beta, write_gate, inverse, states, d_u, d_k, d_decay, layout)
    else:
        d_v, d_beta, d_write, further_k, further_decay = channel_write_gradients(
            erasing, k, v, log_decay, beta, write_gate, inverse, states, u, d_u, layout
        )
        d_k, d_decay = d_k + further_k, d_decay.float() + further_decay
    d_read = q.new_empty(0, dtype=torch.float32) if read_gate is None else d_gates[0]
    d_q, d_k = keys_gradient(d_q, given_q, normalize), keys_gradient(d_k, given_k, normalize)
    return [d_q, d_k, d_v, d_decay, d_beta, d_read, d_write, d_initial]


def fake_backward(d_o, d_final, q, k, v, log_decay, beta, read_gate, write_gate, scale, initial, table, starts, normalize, inverse, cut):
    nothing = q.new_empty(0, dtype=torch.float32)
    rows = [torch.empty_like(x, dtype=torch.float32) if x is not None else nothing for x in (log_decay, beta, read_gate, write_gate)]
    d_initial = q.new_empty(Layout(q.shape[0], q.shape[1], table, starts).states(q, v), dtype=torch.float32)
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *rows, d_initial]


_forward = define_op("gated_delta_rule", forward, fake_forward)
_backward = define_op("gated_delta_rule_backward", backward, fake_backward)


class GatedDeltaRule(torch.autograd.Function):
    """o, and the final state if `return_state`. Saves its inputs, the inverses and `cut`; all else is computed again."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, beta, read_gate, write_gate, scale, initial, table, starts, normalize, return_state):
        o, final, inverse, cut = _forward(q, k, v, log_decay, beta, read_gate, write_gate, scale, initial, table, starts, normalize)
        ctx.save_for_backward(q, k, v, log_decay, beta, read_gate, write_gate, initial, table, starts, inverse, cut)
        ctx.scale, ctx.normalize = scale, normalize
        return (o, final) if return_state else o

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, d_final=None):
        q, k, v, log_decay, beta, read_gate, write_gate, initial, table, starts, inverse, cut = ctx.saved_tensors
        inputs = q, k, v, log_decay, beta, read_gate, write_gate, ctx.scale, initial, table, starts, ctx.normalize
        d_q, d_k, d_v, d_decay, d_beta, d_read, d_write, d_initial = _backward(d_o, d_final, *inputs, inverse, cut)
        d_read = None if read_gate is None else d_read.to(read_gate.dtype)
        d_write = None if write_gate is None else d_write.to(write_gate.dtype)
        d_initial = None if initial is None else d_initial.to(initial.dtype)
        d_decay, d_beta = d_decay.to(log_decay.dtype), d_beta.to(beta.dtype)
        return d_q, d_k, d_v, d_decay, d_beta, d_read, d_write, None, d_initial, None, None, None, None


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, normalize_qk: bool, read_gate: Tensor | None,
    write_gate: Tensor | None, scale: float, initial_state: Tensor | None, packing: Packing | None, return_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """With log_decay [B,T,H], or [B,T,H,K] for KDA."""
    if q.dtype == torch.float16 and log_decay.ndim == 4:  # a chunk's decays do not fit float16's range
        wide = q.float(), k.float(), v.float()
        o, state = gated_delta_rule(
            *wide, log_decay, beta, normalize_qk, read_gate, write_gate, scale, initial_state, packing, return_state
        )
        return o.half(), state
    *given, initial = contiguous(q, k, v, log_decay, beta, read_gate, write_gate, initial_state)
    table, starts = (None, None) if packing is None else packing.chunks(CHUNK)
    result = GatedDeltaRule.apply(*given, scale, initial, table, starts, normalize_qk, return_state)
    return result if return_state else (result, None)
