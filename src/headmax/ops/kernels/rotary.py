"""Queries and keys out of the product that gave them, rotated by their positions on the way; their gradients go straight back into it."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2
from headmax.ops.library import define_op, once_differentiable

TOKENS = 8
"""Of a program, which takes one head."""
ALIGNED = 64
"""At least 128 bytes, in which memory is read."""


@triton.jit
def rotary_kernel(
    product, q, k, rest, cos, sin, tokens, angles, stride,
    H: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Heads of q, then of k [tokens, H, 2 HALF], each rotated, and E further columns `rest` [tokens, E], out of rows of `product`, which
    are `stride` apart; if BACK, the other way about, rotated back. cos, sin [angles, HALF]: tokens' positions repeat after `angles`.
    """
    head, o_r = tl.program_id(0) % (2 * H + 1), tl.program_id(0) // (2 * H + 1) * BT + tl.arange(0, BT)
    o_t, m_t, o_h = o_r.to(tl.int64)[:, None], o_r[:, None] < tokens, tl.arange(0, BH)[None, :]
    if head < 2 * H:
        m_x = m_t & (o_h < HALF)
        p_product = product + o_t * stride + head * (2 * HALF) + o_h
        p_head = tl.where(head < H, q, k) + (o_t * H + head % H) * (2 * HALF) + o_h
        o_a = o_t % angles * HALF + o_h
        b_cos, b_sin = tl.load(cos + o_a, mask=m_x, other=0.0).to(tl.float32), tl.load(sin + o_a, mask=m_x, other=0.0).to(tl.float32)
        if BACK:
            p_from, p_to, b_sin = p_head, p_product, -b_sin
        else:
            p_from, p_to = p_product, p_head
        b_first = tl.load(p_from, mask=m_x, other=0.0).to(tl.float32)  # [BT, BH]
        b_second = tl.load(p_from + HALF, mask=m_x, other=0.0).to(tl.float32)  # [BT, BH]
        tl.store(p_to, (b_first * b_cos - b_second * b_sin).to(product.dtype.element_ty), mask=m_x)
        tl.store(p_to + HALF, (b_second * b_cos + b_first * b_sin).to(product.dtype.element_ty), mask=m_x)
    elif E > 0:
        o_e = tl.arange(0, BE)[None, :]
        p_columns, p_rest, m_e = product + o_t * stride + 4 * H * HALF + o_e, rest + o_t * E + o_e, m_t & (o_e < E)
        if BACK:
            tl.store(p_columns, tl.load(p_rest, mask=m_e, other=0.0), mask=m_e)  # [BT, BE]
        else:
            tl.store(p_rest, tl.load(p_columns, mask=m_e, other=0.0), mask=m_e)  # [BT, BE]


@functools.cache
def _sizes(heads: int, width: int, further: int, back: bool) -> dict[str, int]:
    blocks = {"BT": TOKENS, "BH": power_of_2(width // 2), "BE": power_of_2(max(1, further))}
    return {"H": heads, "HALF": width // 2, "E": further, **blocks, "BACK": back}


def _launch(product: Tensor, q: Tensor, k: Tensor, rest: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    (tokens, heads, width), further = q.shape, rest.shape[1]
    args = product, q, k, rest, cos, sin, tokens, cos.shape[0], product.stride(0)
    launch(rotary_kernel, (cdiv(tokens, TOKENS) * (2 * heads + 1),), args, _sizes(heads, width, further, back))


def _parts(product: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, columns = product.shape
    q, k = (product.new_empty((tokens, heads, width)) for _ in range(2))
    return q, k, product.new_empty((tokens, columns - 2 * heads * width))


def forward(product: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the product may lie further apart than they are long, as a compiler has them for their alignment."""
    parts = _parts(product, heads, width)
    _launch(product if product.stride(1) == 1 else product.contiguous(), *parts, cos, sin, back=False)
    return parts


def _empty_product(q: Tensor, rest: Tensor) -> Tensor:
    """With rows that begin at multiples of ALIGNED."""
    columns = 2 * q.shape[1] * q.shape[2] + rest.shape[1]
    return q.new_empty_strided((q.shape[0], columns), (cdiv(columns, ALIGNED) * ALIGNED, 1))


def backward(d_q: Tensor, d_k: Tensor, d_rest: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    d_product = _empty_product(d_q, d_rest)
    _launch(d_product, d_q.contiguous(), d_k.contiguous(), d_rest.contiguous(), cos, sin, back=True)
    return d_product


_split_rotary = define_op(
    "split_rotary",
    forward,
    lambda product, cos, sin, heads, width: _parts(product, heads, width),
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_split_rotary_backward = define_op("split_rotary_backward", backward, lambda d_q, d_k, d_rest, cos, sin: _empty_product(d_q, d_rest))


class SplitRotary(torch.autograd.Function):
    """See `split_rotary`. Saves the angles [tokens, D/2] alone."""

    @staticmethod
    def forward(ctx, product, cos, sin, heads, width):
        batch, time, _ = product.shape
        cos, sin = (x.expand(-1, time, 1, -1).reshape(-1, width // 2) for x in (cos, sin))
        ctx.save_for_backward(cos, sin)
        q, k, rest = _split_rotary(product.flatten(0, 1), cos, sin, heads, width)
        return q.view(batch, time, heads, width), k.view(batch, time, heads, width), rest.view(batch, time, rest.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_q, d_k, d_rest):
        d_product = _split_rotary_backward(d_q.flatten(0, 1), d_k.flatten(0, 1), d_rest.flatten(0, 1), *ctx.saved_tensors)
        return d_product.unflatten(0, d_q.shape[:2]), None, None, None, None


def split_rotary(product: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [B,T,H,D], rotated, and what else there is, of product [B,T,2 H D + ...]; cos, sin [B or 1,T,1,D/2]."""
    return SplitRotary.apply(product, cos, sin, heads, width)
