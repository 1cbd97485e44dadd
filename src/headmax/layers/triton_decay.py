"""Log-decays in Triton: one pass each way, with nothing kept but the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.launch import launch
from headmax.ops.library import define_op
from headmax.ops.triton_tiles import cdiv

BLOCK = 2048
"""Numbers of a program."""


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
