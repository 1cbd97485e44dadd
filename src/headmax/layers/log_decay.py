"""Log-decays from projections of the hidden state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.ops.checks import compute_dtype
from headmax.ops.registry import Lazy, dispatch, register


class _LogSigmoid(torch.autograd.Function):
    """The gradient needs the result alone: dy/dx = (1 - sigmoid(x)) / n = -expm1(n y) / n. So x need not be kept."""

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


_kernel = Lazy("headmax.layers.triton_decay", "log_sigmoid", needs="triton", interpreted=True)
register("log_sigmoid", {"reference": _LogSigmoid.apply, "triton": _kernel})


def log_sigmoid(x: Tensor, normalizer: float, backend: str = "auto") -> Tensor:
    """log(sigmoid(x)) / normalizer, in float32 (float64 for float64 x)."""
    return dispatch("log_sigmoid", backend, x)(x, normalizer)
