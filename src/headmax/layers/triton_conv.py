"""The short convolution and its silu in Triton: each tensor is read once, where shifted slices would be read once per tap."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.triton_common import beside, on_its_device

MAPPED, SUMMED = (8, 128, 16), (16, 64, 32)
"""Tokens and channels of a tile, and how many tiles a program takes one after the other, so that weights are loaded once: of kernels
that sum nothing over tokens, and of the one that does."""


@triton.jit
def place(T, D, BT: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr):
    """Channels, batch row, first token and number of tiles of this program; tiles of channels are neighbours."""
    n, wide = tl.program_id(0), tl.cdiv(D, BD)
    spans = tl.cdiv(T, BT * STEPS)
    start = n // wide % spans * (BT * STEPS)
    return n % wide * BD + tl.arange(0, BD), (n // wide // spans).to(tl.int64), start, tl.minimum(STEPS, tl.cdiv(T - start, BT))


@triton.jit
def load_weights(weight, channels, D, W: tl.constexpr):
    """The weights of each tap, from the oldest input's on, [1, BD]."""
    weights = ()
    for i in tl.static_range(W):
        weights = beside(weights, tl.load(weight + channels * W + i, mask=channels < D, other=0.0).to(tl.float32)[None, :])
    return weights


@triton.jit
def tile(x, batch, rows, channels, T, D):
    """Pointers and mask of some tokens and channels of x [B,T,D]."""
    return x + (batch * T + rows[:, None]) * D + channels[None, :], (rows[:, None] < T) & (channels[None, :] < D)


@triton.jit
def load_inputs(x, before, batch, rows, channels, T, D, W: tl.constexpr, PACKED: tl.constexpr):
    """x_{t-W+1+i} for each tap i of tokens `rows`, 0 where their sequence has none."""
    inputs = ()
    for i in tl.static_range(W):
        pointers, inside = tile(x, batch, rows - (W - 1 - i), channels, T, D)
        known = (rows >= W - 1 - i) & (rows < T)
        if PACKED:
            known = known & (tl.load(before + rows, mask=rows < T, other=0) >= W - 1 - i)
        inputs = beside(inputs, tl.load(pointers, mask=inside & known[:, None], other=0.0).to(tl.float32))
    return inputs


@triton.jit
def weighted(inputs, weights, W: tl.constexpr):
    """Σ_i weight_i input_i"""
    total = inputs[0] * weights[0]
    for i in tl.static_range(1, W):
        total += inputs[i] * weights[i]
    return total


