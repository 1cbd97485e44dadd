"""Short causal convolution: each channel sees its own last few tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.layers.initialized import Initialized
from headmax.ops.packing import Packing
from headmax.ops.registry import has_kernels


def short_convolution(x: Tensor, weight: Tensor, state: Tensor | None, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """silu of the causal depthwise convolution of x [B,T,D] with weight [D,W], and the last W - 1 inputs, which `state` is too."""
    time, width = x.shape[1], weight.shape[1]
    if state is None and x.dtype != torch.float64 and has_kernels(x.device.type):
        from headmax.layers.triton_conv import short_conv

        y = short_conv(x, weight, None if packing is None else packing.positions)
        last = x[:, 1 - width :]
        return y, F.pad(last, (0, 0, width - 1 - last.shape[1], 0))
    padded = F.pad(x, (0, 0, width - 1, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=1)
    weight = weight.to(x.dtype)
    y = padded[:, width - 1 :] * weight[:, -1]
    for i in range(width - 1):
        term = padded[:, i : i + time] * weight[:, i]
        if packing is not None:  # a token this early in its sequence has no such predecessor
            term = term * (packing.positions >= width - 1 - i).to(x.dtype).unsqueeze(-1)
        y = y + term
    return F.silu(y), padded[:, time:]


class ShortConvolution(Initialized):
    """y_t = silu(Σ_i weight_i x_{t-width+1+i}), depthwise; the state is the last width - 1 inputs [batch, width - 1, channels]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        if width < 2:
            raise ValueError(f"conv_size: a short convolution spans at least 2 tokens, got {width}")
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.reset_parameters()

    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        bound = self.width**-0.5
        yield self.weight, torch.empty_like(self.weight).uniform_(-bound, bound)

    def forward(self, x: Tensor, state: Tensor | None = None, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
        return short_convolution(x, self.weight, state, packing)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.width}"
