"""What the delta rule writes, but for the state: the WY representation of a chunk in Triton, and back.

Within a chunk (I + L) u = β (write_gate v - 2^b k S), with L = β (K K^T ⊙ D) strictly below the diagonal. So u = wy_v - wy_k S with

    wy_v = (I + L)^-1 β write_gate v,   wy_k = (I + L)^-1 β 2^b k,

one triangular inverse per chunk, by substitution (a power series would cancel catastrophically where keys resemble each other). The
inverses are saved for the backward pass: they take longer to make than to keep.

With a decay per channel (KDA) keys that erase are one more reader of the states, with β for a gate: channel.py gives their scaled_q, of β
k, and scores, which are L below the diagonal, and wy_k = (I + L)^-1 scaled_q. What comes back to them is what comes back to queries that
see only earlier tokens, from d(scaled_q S + L u) = -(I + L)^-T dU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.channel import query_key_gradients_channel
from headmax.ops.kernels.common import (
    Layout,
    Prepared,
    chunk_span,
    decay_factors,
    decay_matrix,
    decay_sums,
    load_chunk_gate,
    shape_arguments,
    state_tile,
    tile,
    unit_lower_inverse,
)
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import tile_arguments
from headmax.ops.packing import CHUNK


@triton.jit
def key_products(k, first, count, head, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """K K^T of a chunk, [C, C]."""
    b_kk = tl.zeros([C, C], tl.float32)
    for k_start in range(0, K, BK):
        p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
        b_k = tl.load(p_k, mask=m_k, other=0.0)  # [C, BK]
        b_kk += tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    return b_kk


@triton.jit
def multiply_rows(
    b_matrix, x, y, first, count, head, H: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr
):
    """y = matrix x for a chunk's rows of x [B,T,H,WIDTH], with a matrix [C, C]."""
    for start in range(0, WIDTH, BLOCK):
        p_x, m_x = tile(x, first, count, head, start, H, WIDTH, C, BLOCK)
        p_y, m_y = tile(y, first, count, head, start, H, WIDTH, C, BLOCK)
        b_y = tl.dot(b_matrix, tl.load(p_x, mask=m_x, other=0.0), input_precision=PRECISION)  # [C, BLOCK]
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)


