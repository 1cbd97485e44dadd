"""Short causal convolution: each channel sees its own last few tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.layers.initialized import Initialized
from headmax.ops.packing import Packing
from headmax.ops.registry import has_kernels


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
        if state is None and x.dtype != torch.float64 and has_kernels(x.device.type):
            from headmax.layers.triton_conv import short_conv

            y = short_conv(x, self.weight, None if packing is None else packing.positions)
            last = x[:, 1 - self.width :]
            return y, F.pad(last, (0, 0, self.width - 1 - last.shape[1], 0))
        time = x.shape[1]
        padded = F.pad(x, (0, 0, self.width - 1, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=1)
        weight = self.weight.to(x.dtype)
        y = padded[:, self.width - 1 :] * weight[:, -1]
        for i in range(self.width - 1):
            term = padded[:, i : i + time] * weight[:, i]
            if packing is not None:  # a token this early in its sequence has no such predecessor
                term = term * (packing.positions >= self.width - 1 - i).to(x.dtype).unsqueeze(-1)
            y = y + term
        return F.silu(y), padded[:, time:]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.width}"
