"""Log-decays from projections of the hidden state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.ops.checks import compute_dtype
from headmax.ops.registry import Lazy, dispatch, register, transformed


class _LogSigmoid(torch.autograd.Function):
    """Saves only its output y: dy/dx = (1 - sigmoid(x)) / n = -expm1(n y) / n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, normalizer: float) -> Tensor:
        y = F.logsigmoid(x.to(compute_dtype(x.dtype))) / normalizer
        ctx.save_for_backward(y)
        ctx.normalizer, ctx.dtype = normalizer, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return (d_y * torch.expm1(ctx.normalizer * y) / -ctx.normalizer).to(ctx.dtype), None


def _log_sigmoid(x: Tensor, normalizer: float) -> Tensor:
    if transformed():
        return F.logsigmoid(x.to(compute_dtype(x.dtype))) / normalizer
    return _LogSigmoid.apply(x, normalizer)


_kernel = Lazy("headmax.ops.kernels.decay", "log_sigmoid", needs="triton", interpreted=True)
register("log_sigmoid", {"reference": _log_sigmoid, "triton": _kernel})


def log_sigmoid(x: Tensor, normalizer: float, backend: str = "auto") -> Tensor:
    """log(sigmoid(x)) / normalizer, in float32 (float64 for float64 x)."""
    return dispatch("log_sigmoid", backend, x)(x, normalizer)


def _softplus_decay(x: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    dtype = compute_dtype(x.dtype)
    step = F.softplus(x.to(dtype) + bias.to(dtype)).unflatten(-1, (log_rate.shape[0], -1))
    return (-log_rate.to(dtype).exp()[:, None] * step).flatten(-2)


register(
    "softplus_decay",
    {"reference": _softplus_decay, "triton": Lazy("headmax.ops.kernels.decay", "softplus_decay", needs="triton", interpreted=True)},
)


def softplus_decay(x: Tensor, log_rate: Tensor, bias: Tensor, backend: str = "auto") -> Tensor:
    """-exp(log_rate) softplus(x + bias) of x [..., D] and bias [D], with log_rate [H] for H equal groups of channels; in float32 (float64
    for float64 x)."""
    return dispatch("softplus_decay", backend, x)(x, log_rate, bias)
