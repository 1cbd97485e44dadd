"""Parts of the gradients of queries and keys that no kind of decay changes; see scalar.py and channel.py."""

from __future__ import annotations

import triton
import triton.language as tl

from headmax.ops.kernels.common import state_tile, tile, wait_for_dot


@triton.jit
def score_gradients(
    v, d_o, first, count, head, H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr
):
    """dO V^T of a chunk [C, C]."""
    b_ds = tl.zeros([C, C], tl.float32)
    for v_start in range(0, V, BV):
        p_v, m_v = tile(v, first, count, head, v_start, H, V, C, BV)
        p_o, m_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        b_v, b_o = tl.load(p_v, mask=m_v, other=0.0), tl.load(p_o, mask=m_o, other=0.0)  # [C, BV]
        b_ds += tl.dot(b_o, tl.trans(b_v), input_precision=PRECISION)
    return b_ds


@triton.jit
def state_gradients(
    v, d_o, states, d_states, first, count, head, index, k_start,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of some key channels, dO S^T and V dS^T [C, BK]; and, if PRODUCT, S ⊙ dS summed over eights of value channels [BK, BV / 8].

    Zeros for the last two where nothing is written to the states, whose gradient then is None.
    """
    b_dq, b_dk = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    b_product = tl.zeros([BK, BV // 8], tl.float32)  # sums of eight, which no two threads have to share
    for v_start in range(0, V, BV):
        p_v, m_v = tile(v, first, count, head, v_start, H, V, C, BV)
        p_o, m_o = tile(d_o, first, count, head, v_start, H, V, C, BV)
        p_s, m_s = state_tile(states, index, k_start, v_start, K, V, BK, BV)
        if d_states is not None:
            p_d, m_d = state_tile(d_states, index, k_start, v_start, K, V, BK, BV)
        b_v, b_o = tl.load(p_v, mask=m_v, other=0.0), tl.load(p_o, mask=m_o, other=0.0)  # [C, BV]
        b_s = tl.load(p_s, mask=m_s, other=0.0)  # [BK, BV]
        if d_states is not None:
            b_d = tl.load(p_d, mask=m_d, other=0.0)  # [BK, BV]
        b_dq += tl.dot(b_o, tl.trans(b_s), input_precision=PRECISION)
        if d_states is not None:
            if PRODUCT and V > BV:
                b_dk = wait_for_dot(b_dk, count)
            b_dk += tl.dot(b_v, tl.trans(b_d), input_precision=PRECISION)
            if PRODUCT:
                b_product += tl.sum(tl.reshape(b_s.to(tl.float32) * b_d.to(tl.float32), (BK, BV // 8, 8)), 2)
    return b_dq, b_dk, b_product
