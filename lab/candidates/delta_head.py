"""The gated delta rule with one decay per head, in kernels that take queries and keys as they are given.

Unit length, gates and decays are factors of a chunk's rows. They go to what is made of the rows, never to the rows: so the value heads
that share a key head share its tiles and its products, and nothing as large as the keys is written on the way. Forwards

    prepare   inverse = (I + β M)^-1,  scores = read q k^T ⊙ D below and on the diagonal           of a chunk, all heads of a key at once
    scan      u = inverse (fresh v - erase (k S)) ;  o = read (q S) + scores u ;  S' = exp(whole) S + k^T (write u)

with M = k k^T ⊙ D strictly below the diagonal, q and k of unit length, and the factors of a row

    read = scale read_gate exp(b) / |q|,  erase = β exp(b) / |k|,  write = exp(b_C - b) / |k|,  fresh = β write_gate.

Backwards, with dS' for the gradient of S',

    scan      y = inverse^T (scores^T dO + write (k dS')) ;  dS = exp(whole) dS' + q^T (read dO) - k^T (erase y)
    gradients d scores = dO u^T,  dM = -β y u^T,  d v = fresh y,  and dO S^T, y S^T, u dS'^T for queries and keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.gated_delta_rule.reference import EPS
from headmax.ops.kernels.common import (
    Layout,
    channel_block,
    chunk_span,
    contiguous,
    decay_factors,
    decay_matrix,
    decay_sums,
    dot_precision,
    load_chunk_gate,
    scan_index,
    segment_span,
    state_tile,
    tile,
    unit_lower_inverse,
    wait_for_dot,
)
from headmax.ops.kernels.delta_scan import NARROWEST, carry, delta_boundaries_shape
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.scan import scan_tiles
from headmax.ops.kernels.tiles import cdiv, power_of_2, tile_width
from headmax.ops.packing import CHUNK, Packing

ROWS = 32
"""Heads of tokens in a tile of `delta_unit_gradient_kernel`."""
TILES = {
    "prepare": (128, 64, 4, 1),
    "read": (128, 64, 4, 2),
    "store": (128, 64, 4, 2),
    "back": (128, 64, 8, 2),
    "gradients": (64, 64, 4, 2),
}
"""Key and value channels of a tile, warps and stages: first guesses, for keys of at most 128 channels."""


def tiles_for(kernel: str, x: Inputs, value: bool = True) -> dict[str, int]:
    k, v, warps, stages = TILES[kernel]
    key, short = x.k.shape[3], x.k.element_size() < 4
    # narrower products than 64 have gone wrong on Hopper, see tile_width
    widths = {"BK": max(64, power_of_2(key)) if kernel in ("read", "store", "back") else tile_width(key, k)}
    widths |= {"BV": tile_width(x.v.shape[3], v)} if value else {}
    return widths | {"num_warps": warps, "num_stages": stages if short else 1}


@triton.jit
def delta_prepare_kernel(
    q, k, log_decay, beta, read_gate, write_gate, inverse, scores, factors, whole, table, scale, eps, T, size,
    H: tl.constexpr, TIMES: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    UNIT: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What scans need of a chunk beside q, k and v, for the TIMES value heads of a key head; the inverses unless they are KNOWN."""
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C)
    rows = tl.arange(0, C)
    products, keys = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    of_q, of_k = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for k_start in range(0, K, BK):
        p_q, inside = tile(q, first, count, key_head, k_start, H // TIMES, K, C, BK)
        p_k, in_k = tile(k, first, count, key_head, k_start, H // TIMES, K, C, BK)
        t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=in_k, other=0.0)  # [C, BK]
        of_q += tl.sum(t_q.to(tl.float32) * t_q.to(tl.float32), 1)
        of_k += tl.sum(t_k.to(tl.float32) * t_k.to(tl.float32), 1)
        if K > BK:
            products, keys = wait_for_dot(products, count), wait_for_dot(keys, count)
        products += tl.dot(t_q, tl.trans(t_k), input_precision=PRECISION)
        keys += tl.dot(t_k, tl.trans(t_k), input_precision=PRECISION)
    per_q, per_k = per_length(of_q, eps, UNIT) * scale, per_length(of_k, eps, UNIT)
    products, keys = products * per_q[:, None] * per_k[None, :], keys * per_k[:, None] * per_k[None, :]
    for i in range(TIMES):
        head = key_head * TIMES + i
        b, left, total = decay_sums(log_decay, first, count, head, H, C, "token")
        between = decay_matrix(b, log_decay, count, head, C, "token")  # [C, C]
        strength = load_chunk_gate(beta, first, count, head, H, C)
        read = load_chunk_gate(read_gate, first, count, head, H, C)
        if not KNOWN:
            lower = tl.where(rows[:, None] > rows[None, :], keys * between * strength[:, None], 0.0)
            p_i, in_i = tile(inverse, first, count, head, 0, H, C, C, C)
            tl.store(p_i, unit_lower_inverse(lower, C, PRECISION).to(inverse.dtype.element_ty), mask=in_i)
        p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
        tl.store(p_a, (products * between * read[:, None]).to(scores.dtype.element_ty), mask=in_a)
        from_start, p_f = decay_factors(b, count, C), factors + (first + rows) * H + head
        tl.store(p_f, read * per_q * from_start, mask=rows < count)
        tl.store(p_f + size, strength * per_k * from_start, mask=rows < count)
        tl.store(p_f + 2 * size, per_k * decay_factors(left, count, C), mask=rows < count)
        tl.store(p_f + 3 * size, strength * load_chunk_gate(write_gate, first, count, head, H, C), mask=rows < count)
        tl.store(whole + chunk.to(tl.int64) * H + head, total.to(tl.float32))


@triton.jit
def per_length(squares, eps, UNIT: tl.constexpr):
    """1 / |x| for the sums of squares of some x, or 1."""
    if UNIT:
        return tl.rsqrt(squares + eps)
    else:
        return tl.zeros_like(squares) + 1.0


@triton.jit
def row_factors(factors, size, first, count, head, H: tl.constexpr, C: tl.constexpr):
    """read, erase, write and fresh for each row of a chunk [C], 0 beyond its end."""
    at, there = factors + (first + tl.arange(0, C)) * H + head, tl.arange(0, C) < count
    read, erase = tl.load(at, mask=there, other=0.0), tl.load(at + size, mask=there, other=0.0)
    return read, erase, tl.load(at + 2 * size, mask=there, other=0.0), tl.load(at + 3 * size, mask=there, other=0.0)


@triton.jit
def load_begin(
    begin, cut, whole_place, place, known, v_start,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BEGIN: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Some columns of what a segment begins with: what `cut` has for it, or, if `known`, what `begin` has for its sequence, else zeros."""
    values = (v_start + tl.arange(0, BV) < V)[None, :]
    if CUT:
        p_b, in_b = state_tile(cut, place, 0, v_start, K, V + K, BK, BV)
        return tl.load(p_b, mask=in_b & values, other=0.0)
    elif BEGIN:
        p_b, in_b = state_tile(begin, whole_place, 0, v_start, K, V, BK, BV)
        return tl.load(p_b, mask=in_b & values & known, other=0.0).to(tl.float32)
    else:
        return tl.zeros([BK, BV], tl.float32)


@triton.jit
def delta_scan_kernel(
    q, k, v, inverse, scores, factors, whole, begin, cut, states, out, end, table, starts, segments, T, size,
    H: tl.constexpr, TIMES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KIND: tl.constexpr, BEGIN: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the state through a segment of a sequence.

    To "read", `out` gets what is read out; to "store", u, and `states` each chunk's first. A "probe" fills `cut`, see delta_scan.py:
    the first segment begins with `begin`, the last is left out, and those between turn the identity too, in further columns, which
    nothing is written to. A chunk's factors are fetched one chunk ahead: no step waits for them.
    """
    PROBE: tl.constexpr = KIND == "probe"
    EDGE: tl.constexpr = (V + BV - 1) // BV * BV
    v_start, run, head = channel_block(H, EDGE + K if PROBE else V, BV)
    sequence, segment, key_head = run // segments, run % segments, head // TIMES
    if PROBE:
        if (segment == segments - 1) | ((segment == 0) & (v_start >= EDGE)):
            return
        v_start = tl.where(v_start < EDGE, v_start, v_start - EDGE + V)
    first_chunk, chunks, token, last = segment_span(run, segments, table, starts, T, C)
    columns, place, whole_place = v_start + tl.arange(0, BV), run.to(tl.int64) * H + head, sequence.to(tl.int64) * H + head
    state = load_begin(begin, cut, whole_place, place, segment == 0, v_start, K, V, BK, BV, BEGIN, CUT)  # [BK, BV]
    if PROBE:
        state += tl.where(tl.arange(0, BK)[:, None] == columns[None, :] - V, 1.0, 0.0)
    count = tl.where(chunks > 0, tl.minimum(C, last - token), 0).to(tl.int32)
    read, erase, write, fresh = row_factors(factors, size, token, count, head, H, C)
    decay = tl.load(whole + first_chunk.to(tl.int64) * H + head, mask=chunks > 0, other=0.0)
    for n in range(chunks):
        count, index = tl.minimum(C, last - token).to(tl.int32), (first_chunk + n).to(tl.int64) * H + head
        p_k, in_k = tile(k, token, count, key_head, 0, H // TIMES, K, C, BK)
        p_i, in_i = tile(inverse, token, count, head, 0, H, C, C, C)
        p_v, in_v = tile(v, token, count, head, v_start, H, V, C, BV)
        t_k, t_i = tl.load(p_k, mask=in_k, other=0.0), tl.load(p_i, mask=in_i, other=0.0)  # [C, BK], [C, C]
        t_v = tl.load(p_v, mask=in_v, other=0.0)  # [C, BV]
        if KIND == "read":
            p_q, in_q = tile(q, token, count, key_head, 0, H // TIMES, K, C, BK)
            p_a, in_a = tile(scores, token, count, head, 0, H, C, C, C)
            t_q, t_a = tl.load(p_q, mask=in_q, other=0.0), tl.load(p_a, mask=in_a, other=0.0)
        rest = tl.where(n + 1 < chunks, tl.minimum(C, last - token - C), 0).to(tl.int32)
        next_read, next_erase, next_write, next_fresh = row_factors(factors, size, token + C, rest, head, H, C)
        next_decay = tl.load(whole + index + H, mask=n + 1 < chunks, other=0.0)
        rounded = state.to(t_k.dtype)
        if KIND == "store":
            p_s, in_s = state_tile(states, index, 0, v_start, K, V, BK, BV)
            tl.store(p_s, rounded, mask=in_s)
        new = fresh[:, None] * t_v.to(tl.float32) - erase[:, None] * tl.dot(t_k, rounded, input_precision=PRECISION)
        u = tl.dot(t_i, new.to(t_k.dtype), input_precision=PRECISION)  # [C, BV]
        state = tl.dot(tl.trans(t_k), (u * write[:, None]).to(t_k.dtype), state * tl.exp2(decay), input_precision=PRECISION)
        p_o, in_o = tile(out, token, count, head, v_start, H, V, C, BV)
        if KIND == "read":
            o = tl.dot(t_q, rounded, input_precision=PRECISION) * read[:, None]
            u = tl.dot(t_a, u.to(t_k.dtype), o, input_precision=PRECISION)
        if not PROBE:
            tl.store(p_o, u.to(out.dtype.element_ty), mask=in_o)
        read, erase, write, fresh, decay = next_read, next_erase, next_write, next_fresh, next_decay
        token += C
    if PROBE:
        p_end, in_end = state_tile(cut, place, 0, v_start, K, V + K, BK, BV)
        tl.store(p_end, state, mask=in_end & ((columns < V) | (v_start >= V))[None, :])
    else:
        p_end, in_end = state_tile(end, whole_place, 0, v_start, K, V, BK, BV)
        tl.store(p_end, state, mask=in_end & (segment == segments - 1))


@triton.jit
def delta_scan_back_kernel(
    q, k, d_o, inverse, scores, factors, whole, begin, cut, d_states, y, end, table, starts, segments, T, size,
    H: tl.constexpr, TIMES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BEGIN: tl.constexpr, STORE: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the states' gradient backwards through a segment of a sequence, and y.

    Without STORE it is to fill `cut`: then the last segment begins with `begin`, and the first is left out.
    """
    v_start, run, head = channel_block(H, V, BV)
    sequence, segment, key_head = run // segments, run % segments, head // TIMES
    if (segment == 0) & (not STORE):
        return
    first_chunk, chunks, token, last = segment_span(run, segments, table, starts, T, C)
    columns, place, whole_place = v_start + tl.arange(0, BV), run.to(tl.int64) * H + head, sequence.to(tl.int64) * H + head
    gradient = load_begin(begin, cut, whole_place, place, segment == segments - 1, v_start, K, V, BK, BV, BEGIN, CUT)  # [BK, BV]
    first = token + (chunks - 1) * C
    count = tl.where(chunks > 0, tl.minimum(C, last - first), 0).to(tl.int32)
    read, erase, write, _ = row_factors(factors, size, first, count, head, H, C)
    decay = tl.load(whole + (first_chunk + chunks - 1).to(tl.int64) * H + head, mask=chunks > 0, other=0.0)
    for i in range(chunks):
        n = scan_index(i, chunks, True)
        first = token + n * C
        count, index = tl.minimum(C, last - first).to(tl.int32), (first_chunk + n).to(tl.int64) * H + head
        p_q, in_q = tile(q, first, count, key_head, 0, H // TIMES, K, C, BK)
        p_k, in_k = tile(k, first, count, key_head, 0, H // TIMES, K, C, BK)
        p_i, in_i = tile(inverse, first, count, head, 0, H, C, C, C)
        p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
        p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        t_q, t_k = tl.load(p_q, mask=in_q, other=0.0), tl.load(p_k, mask=in_k, other=0.0)  # [C, BK]
        t_i, t_a = tl.load(p_i, mask=in_i, other=0.0), tl.load(p_a, mask=in_a, other=0.0)  # [C, C]
        t_o = tl.load(p_o, mask=in_o, other=0.0)  # [C, BV]
        earlier = tl.where(n > 0, C, 0)
        next_read, next_erase, next_write, _ = row_factors(factors, size, first - C, earlier, head, H, C)
        next_decay = tl.load(whole + index - H, mask=n > 0, other=0.0)
        rounded = gradient.to(t_k.dtype)
        if STORE:
            p_s, in_s = state_tile(d_states, index, 0, v_start, K, V, BK, BV)
            tl.store(p_s, rounded, mask=in_s)
        d_u = tl.dot(t_k, rounded, input_precision=PRECISION) * write[:, None]
        d_u = tl.dot(tl.trans(t_a), t_o, d_u, input_precision=PRECISION)  # [C, BV]
        t_y = tl.dot(tl.trans(t_i), d_u.to(t_k.dtype), input_precision=PRECISION)
        if STORE:
            p_y, in_y = tile(y, first, count, head, v_start, H, V, C, BV)
            tl.store(p_y, t_y.to(y.dtype.element_ty), mask=in_y)
        as_read = (t_o.to(tl.float32) * read[:, None]).to(t_k.dtype)
        gradient = tl.dot(tl.trans(t_q), as_read, gradient * tl.exp2(decay), input_precision=PRECISION)
        gradient -= tl.dot(tl.trans(t_k), (t_y * erase[:, None]).to(t_k.dtype), input_precision=PRECISION)
        read, erase, write, decay = next_read, next_erase, next_write, next_decay
    if STORE:
        p_end, in_end = state_tile(end, whole_place, 0, v_start, K, V, BK, BV)
        tl.store(p_end, gradient, mask=in_end & (segment == 0))
    else:
        p_end, in_end = state_tile(cut, place, 0, v_start, K, V + K, BK, BV)
        tl.store(p_end, gradient, mask=in_end & (columns < V)[None, :])


@triton.jit
def delta_gradients_kernel(
    q, k, v, d_o, u, y, states, d_states, log_decay, beta, read_gate, write_gate,
    d_q, d_k, d_v, d_decay, d_beta, d_read, d_write, table, scale, eps, T,
    H: tl.constexpr, TIMES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's gradients, for one value head: d_q and d_k [B,T,HV,K] are those of q and k of unit length."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, count = chunk_span(chunk, table, T, C)
    key_head, index, rows = head // TIMES, chunk.to(tl.int64) * H + head, tl.arange(0, C)
    at, there = (first + rows) * H + head, rows < count
    d_scores, d_lower = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    met = tl.zeros([C], tl.float32)
    strength, write = load_chunk_gate(beta, first, count, head, H, C), load_chunk_gate(write_gate, first, count, head, H, C)
    read = load_chunk_gate(read_gate, first, count, head, H, C)
    for v_start in range(0, V, BV):
        p_v, in_v = tile(v, first, count, head, v_start, H, V, C, BV)
        p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        p_u, in_u = tile(u, first, count, head, v_start, H, V, C, BV)
        p_y, in_y = tile(y, first, count, head, v_start, H, V, C, BV)
        p_g, in_g = tile(d_v, first, count, head, v_start, H, V, C, BV)
        t_v, t_o = tl.load(p_v, mask=in_v, other=0.0), tl.load(p_o, mask=in_o, other=0.0)
        t_u, t_y = tl.load(p_u, mask=in_u, other=0.0), tl.load(p_y, mask=in_y, other=0.0)  # [C, BV]
        if V > BV:
            d_scores, d_lower = wait_for_dot(d_scores, count), wait_for_dot(d_lower, count)
        d_scores += tl.dot(t_o, tl.trans(t_u), input_precision=PRECISION)
        d_lower += tl.dot(t_y, tl.trans(t_u), input_precision=PRECISION)
        met += tl.sum(t_y.to(tl.float32) * t_v.to(tl.float32), 1)
        tl.store(p_g, (t_y.to(tl.float32) * (strength * write)[:, None]).to(d_v.dtype.element_ty), mask=in_g)
    products, keys = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    of_q, of_k = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for k_start in range(0, K, BK):
        p_q, in_q = tile(q, first, count, key_head, k_start, H // TIMES, K, C, BK)
        p_k, in_k = tile(k, first, count, key_head, k_start, H // TIMES, K, C, BK)
        t_q, t_k = tl.load(p_q, mask=in_q, other=0.0), tl.load(p_k, mask=in_k, other=0.0)  # [C, BK]
        of_q += tl.sum(t_q.to(tl.float32) * t_q.to(tl.float32), 1)
        of_k += tl.sum(t_k.to(tl.float32) * t_k.to(tl.float32), 1)
        if K > BK:
            products, keys = wait_for_dot(products, count), wait_for_dot(keys, count)
        products += tl.dot(t_q, tl.trans(t_k), input_precision=PRECISION)
        keys += tl.dot(t_k, tl.trans(t_k), input_precision=PRECISION)
    per_q, per_k = per_length(of_q, eps, UNIT), per_length(of_k, eps, UNIT)
    b, left, total = decay_sums(log_decay, first, count, head, H, C, "token")
    between, from_start, to_end = (
        decay_matrix(b, log_decay, count, head, C, "token"),
        decay_factors(b, count, C),
        decay_factors(left, count, C),
    )
    d_scores *= between * scale
    d_lower = -tl.where(rows[:, None] > rows[None, :], d_lower * between, 0.0)  # but for beta, which it has a gradient of itself
    read_scores = d_scores * products * per_q[:, None] * per_k[None, :]
    erased = d_lower * keys * per_k[:, None] * per_k[None, :]
    by_beta, by_read = write * met + tl.sum(erased, 1), tl.sum(read_scores, 1)
    both = read_scores * read[:, None] + erased * strength[:, None]
    moves, leaves = tl.sum(both, 1) - tl.sum(both, 0), 0.0
    # those that q and k meet, as they are given
    to_q = (d_scores * read[:, None] * per_k[None, :]).to(q.dtype.element_ty)
    to_k = (d_scores * (read * per_q)[:, None]).to(q.dtype.element_ty)
    lower = d_lower * strength[:, None]
    among = (lower * per_k[None, :] + tl.trans(lower * per_k[:, None])).to(q.dtype.element_ty)
    for k_start in range(0, K, BK):
        g_read, g_erase, g_write = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
        kept = 0.0
        for v_start in range(0, V, BV):
            p_o, in_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
            p_u, in_u = tile(u, first, count, head, v_start, H, V, C, BV)
            p_y, in_y = tile(y, first, count, head, v_start, H, V, C, BV)
            p_s, in_s = state_tile(states, index, k_start, v_start, K, V, BK, BV)
            p_d, in_d = state_tile(d_states, index, k_start, v_start, K, V, BK, BV)
            t_o, t_u = tl.load(p_o, mask=in_o, other=0.0), tl.load(p_u, mask=in_u, other=0.0)  # [C, BV]
            t_y = tl.load(p_y, mask=in_y, other=0.0)
            t_s, t_d = tl.load(p_s, mask=in_s, other=0.0), tl.load(p_d, mask=in_d, other=0.0)  # [BK, BV]
            if V > BV:
                g_read, g_erase, g_write = wait_for_dot(g_read, count), wait_for_dot(g_erase, count), wait_for_dot(g_write, count)
            g_read += tl.dot(t_o, tl.trans(t_s), input_precision=PRECISION)
            g_erase += tl.dot(t_y, tl.trans(t_s), input_precision=PRECISION)
            g_write += tl.dot(t_u, tl.trans(t_d), input_precision=PRECISION)
            kept += tl.sum(tl.sum(t_s.to(tl.float32) * t_d.to(tl.float32), 1), 0)
        p_q, in_q = tile(q, first, count, key_head, k_start, H // TIMES, K, C, BK)
        p_k, in_k = tile(k, first, count, key_head, k_start, H // TIMES, K, C, BK)
        t_q, t_k = tl.load(p_q, mask=in_q, other=0.0), tl.load(p_k, mask=in_k, other=0.0)  # [C, BK]
        unit_q, unit_k = t_q.to(tl.float32) * per_q[:, None], t_k.to(tl.float32) * per_k[:, None]
        g_read *= (from_start * scale)[:, None]
        g_erase *= from_start[:, None]
        g_write *= to_end[:, None]
        reads, erases, writes = tl.sum(g_read * unit_q, 1), tl.sum(g_erase * unit_k, 1), tl.sum(g_write * unit_k, 1)
        by_read += reads
        by_beta -= erases
        moves += reads * read - erases * strength - writes
        leaves += tl.sum(writes, 0) + tl.exp2(total.to(tl.float32)) * kept
        g_q = g_read * read[:, None] + tl.dot(to_q, t_k, input_precision=PRECISION)
        g_k = g_write - g_erase * strength[:, None] + tl.dot(tl.trans(to_k), t_q, input_precision=PRECISION)
        g_k += tl.dot(among, t_k, input_precision=PRECISION)
        p_dq, in_dq = tile(d_q, first, count, head, k_start, H, K, C, BK)
        p_dk, in_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
        tl.store(p_dq, g_q.to(d_q.dtype.element_ty), mask=in_dq)
        tl.store(p_dk, g_k.to(d_k.dtype.element_ty), mask=in_dk)
    tl.store(d_beta + at, by_beta, mask=there)
    if READ:
        tl.store(d_read + at, by_read, mask=there)
    if WRITE:
        tl.store(d_write + at, met * strength, mask=there)
    tl.store(d_decay + at, tl.cumsum(moves, 0, reverse=True) + leaves, mask=there)


@triton.jit
def delta_unit_gradient_kernel(
    x, d_units, d_x, rows_in_all, eps, TIMES: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr
):
    """d_x of x = |x| unit [rows, K] from the gradients of its unit that its TIMES value heads have."""
    rows, columns = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BK)
    inside = (rows[:, None] < rows_in_all) & (columns[None, :] < K)
    total = tl.zeros([BR, BK], tl.float32)
    for i in range(TIMES):
        total += tl.load(d_units + (rows[:, None] * TIMES + i) * K + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if UNIT:
        t_x = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(t_x * t_x, 1) + eps)[:, None]
        unit = t_x * scale
        total = (total - unit * tl.sum(unit * total, 1)[:, None]) * scale
    tl.store(d_x + rows[:, None] * K + columns[None, :], total.to(d_x.dtype.element_ty), mask=inside)


class Inputs(NamedTuple):
    """A call's."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    read_gate: Tensor | None
    write_gate: Tensor | None
    scale: float
    normalize: bool
    layout: Layout

    def shape(self) -> dict[str, Any]:
        """What all kernels are specialised to."""
        key_heads, heads = self.k.shape[2], self.v.shape[2]
        return {"H": heads, "TIMES": heads // key_heads, "K": self.k.shape[3], "C": self.layout.chunk,
                "PRECISION": dot_precision(self.k.dtype)}  # fmt: skip

    def gates(self) -> dict[str, bool]:
        return {"READ": self.read_gate is not None, "WRITE": self.write_gate is not None, "UNIT": self.normalize}

    def states(self, segments: int, blocks: int) -> tuple[int]:
        """A scan's grid."""
        return (self.layout.sequences * segments * self.v.shape[2] * blocks,)


class Chunks(NamedTuple):
    """What `delta_prepare_kernel` makes."""

    inverse: Tensor
    """[B,T,HV,CHUNK], in the dtype of the values."""
    scores: Tensor
    """[B,T,HV,CHUNK]"""
    factors: Tensor
    """[4,B,T,HV]: read, erase, write, fresh."""
    whole: Tensor
    """[chunks, HV] the log-decay of a chunk, base 2."""


def prepare(x: Inputs, inverse: Tensor | None = None) -> Chunks:
    shape, chunks = x.v.shape[:3], x.layout.chunks
    square = (*shape, x.layout.chunk)
    factors, whole = (x.v.new_empty(size, dtype=torch.float32) for size in ((4, *shape), (chunks, shape[2])))
    made = Chunks(x.v.new_empty(square) if inverse is None else inverse, x.v.new_empty(square), factors, whole)
    launch(
        delta_prepare_kernel, (chunks, x.k.shape[2]),
        (x.q, x.k, x.log_decay, x.beta, x.read_gate, x.write_gate, *made, x.layout.table, x.scale, EPS, x.layout.length, shape.numel()),
        x.shape() | x.gates() | {"KNOWN": inverse is not None, **tiles_for("prepare", x, value=False)},
    )  # fmt: skip
    return made


def scan(
    x: Inputs, made: Chunks, kind: str, begin: Tensor | None, cut: Tensor | None, segments: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """To "store", the states before every chunk [chunks, HV, K, V]; what was read out or, to "store", u; and the last states."""
    key, (_, _, heads, value), probe = x.k.shape[3], x.v.shape, kind == "probe"
    states = x.v.new_empty((x.layout.chunks, heads, key, value)) if kind == "store" else None
    out, end = torch.empty_like(x.v), x.v.new_empty((x.layout.sequences, heads, key, value), dtype=torch.float32)
    tiles = tiles_for("store" if kind == "store" else "read", x)
    blocks, begun = cdiv(value, tiles["BV"]) + cdiv(key, tiles["BV"]) * probe, segments > 1 and not probe
    launch(
        delta_scan_kernel, x.states(segments, blocks),
        (x.q, x.k, x.v, *made, begin, cut, states, out, end, x.layout.table, x.layout.starts, segments, x.layout.length,
         x.v.shape[:3].numel()),
        x.shape() | {"V": value, "KIND": kind, "BEGIN": begin is not None and not begun, "CUT": begun, **tiles},
    )  # fmt: skip
    return states, out, end


def scan_back(
    x: Inputs, made: Chunks, d_o: Tensor, begin: Tensor | None, cut: Tensor | None, segments: int, probe: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the states after every chunk, y, and the gradient of the first states; a `probe` fills `cut` alone."""
    key, (_, _, heads, value) = x.k.shape[3], x.v.shape
    d_states, y = x.v.new_empty((x.layout.chunks, heads, key, value)), torch.empty_like(x.v)
    end, begun = x.v.new_empty((x.layout.sequences, heads, key, value), dtype=torch.float32), segments > 1 and not probe
    tiles = tiles_for("back", x)
    launch(
        delta_scan_back_kernel, x.states(segments, cdiv(value, tiles["BV"])),
        (x.q, x.k, d_o, *made, begin, cut, d_states, y, end, x.layout.table, x.layout.starts, segments, x.layout.length,
         x.v.shape[:3].numel()),
        x.shape() | {"V": value, "STORE": not probe, "BEGIN": begin is not None and not begun, "CUT": begun, **tiles},
    )  # fmt: skip
    return d_states, y, end


def gradients(x: Inputs, d_o: Tensor, u: Tensor, y: Tensor, states: Tensor, d_states: Tensor) -> list[Tensor]:
    """Of q, k, v, log_decay, beta and the gates; empty where there is none."""
    (_, _, _, key), (*tokens, heads, value) = x.k.shape, x.v.shape
    d_units = [x.k.new_empty((*tokens, heads, key)) for _ in range(2)]
    nothing = x.v.new_empty(0, dtype=torch.float32)
    rows = [nothing if gate is None else torch.empty_like(gate, dtype=torch.float32)
            for gate in (x.log_decay, x.beta, x.read_gate, x.write_gate)]  # fmt: skip
    d_v = torch.empty_like(x.v)
    launch(
        delta_gradients_kernel, (x.layout.chunks * heads,),
        (x.q, x.k, x.v, d_o, u, y, states, d_states, x.log_decay, x.beta, x.read_gate, x.write_gate, *d_units, d_v, *rows,
         x.layout.table, x.scale, EPS, x.layout.length),
        x.shape() | x.gates() | {"V": value, **tiles_for("gradients", x)},
    )  # fmt: skip
    return [*(unit_gradient(given, d_unit, x.normalize) for given, d_unit in zip((x.q, x.k), d_units, strict=True)), d_v, *rows]


def unit_gradient(x: Tensor, d_unit: Tensor, normalize: bool) -> Tensor:
    """d_x of x [B,T,H,K] from d_unit [B,T,HV,K], of its unit vectors or, unless it is to `normalize`, of itself."""
    if d_unit.shape == x.shape and not normalize:
        return d_unit
    (*_, heads, key), d_x = x.shape, torch.empty_like(x)
    rows, block = x.numel() // key, power_of_2(key)
    launch(
        delta_unit_gradient_kernel, (cdiv(rows, ROWS),), (x, d_unit, d_x, rows, EPS),
        {"TIMES": d_unit.shape[2] // heads, "K": key, "BR": ROWS, "BK": block, "UNIT": normalize},
    )  # fmt: skip
    return d_x


class GatedDeltaRule(torch.autograd.Function):
    """o and the final state. Saves its inputs, the inverses and what segments begin with."""

    @staticmethod
    def forward(ctx: Any, scale: float, normalize: bool, layout: Layout, *tensors: Any) -> tuple[Tensor, Tensor]:
        *given, initial = tensors
        x = Inputs._make([*given, scale, normalize, layout])
        made, runs = prepare(x), layout.sequences
        # segments would have to be chosen by this scan's own tiles; until then, by those of the scan that is
        _, segments = scan_tiles("delta_scan", x.k, x.v, layout, NARROWEST)
        cut = x.v.new_empty(delta_boundaries_shape(x.k, x.v, layout), dtype=torch.float32)
        if segments > 1:
            scan(x, made, "probe", initial, cut, segments)
            carry(cut, initial, x.v, runs)
        _, o, final = scan(x, made, "read", initial, cut, segments)
        ctx.x, ctx.segments = (scale, normalize, layout), segments
        ctx.save_for_backward(*given, initial, made.inverse, cut)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Any, ...]:
        *given, initial, inverse, cut = ctx.saved_tensors
        x, segments, d_o, d_final = Inputs._make([*given, *ctx.x]), ctx.segments, d_o.contiguous(), d_final.contiguous()
        made, value, runs = prepare(x, inverse), x.v.shape[3], x.layout.sequences
        states, u, _ = scan(x, made, "store", initial, cut, segments)
        assert states is not None
        if segments > 1:
            turned = torch.empty_like(cut)  # gradients take the states' place, and are turned by the transposed matrices
            turned[..., value:] = cut[..., value:].mT
            scan_back(x, made, d_o, d_final, turned, segments, probe=True)
            carry(turned, d_final, d_o, runs, reverse=True)
            cut = turned
        d_states, y, d_initial = scan_back(x, made, d_o, d_final, cut, segments)
        d_all = [*gradients(x, d_o, u, y, states, d_states), d_initial]
        return None, None, None, *(None if of is None else d.to(of.dtype) for d, of in zip(d_all, (*given, initial), strict=True))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial: Tensor | None, packing: Packing | None, normalize: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As headmax.ops.gated_delta_rule, with a state."""
    table, starts = (None, None) if packing is None else packing.chunks(CHUNK)
    layout = Layout(q.shape[0], q.shape[1], table, starts)
    tensors = contiguous(q, k, v, log_decay, beta, read_gate, write_gate, initial)
    return GatedDeltaRule.apply(scale, normalize, layout, *tensors)
