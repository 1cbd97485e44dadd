"""The short convolution and its silu in Triton: programs go through a span of tokens with the last few inputs in registers, so that each
tensor is read once, by the gradients of inputs and weights together too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.triton_common import beside, on_its_device, sigmoid

SPAN = 64
"""Tokens of a program."""
AHEAD = 4
"""Tokens whose loads are under way together."""
CHANNELS = 256
"""Of a program, four to a thread."""
WARPS = 2


@triton.jit
def place(T, D, BD: tl.constexpr, SPAN: tl.constexpr):
    """Channels, number of the batch row, and first token of this program; blocks of channels are neighbours."""
    n, wide, spans = tl.program_id(0), tl.cdiv(D, BD), tl.cdiv(T, SPAN)
    return n % wide * BD + tl.arange(0, BD), (n // wide // spans).to(tl.int64), n // wide % spans * SPAN


@triton.jit
def row(x, batch, t, channels, T, D, stride):
    """The channels of token t of x [B,T,D], whose tokens lie `stride` apart; 0 where there is no such token."""
    return tl.load(x + (batch * T + t) * stride + channels, mask=(channels < D) & (t >= 0) & (t < T), other=0.0).to(tl.float32)


@triton.jit
def load_weights(weight, channels, D, W: tl.constexpr):
    """The weights of each tap, from the oldest input's on."""
    weights = ()
    for i in tl.static_range(W):
        weights = beside(weights, tl.load(weight + channels * W + i, mask=channels < D, other=0.0).to(tl.float32))
    return weights


@triton.jit
def moved_on(window, x, W: tl.constexpr):
    """A window of W values without its first and with x behind the last."""
    moved = ()
    for i in tl.static_range(1, W):
        moved = beside(moved, window[i])
    return beside(moved, x)


@triton.jit
def reach(before, t, T, W: tl.constexpr, PACKED: tl.constexpr):
    """How many tokens before t are of its sequence, W or more being alike."""
    if PACKED:
        return tl.load(before + t, mask=t < T, other=0).to(tl.int32)
    else:
        return W


@triton.jit
def seen(x, reached, I: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr):
    """Input I of a window as its last token sees it: 0 where its sequence does not reach as far."""
    if PACKED:
        return tl.where(reached >= W - 1 - I, x, 0.0)
    else:
        return x


@triton.jit
def weighted(window, weights, reached, W: tl.constexpr, PACKED: tl.constexpr):
    """Σ_i weight_i input_i"""
    total = window[W - 1] * weights[W - 1]
    for i in tl.static_range(W - 1):
        total += seen(window[i], reached, i, W, PACKED) * weights[i]
    return total


@triton.jit
def with_products(sums, x, factors, reached, W: tl.constexpr, PACKED: tl.constexpr):
    """sums_i + x factors_i, for each input of a window that its last token sees."""
    made = ()
    for i in tl.static_range(W):
        made = beside(made, sums[i] + seen(x, reached, i, W, PACKED) * factors[i])
    return made


@triton.jit
def first_window(x, batch, start, channels, T, D, stride, W: tl.constexpr):
    """The W inputs before token `start`."""
    window = ()
    for i in tl.static_range(W):
        window = beside(window, row(x, batch, start - W + i, channels, T, D, stride))
    return window


@triton.jit
def nothing(W: tl.constexpr, BD: tl.constexpr):
    """W times zeros."""
    zeros = ()
    for _ in tl.static_range(W):
        zeros = beside(zeros, tl.zeros([BD], tl.float32))
    return zeros


