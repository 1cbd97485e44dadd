"""Decay per key channel, on tiles in registers.

With b the running sum of a chunk's log-decays, token i reads through exp(b_i - half) and token j writes through exp(b_C - b_j - half).
`half` is half the chunk's decay, so that both factors stay within exp(±40) and the scores A_ij = Σ_c q_ic k_jc exp(b_ic - b_jc) are one
matrix product of what is read with and what is written. Where a channel decays by more than exp(-80) over a chunk, the factors would
overflow: for such a chunk `half` is 0 and the scores come from several products. Blocks of 16 tokens are done as before. Then, for halves
of 16 and of 32 tokens, those of a right half read, through the decay since the boundary, what those of the left half beside it wrote,
through the decay until it: every pair of tokens meets once, and no factor is above 1. Where the blocks decay too much as well, they are
single tokens, and halves of 1, 2, 4 and 8 come first. That is exact for any decay. It takes several times as long, so it is done (EXACT)
only for the chunks that need it; trained models have them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headmax.ops.packing import CHUNK

SIZES = tl.constexpr(CHUNK.bit_length() - 1)
"""Halves of 2^0, 2^1, ... tokens, up to half a chunk."""


@triton.jit
def high_part(x):
    """The leading 11 bits of float32 numbers, which the matrix units take exactly."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def sum_where(chosen, x, PRECISION: tl.constexpr):
    """Sums of rows of x [C, ...], those `chosen` for each [C, C], by the matrix units, in two parts or more that keep 22 bits."""
    ones = chosen.to(tl.float32)
    if PRECISION == "tf32x3":
        return tl.dot(ones, x, input_precision=PRECISION)
    else:
        high = high_part(x)
        return tl.dot(ones, x - high, tl.dot(ones, high, input_precision="tf32"), input_precision="tf32")


@triton.jit
def running_sum(x, C: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr):
    """Sums down the rows of [C, ...], from the end if REVERSE.

    For float32 inputs one by one: the matrix units cut off what they add instead of rounding it, which a long sum shows.
    """
    if PRECISION == "tf32x3":
        return tl.cumsum(x, 0, reverse=REVERSE)
    else:
        rows = tl.arange(0, C)
        if REVERSE:
            return sum_where(rows[:, None] <= rows[None, :], x, PRECISION)
        else:
            return sum_where(rows[:, None] >= rows[None, :], x, PRECISION)


@triton.jit
def chunk_steps(log_decay, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """The log-decays of a chunk [C, BK]."""
    rows, columns = tl.arange(0, C), k_start + tl.arange(0, BK)
    inside = (rows[:, None] < count) & (columns[None, :] < K)
    return tl.load(log_decay + ((first + rows[:, None]) * H + head) * K + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def channel_decays(
    log_decay, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The steps of a chunk [C, BK]; what its tokens read and write through [C, BK]; log-decay of the chunk and its `half` [BK]."""
    rows = tl.arange(0, C)
    step = chunk_steps(log_decay, first, count, head, k_start, H, K, C, BK)
    whole = tl.sum(step, 0)
    if EXACT:  # the sum of what comes after a token is no difference of two large sums
        half = tl.zeros([BK], tl.float32)
        reads = tl.exp(sum_where(rows[:, None] >= rows[None, :], step, PRECISION))
        writes = tl.exp(sum_where(rows[:, None] < rows[None, :], step, PRECISION))
    else:
        half = 0.5 * whole
        offset = running_sum(step, C, False, PRECISION) - half[None, :]
        reads, writes = tl.exp(offset), tl.exp(-offset)
    return step, reads, writes, whole, half


@triton.jit
def blocks(q, k, step, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """The power of two of the blocks' size, 4 or 0, which pairs meet in one [C, C], and for each token, seen from its block's first, what
    scales it when it reads and when it has written, and what it reads with and has written [C, BK]."""
    rows = tl.arange(0, C)
    since = (rows[None, :] <= rows[:, None]) & (rows[None, :] // 16 == rows[:, None] // 16) & (rows[None, :] % 16 != 0)
    log = sum_where(since, step, PRECISION)
    mild = tl.min(tl.min(log, 1), 0) > -80.0
    log = tl.where(mild, log, 0.0) + 40.0
    power = tl.where(mild, 4, 0)
    reads, writes = tl.exp(log), tl.exp(-log)
    return power, rows[:, None] >> power == rows[None, :] >> power, reads, writes, (q * reads).to(DTYPE), (k * writes).to(DTYPE)


@triton.jit
def halves(q, k, step, power, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Of a chunk cut into halves of 2^power tokens: which rows are in right halves [C, 1], which pairs meet at this size [C, C], the decay
    between each token and its boundary [C, BK], and what it reads with, in right halves, or has written, in left ones [C, BK]."""
    rows = tl.arange(0, C)
    half, other = rows[:, None] >> power, rows[None, :] >> power
    right = half % 2 == 1
    between = tl.where(right, rows[None, :] <= rows[:, None], rows[None, :] > rows[:, None]) & (half == other)
    decay = tl.exp(sum_where(between, step, PRECISION))
    return right, right & (half == other + 1), decay, (tl.where(right, q, k) * decay).to(DTYPE)


@triton.jit
def exact_scores(q, k, step, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A [C, C], to be masked by the caller; its upper triangle is undefined."""
    power, pairs, reads, writes, x_q, x_k = blocks(q, k, step, C, DTYPE, PRECISION)
    scores = tl.where(pairs, tl.dot(x_q, tl.trans(x_k), input_precision=PRECISION), 0.0)
    for larger in range(power, SIZES):
        right, pairs, decay, x = halves(q, k, step, larger, C, DTYPE, PRECISION)
        scores = tl.where(pairs, tl.dot(x, tl.trans(x), input_precision=PRECISION), scores)
    return scores


@triton.jit
def exact_score_gradients(d_scores, q, k, step, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of q and k [C, BK] for masked d_scores [C, C]; and q g_q - k g_k, whose terms for a pair cancel to the last bit."""
    power, pairs, reads, writes, x_q, x_k = blocks(q, k, step, C, DTYPE, PRECISION)
    met = tl.where(pairs, d_scores, 0.0).to(DTYPE)
    g_q, g_k = tl.dot(met, x_k, input_precision=PRECISION), tl.dot(tl.trans(met), x_q, input_precision=PRECISION)
    each = g_q * x_q.to(tl.float32) - g_k * x_k.to(tl.float32)
    g_q *= reads
    g_k *= writes
    for larger in range(power, SIZES):
        right, pairs, decay, x = halves(q, k, step, larger, C, DTYPE, PRECISION)
        met = tl.where(pairs, d_scores, 0.0).to(DTYPE)
        g_x = tl.dot(met + tl.trans(met), x, input_precision=PRECISION)
        each += tl.where(right, g_x, -g_x) * x.to(tl.float32)
        g_q += tl.where(right, g_x * decay, 0.0)
        g_k += tl.where(right, 0.0, g_x * decay)
    return g_q, g_k, each
