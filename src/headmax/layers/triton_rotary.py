"""Queries and keys out of the product that gave them, turned by their positions on the way; their gradients go straight back into it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.triton_common import on_its_device

TOKENS = 8
"""Of a program, which takes one head."""
ALIGNED = 64
"""At least 128 bytes, in which memory is read."""


@triton.jit
def turn_kernel(
    product, q, k, rest, cos, sin, tokens, angles, stride,
    H: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Heads of q, then of k, then E further columns, from rows of `product` to tensors of their own; if BACK, the other way about."""
    head, rows = tl.program_id(0) % (2 * H + 1), tl.program_id(0) // (2 * H + 1) * BT + tl.arange(0, BT)
    at, there, columns = rows.to(tl.int64)[:, None], rows[:, None] < tokens, tl.arange(0, BH)[None, :]
    if head < 2 * H:
        inside = there & (columns < HALF)
        joint = product + at * stride + head * (2 * HALF) + columns
        own = tl.where(head < H, q, k) + (at * H + head % H) * (2 * HALF) + columns
        angle = at % angles * HALF + columns
        c, s = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32), tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        if BACK:
            source, target, s = own, joint, -s
        else:
            source, target = joint, own
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, (first * c - second * s).to(product.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (second * c + first * s).to(product.dtype.element_ty), mask=inside)
    elif E > 0:
        further = tl.arange(0, BE)[None, :]
        in_product, in_rest, known = product + at * stride + 4 * H * HALF + further, rest + at * E + further, there & (further < E)
        if BACK:
            tl.store(in_product, tl.load(in_rest, mask=known, other=0.0), mask=known)
        else:
            tl.store(in_rest, tl.load(in_product, mask=known, other=0.0), mask=known)


def _launch(product: Tensor, q: Tensor, k: Tensor, rest: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    (tokens, heads, width), further = q.shape, rest.shape[1]
    sizes = {"H": heads, "HALF": width // 2, "E": further, "BT": TOKENS, "BH": triton.next_power_of_2(width // 2)}
    turn_kernel[(triton.cdiv(tokens, TOKENS) * (2 * heads + 1),)](
        product,
        q,
        k,
        rest,
        cos,
        sin,
        tokens,
        cos.shape[0],
        product.stride(0),
        **sizes,
        BE=triton.next_power_of_2(max(1, further)),
        BACK=back,
    )


def _parts(product: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, columns = product.shape
    q, k = (product.new_empty(tokens, heads, width) for _ in range(2))
    return q, k, product.new_empty(tokens, columns - 2 * heads * width)


@torch.library.custom_op("headmax::turned", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
@on_its_device
def _turned(product: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the product may lie further apart than they are long, as a compiler has them for their alignment."""
    parts = _parts(product, heads, width)
    _launch(product if product.stride(1) == 1 else product.contiguous(), *parts, cos, sin, back=False)
    return parts


@_turned.register_fake
def _(product, cos, sin, heads, width):
    return _parts(product, heads, width)


def _empty_product(q: Tensor, rest: Tensor) -> Tensor:
    """With rows that begin at multiples of ALIGNED."""
    columns = 2 * q.shape[1] * q.shape[2] + rest.shape[1]
    return q.new_empty_strided((q.shape[0], columns), (triton.cdiv(columns, ALIGNED) * ALIGNED, 1))


@torch.library.custom_op("headmax::turned_backward", mutates_args=())
@on_its_device
def _turned_backward(d_q: Tensor, d_k: Tensor, d_rest: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    d_product = _empty_product(d_q, d_rest)
    _launch(d_product, d_q.contiguous(), d_k.contiguous(), d_rest.contiguous(), cos, sin, back=True)
    return d_product


@_turned_backward.register_fake
def _(d_q, d_k, d_rest, cos, sin):
    return _empty_product(d_q, d_rest)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _gradient(ctx, d_q, d_k, d_rest):
    return _turned_backward(d_q, d_k, d_rest, *ctx.saved_tensors), None, None, None, None


_turned.register_autograd(_gradient, setup_context=_save)


def turned(product: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [B,T,H,D], turned, and what else there is, of product [B,T,2 H D + ...]; cos, sin [B or 1,T,1,D/2]."""
    angles = (x.expand(-1, product.shape[1], 1, -1).reshape(-1, width // 2) for x in (cos, sin))
    q, k, rest = _turned(product.flatten(0, 1), *angles, heads, width)
    return q.unflatten(0, product.shape[:2]), k.unflatten(0, product.shape[:2]), rest.unflatten(0, product.shape[:2])