@triton.jit
def short_conv_kernel(
    x, weight, before, y, stride, T, D,
    W: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """y_t = silu(Σ_i weight_i x_{t-W+1+i})"""
    channels, batch, start = place(T, D, BD, SPAN)
    weights, window = load_weights(weight, channels, D, W), first_window(x, batch, start, channels, T, D, stride, W)
    for n in range(start, tl.minimum(start + SPAN, T), AHEAD):
        inputs = ()
        for i in tl.static_range(AHEAD):
            inputs = beside(inputs, row(x, batch, n + i, channels, T, D, stride))
        for i in tl.static_range(AHEAD):
            window = moved_on(window, inputs[i], W)
            total = weighted(window, weights, reach(before, n + i, T, W, PACKED), W, PACKED)
            inside = (channels < D) & (n + i < T)
            tl.store(y + (batch * T + n + i) * D + channels, (total * sigmoid(total)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def short_conv_gradients_kernel(
    x, weight, before, d_y, d_x, d_weight, stride, T, D,
    W: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """d_x_t = Σ_i weight_i inner_{t+W-1-i} with inner = d_y through the silu, and a share of d_weight_i = Σ_t inner_t x_{t-W+1+i}.

    A token's d_x is known once W - 1 more inners are: the program goes that much further than its span, whose weights' share ends with it.
    """
    channels, batch, start = place(T, D, BD, SPAN)
    end = tl.minimum(start + SPAN, T)
    weights, window = load_weights(weight, channels, D, W), first_window(x, batch, start, channels, T, D, stride, W)
    shares, open_ = nothing(W, BD), nothing(W, BD)  # the second is d_x of the last W tokens, as far as it is known
    for n in range(start, end + W - 1, AHEAD):
        inputs, gradients = (), ()
        for i in tl.static_range(AHEAD):
            inputs = beside(inputs, row(x, batch, n + i, channels, T, D, stride))
            gradients = beside(gradients, row(d_y, batch, n + i, channels, T, D, D))
        for i in tl.static_range(AHEAD):
            window = moved_on(window, inputs[i], W)
            reached = reach(before, n + i, T, W, PACKED)
            total = weighted(window, weights, reached, W, PACKED)
            gate = sigmoid(total)
            inner = gradients[i] * gate * (1.0 + total * (1.0 - gate))
            own = tl.where(n + i < end, inner, 0.0)
            shares = with_products(shares, own, window, reached, W, PACKED)
            open_ = with_products(moved_on(open_, tl.zeros([BD], tl.float32), W), inner, weights, reached, W, PACKED)
            t = n + i - (W - 1)
            inside = (channels < D) & (t >= start) & (t < end)
            tl.store(d_x + (batch * T + t) * D + channels, open_[0].to(d_x.dtype.element_ty), mask=inside)
    at = (batch * tl.cdiv(T, SPAN) + start // SPAN) * D + channels
    for i in tl.static_range(W):
        tl.store(d_weight + at * W + i, shares[i], mask=channels < D)


def _spans(x: Tensor) -> int:
    return x.shape[0] * triton.cdiv(x.shape[1], SPAN)


def _launch(kernel, x: Tensor, weight: Tensor, before: Tensor | None, *others: Tensor) -> None:
    sizes = {"T": x.shape[1], "D": x.shape[2], "W": weight.shape[1], "PACKED": before is not None}
    kernel[(_spans(x) * triton.cdiv(x.shape[2], CHANNELS),)](
        x, weight, before, *others, x.stride(1), **sizes, BD=CHANNELS, SPAN=SPAN, AHEAD=AHEAD, num_warps=WARPS
    )


@torch.library.custom_op("headmax::short_conv", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
@on_its_device
def _forward(x: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    y = x.new_empty(x.shape)
    _launch(short_conv_kernel, x, weight, before, y)
    return y


@_forward.register_fake
def _(x, weight, before):
    return x.new_empty(x.shape)


@torch.library.custom_op("headmax::short_conv_backward", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
@on_its_device
def _backward(d_y: Tensor, x: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """d_x, and each span's share of d_weight."""
    d_x, shares = x.new_empty(x.shape), x.new_empty(_spans(x), *weight.shape, dtype=torch.float32)
    _launch(short_conv_gradients_kernel, x, weight, before, d_y.contiguous(), d_x, shares)
    return d_x, shares


@_backward.register_fake
def _(d_y, x, weight, before):
    return x.new_empty(x.shape), x.new_empty(_spans(x), *weight.shape, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx, d_y):
    d_x, shares = _backward(d_y, *ctx.saved_tensors)
    return d_x, shares.sum(0).to(ctx.saved_tensors[1].dtype), None


_forward.register_autograd(_gradient, setup_context=_save)


def short_conv(x: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    """silu of the causal depthwise convolution of x [B,T,D] with weight [D,W]; `before` [T] counts a packed token's predecessors."""
    if x.dtype == torch.float64:
        raise ValueError("short_conv: backend 'triton' computes in float32, got torch.float64; use 'chunkwise'")
    regular = x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1)  # rows of a wider matrix too
    return _forward(x if regular else x.contiguous(), weight.contiguous(), before)
