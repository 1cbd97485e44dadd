"""Decay per key channel, on tiles in registers.

With b the running sum of a chunk's log-decays, token i reads through exp(b_i - half) and token j writes through exp(b_C - b_j - half).
`half` is half the chunk's decay, so that both factors stay within exp(±40) and the scores A_ij = Σ_c q_ic k_jc exp(b_ic - b_jc) are one
matrix product of what is read with and what is written. Where a channel decays by more than exp(-80) over a chunk, the factors would
overflow: for such a chunk `half` is 0, and the scores are built token by token, the keys decaying as time goes on. That is slow, exact
for any decay, and done (EXACT) only for the chunks that need it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def high_part(x):
    """The leading 11 bits of float32 numbers, which the matrix units take exactly."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def running_sum(x, C: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr):
    """Sums down the rows of [C, ...], from the end if REVERSE: by the matrix units, in two parts that keep 22 bits.

    For float32 inputs one by one: the matrix units cut off what they add instead of rounding it.
    """
    if PRECISION == "tf32x3":
        return tl.cumsum(x, 0, reverse=REVERSE)
    else:
        rows = tl.arange(0, C)
        if REVERSE:
            triangle = tl.where(rows[:, None] <= rows[None, :], 1.0, 0.0)
        else:
            triangle = tl.where(rows[:, None] >= rows[None, :], 1.0, 0.0)
        high = high_part(x)
        return tl.dot(triangle, x - high, tl.dot(triangle, high, input_precision="tf32"), input_precision="tf32")


@triton.jit
def channel_decays(
    log_decay, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The steps of a chunk [C, BK]; what its tokens read and write through [C, BK]; log-decay of the chunk and its `half` [BK]."""
    rows, columns = tl.arange(0, C), k_start + tl.arange(0, BK)
    pointers = log_decay + ((first + rows[:, None]) * H + head) * K + columns[None, :]
    inside = (rows[:, None] < count) & (columns[None, :] < K)
    step = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    whole = tl.sum(step, 0)
    if EXACT:  # the sum of what comes after a token is no difference of two large sums
        later = tl.load(pointers + H * K, mask=inside & (rows[:, None] + 1 < count), other=0.0).to(tl.float32)
        half = tl.zeros([BK], tl.float32)
        reads, writes = tl.exp(tl.cumsum(step, 0)), tl.exp(tl.cumsum(later, 0, reverse=True))
    else:
        half = 0.5 * whole
        offset = running_sum(step, C, False, PRECISION) - half[None, :]
        reads, writes = tl.exp(tl.minimum(offset, 40.0)), tl.exp(tl.minimum(-offset, 40.0))
    return step, reads, writes, whole, half


@triton.jit
def row(x, i, rows):
    """Row i of a tile."""
    return tl.sum(tl.where(rows[:, None] == i, x, 0.0), 0)


@triton.jit
def exact_scores(q, k, step, count, C: tl.constexpr, BK: tl.constexpr):
    """A [C, C], to be masked by the caller; its upper triangle is undefined."""
    rows = tl.arange(0, C)
    scores, decayed = tl.zeros([C, C], tl.float32), tl.zeros([C, BK], tl.float32)
    for i in range(count):
        decayed *= tl.exp(row(step, i, rows))[None, :]
        decayed = tl.where(rows[:, None] == i, k, decayed)
        scores = tl.where(rows[:, None] == i, tl.sum(decayed * row(q, i, rows)[None, :], 1)[None, :], scores)
    return scores


@triton.jit
def exact_score_gradients(d_scores, q, k, step, count, C: tl.constexpr, BK: tl.constexpr):
    """Gradients of q and k [C, BK] for d_scores [C, C], already masked."""
    rows = tl.arange(0, C)
    g_q, g_k, decayed = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    for i in range(count):
        decayed *= tl.exp(row(step, i, rows))[None, :]
        decayed = tl.where(rows[:, None] == i, k, decayed)
        g_q = tl.where(rows[:, None] == i, tl.sum(row(d_scores, i, rows)[:, None] * decayed, 0)[None, :], g_q)
    decayed = tl.zeros([C, BK], tl.float32)
    for back in range(count):
        j = count - 1 - back
        decayed = tl.where(rows[:, None] == j, q, decayed)
        column = tl.sum(tl.where(rows[None, :] == j, d_scores, 0.0), 1)
        g_k = tl.where(rows[:, None] == j, tl.sum(column[:, None] * decayed, 0)[None, :], g_k)
        decayed *= tl.exp(row(step, j, rows))[None, :]
    return g_q, g_k