@triton.jit
def delta_writes_kernel(
    k, v, log_decay, beta, write_gate, inverse, wy_k, wy_v, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KNOWN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """wy_k [B,T,H,K] and wy_v [B,T,H,V] from k, v, log_decay, beta [B,T,H]; makes the inverse [B,T,H,C] unless it is KNOWN."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C)
    o_c = tl.arange(0, C)
    b_cum, b_rest, total = decay_sums(log_decay, first, count, head, H, C, "token")
    b_from_start = decay_factors(b_cum, count, C)
    b_beta = load_chunk_gate(beta, first, count, head, H, C)  # [C]
    p_i, m_i = tile(inverse, first, count, head, 0, H, C, C, C)
    if KNOWN:
        b_i = tl.load(p_i, mask=m_i, other=0.0)  # [C, C]
    else:
        b_l = key_products(k, first, count, head, H, K, C, BK, PRECISION) * decay_matrix(b_cum, log_decay, count, head, C, "token")
        b_l *= b_beta[:, None]
        b_i = unit_lower_inverse(tl.where(o_c[:, None] > o_c[None, :], b_l, 0.0), C, PRECISION)
        tl.store(p_i, b_i, mask=m_i)
    b_write = load_chunk_gate(write_gate, first, count, head, H, C)  # [C]
    # the factors of the rows of k and v go to the inverse's columns, so that k and v go to their products as they are
    b_i_k = (b_i * (b_beta * b_from_start)[None, :]).to(k.dtype.element_ty)
    b_i_v = (b_i * (b_beta * b_write)[None, :]).to(v.dtype.element_ty)
    multiply_rows(b_i_k, k, wy_k, first, count, head, H, K, C, BK, PRECISION)
    multiply_rows(b_i_v, v, wy_v, first, count, head, H, V, C, BV, PRECISION)


@triton.jit
def delta_write_gradients_kernel(
    k, v, log_decay, beta, write_gate, inverse, states, d_u, d_k, d_v, d_beta, d_write, d_decay, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From dU [B,T,H,V] back through u = wy_v - wy_k S: adds to d_k [B,T,H,K] and d_decay [B,T,H], gives d_v, d_beta, d_write.

    The inverse meets wide tiles in their own dtype. Where terms cancel, in d_beta, it stays float32: v dU^T, `b_products`, is summed with
    it.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C)
    o_c = tl.arange(0, C)
    b_cum, b_rest, total = decay_sums(log_decay, first, count, head, H, C, "token")
    b_from_start = decay_factors(b_cum, count, C)
    b_beta = load_chunk_gate(beta, first, count, head, H, C)  # [C]
    b_write = load_chunk_gate(write_gate, first, count, head, H, C)  # [C]
    p_i, m_i = tile(inverse, first, count, head, 0, H, C, C, C)
    b_i = tl.load(p_i, mask=m_i, other=0.0)  # [C, C]
    b_back = tl.trans(b_i.to(k.dtype.element_ty))
    b_products = tl.zeros([C, C], tl.float32)
    for v_start in range(0, V, BV):
        p_v, m_v = tile(v, first, count, head, v_start, H, V, C, BV)
        p_u, m_u = tile(d_u, first, count, head, v_start, H, V, C, BV)
        b_v, b_u = tl.load(p_v, mask=m_v, other=0.0), tl.load(p_u, mask=m_u, other=0.0)  # [C, BV]
        b_products += tl.dot(b_v, tl.trans(b_u), input_precision=PRECISION)
        p_dv, m_dv = tile(d_v, first, count, head, v_start, H, V, C, BV)
        b_dv = tl.dot(b_back, b_u, input_precision=PRECISION) * (b_beta * b_write)[:, None]
        tl.store(p_dv, b_dv.to(d_v.dtype.element_ty), mask=m_dv)
    b_row = tl.sum(b_products * tl.trans(b_i), 1)
    b_d_beta, b_d_write = b_row * b_write, b_row * b_beta
    b_di = b_products * (b_beta * b_write)[:, None]
    b_products = tl.zeros([C, C], tl.float32)
    for k_start in range(0, K, BK):
        b_us = tl.zeros([C, BK], tl.float32)  # dU S^T = -d wy_k
        for v_start in range(0, V, BV):
            p_u, m_u = tile(d_u, first, count, head, v_start, H, V, C, BV)
            p_s, m_s = state_tile(states, chunk.to(tl.int64) * H + head, k_start, v_start, K, V, BK, BV)
            b_u, b_s = tl.load(p_u, mask=m_u, other=0.0), tl.load(p_s, mask=m_s, other=0.0)  # [C, BV], [BK, BV]
            b_us += tl.dot(b_u, tl.trans(b_s), input_precision=PRECISION)
        p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
        p_dk, m_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
        b_rounded = (-b_us).to(k.dtype.element_ty)
        b_products += tl.dot(tl.load(p_k, mask=m_k, other=0.0), tl.trans(b_rounded), input_precision=PRECISION)  # [C, BK]
        b_dk = tl.dot(b_back, b_rounded, input_precision=PRECISION) * (b_beta * b_from_start)[:, None]
        b_earlier = tl.load(p_dk, mask=m_dk, other=0.0).to(tl.float32)  # [C, BK]
        tl.store(p_dk, (b_earlier + b_dk).to(d_k.dtype.element_ty), mask=m_dk)
    b_row = tl.sum(b_products * tl.trans(b_i), 1) * b_from_start
    b_d_beta += b_row
    b_dg = b_row * b_beta
    b_di += b_products * (b_beta * b_from_start)[:, None]
    # d(I + L)^-1 = -(I + L)^-1 dL (I + L)^-1, all of it transposed
    b_dl = -tl.trans(tl.dot(tl.dot(b_i, b_di, input_precision=PRECISION), b_i, input_precision=PRECISION))
    b_kk = key_products(k, first, count, head, H, K, C, BK, PRECISION)
    b_dl *= decay_matrix(b_cum, log_decay, count, head, C, "token")
    b_dl = tl.where(o_c[:, None] > o_c[None, :], b_dl, 0.0)
    b_d_beta += tl.sum(b_dl * b_kk, 1)
    b_dl *= b_beta[:, None]
    b_terms = b_dl * b_kk
    b_dg += tl.sum(b_terms, 1) - tl.sum(b_terms, 0)
    b_both = (b_dl + tl.trans(b_dl)).to(k.dtype.element_ty)
    for k_start in range(0, K, BK):
        p_k, m_k = tile(k, first, count, head, k_start, H, K, C, BK)
        p_dk, m_dk = tile(d_k, first, count, head, k_start, H, K, C, BK)
        b_dk = tl.dot(b_both, tl.load(p_k, mask=m_k, other=0.0), input_precision=PRECISION)  # [C, BK]
        tl.store(p_dk, (tl.load(p_dk, mask=m_dk, other=0.0).to(tl.float32) + b_dk).to(d_k.dtype.element_ty), mask=m_dk)
    o_t = (first + o_c) * H + head
    tl.store(d_beta + o_t, b_d_beta, mask=o_c < count)
    if write_gate is not None:
        tl.store(d_write + o_t, b_d_write, mask=o_c < count)
    b_earlier = tl.load(d_decay + o_t, mask=o_c < count, other=0.0)  # [C]
    tl.store(d_decay + o_t, b_earlier + tl.cumsum(b_dg, 0, reverse=True), mask=o_c < count)


@triton.jit
def channel_writes_kernel(
    scaled_q, scores, v, beta, write_gate, inverse, wy_k, wy_v, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KNOWN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`delta_writes_kernel` for a decay per channel, from the scaled_q [B,T,H,K] and scores [B,T,H,C] of keys that erase."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C)
    o_c = tl.arange(0, C)
    p_i, m_i = tile(inverse, first, count, head, 0, H, C, C, C)
    if KNOWN:
        b_i = tl.load(p_i, mask=m_i, other=0.0)  # [C, C]
    else:
        p_a, m_a = tile(scores, first, count, head, 0, H, C, C, C)
        b_l = tl.where(o_c[:, None] > o_c[None, :], tl.load(p_a, mask=m_a, other=0.0), 0.0)  # [C, C]
        b_i = unit_lower_inverse(b_l, C, PRECISION)
        tl.store(p_i, b_i, mask=m_i)
    b_factor = load_chunk_gate(beta, first, count, head, H, C) * load_chunk_gate(write_gate, first, count, head, H, C)  # [C]
    b_i_k, b_i_v = b_i.to(scaled_q.dtype.element_ty), (b_i * b_factor[None, :]).to(v.dtype.element_ty)
    multiply_rows(b_i_k, scaled_q, wy_k, first, count, head, H, K, C, BK, PRECISION)
    multiply_rows(b_i_v, v, wy_v, first, count, head, H, V, C, BV, PRECISION)


@triton.jit
def channel_write_gradients_kernel(
    v, beta, write_gate, inverse, d_u, d_v, d_beta, d_write, d_erased, table, T,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With G = (I + L)^-T dU [C, V]: d_v = β write_gate G, d_erased = -G [B,T,H,V]; and of beta and the gate what comes through β
    write_gate v."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = chunk_span(chunk, table, T, C)
    o_c = tl.arange(0, C)
    b_beta = load_chunk_gate(beta, first, count, head, H, C)  # [C]
    b_write = load_chunk_gate(write_gate, first, count, head, H, C)  # [C]
    p_i, m_i = tile(inverse, first, count, head, 0, H, C, C, C)
    b_back = tl.trans(tl.load(p_i, mask=m_i, other=0.0).to(v.dtype.element_ty))  # [C, C]
    b_row = tl.zeros([C], tl.float32)
    for v_start in range(0, V, BV):
        p_u, m_u = tile(d_u, first, count, head, v_start, H, V, C, BV)
        p_v, m_v = tile(v, first, count, head, v_start, H, V, C, BV)
        b_u, b_v = tl.load(p_u, mask=m_u, other=0.0), tl.load(p_v, mask=m_v, other=0.0)  # [C, BV]
        b_g = tl.dot(b_back, b_u, input_precision=PRECISION)  # [C, BV]
        b_row += tl.sum(b_g * b_v.to(tl.float32), 1)
        p_dv, m_dv = tile(d_v, first, count, head, v_start, H, V, C, BV)
        p_e, m_e = tile(d_erased, first, count, head, v_start, H, V, C, BV)
        tl.store(p_dv, (b_g * (b_beta * b_write)[:, None]).to(d_v.dtype.element_ty), mask=m_dv)
        tl.store(p_e, (-b_g).to(d_erased.dtype.element_ty), mask=m_e)
    o_t = (first + o_c) * H + head
    tl.store(d_beta + o_t, b_row * b_write, mask=o_c < count)
    if write_gate is not None:
        tl.store(d_write + o_t, b_row * b_beta, mask=o_c < count)


class Writes(NamedTuple):
    """What is known of a call's writes, u = wy_v - wy_k S."""

    inverse: Tensor
    """(I + L)^-1 of every chunk, [B,T,H,CHUNK]."""
    wy_k: Tensor
    """[B,T,H,K]"""
    wy_v: Tensor
    """[B,T,H,V]"""


def empty_inverse(v: Tensor) -> Tensor:
    return v.new_empty(*v.shape[:3], CHUNK, dtype=torch.float32)


def delta_writes(
    k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, write_gate: Tensor | None, layout: Layout, inverse: Tensor | None = None
) -> Writes:
    writes = Writes(empty_inverse(v) if inverse is None else inverse, torch.empty_like(k), torch.empty_like(v))
    (_, _, heads, key), value = k.shape, v.shape[3]
    launch(
        delta_writes_kernel, (layout.chunks, heads), (k, v, log_decay, beta, write_gate, *writes, layout.table, layout.length),
        {**shape_arguments(k, layout), "V": value, "KNOWN": inverse is not None, **tile_arguments("delta_writes", k, key, value)},
    )  # fmt: skip
    return writes


def delta_write_gradients(
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
        {**shape_arguments(k, layout), "V": value, **tile_arguments("delta_write_gradients", k, key, value)},
    )  # fmt: skip
    return d_v, d_beta, d_write


def channel_writes(
    erasing: Prepared, v: Tensor, beta: Tensor, write_gate: Tensor | None, layout: Layout, inverse: Tensor | None = None
) -> Writes:
    writes = Writes(empty_inverse(v) if inverse is None else inverse, torch.empty_like(erasing.scaled_q), torch.empty_like(v))
    (_, _, heads, key), value = erasing.scaled_q.shape, v.shape[3]
    launch(
        channel_writes_kernel, (layout.chunks, heads),
        (erasing.scaled_q, erasing.scores, v, beta, write_gate, *writes, layout.table, layout.length),
        {**shape_arguments(erasing.scaled_q, layout), "V": value, "KNOWN": inverse is not None,
         **tile_arguments("delta_writes", v, key, value)},
    )  # fmt: skip
    return writes


def channel_write_gradients(
    erasing: Prepared, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, write_gate: Tensor | None, inverse: Tensor, states: Tensor,
    u: Tensor, d_u: Tensor, layout: Layout,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of v, beta and write_gate, empty if there is none; and what erasing adds to those of k and log_decay."""
    d_v, d_erased, d_beta = torch.empty_like(v), torch.empty_like(v), torch.empty_like(beta, dtype=torch.float32)
    d_write = v.new_empty(0 if write_gate is None else write_gate.shape, dtype=torch.float32)
    options = {**shape_arguments(k, layout), "V": v.shape[3], **tile_arguments("delta_write_gradients", v, k.shape[3], v.shape[3])}
    launch(
        channel_write_gradients_kernel, (layout.chunks, v.shape[2]),
        (v, beta, write_gate, inverse, d_u, d_v, d_beta, d_write, d_erased, layout.table, layout.length),
        {name: x for name, x in options.items() if name not in ("K", "BK")},
    )  # fmt: skip
    d_q, d_k, d_decay, d_gate = query_key_gradients_channel(
        k, k, u, d_erased, log_decay, beta, None, 1.0, erasing, states, None, layout, decay_gradient=True
    )
    return d_v, d_beta + d_gate[0], d_write, d_q + d_k, d_decay