@triton.jit
def short_conv_kernel(
    x, weight, before, y, T, D,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """y_t = silu(Σ_i weight_i x_{t-W+1+i})"""
    channels, batch, start, tiles = place(T, D, BT, BD, STEPS)
    weights = load_weights(weight, channels, D, W)
    for n in range(tiles):
        rows = start + n * BT + tl.arange(0, BT)
        total = weighted(load_inputs(x, before, batch, rows, channels, T, D, W, PACKED), weights, W)
        p_y, inside = tile(y, batch, rows, channels, T, D)
        tl.store(p_y, (total * tl.sigmoid(total)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def short_conv_inner_gradients_kernel(
    x, weight, before, d_y, inner, d_weight, T, D,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """inner = d_y through the silu, and this program's share of d_weight_i = Σ_t inner_t x_{t-W+1+i}."""
    channels, batch, start, tiles = place(T, D, BT, BD, STEPS)
    weights, shares = load_weights(weight, channels, D, W), ()
    for _ in tl.static_range(W):
        shares = beside(shares, tl.zeros([BT, BD], tl.float32))  # over tokens at the end alone: threads must meet for that
    for n in range(tiles):
        rows = start + n * BT + tl.arange(0, BT)
        inputs = load_inputs(x, before, batch, rows, channels, T, D, W, PACKED)
        total = weighted(inputs, weights, W)
        gate = tl.sigmoid(total)
        p_d, inside = tile(d_y, batch, rows, channels, T, D)
        t_d = tl.load(p_d, mask=inside, other=0.0).to(tl.float32) * gate * (1 + total * (1 - gate))
        p_i, in_i = tile(inner, batch, rows, channels, T, D)
        tl.store(p_i, t_d.to(inner.dtype.element_ty), mask=inside)
        sums = ()
        for i in tl.static_range(W):
            sums = beside(sums, shares[i] + t_d * inputs[i])
        shares = sums
    row = (batch * tl.cdiv(T, BT * STEPS) + start // (BT * STEPS)) * D
    for i in tl.static_range(W):
        tl.store(d_weight + (row + channels) * W + i, tl.sum(shares[i], 0), mask=channels < D)


@triton.jit
def short_conv_input_gradients_kernel(
    inner, weight, before, d_x, T, D,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """d_x_t = Σ_i weight_i inner_{t+W-1-i}"""
    channels, batch, start, tiles = place(T, D, BT, BD, STEPS)
    weights = load_weights(weight, channels, D, W)
    for n in range(tiles):
        rows = start + n * BT + tl.arange(0, BT)
        gradient = tl.zeros([BT, BD], tl.float32)
        for i in tl.static_range(W):
            ahead = rows + (W - 1 - i)
            pointers, inside = tile(inner, batch, ahead, channels, T, D)
            if PACKED:
                inside = inside & (tl.load(before + ahead, mask=ahead < T, other=0) >= W - 1 - i)[:, None]
            gradient += tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * weights[i]
        p_x, whole = tile(d_x, batch, rows, channels, T, D)
        tl.store(p_x, gradient.to(d_x.dtype.element_ty), mask=whole)


def _grid(x: Tensor, tiles: tuple[int, int, int]) -> tuple[int, int]:
    """How many programs share the tokens, and how many the channels."""
    tokens, channels, steps = tiles
    return x.shape[0] * triton.cdiv(x.shape[1], tokens * steps), triton.cdiv(x.shape[2], channels)


def _launch(kernel, tiles: tuple[int, int, int], x: Tensor, weight: Tensor, before: Tensor | None, *others: Tensor) -> None:
    sizes = dict(zip(("BT", "BD", "STEPS"), tiles, strict=True)) | {"W": weight.shape[1], "PACKED": before is not None}
    kernel[(math.prod(_grid(x, tiles)),)](x, weight, before, *others, T=x.shape[1], D=x.shape[2], **sizes)


@torch.library.custom_op("headmax::short_conv", mutates_args=())
@on_its_device
def _forward(x: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    y = torch.empty_like(x)
    _launch(short_conv_kernel, MAPPED, x, weight, before, y)
    return y


@_forward.register_fake
def _(x, weight, before):
    return torch.empty_like(x)


@torch.library.custom_op("headmax::short_conv_backward", mutates_args=())
@on_its_device
def _backward(d_y: Tensor, x: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    inner, d_x = torch.empty_like(x), torch.empty_like(x)
    shares = x.new_empty(_grid(x, SUMMED)[0], *weight.shape, dtype=torch.float32)
    _launch(short_conv_inner_gradients_kernel, SUMMED, x, weight, before, d_y.contiguous(), inner, shares)
    _launch(short_conv_input_gradients_kernel, MAPPED, inner, weight, before, d_x)
    return d_x, shares.sum(0).to(weight.dtype)


@_backward.register_fake
def _(d_y, x, weight, before):
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx, d_y):
    return *_backward(d_y, *ctx.saved_tensors), None


_forward.register_autograd(_gradient, setup_context=_save)


def short_conv(x: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    """silu of the causal depthwise convolution of x [B,T,D] with weight [D,W]; `before` [T] counts a packed token's predecessors."""
    if x.dtype == torch.float64:
        raise ValueError("short_conv: backend 'triton' computes in float32, got torch.float64; use 'chunkwise'")
    return _forward(x.contiguous(), weight.contiguous(), before)
