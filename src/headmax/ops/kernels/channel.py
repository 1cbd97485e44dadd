"""Linear attention with a decay per key channel: what a chunk's gates and decays are folded into, and back.

With b the running sums of a chunk's log-decays (as powers of two), token i reads through 2^(b_i - h) and token j writes through 2^(b_C -
b_j - h). With h = b_C / 2 both factors stay within exp(±60), and the scores A_ij = Σ_c q_ic k_jc 2^(b_ic - b_jc) are one matrix product of
what is read with and what is written: the chunk is *factored*,

    scaled_q = scale read_gate q 2^(b - h),   scaled_k = write_gate k 2^(b_C - b - h),   scores = scaled_q scaled_k^T on and below the
    diagonal.

Where a channel decays by more than exp(-120) over a chunk, the factors would overflow: such a chunk is *exact* instead, h is 0, and the
scores come from several products. Blocks of 32 tokens are done as before. Then those of the right half of the chunk read, through the decay
since the boundary, what those of the left half wrote, through the decay until it: every pair of tokens meets once, and no factor is above
1. Where blocks of 32 decay too much as well, they have 16 tokens, and halves of 16 come before halves of 32; where those do, they are
single tokens, and halves of 1, 2, 4, ... come first. That is exact for any decay. It takes longer, so it is done only for the chunks that
need it; trained models have them. Every kernel here is one of a pair, of which one returns at once: which one, `factored` says, for each
chunk and head.

All decays are differences of running sums: float32, or float64 for float32 inputs. Of exact chunks these lie in memory, to be read wherever
a boundary is; of factored chunks b - h does, for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import (
    Layout,
    Prepared,
    base_2,
    causal_mask,
    chunk_span,
    convert_layout_like,
    load_chunk_gate,
    shape_arguments,
    tile,
)
from headmax.ops.kernels.gradients import score_gradients, state_gradients
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.scan import load_decay
from headmax.ops.kernels.tiles import tile_arguments
from headmax.ops.packing import CHUNK

LARGEST = tl.constexpr(120 * math.log2(math.e))
"""A decay of exp(-120), split in two, leaves factors of at most exp(60): float32's and bfloat16's range has room for queries and keys."""

SMALL_GATE = tl.constexpr(1e-10)
"""Times a factor of exp(-60), a gate above it still leaves numbers that float32 and bfloat16 hold in full."""

SIZES = tl.constexpr(CHUNK.bit_length() - 1)
"""Halves of 2^0, 2^1, ... tokens, up to half a chunk."""


@triton.jit
def weighted_sums(b_weights, b_x):
    """weights x on the matrix units, for weights [C, C] that bfloat16 holds, of x [C, ...] in two parts that keep 16 bits.

    The first part is cut off, not rounded: that takes one instruction, and the second has all that is left.
    """
    b_high = (b_x.to(tl.int32, bitcast=True) & -(2**16)).to(tl.float32, bitcast=True)
    return tl.dot(b_weights, b_high.to(tl.bfloat16), tl.dot(b_weights, (b_x - b_high).to(tl.bfloat16)))


@triton.jit
def sums_from_the_end(b_x, C: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of the rows of x [C, ...] from each on.

    For float32 inputs one by one: the matrix units cut off what they add instead of rounding it, which a long sum shows.
    """
    if PRECISION == "tf32x3":
        return tl.cumsum(b_x, 0, reverse=True)
    else:
        o_c = tl.arange(0, C)
        return weighted_sums((o_c[:, None] <= o_c[None, :]).to(tl.float32).to(tl.bfloat16), b_x)


@triton.jit
def centred_sums(b_x, C: tl.constexpr, PRECISION: tl.constexpr):
    """Running sums of the rows of x [C, ...] less half of the whole sum; for float32 inputs one by one.

    They are exponents: where 16 bits of one are too few, what decays by it has vanished.
    """
    if PRECISION == "tf32x3":
        return tl.cumsum(b_x, 0) - 0.5 * tl.sum(b_x, 0)[None, :]
    else:
        o_c = tl.arange(0, C)
        return weighted_sums(tl.where(o_c[:, None] >= o_c[None, :], 0.5, -0.5).to(tl.bfloat16), b_x)


