"""RMS normalisation: of the residual stream, and of what the heads read out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from headmax.layers.initialized import Initialized
from headmax.ops.checks import compute_dtype
from headmax.ops.registry import suggest

OutputNormKind = Literal["head", "joint", "none"]


class RMSNorm(Initialized):
    """y = weight * x / sqrt(mean(x^2) + eps), computed in float32."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        yield self.weight, torch.ones_like(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(compute_dtype(x.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class OutputNorm(nn.Module):
    """Normalises the read-out [batch, time, heads, value].

    "head": each head by itself, one weight shared by the heads, as the backbones have it. It divides a per-head factor out
    again (see docs/derivation.md). "joint": all heads together, which keeps their proportions. "none": nothing.
    """

    def __init__(self, kind: OutputNormKind, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        if kind not in get_args(OutputNormKind):
            raise ValueError(f"output_norm: unknown {kind!r}{suggest(kind, get_args(OutputNormKind))}")
        self.kind = kind
        if kind != "none":
            self.norm = RMSNorm(head_dim if kind == "head" else num_heads * head_dim, eps)

    def forward(self, o: Tensor) -> Tensor:
        if self.kind == "none":
            return o
        return self.norm(o) if self.kind == "head" else self.norm(o.flatten(2)).view_as(o)
