"""Scores under a decay per key channel, A_ij = Σ_c q_ic k_jc exp(b_ic - b_jc), on tiles in registers.

Where a chunk's decay is mild, exp splits around the chunk's middle into a factor of i and a factor of j, and A is one matrix
product. Where it is not, a factor would overflow: then A is built token by token, the keys decaying as time goes on. That is slow,
exact for any decay, and done (EXACT) only for the chunks that need it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def channel_sums(log_decay, first, count, head, k_start, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Per channel the steps of a chunk, their sum up to each token and their sum after it, [C, BK] each. No sum is a difference."""
    rows, columns = tl.arange(0, C), k_start + tl.arange(0, BK)
    pointers = log_decay + ((first + rows[:, None]) * H + head) * K + columns[None, :]
    inside = (rows[:, None] < count) & (columns[None, :] < K)
    step = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    later = tl.load(pointers + H * K, mask=inside & (rows[:, None] + 1 < count), other=0.0).to(tl.float32)
    return step, tl.cumsum(step, 0), tl.cumsum(later, 0, reverse=True)


@triton.jit
def is_mild(whole):
    """Whether exp(± half of a chunk's decay) stays far inside float32 and bfloat16."""
    return tl.min(whole, 0) > -80.0


@triton.jit
def split_decay(q, k, before, whole):
    """q and k, each scaled by the decay between its token and the chunk's middle. Float16 is too narrow for that: it goes on as float32."""
    offset = before - 0.5 * whole[None, :]  # within ±40 where the decay is mild; elsewhere the result is done over
    towards, away = tl.exp(tl.minimum(offset, 40.0)), tl.exp(tl.minimum(-offset, 40.0))
    scaled_q, scaled_k = q.to(tl.float32) * towards, k.to(tl.float32) * away
    if q.dtype == tl.bfloat16:
        return scaled_q.to(tl.bfloat16), scaled_k.to(tl.bfloat16), towards, away
    else:
        return scaled_q, scaled_k, towards, away


@triton.jit
def row(x, i, rows):
    """Row i of a tile."""
    return tl.sum(tl.where(rows[:, None] == i, x.to(tl.float32), 0.0), 0)


@triton.jit
def channel_scores(q, k, step, before, count, C: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """A [C, C], to be masked by the caller; its upper triangle is undefined."""
    rows = tl.arange(0, C)
    if not EXACT:
        scaled_q, scaled_k, towards, away = split_decay(q, k, before, tl.sum(step, 0))
        scores = tl.dot(scaled_q, tl.trans(scaled_k), input_precision=PRECISION)
    else:
        scores, decayed = tl.zeros([C, C], tl.float32), tl.zeros([C, BK], tl.float32)
        for i in range(count):
            decayed *= tl.exp(row(step, i, rows))[None, :]
            decayed = tl.where(rows[:, None] == i, k.to(tl.float32), decayed)
            scores = tl.where(rows[:, None] == i, tl.sum(decayed * row(q, i, rows)[None, :], 1)[None, :], scores)
    return scores


@triton.jit
def channel_score_gradients(
    d_scores, q, k, step, before, count, C: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr
):
    """Gradients of q and k [C, BK] for d_scores [C, C], already masked."""
    rows = tl.arange(0, C)
    if not EXACT:
        scaled_q, scaled_k, towards, away = split_decay(q, k, before, tl.sum(step, 0))
        d = d_scores.to(scaled_q.dtype)
        g_q = tl.dot(d, scaled_k, input_precision=PRECISION) * towards
        g_k = tl.dot(tl.trans(d), scaled_q, input_precision=PRECISION) * away
    else:
        g_q, g_k, decayed = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
        for i in range(count):
            decayed *= tl.exp(row(step, i, rows))[None, :]
            decayed = tl.where(rows[:, None] == i, k.to(tl.float32), decayed)
            g_q = tl.where(rows[:, None] == i, tl.sum(row(d_scores, i, rows)[:, None] * decayed, 0)[None, :], g_q)
        decayed = tl.zeros([C, BK], tl.float32)
        for back in range(count):
            j = count - 1 - back
            decayed = tl.where(rows[:, None] == j, q.to(tl.float32), decayed)
            column = tl.sum(tl.where(rows[None, :] == j, d_scores, 0.0), 1)
            g_k = tl.where(rows[:, None] == j, tl.sum(column[:, None] * decayed, 0)[None, :], g_k)
            decayed *= tl.exp(row(step, j, rows))[None, :]
    return g_q, g_k