@triton.jit
def load_sums(sums, rows, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """What `sums` has of a chunk at these rows, or at its last if it is shorter [rows, BK]."""
    o_c, o_k = tl.minimum(rows, count - 1)[:, None], k_start + tl.arange(0, BK)[None, :]
    return tl.load(sums + (first * H + head) * K + (o_c * (H * K) + o_k), mask=o_k < K, other=0.0)  # [rows, BK]


@triton.jit
def exact_exponents(sums, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """b and b_C - b of an exact chunk: what its tokens read and write through, as powers of two [C, BK]."""
    b_cum = load_sums(sums, tl.arange(0, C), first, count, head, k_start, H, K, BK)
    b_last = load_sums(sums, tl.arange(0, 1) + C, first, count, head, k_start, H, K, BK)
    return b_cum.to(tl.float32), (b_last - b_cum).to(tl.float32)


@triton.jit
def diagonal_blocks(
    q, k, b_read, b_write, sums, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr
):
    """Log2 of the blocks' size; which pairs of tokens share a block [C, C]; what scales each token, seen from its block's first, when it
    reads and when it has written; and what it reads with and has written [C, BK]."""
    o_c = tl.arange(0, C)
    b_cum = load_sums(sums, o_c, first, count, head, k_start, H, K, BK)
    b_log = (b_cum - load_sums(sums, o_c // 32 * 32, first, count, head, k_start, H, K, BK)).to(tl.float32)
    power = 5
    if tl.min(tl.min(b_log, 1), 0) <= -LARGEST:
        b_log = (b_cum - load_sums(sums, o_c // 16 * 16, first, count, head, k_start, H, K, BK)).to(tl.float32)
        power = 4
        if tl.min(tl.min(b_log, 1), 0) <= -LARGEST:
            b_log = tl.zeros([C, BK], tl.float32)
            power = 0
    b_log += 0.5 * LARGEST
    b_reads, b_writes = tl.exp2(b_log), tl.exp2(-b_log)
    p_q, m_q = tile(q, first, count, head, k_start, H, K, C, BK)
    p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
    b_q, b_k = tl.load(p_q, mask=m_q, other=0.0), tl.load(p_k, mask=m_k, other=0.0)  # [C, BK]
    b_sq, b_sk = (b_q.to(tl.float32) * (b_read * b_reads)).to(b_q.dtype), (b_k.to(tl.float32) * (b_write * b_writes)).to(b_k.dtype)
    return power, o_c[:, None] >> power == o_c[None, :] >> power, b_reads, b_writes, b_sq, b_sk


@triton.jit
def halves(
    q, k, b_read, b_write, power, sums, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr
):
    """Of a chunk cut into halves of 2^power tokens: which rows are in right halves [C, 1], which pairs meet at this size [C, C], the decay
    between each token and its boundary [C, BK], and what it reads with, in right halves, or has written, in left ones [C, BK]."""
    o_c = tl.arange(0, C)
    half, other_half = o_c[:, None] >> power, o_c[None, :] >> power
    m_right, boundary = half % 2 == 1, (((o_c >> power) | 1) << power) - 1
    b_since = load_sums(sums, o_c, first, count, head, k_start, H, K, BK) - load_sums(sums, boundary, first, count, head, k_start, H, K, BK)
    b_decay = tl.exp2(tl.where(m_right, b_since, -b_since).to(tl.float32))
    p_q, m_q = tile(q, first, count, head, k_start, H, K, C, BK)
    p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
    b_x = tl.load(tl.where(m_right, p_q, p_k), mask=m_q, other=0.0)  # [C, BK]
    m_pairs = m_right & (half == other_half + 1)
    return m_right, m_pairs, b_decay, (b_x.to(tl.float32) * (tl.where(m_right, b_read, b_write) * b_decay)).to(b_x.dtype)


@triton.jit
def exact_scores(
    q, k, b_read, b_write, sums, first, count, head, k_start,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A [C, C] of a chunk's queries and keys with their gates [C, 1], to be masked by the caller; its upper triangle is undefined."""
    power, m_pairs, b_reads, b_writes, b_sq, b_sk = diagonal_blocks(q, k, b_read, b_write, sums, first, count, head, k_start, H, K, C, BK)
    b_a = tl.where(m_pairs, tl.dot(b_sq, tl.trans(b_sk), input_precision=PRECISION), 0.0)
    for larger in tl.range(power, SIZES, num_stages=1, disable_licm=True):
        m_right, m_pairs, b_decay, b_x = halves(q, k, b_read, b_write, larger, sums, first, count, head, k_start, H, K, C, BK)
        b_a = tl.where(m_pairs, tl.dot(b_x, tl.trans(b_x), input_precision=PRECISION), b_a)
    return b_a


@triton.jit
def add_exact_score_gradients(
    b_dq, b_dk, b_dg, b_ds, q, k, b_read, b_write, sums, first, count, head, k_start,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of gated queries and keys [C, BK] those through masked d scores [C, C], and to `b_dg` their q d_q - k d_k,
    where the two terms of a pair are the same to the last bit; of a token with itself nothing, since no step lies between.

    Registers are short here: what is loaded within the loop is meant to be loaded each time.
    """
    power, m_pairs, b_reads, b_writes, b_sq, b_sk = diagonal_blocks(q, k, b_read, b_write, sums, first, count, head, k_start, H, K, C, BK)
    b_ds, o_c = b_ds.to(b_sq.dtype), tl.arange(0, C)
    m_own = o_c[:, None] == o_c[None, :]
    b_own = tl.sum(tl.where(m_own, b_ds, 0.0).to(tl.float32), 1)[:, None]  # [C, 1]
    b_pairs = tl.where(m_pairs & (o_c[:, None] != o_c[None, :]), b_ds, 0.0)
    b_dx = tl.dot(b_pairs, b_sk, input_precision=PRECISION)
    b_dg += b_dx * b_sq.to(tl.float32)
    b_dq += (b_dx + b_own * b_sk.to(tl.float32)) * b_reads
    b_dx = tl.dot(tl.trans(b_pairs), b_sq, input_precision=PRECISION)
    b_dg -= b_dx * b_sk.to(tl.float32)
    b_dk += (b_dx + b_own * b_sq.to(tl.float32)) * b_writes
    for larger in tl.range(power, SIZES, num_stages=1, disable_licm=True):
        m_right, m_pairs, b_decay, b_x = halves(q, k, b_read, b_write, larger, sums, first, count, head, k_start, H, K, C, BK)
        b_pairs = tl.where(m_pairs, b_ds, 0.0)
        b_dx = tl.dot(b_pairs + tl.trans(b_pairs), b_x, input_precision=PRECISION)
        b_dg += tl.where(m_right, b_dx, -b_dx) * b_x.to(tl.float32)
        b_dx *= b_decay
        b_dq += tl.where(m_right, b_dx, 0.0)
        b_dk += tl.where(m_right, 0.0, b_dx)
    return b_dq, b_dk, b_dg


@triton.jit
def store_scores(b_a, scores, first, count, head, H: tl.constexpr, C: tl.constexpr, BACKWARD: tl.constexpr):
    """The causal part of A [C, C], transposed for the backward pass."""
    b_a = tl.where(causal_mask(count, C), b_a, 0.0).to(scores.dtype.element_ty)
    p_a, m_a = tile(scores, first, count, head, 0, H, C, C, C)
    tl.store(p_a, tl.trans(b_a) if BACKWARD else b_a, mask=m_a)


@triton.jit
def prepare_channel_kernel(
    q, k, log_decay, read_gate, write_gate, sums, scaled_q, scaled_k, scores, chunk_decay, factored, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scaled_q, scaled_k [B,T,H,K] and scores [B,T,H,C] of a factored chunk, see the top of the file; chunk_decay [chunks, H, K] of any.

    In: q, k, log_decay [B,T,H,K], gates None or [B,T,H]. It finds out whether the chunk is factored: its decays slow enough for one
    product, and its gates large enough to divide their gradients out of that product's. If not, all but chunk_decay is made again by
    `prepare_channel_exact_kernel`. The BACKWARD pass has scores transposed, and keeps in `sums` what it would have to sum again.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C)
    index = chunk.to(tl.int64) * H + head
    b_read = load_chunk_gate(read_gate, first, count, head, H, C) * scale  # [C]
    b_write = load_chunk_gate(write_gate, first, count, head, H, C)  # [C]
    o_c, b_a, b_steepest = tl.arange(0, C), tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    for k_start in range(0, K, BK):
        p_q, m_q = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
        b_q, b_k = tl.load(p_q, mask=m_q, other=0.0), tl.load(p_k, mask=m_k, other=0.0)  # [C, BK]
        p_g, m_g = tile(log_decay, first, count, head, k_start, H, K, C, BK)
        b_g = tl.load(p_g, mask=m_g, other=0.0)  # [C, BK]
        if K <= BK:
            tl.debug_barrier()  # or queries and keys would be asked for when decays have come
        b_reads = centred_sums(base_2(b_g.to(sums.dtype.element_ty)), C, PRECISION).to(tl.float32)
        b_writes = -b_reads
        b_steepest = tl.maximum(b_steepest, tl.max(-b_reads, 1))
        o_k = k_start + tl.arange(0, BK)[None, :]
        p_t = tl.broadcast_to(chunk_decay + index * K + o_k, (C, BK))
        tl.store(p_t, 2.0 * b_reads, mask=(o_c == C - 1)[:, None] & (o_k < K))
        if BACKWARD:
            p_s, m_s = tile(sums, first, count, head, k_start, H, K, C, BK)
            tl.store(p_s, b_reads.to(sums.dtype.element_ty), mask=m_s)
        b_sq = (b_q.to(tl.float32) * b_read[:, None] * tl.exp2(b_reads)).to(b_q.dtype)
        b_sk = (b_k.to(tl.float32) * b_write[:, None] * tl.exp2(b_writes)).to(b_k.dtype)
        b_a += tl.dot(b_sq, tl.trans(b_sk), input_precision=PRECISION)
        p_sq, m_sq = tile(scaled_q, first, count, head, k_start, H, K, C, BK)
        p_sk, m_sk = tile(scaled_k, first, count, head, k_start, H, K, C, BK)
        tl.store(p_sq, b_sq, mask=m_sq)
        tl.store(p_sk, b_sk, mask=m_sk)
    m_gates = tl.minimum(tl.abs(b_read), tl.abs(b_write * scale)) > tl.abs(scale) * SMALL_GATE
    # the last row has half of the chunk's decay; a short chunk must have as slow decays per token as a whole one
    m_decays = (b_steepest * C / count < 0.5 * LARGEST) | (o_c < C - 1)
    tl.store(factored + index, tl.min((m_gates & m_decays).to(tl.int32), 0))
    store_scores(b_a, scores, first, count, head, H, C, BACKWARD)


@triton.jit
def prepare_channel_exact_kernel(
    q, k, log_decay, read_gate, write_gate, sums, scaled_q, scaled_k, scores, factored, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `prepare_channel_kernel` makes, of an exact chunk: with h = 0 and scores of several products, for which it stores `sums`
    first."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C)
    index = chunk.to(tl.int64) * H + head
    if tl.load(factored + index) != 0:  # most have nothing to do
        return
    b_read = load_chunk_gate(read_gate, first, count, head, H, C) * scale  # [C]
    b_write = load_chunk_gate(write_gate, first, count, head, H, C)  # [C]
    b_a = tl.zeros([C, C], tl.float32)
    for k_start in range(0, K, BK):
        p_g, m_g = tile(log_decay, first, count, head, k_start, H, K, C, BK)
        p_s, m_s = tile(sums, first, count, head, k_start, H, K, C, BK)
        b_g = base_2(tl.load(p_g, mask=m_g, other=0.0).to(sums.dtype.element_ty))  # [C, BK]
        tl.store(p_s, tl.cumsum(b_g, 0), mask=m_s)
    tl.debug_barrier()  # other threads read them
    for k_start in range(0, K, BK):
        p_q, m_q = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
        b_q, b_k = tl.load(p_q, mask=m_q, other=0.0), tl.load(p_k, mask=m_k, other=0.0)  # [C, BK]
        b_reads, b_writes = exact_exponents(sums, first, count, head, k_start, H, K, C, BK)
        b_a += exact_scores(q, k, b_read[:, None], b_write[:, None], sums, first, count, head, k_start, H, K, C, BK, PRECISION)
        b_sq = (b_q.to(tl.float32) * b_read[:, None] * tl.exp2(b_reads)).to(b_q.dtype)
        b_sk = (b_k.to(tl.float32) * b_write[:, None] * tl.exp2(b_writes)).to(b_k.dtype)
        p_sq, m_sq = tile(scaled_q, first, count, head, k_start, H, K, C, BK)
        p_sk, m_sk = tile(scaled_k, first, count, head, k_start, H, K, C, BK)
        tl.store(p_sq, b_sq, mask=m_sq)
        tl.store(p_sk, b_sk, mask=m_sk)
    store_scores(b_a, scores, first, count, head, H, C, BACKWARD)


@triton.jit
def mask_score_gradients(b_ds, count, C: tl.constexpr, STRICT: tl.constexpr):
    """d scores [C, C] on and below the diagonal, below it if STRICT."""
    b_ds = tl.where(causal_mask(count, C), b_ds, 0.0)
    if STRICT:
        o_c = tl.arange(0, C)
        b_ds = tl.where(o_c[:, None] > o_c[None, :], b_ds, 0.0)
    return b_ds


@triton.jit
def query_key_gradients_channel_kernel(
    v, d_o, sums, read_gate, write_gate, scaled_q, scaled_k, states, d_states, factored, d_q, d_k, d_read, d_write, d_decay,
    table, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Of a factored chunk, from d scores = dO V^T, d scaled_q = dO S^T and d scaled_k = V dS'^T back to q and k.

    In: states 2^h S and their gradients 2^h dS' [chunks, H, K, V]; where the latter are None, tokens read only earlier ones, and nothing is
    written to the state. Out: d_q, d_k [B,T,H,K], d_decay [B,T,H,K] or None where it is not asked for, d_read, d_write [B,T,H] where there
    are such gates: row sums, times the gate, which the gradient is divided by (chunks with gates near 0 are exact ones). The decay's
    gradient sums scaled_q d scaled_q - scaled_k d scaled_k over the chunk: the scores' share nearly cancels in it, which needs the very
    same rounded factors in both its terms.
    """
    PRECISION: tl.constexpr = "tf32x3" if v.dtype.element_ty == tl.float32 else "tf32"
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, count = chunk_span(chunk, table, T, C)
    index, o_c = chunk.to(tl.int64) * H + head, tl.arange(0, C)
    o_t, m_t = (first + o_c) * H + head, o_c < count
    b_read = load_chunk_gate(read_gate, first, count, head, H, C)[:, None]  # [C, 1]
    b_write = load_chunk_gate(write_gate, first, count, head, H, C)[:, None]  # [C, 1]
    if tl.load(factored + index) == 0:  # looked up while gates are on their way
        return
    b_read *= scale
    b_ds = mask_score_gradients(score_gradients(v, d_o, first, count, head, H, V, C, BV, PRECISION), count, C, d_states is None)
    b_ds = b_ds.to(scaled_q.dtype.element_ty)
    b_d_read, b_d_write = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for k_start in tl.range(0, K, BK, num_stages=1, disable_licm=True):  # pointers made early would take up registers
        b_dq, b_dk, b_product = state_gradients(
            v, d_o, states, d_states, first, count, head, index, k_start, H, K, V, C, BK, BV, d_decay is not None, PRECISION
        )
        p_sq, m_sq = tile(scaled_q, first, count, head, k_start, H, K, C, BK)
        p_sk, m_sk = tile(scaled_k, first, count, head, k_start, H, K, C, BK)
        b_sq, b_sk = tl.load(p_sq, mask=m_sq, other=0.0), tl.load(p_sk, mask=m_sk, other=0.0)  # [C, BK]
        b_every = tl.sum(b_dk * b_sk.to(tl.float32), 0)  # [BK], what every step of the decay gets
        b_dq += tl.dot(b_ds, b_sk, input_precision=PRECISION)
        b_dk += tl.dot(tl.trans(b_ds), b_sq, input_precision=PRECISION)
        b_every += tl.sum(b_product, 1)  # both states are scaled by 2^h already
        b_dq_q, b_dk_k = b_dq * b_sq.to(tl.float32), b_dk * b_sk.to(tl.float32)
        b_d_read += tl.sum(b_dq_q, 1)
        b_d_write += tl.sum(b_dk_k, 1)
        if d_decay is not None:
            p_dg, m_dg = tile(d_decay, first, count, head, k_start, H, K, C, BK)
            tl.store(p_dg, sums_from_the_end(b_dq_q - b_dk_k, C, PRECISION) + b_every[None, :], mask=m_dg)
        b_reads = convert_layout_like(load_sums(sums, o_c, first, count, head, k_start, H, K, BK).to(tl.float32), b_dq)
        b_dq *= tl.exp2(b_reads)
        b_dk *= tl.exp2(-b_reads)
        p_dq, m_dq = tile(d_q, first, count, head, k_start, H, K, C, BK)
        p_dk, m_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
        tl.store(p_dq, (b_dq * b_read).to(d_q.dtype.element_ty), mask=m_dq)
        tl.store(p_dk, (b_dk * b_write).to(d_k.dtype.element_ty), mask=m_dk)
    b_d_read *= scale / tl.sum(b_read, 1)
    b_d_write /= tl.sum(b_write, 1)
    if read_gate is not None:
        tl.store(d_read + o_t, b_d_read, mask=m_t)
    if write_gate is not None:
        tl.store(d_write + o_t, b_d_write, mask=m_t)


@triton.jit
def query_key_gradients_channel_exact_kernel(
    q, k, v, d_o, sums, read_gate, write_gate, scaled_q, scaled_k, states, d_states, chunk_decay, factored, d_q, d_k, d_read, d_write,
    d_decay, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What `query_key_gradients_channel_kernel` gives, of an exact chunk, where h is 0."""
    PRECISION: tl.constexpr = "tf32x3" if v.dtype.element_ty == tl.float32 else "tf32"
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, count = chunk_span(chunk, table, T, C)
    index, o_c = chunk.to(tl.int64) * H + head, tl.arange(0, C)
    o_t, m_t = (first + o_c) * H + head, o_c < count
    if tl.load(factored + index) != 0:
        return
    b_read = load_chunk_gate(read_gate, first, count, head, H, C)[:, None]  # [C, 1]
    b_write = load_chunk_gate(write_gate, first, count, head, H, C)[:, None]  # [C, 1]
    b_ds = mask_score_gradients(score_gradients(v, d_o, first, count, head, H, V, C, BV, PRECISION), count, C, d_states is None)
    b_d_read, b_d_write = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for k_start in tl.range(0, K, BK, num_stages=1, disable_licm=True):  # pointers made early would take up registers
        p_q, m_q = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
        b_dq, b_dk, b_product = state_gradients(
            v, d_o, states, d_states, first, count, head, index, k_start, H, K, V, C, BK, BV, d_decay is not None, PRECISION
        )
        p_sq, m_sq = tile(scaled_q, first, count, head, k_start, H, K, C, BK)
        p_sk, m_sk = tile(scaled_k, first, count, head, k_start, H, K, C, BK)
        b_sq, b_sk = tl.load(p_sq, mask=m_sq, other=0.0), tl.load(p_sk, mask=m_sk, other=0.0)  # [C, BK]
        # no step of the chunk scales what its last token writes
        b_written = tl.where((o_c < count - 1)[:, None], b_dk * b_sk.to(tl.float32), 0.0)  # [C, BK]
        b_every = tl.sum(b_written, 0)  # [BK], what every step of the decay gets
        b_every += tl.sum(b_product, 1) * tl.exp2(load_decay(chunk_decay, index, True, k_start, K, BK, True))
        b_dg = b_dq * b_sq.to(tl.float32) - b_written
        b_reads, b_writes = exact_exponents(sums, first, count, head, k_start, H, K, C, BK)
        b_dq *= tl.exp2(b_reads)
        b_dk *= tl.exp2(b_writes)
        b_dq, b_dk, b_dg = add_exact_score_gradients(
            b_dq, b_dk, b_dg, b_ds, q, k, b_read * scale, b_write, sums, first, count, head, k_start, H, K, C, BK, PRECISION
        )
        b_dq *= scale
        b_d_read += tl.sum(b_dq * tl.load(p_q, mask=m_q, other=0.0).to(tl.float32), 1)  # [C, BK] each
        b_d_write += tl.sum(b_dk * tl.load(p_k, mask=m_k, other=0.0).to(tl.float32), 1)  # [C, BK]
        if d_decay is not None:
            p_dg, m_dg = tile(d_decay, first, count, head, k_start, H, K, C, BK)
            tl.store(p_dg, sums_from_the_end(b_dg, C, PRECISION) + b_every[None, :], mask=m_dg)
        p_dq, m_dq = tile(d_q, first, count, head, k_start, H, K, C, BK)
        p_dk, m_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
        tl.store(p_dq, (b_dq * b_read).to(d_q.dtype.element_ty), mask=m_dq)
        tl.store(p_dk, (b_dk * b_write).to(d_k.dtype.element_ty), mask=m_dk)
    if read_gate is not None:
        tl.store(d_read + o_t, b_d_read, mask=m_t)
    if write_gate is not None:
        tl.store(d_write + o_t, b_d_write, mask=m_t)


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
    """`prepare` for a decay per channel, for each reader of the same keys; a chunk is factored if it is for all of them."""
    (batch, time, heads, key), grid = k.shape, (layout.chunks, k.shape[2])
    scaled_k, chunk_decay = torch.empty_like(k), k.new_empty((*grid, key), dtype=torch.float32)
    sums = torch.empty_like(k, dtype=torch.float64 if k.dtype == torch.float32 else torch.float32)
    factored = [k.new_empty(grid, dtype=torch.int32) for _ in readers]
    scaled_q = [torch.empty_like(k) for _ in readers]
    scores = [k.new_empty((batch, time, heads, layout.chunk), dtype=reader.dtype) for reader in readers]
    options, exact = shape_arguments(k, layout) | {"BACKWARD": backward}, tile_arguments("prepare_exact", k, key)
    tiles = exact if k.dtype == torch.float32 else tile_arguments("prepare_channel", k, key)  # float32 needs as much room as the exact form
    for n, reader in enumerate(readers):
        launch(
            prepare_channel_kernel, grid,
            (reader.x, k, log_decay, reader.gate, write_gate, sums, scaled_q[n], scaled_k, scores[n], chunk_decay, factored[n],
             layout.table, reader.scale, layout.length),
            options | tiles,
        )  # fmt: skip
    if len(readers) > 1:
        factored = [torch.stack(factored).amin(0)] * len(readers)
    for n, reader in enumerate(readers):
        launch(
            prepare_channel_exact_kernel, grid,
            (reader.x, k, log_decay, reader.gate, write_gate, sums, scaled_q[n], scaled_k, scores[n], factored[n], layout.table,
             reader.scale, layout.length),
            options | exact,
        )  # fmt: skip
    return [Prepared(scaled_q[n], scaled_k, scores[n], chunk_decay, factored[n], sums) for n in range(len(readers))]


def query_key_gradients_channel(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, log_decay: Tensor, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, prepared: Prepared, states: Tensor, d_states: Tensor | None, layout: Layout, decay_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, the gradient of log_decay, empty if it is not asked for, and those of the gates there are [gates, B, T, H].

    Without `d_states`: of a reader that reads earlier tokens alone and writes nothing to the states.
    """
    (batch, time, heads, key), value = q.shape, v.shape[3]
    d_q, d_k = torch.empty_like(q), torch.empty_like(k)
    d_gates = q.new_empty(((read_gate is not None) + (write_gate is not None), batch, time, heads), dtype=torch.float32)
    d_decay = torch.empty_like(log_decay) if decay_gradient else q.new_empty(0, dtype=torch.float32)
    gates, scaled = (read_gate, write_gate), (prepared.scaled_q, prepared.scaled_k)
    given, factored = (states, d_states), prepared.factored
    made = (d_q, d_k, d_gates[:1], d_gates[-1:], d_decay if decay_gradient else None, layout.table, scale, layout.length)
    shape = {name: size for name, size in shape_arguments(q, layout).items() if name != "PRECISION"}
    shape |= {"V": value, **tile_arguments("query_key_gradients_channel", q, key, value)}
    grid = (layout.chunks * heads,)
    launch(query_key_gradients_channel_kernel, grid, (v, d_o, prepared.sums, *gates, *scaled, *given, factored, *made), shape)
    exact = (q, k, v, d_o, prepared.sums, *gates, *scaled, *given, prepared.chunk_decay, factored, *made)
    launch(query_key_gradients_channel_exact_kernel, grid, exact, shape)
    return d_q, d_k, d_decay, d_gates
