"""Log-decays in Triton: one pass each way, with nothing kept but the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2
from headmax.ops.library import define_op

BLOCK = 2048
"""Numbers of a program."""
ROWS = 32
"""Rows of a program where a gradient is summed over rows."""


@triton.jit
def log_sigmoid_kernel(x, y, count, normalizer, BLOCK: tl.constexpr):
    """y = log(sigmoid(x)) / normalizer"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t_x = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    t_y = (tl.minimum(t_x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(t_x)))) / normalizer
    tl.store(y + at, t_y, mask=at < count)


@triton.jit
def log_sigmoid_gradient_kernel(d_y, y, d_x, count, normalizer, BLOCK: tl.constexpr):
    """d_x = d_y (1 - exp(normalizer y)) / normalizer"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t_d = tl.load(d_y + at, mask=at < count, other=0.0).to(tl.float32)
    t_y = tl.load(y + at, mask=at < count, other=0.0) * normalizer
    # 1 - e^y loses the digits of a small y, which 1 - e^y = -y - y^2/2 - y^3/6 keeps
    rest = tl.where(t_y > -0.01, -t_y * (1.0 + t_y * (0.5 + t_y / 6.0)), 1.0 - tl.exp(t_y))
    tl.store(d_x + at, (t_d * rest / normalizer).to(d_x.dtype.element_ty), mask=at < count)


def forward(x: Tensor, normalizer: float) -> Tensor:
    y = x.new_empty(x.shape, dtype=torch.float32)
    launch(log_sigmoid_kernel, (cdiv(x.numel(), BLOCK),), (x.contiguous(), y, x.numel(), normalizer), {"BLOCK": BLOCK})
    return y


def backward(d_y: Tensor, y: Tensor, normalizer: float, dtype: torch.dtype) -> Tensor:
    d_x = y.new_empty(y.shape, dtype=dtype)
    launch(log_sigmoid_gradient_kernel, (cdiv(y.numel(), BLOCK),), (d_y.contiguous(), y, d_x, y.numel(), normalizer), {"BLOCK": BLOCK})
    return d_x


_log_sigmoid = define_op("log_sigmoid", forward, lambda x, normalizer: x.new_empty(x.shape, dtype=torch.float32))
_log_sigmoid_backward = define_op("log_sigmoid_backward", backward, lambda d_y, y, normalizer, dtype: y.new_empty(y.shape, dtype=dtype))


class LogSigmoid(torch.autograd.Function):
    """See `log_sigmoid`. Saves its output, which the op that takes it keeps anyway."""

    @staticmethod
    def forward(ctx, x, normalizer):
        y = _log_sigmoid(x, normalizer)
        ctx.save_for_backward(y)
        ctx.normalizer, ctx.dtype = normalizer, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        return _log_sigmoid_backward(d_y, *ctx.saved_tensors, ctx.normalizer, ctx.dtype), None


def log_sigmoid(x: Tensor, normalizer: float) -> Tensor:
    """log(sigmoid(x)) / normalizer, in float32."""
    return LogSigmoid.apply(x, normalizer)


@triton.jit
def softplus_decay_tile(x, log_rate, bias, rows, D: tl.constexpr, PART: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Of a tile of x [rows, D]: where it lies, what is inside, x + bias, its softplus, and -exp(log_rate) of its channels."""
    row, channel = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1) * BD + tl.arange(0, BD)
    at, inside = row[:, None] * D + channel[None, :], (row < rows)[:, None] & (channel < D)[None, :]
    t_b = tl.load(bias + channel, mask=channel < D, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(log_rate + channel // PART, mask=channel < D, other=0.0).to(tl.float32))
    t_x = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + t_b[None, :]
    rest = tl.exp(-tl.abs(t_x))
    # log(1 + r) loses the digits of a small r, which r - r^2/2 + r^3/3 keeps
    softplus = tl.maximum(t_x, 0.0) + tl.where(rest < 0.01, rest * (1.0 - rest * (0.5 - rest / 3.0)), tl.log(1.0 + rest))
    return at, inside, t_x, softplus, rate[None, :]


@triton.jit
def softplus_decay_kernel(x, log_rate, bias, y, rows, D: tl.constexpr, PART: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """y = -exp(log_rate) softplus(x + bias)"""
    at, inside, _, softplus, rate = softplus_decay_tile(x, log_rate, bias, rows, D, PART, BR, BD)
    tl.store(y + at, rate * softplus, mask=inside)


@triton.jit
def softplus_decay_gradient_kernel(
    d_y, x, log_rate, bias, d_x, shares, rows, D: tl.constexpr, PART: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """d_x, and the program's sums for log_rate and bias: shares [2, programs, D]."""
    at, inside, t_x, softplus, rate = softplus_decay_tile(x, log_rate, bias, rows, D, PART, BR, BD)
    t_d = tl.load(d_y + at, mask=inside, other=0.0).to(tl.float32) * rate
    t_g = t_d / (1.0 + tl.exp(-t_x))
    tl.store(d_x + at, t_g.to(d_x.dtype.element_ty), mask=inside)
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    share, size = shares + tl.program_id(0) * D + channel, tl.num_programs(0) * D
    tl.store(share, tl.sum(t_d * softplus, 0), mask=channel < D)
    tl.store(share + size, tl.sum(t_g, 0), mask=channel < D)


def _softplus_launch(kernel, x: Tensor, log_rate: Tensor, *tensors: Tensor) -> None:
    rows, width = x.shape
    block = min(64, power_of_2(width))
    sizes = {"D": width, "PART": width // log_rate.shape[0], "BR": ROWS, "BD": block}
    launch(kernel, (cdiv(rows, ROWS), cdiv(width, block)), (*tensors, rows), sizes)


def softplus_forward(x: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    y = x.new_empty(x.shape, dtype=torch.float32)
    _softplus_launch(softplus_decay_kernel, x, log_rate, x.contiguous(), log_rate, bias, y)
    return y


def softplus_backward(d_y: Tensor, x: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    d_x, shares = x.new_empty(x.shape), x.new_empty(2, cdiv(x.shape[0], ROWS), x.shape[1], dtype=torch.float32)
    _softplus_launch(softplus_decay_gradient_kernel, x, log_rate, d_y.contiguous(), x.contiguous(), log_rate, bias, d_x, shares)
    return d_x, shares


def fake_softplus_backward(d_y, x, log_rate, bias):
    return x.new_empty(x.shape), x.new_empty(2, cdiv(x.shape[0], ROWS), x.shape[1], dtype=torch.float32)


_softplus_decay = define_op("softplus_decay", softplus_forward, lambda x, log_rate, bias: x.new_empty(x.shape, dtype=torch.float32))
_softplus_decay_backward = define_op("softplus_decay_backward", softplus_backward, fake_softplus_backward)


class SoftplusDecay(torch.autograd.Function):
    """See `softplus_decay`. Saves its inputs."""

    @staticmethod
    def forward(ctx, x, log_rate, bias):
        ctx.save_for_backward(x, log_rate, bias)
        return _softplus_decay(x.flatten(0, -2), log_rate, bias).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        x, log_rate, bias = ctx.saved_tensors
        d_x, shares = _softplus_decay_backward(d_y.flatten(0, -2), x.flatten(0, -2), log_rate, bias)
        d_rate, d_bias = shares.sum(1)
        return d_x.view(x.shape), d_rate.view(len(log_rate), -1).sum(1).to(log_rate.dtype), d_bias.to(bias.dtype)


def softplus_decay(x: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """-exp(log_rate) softplus(x + bias), in float32."""
    return SoftplusDecay.apply(x, log_rate, bias)
