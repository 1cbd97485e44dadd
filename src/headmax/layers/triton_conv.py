"""The short convolution and its silu in Triton: each tensor is read once, where shifted slices would be read once per tap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.triton_common import on_its_device

TOKENS, CHANNELS = 16, 64
"""The tile of a program."""
STEPS = 8
"""Tiles of tokens over which a program sums its share of the weight's gradient."""


@triton.jit
def place(T, D, BT: tl.constexpr, BD: tl.constexpr):
    """Channels, batch row and first token of this program; tiles of channels are neighbours."""
    n, wide = tl.program_id(0), tl.cdiv(D, BD)
    return n % wide * BD + tl.arange(0, BD), (n // wide // tl.cdiv(T, BT)).to(tl.int64), n // wide % tl.cdiv(T, BT) * BT


@triton.jit
def beside(tensors, x):
    """A tuple of tensors and one more: what there is one of for each tap."""
    return tensors + (x,)  # noqa: RUF005


@triton.jit
def tap_weight(weight, channels, i: tl.constexpr, D, W: tl.constexpr):
    return tl.load(weight + channels * W + i, mask=channels < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def earlier(x, before, batch, rows, back: tl.constexpr, channels, T, D, PACKED: tl.constexpr):
    """x_{t-back} for tokens `rows` of the same sequence, 0 where there is none."""
    inside = (rows >= back) & (rows < T)
    if PACKED:
        inside = inside & (tl.load(before + rows, mask=rows < T, other=0) >= back)
    at = (batch * T + rows[:, None] - back) * D + channels[None, :]
    return tl.load(x + at, mask=inside[:, None] & (channels[None, :] < D), other=0.0).to(tl.float32)


@triton.jit
def short_conv_kernel(
    x, weight, before, y, T, D, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """y_t = silu(Σ_i weight_i x_{t-W+1+i}) for a tile of tokens and channels."""
    channels, batch, start = place(T, D, BT, BD)
    rows = start + tl.arange(0, BT)
    total = tl.zeros([BT, BD], tl.float32)
    for i in tl.static_range(W):
        total += earlier(x, before, batch, rows, W - 1 - i, channels, T, D, PACKED) * tap_weight(weight, channels, i, D, W)
    inside = (rows[:, None] < T) & (channels[None, :] < D)
    tl.store(y + (batch * T + rows[:, None]) * D + channels[None, :], (total * tl.sigmoid(total)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def short_conv_inner_gradients_kernel(
    x, weight, before, d_y, inner, d_weight, T, D,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """inner = d_y through the silu, for STEPS tiles of tokens, and their share of d_weight_i = Σ_t inner_t x_{t-W+1+i}."""
    channels, batch, base = place(T, D, BT * STEPS, BD)
    weights, shares = (), ()  # shares are summed over tokens at the end alone: threads must meet for that
    for i in tl.static_range(W):
        weights, shares = beside(weights, tap_weight(weight, channels, i, D, W)), beside(shares, tl.zeros([BT, BD], tl.float32))
    for n in range(STEPS):
        rows = base + n * BT + tl.arange(0, BT)
        total, inputs = tl.zeros([BT, BD], tl.float32), ()
        for i in tl.static_range(W):
            t_x = earlier(x, before, batch, rows, W - 1 - i, channels, T, D, PACKED)
            total, inputs = total + t_x * weights[i], beside(inputs, t_x)
        inside = (rows[:, None] < T) & (channels[None, :] < D)
        at = (batch * T + rows[:, None]) * D + channels[None, :]
        gate = tl.sigmoid(total)
        t_d = tl.load(d_y + at, mask=inside, other=0.0).to(tl.float32) * gate * (1 + total * (1 - gate))
        tl.store(inner + at, t_d.to(inner.dtype.element_ty), mask=inside)
        sums = ()
        for i in tl.static_range(W):
            sums = beside(sums, shares[i] + t_d * inputs[i])
        shares = sums
    row = (batch * tl.cdiv(T, BT * STEPS) + base // (BT * STEPS)) * D
    for i in tl.static_range(W):
        tl.store(d_weight + (row + channels) * W + i, tl.sum(shares[i], 0), mask=channels < D)


@triton.jit
def short_conv_input_gradients_kernel(
    inner, weight, before, d_x, T, D, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """d_x_t = Σ_i weight_i inner_{t+W-1-i}"""
    channels, batch, start = place(T, D, BT, BD)
    rows, in_channels = start + tl.arange(0, BT), channels < D
    gradient = tl.zeros([BT, BD], tl.float32)
    for i in tl.static_range(W):
        ahead = rows + (W - 1 - i)
        inside = ahead < T
        if PACKED:
            inside = inside & (tl.load(before + ahead, mask=inside, other=0) >= W - 1 - i)
        at = (batch * T + ahead[:, None]) * D + channels[None, :]
        t_d = tl.load(inner + at, mask=inside[:, None] & in_channels[None, :], other=0.0).to(tl.float32)
        gradient += t_d * tap_weight(weight, channels, i, D, W)
    whole = (rows[:, None] < T) & in_channels[None, :]
    tl.store(d_x + (batch * T + rows[:, None]) * D + channels[None, :], gradient.to(d_x.dtype.element_ty), mask=whole)


def _tiles(x: Tensor, tokens: int = TOKENS) -> tuple[int, int]:
    """Tiles of `tokens` tokens, and of channels."""
    return x.shape[0] * triton.cdiv(x.shape[1], tokens), triton.cdiv(x.shape[2], CHANNELS)


def _sizes(x: Tensor, weight: Tensor, before: Tensor | None) -> dict[str, int]:
    return {"T": x.shape[1], "D": x.shape[2], "W": weight.shape[1], "BT": TOKENS, "BD": CHANNELS, "PACKED": before is not None}


@torch.library.custom_op("headmax::short_conv", mutates_args=())
@on_its_device
def _forward(x: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    y, tiles = torch.empty_like(x), _tiles(x)
    short_conv_kernel[(tiles[0] * tiles[1],)](x, weight, before, y, **_sizes(x, weight, before))
    return y


@_forward.register_fake
def _(x, weight, before):
    return torch.empty_like(x)


@torch.library.custom_op("headmax::short_conv_backward", mutates_args=())
@on_its_device
def _backward(d_y: Tensor, x: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    inner, d_x, sizes = torch.empty_like(x), torch.empty_like(x), _sizes(x, weight, before)
    rows, columns = _tiles(x, STEPS * TOKENS)
    shares = x.new_empty(rows, *weight.shape, dtype=torch.float32)
    short_conv_inner_gradients_kernel[(rows * columns,)](x, weight, before, d_y.contiguous(), inner, shares, **sizes, STEPS=STEPS)
    rows, columns = _tiles(x)
    short_conv_input_gradients_kernel[(rows * columns,)](inner, weight, before, d_x, **sizes)
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
