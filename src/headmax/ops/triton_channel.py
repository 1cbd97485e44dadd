"""Decay per key channel, on tiles in registers.

With b the running sum of a chunk's log-decays, token i reads through exp(b_i - half) and token j writes through exp(b_C - b_j - half).
`half` is half the chunk's decay, so that both factors stay within exp(±60) and the scores A_ij = Σ_c q_ic k_jc exp(b_ic - b_jc) are one
matrix product of what is read with and what is written. Where a channel decays by more than exp(-120) over a chunk, the factors would
overflow: for such a chunk `half` is 0 and the scores come from several products. Blocks of 32 tokens are done as before. Then those of
the right half of the chunk read, through the decay since the boundary, what those of the left half wrote, through the decay until it:
every pair of tokens meets once, and no factor is above 1. Where blocks of 32 decay too much as well, they have 16 tokens, and halves of 16
come before halves of 32; where those do, they are single tokens, and halves of 1, 2, 4, ... come first. That is exact for any decay. It
takes longer, so it is done (EXACT) only for the chunks that need it; trained models have them.

All decays are differences of running sums: float32, or float64 for float32 inputs. Where there are several products, these lie in memory,
to be read wherever a boundary is; of mild chunks b - half does, for the backward pass.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from headmax.ops.packing import CHUNK
from headmax.ops.triton_common import base_2, causal_mask, chunk_span, row_values, tile

MILD = tl.constexpr(120 * math.log2(math.e))
"""A decay of exp(-120), split in two, leaves factors of at most exp(60): float32's and bfloat16's range has room for queries and keys."""

SMALL_GATE = tl.constexpr(1e-10)
"""Times a factor of exp(-60), a gate above it still leaves numbers that float32 and bfloat16 hold in full."""

SIZES = tl.constexpr(CHUNK.bit_length() - 1)
"""Halves of 2^0, 2^1, ... tokens, up to half a chunk."""


@triton.jit
def weighted_sums(weights, x):
    """weights x on the matrix units, for weights that bfloat16 holds, of x [C, ...] in two parts that keep 16 bits.

    The first part is cut off, not rounded: that takes one instruction, and the second has all that is left.
    """
    high = (x.to(tl.int32, bitcast=True) & -(2**16)).to(tl.float32, bitcast=True)
    return tl.dot(weights, high.to(tl.bfloat16), tl.dot(weights, (x - high).to(tl.bfloat16)))


@triton.jit
def sums_from_the_end(x, C: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of the rows of x [C, ...] from each on.

    For float32 inputs one by one: the matrix units cut off what they add instead of rounding it, which a long sum shows.
    """
    if PRECISION == "tf32x3":
        return tl.cumsum(x, 0, reverse=True)
    else:
        rows = tl.arange(0, C)
        return weighted_sums((rows[:, None] <= rows[None, :]).to(tl.float32).to(tl.bfloat16), x)


@triton.jit
def sums_around_half(x, C: tl.constexpr, PRECISION: tl.constexpr):
    """Running sums of the rows of x [C, ...] less half of the whole sum; for float32 inputs one by one.

    They are exponents: where 16 bits of one are too few, what decays by it has vanished.
    """
    if PRECISION == "tf32x3":
        return tl.cumsum(x, 0) - 0.5 * tl.sum(x, 0)[None, :]
    else:
        rows = tl.arange(0, C)
        return weighted_sums(tl.where(rows[:, None] >= rows[None, :], 0.5, -0.5).to(tl.bfloat16), x)


