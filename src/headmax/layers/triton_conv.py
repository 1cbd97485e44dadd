"""The short convolution and its silu in Triton: each tensor is read once, where shifted slices would be read once per tap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, CHANNELS = 64, 64
"""The tile of a program."""


@triton.jit
def taps(
    x, weight, before, batch, start, channels, T, D,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Σ_i weight_i x_{t + SHIFT - W + 1 + i}: the sum the silu is taken of, for BT tokens from `start` + SHIFT on."""
    rows = start + SHIFT + tl.arange(0, BT)
    total = tl.zeros([BT, BD], tl.float32)
    if PACKED:
        seen = tl.load(before + rows, mask=(rows >= 0) & (rows < T), other=0)
    for i in tl.static_range(W):
        at = rows - (W - 1 - i)
        inside = (at >= 0) & (rows < T)
        if PACKED:
            inside = inside & (seen >= W - 1 - i)
        t_x = tl.load(x + (batch * T + at[:, None]) * D + channels[None, :], mask=inside[:, None] & (channels[None, :] < D), other=0.0)
        total += t_x.to(tl.float32) * tl.load(weight + channels * W + i, mask=channels < D, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def short_conv_kernel(
    x, weight, before, y, T, D, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """y_t = silu(Σ_i weight_i x_{t-W+1+i}) for a tile of tokens and channels."""
    channels, batch = tl.program_id(0) * BD + tl.arange(0, BD), tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * BT
    total = taps(x, weight, before, batch, start, channels, T, D, W, BT, BD, PACKED, 0)
    rows = start + tl.arange(0, BT)
    inside = (rows[:, None] < T) & (channels[None, :] < D)
    tl.store(y + (batch * T + rows[:, None]) * D + channels[None, :], (total * tl.sigmoid(total)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def short_conv_gradients_kernel(
    x, weight, before, d_y, d_x, d_weight, T, D, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """d_x_t = Σ_i weight_i d_{t+W-1-i}, where d is d_y through the silu, and this tile's share of d_weight_i = Σ_t d_t x_{t-W+1+i}."""
    channels, batch = tl.program_id(0) * BD + tl.arange(0, BD), tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * BT
    rows = start + tl.arange(0, BT)
    in_channels = channels < D
    gradient = tl.zeros([BT, BD], tl.float32)
    for back in tl.static_range(W):  # the token `back` further on, whose tap W - 1 - back is this one
        total = taps(x, weight, before, batch, start, channels, T, D, W, BT, BD, PACKED, back)
        ahead = rows + back
        inside = ahead < T
        t_y = tl.load(d_y + (batch * T + ahead[:, None]) * D + channels[None, :], mask=inside[:, None] & in_channels[None, :], other=0.0)
        gate = tl.sigmoid(total)
        through = t_y.to(tl.float32) * gate * (1 + total * (1 - gate))
        if PACKED:
            seen = tl.load(before + ahead, mask=inside, other=0)
            through = tl.where((seen >= back)[:, None], through, 0.0)
        tap = weight + channels * W + W - 1 - back
        gradient += through * tl.load(tap, mask=in_channels, other=0.0).to(tl.float32)[None, :]
        t_x = tl.load(x + (batch * T + rows[:, None]) * D + channels[None, :], mask=(rows[:, None] < T) & in_channels[None, :], other=0.0)
        share = d_weight + ((batch * tl.num_programs(1) + tl.program_id(1)) * D + channels) * W + W - 1 - back
        tl.store(share, tl.sum(through * t_x.to(tl.float32), 0), mask=in_channels)
    whole = (rows[:, None] < T) & in_channels[None, :]
    tl.store(d_x + (batch * T + rows[:, None]) * D + channels[None, :], gradient.to(d_x.dtype.element_ty), mask=whole)


def _grid(x: Tensor) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[2], CHANNELS), triton.cdiv(x.shape[1], TOKENS), x.shape[0]


def _sizes(x: Tensor, weight: Tensor, before: Tensor | None) -> dict[str, int]:
    return {"T": x.shape[1], "D": x.shape[2], "W": weight.shape[1], "BT": TOKENS, "BD": CHANNELS, "PACKED": before is not None}


@torch.library.custom_op("headmax::short_conv", mutates_args=())
def _forward(x: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    y = torch.empty_like(x)
    short_conv_kernel[_grid(x)](x, weight, before, y, **_sizes(x, weight, before))
    return y


@_forward.register_fake
def _(x, weight, before):
    return torch.empty_like(x)


@torch.library.custom_op("headmax::short_conv_backward", mutates_args=())
def _backward(d_y: Tensor, x: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    d_x, grid = torch.empty_like(x), _grid(x)
    shares = x.new_empty(grid[1] * grid[2], *weight.shape, dtype=torch.float32)
    short_conv_gradients_kernel[grid](x, weight, before, d_y.contiguous(), d_x, shares, **_sizes(x, weight, before))
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
