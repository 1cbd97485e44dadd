"""Mamba-2: linear attention whose decay and whose strength of writing are one data-dependent step per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.layers.head_gate import HeadGateConfig
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.mixers.config import ConvSize, RecurrentConfig, Shared, Width
from headmax.layers.mixers.gated_deltanet import initial_step
from headmax.layers.mixers.terms import Projected, Recurrence, StepTerms, Weights
from headmax.layers.mlp import swish_gate
from headmax.layers.norm import OutputNormKind, apply_gates
from headmax.ops import linear_attention
from headmax.ops.checks import compute_dtype
from headmax.ops.linear_attention.spec import SPEC


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(RecurrentConfig):
    """Settings of Mamba-2."""

    name, title, recipe = "mamba2", "Mamba-2", "mamba2"
    spec = SPEC
    lora_targets = (*RecurrentConfig.lora_targets, "dt_proj")
    conv_bias = True
    expand_v, mlp_ratio = 2.0, 3.0
    hidden_per_head = 32
    recipe_gate = HeadGateConfig(scale="heads")

    num_groups: Width = 1
    """Heads of B and C (keys and queries), each shared by an equal number of the model's heads."""
    head_k_dim: Width | None = 128
    """Width of B and C: the size of the state for each channel of a head."""
    conv_size: ConvSize = 4
    """Width of the short convolution on C, B and x; 0 for none."""
    output_norm: OutputNormKind = "joint"
    """Norm of the gated output: joint over all heads, as in Mamba-2; per head; or none."""

    def key_heads(self, num_heads: int) -> int:
        if num_heads % self.num_groups:
            raise ValueError(f"num_groups must divide the {num_heads} heads, got {self.num_groups}")
        return self.num_groups

    def build(self, hidden_size: int, num_heads: int, **options: Unpack[Shared]) -> Mamba2:
        return Mamba2(hidden_size, num_heads, self, **options)


class Mamba2(RecurrentMixer):
    """S_t = exp(-Δ_t exp(A_log)) S_{t-1} + (G^K_t Δ_t B_t)^T x_t ;  y_t = (G^Q_t C_t) S_t + D x_t,  with Δ = softplus(W_Δ x + dt_bias)

    Its C, B, x and z are q, k, v and the swish gate here. The gates scale what passes through the state, not D x; the swish gate comes
    before the norm.
    """

    side = ("dt_proj",)
    config: Mamba2Config

    def __init__(self, hidden_size: int, num_heads: int, config: Mamba2Config = Mamba2Config(), **options: Unpack[Shared]) -> None:
        super().__init__(hidden_size, num_heads, config, **options)
        self.dt_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """A uniform in (1, 16); softplus(dt_bias) log-uniform in (0.001, 0.1); D = 1."""
        yield self.A_log, torch.empty_like(self.A_log).uniform_(1, 16).log()
        yield self.dt_bias, initial_step(self.dt_bias)
        yield self.D, torch.ones_like(self.D)

    def recurrence(self, p: Projected) -> Recurrence:
        dtype = compute_dtype(p.q.dtype)
        step = F.softplus(p.side[0].to(dtype) + self.dt_bias.to(dtype))
        write = step if p.write is None else step * p.write
        return Recurrence(linear_attention, (p.q, p.k, p.v, -self.A_log.to(dtype).exp() * step), {"scale": 1.0, "write_gate": write})

    def read_out(self, o: Tensor, p: Projected, weights: Weights | None) -> Tensor:
        """o + D v; then swish gate, norm, output projection."""
        assert p.swish is not None
        o = torch.addcmul(o, p.v, self.D.to(o.dtype)[:, None])
        o = swish_gate(o.flatten(2), p.swish).view_as(o)
        return self.product("o_proj", apply_gates(self.output_norm(o), None, self.norm_gate(p)), weights)

    def step_terms(self) -> StepTerms:
        return StepTerms("step", "identity", (self.dt_proj,), self.A_log, self.dt_bias, skip=self.D, swish_first=True, scale=1.0)
