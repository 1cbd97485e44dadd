"""Log-decays in Triton: one pass each way, with nothing kept but the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2
from headmax.ops.library import define_op, once_differentiable

BLOCK = 2048
"""Numbers of a program."""
ROWS = 32
"""Rows of a program where a gradient is summed over rows."""


@triton.jit
def log_sigmoid_kernel(x, y, count, normalizer, BLOCK: tl.constexpr):
    """y = log(sigmoid(x)) / normalizer, of `count` numbers."""
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + o_x, mask=o_x < count, other=0.0).to(tl.float32)  # [BLOCK]
    b_y = (tl.minimum(b_x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_x)))) / normalizer
    tl.store(y + o_x, b_y, mask=o_x < count)


@triton.jit
def log_sigmoid_gradient_kernel(d_y, y, d_x, count, normalizer, BLOCK: tl.constexpr):
    """d_x = d_y (1 - exp(normalizer y)) / normalizer"""
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_d = tl.load(d_y + o_x, mask=o_x < count, other=0.0).to(tl.float32)  # [BLOCK]
    b_y = tl.load(y + o_x, mask=o_x < count, other=0.0) * normalizer  # [BLOCK]
    # 1 - e^y loses the digits of a small y, which 1 - e^y = -y - y^2/2 - y^3/6 keeps
    b_slope = tl.where(b_y > -0.01, -b_y * (1.0 + b_y * (0.5 + b_y / 6.0)), 1.0 - tl.exp(b_y))
    tl.store(d_x + o_x, (b_d * b_slope / normalizer).to(d_x.dtype.element_ty), mask=o_x < count)


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
    """Of a tile of x [rows, D]: offsets, mask, x + bias and its softplus [BR, BD], and -exp(log_rate) of its channels [1, BD]."""
    o_r, o_d = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1) * BD + tl.arange(0, BD)
    o_x, m_x = o_r[:, None] * D + o_d[None, :], (o_r < rows)[:, None] & (o_d < D)[None, :]
    b_bias = tl.load(bias + o_d, mask=o_d < D, other=0.0).to(tl.float32)  # [BD]
    b_rate = -tl.exp(tl.load(log_rate + o_d // PART, mask=o_d < D, other=0.0).to(tl.float32))  # [BD]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32) + b_bias[None, :]  # [BR, BD]
    b_power = tl.exp(-tl.abs(b_x))
    # log(1 + p) loses the digits of a small p, which p - p^2/2 + p^3/3 keeps
    b_log = tl.where(b_power < 0.01, b_power * (1.0 - b_power * (0.5 - b_power / 3.0)), tl.log(1.0 + b_power))
    return o_x, m_x, b_x, tl.maximum(b_x, 0.0) + b_log, b_rate[None, :]


@triton.jit
def softplus_decay_kernel(x, log_rate, bias, y, rows, D: tl.constexpr, PART: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """y = -exp(log_rate) softplus(x + bias) [rows, D], with bias [D] and log_rate [D / PART]."""
    o_x, m_x, _, b_softplus, b_rate = softplus_decay_tile(x, log_rate, bias, rows, D, PART, BR, BD)
    tl.store(y + o_x, b_rate * b_softplus, mask=m_x)


@triton.jit
def softplus_decay_gradient_kernel(
    d_y, x, log_rate, bias, d_x, shares, rows, D: tl.constexpr, PART: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """d_x [rows, D], and the program's sums for log_rate and bias: shares [2, programs, D]."""
    o_x, m_x, b_x, b_softplus, b_rate = softplus_decay_tile(x, log_rate, bias, rows, D, PART, BR, BD)
    b_d = tl.load(d_y + o_x, mask=m_x, other=0.0).to(tl.float32) * b_rate  # [BR, BD]
    b_dx = b_d / (1.0 + tl.exp(-b_x))
    tl.store(d_x + o_x, b_dx.to(d_x.dtype.element_ty), mask=m_x)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    p_share, size = shares + tl.program_id(0) * D + o_d, tl.num_programs(0) * D
    tl.store(p_share, tl.sum(b_d * b_softplus, 0), mask=o_d < D)
    tl.store(p_share + size, tl.sum(b_dx, 0), mask=o_d < D)


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