@triton.jit
def sums_at(sums, rows, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """What `sums` has of a chunk at these rows, or at its last if it is shorter [rows, BK]."""
    at, columns = tl.minimum(rows, count - 1)[:, None], k_start + tl.arange(0, BK)[None, :]
    return tl.load(sums + (first * H + head) * K + (at * (H * K) + columns), mask=columns < K, other=0.0)


@triton.jit
def exact_exponents(sums, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """What the tokens of a chunk that is not mild read and write through, as powers of two [C, BK]."""
    b = sums_at(sums, tl.arange(0, C), first, count, head, k_start, H, K, BK)
    last = sums_at(sums, tl.arange(0, 1) + C, first, count, head, k_start, H, K, BK)
    return b.to(tl.float32), (last - b).to(tl.float32)


@triton.jit
def blocks(q, k, read, write, sums, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """The power of two of the blocks' size, which pairs meet in one [C, C], and for each token, seen from its block's first, what scales
    it when it reads and when it has written, and what it reads with and has written [C, BK]."""
    rows = tl.arange(0, C)
    b = sums_at(sums, rows, first, count, head, k_start, H, K, BK)
    log = (b - sums_at(sums, rows // 32 * 32, first, count, head, k_start, H, K, BK)).to(tl.float32)
    power = 5
    if tl.min(tl.min(log, 1), 0) <= -MILD:
        log = (b - sums_at(sums, rows // 16 * 16, first, count, head, k_start, H, K, BK)).to(tl.float32)
        power = 4
        if tl.min(tl.min(log, 1), 0) <= -MILD:
            log = tl.zeros([C, BK], tl.float32)
            power = 0
    log += 0.5 * MILD
    reads, writes = tl.exp2(log), tl.exp2(-log)
    p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
    p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
    t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
    x_q, x_k = (t_q.to(tl.float32) * (read * reads)).to(t_q.dtype), (t_k.to(tl.float32) * (write * writes)).to(t_k.dtype)
    return power, rows[:, None] >> power == rows[None, :] >> power, reads, writes, x_q, x_k


@triton.jit
def halves(
    q, k, read, write, power, sums, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr
):
    """Of a chunk cut into halves of 2^power tokens: which rows are in right halves [C, 1], which pairs meet at this size [C, C], the decay
    between each token and its boundary [C, BK], and what it reads with, in right halves, or has written, in left ones [C, BK]."""
    rows = tl.arange(0, C)
    half, other = rows[:, None] >> power, rows[None, :] >> power
    right, boundary = half % 2 == 1, (((rows >> power) | 1) << power) - 1
    since = sums_at(sums, rows, first, count, head, k_start, H, K, BK) - sums_at(sums, boundary, first, count, head, k_start, H, K, BK)
    decay = tl.exp2(tl.where(right, since, -since).to(tl.float32))
    p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
    p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
    x = tl.load(tl.where(right, p_q, p_k), mask=inside, other=0.0)
    return right, right & (half == other + 1), decay, (x.to(tl.float32) * (tl.where(right, read, write) * decay)).to(x.dtype)


@triton.jit
def exact_scores(
    q, k, read, write, sums, first, count, head, k_start,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A [C, C] of a chunk's queries and keys with their gates [C, 1], to be masked by the caller; its upper triangle is undefined."""
    power, pairs, reads, writes, x_q, x_k = blocks(q, k, read, write, sums, first, count, head, k_start, H, K, C, BK)
    scores = tl.where(pairs, tl.dot(x_q, tl.trans(x_k), input_precision=PRECISION), 0.0)
    for larger in tl.range(power, SIZES, num_stages=1, disable_licm=True):
        right, pairs, decay, x = halves(q, k, read, write, larger, sums, first, count, head, k_start, H, K, C, BK)
        scores = tl.where(pairs, tl.dot(x, tl.trans(x), input_precision=PRECISION), scores)
    return scores


@triton.jit
def add_exact_score_gradients(
    g_q, g_k, each, d_scores, q, k, read, write, sums, first, count, head, k_start,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of gated queries and keys [C, BK] those through masked d_scores [C, C], and to `each` their q g_q - k g_k,
    where the two terms of a pair are the same to the last bit; of a token with itself nothing, since no step lies between.

    Registers are short here: what is loaded within the loop is meant to be loaded each time.
    """
    power, pairs, reads, writes, x_q, x_k = blocks(q, k, read, write, sums, first, count, head, k_start, H, K, C, BK)
    rows = tl.arange(0, C)
    d_scores = d_scores.to(x_q.dtype)
    own = tl.sum(tl.where(rows[:, None] == rows[None, :], d_scores, 0.0).to(tl.float32), 1)[:, None]
    met = tl.where(pairs & (rows[:, None] != rows[None, :]), d_scores, 0.0)
    g_x = tl.dot(met, x_k, input_precision=PRECISION)
    each += g_x * x_q.to(tl.float32)
    g_q += (g_x + own * x_k.to(tl.float32)) * reads
    g_x = tl.dot(tl.trans(met), x_q, input_precision=PRECISION)
    each -= g_x * x_k.to(tl.float32)
    g_k += (g_x + own * x_q.to(tl.float32)) * writes
    for larger in tl.range(power, SIZES, num_stages=1, disable_licm=True):
        right, pairs, decay, x = halves(q, k, read, write, larger, sums, first, count, head, k_start, H, K, C, BK)
        met = tl.where(pairs, d_scores, 0.0)
        g_x = tl.dot(met + tl.trans(met), x, input_precision=PRECISION)
        each += tl.where(right, g_x, -g_x) * x.to(tl.float32)
        g_x *= decay
        g_q += tl.where(right, g_x, 0.0)
        g_k += tl.where(right, 0.0, g_x)
    return g_q, g_k, each


@triton.jit
def prepare_channel_kernel(
    q, k, log_decay, read_gate, write_gate, sums, reading, writing, scores, whole, mild, table, scale, T,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, PACKED: tl.constexpr,
    BACKWARD: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `prepare` makes of a chunk with a decay per channel, and whether it is mild: its decays mild enough for one product, and its
    gates large enough to divide their gradients out of that product's. If it is not, all is left to EXACT, which does it over again.

    The backward pass has scores transposed, and keeps in `sums` what it would have to sum again.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    index = chunk.to(tl.int64) * H + head
    if EXACT:  # most have nothing to do
        if tl.load(mild + index) != 0:
            return
    read = row_values(read_gate, first, count, head, H, C, READ) * scale
    write = row_values(write_gate, first, count, head, H, C, WRITE)
    rows, products, steepest = tl.arange(0, C), tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    if EXACT:
        for k_start in range(0, K, BK):
            p_g, inside = tile(log_decay, first, count, head, k_start, H, K, C, BK)
            p_s, in_s = tile(sums, first, count, head, k_start, H, K, C, BK)
            step = base_2(tl.load(p_g, mask=inside, other=0.0).to(sums.dtype.element_ty))
            tl.store(p_s, tl.cumsum(step, 0), mask=inside)
        tl.debug_barrier()  # other threads read them
    for k_start in range(0, K, BK):
        p_q, inside = tile(q, first, count, head, k_start, H, K, C, BK)
        p_k, in_k = tile(k, first, count, head, k_start, H, K, C, BK)
        t_q, t_k = tl.load(p_q, mask=inside, other=0.0), tl.load(p_k, mask=inside, other=0.0)
        if EXACT:
            reads, writes = exact_exponents(sums, first, count, head, k_start, H, K, C, BK)
            products += exact_scores(q, k, read[:, None], write[:, None], sums, first, count, head, k_start, H, K, C, BK, PRECISION)
        else:
            p_g, in_g = tile(log_decay, first, count, head, k_start, H, K, C, BK)
            t_g = tl.load(p_g, mask=inside, other=0.0)
            if K <= BK:
                tl.debug_barrier()  # or queries and keys would be asked for when decays have come
            reads = sums_around_half(base_2(t_g.to(sums.dtype.element_ty)), C, PRECISION).to(tl.float32)
            writes = -reads
            steepest = tl.maximum(steepest, tl.max(-reads, 1))
            columns = k_start + tl.arange(0, BK)[None, :]
            p_t = tl.broadcast_to(whole + index * K + columns, (C, BK))
            tl.store(p_t, 2.0 * reads, mask=(rows == C - 1)[:, None] & (columns < K))
            if BACKWARD:
                p_s, in_s = tile(sums, first, count, head, k_start, H, K, C, BK)
                tl.store(p_s, reads.to(sums.dtype.element_ty), mask=inside)
        gated_q = (t_q.to(tl.float32) * read[:, None] * tl.exp2(reads)).to(t_q.dtype)
        gated_k = (t_k.to(tl.float32) * write[:, None] * tl.exp2(writes)).to(t_k.dtype)
        if not EXACT:
            products += tl.dot(gated_q, tl.trans(gated_k), input_precision=PRECISION)
        p_r, in_r = tile(reading, first, count, head, k_start, H, K, C, BK)
        p_w, in_w = tile(writing, first, count, head, k_start, H, K, C, BK)
        tl.store(p_r, gated_q, mask=inside)
        tl.store(p_w, gated_k, mask=inside)
    if not EXACT:
        large = tl.minimum(tl.abs(read), tl.abs(write * scale)) > tl.abs(scale) * SMALL_GATE
        # the last row has half of the chunk's decay; a short chunk is to be as mild a token as a whole one
        soft = (steepest * C / count < 0.5 * MILD) | (rows < C - 1)
        tl.store(mild + index, tl.min((large & soft).to(tl.int32), 0))
    products = tl.where(causal_mask(count, C), products, 0.0).to(scores.dtype.element_ty)
    p_a, in_a = tile(scores, first, count, head, 0, H, C, C, C)
    tl.store(p_a, tl.trans(products) if BACKWARD else products, mask=in_a)
