"""Kimi delta attention: the delta rule with a data-dependent decay per key channel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from headmax.layers.log_decay import softplus_decay
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.mixers.config import ConvSize, RecurrentConfig, Shared, Width
from headmax.layers.mixers.gated_deltanet import initial_step
from headmax.layers.mixers.terms import Projected, Recurrence, StepTerms, Weights
from headmax.layers.norm import apply_gates
from headmax.ops import kda
from headmax.ops.checks import compute_dtype
from headmax.ops.kda.spec import SPEC


@dataclass(frozen=True, kw_only=True)
class KDAConfig(RecurrentConfig):
    """Settings of Kimi delta attention."""

    name, title, recipe = "kda", "KDA", "kda"
    spec = SPEC
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "decay_down_proj", "decay_up_proj", "b_proj", "gate_down_proj", "gate_up_proj")
    output_gate = False
    hidden_per_head = 128

    conv_size: ConvSize = 4
    """Width of the short convolution on q, k and v; 0 for none."""
    decay_rank: Width | None = None
    """Rank of the projection to log-decays; a head's width unless given."""
    gate_rank: Width | None = None
    """Rank of the projection to the output gate; a head's width unless given."""

    def build(self, hidden_size: int, num_heads: int, **options: Unpack[Shared]) -> KimiDeltaAttention:
        return KimiDeltaAttention(hidden_size, num_heads, self, **options)


class KimiDeltaAttention(RecurrentMixer):
    """S' = diag(α_t) S_{t-1} ;  u_t = β_t (G^K_t v_t - k_t S') ;  S_t = S' + k_t^T u_t ;  o_t = (G^Q_t q_t) S_t

    with log α = -exp(A_log) softplus(W_2 W_1 x + dt_bias), β = sigmoid(W_b x) and q, k of unit length. The output's gate is a sigmoid,
    of a product of two narrow matrices.
    """

    side = ("decay_down_proj", "b_proj")
    shared = ("decay_down_proj", "gate_down_proj")
    single = ("k_proj", "v_proj", "gate_down_proj", "gate_up_proj", "o_proj")
    config: KDAConfig

    def __init__(self, hidden_size: int, num_heads: int, config: KDAConfig = KDAConfig(), **options: Unpack[Shared]) -> None:
        super().__init__(hidden_size, num_heads, config, **options)
        decay_rank, gate_rank = config.decay_rank or self.head_k_dim, config.gate_rank or self.head_v_dim
        self.decay_down_proj = nn.Linear(hidden_size, decay_rank, bias=False)
        self.decay_up_proj = nn.Linear(decay_rank, num_heads * self.head_k_dim, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.gate_down_proj = nn.Linear(hidden_size, gate_rank, bias=False)
        self.gate_up_proj = nn.Linear(gate_rank, num_heads * self.head_v_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads * self.head_k_dim))
        self.reset_parameters()

    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """A uniform in (1, 16); softplus(dt_bias) log-uniform in (0.001, 0.1)."""
        yield self.A_log, torch.empty_like(self.A_log).uniform_(1, 16).log()
        yield self.dt_bias, initial_step(self.dt_bias)

    def output_gate(self, x: Tensor, weights: Weights | None) -> Tensor:
        return self.product("gate_up_proj", self.product("gate_down_proj", x, weights), weights)

    def recurrence(self, p: Projected) -> Recurrence:
        low, b = p.side
        log_decay = softplus_decay(self.decay_up_proj(low), self.A_log, self.dt_bias, self.backend).unflatten(-1, (self.num_heads, -1))
        beta = b.to(compute_dtype(b.dtype)).sigmoid()
        return Recurrence(kda, (p.q, p.k, p.v, log_decay, beta), {"normalize_qk": True})

    def read_out(self, o: Tensor, p: Projected, weights: Weights | None) -> Tensor:
        """As for every mixer, with a sigmoid in place of the swish."""
        assert p.swish is not None
        return self.product("o_proj", apply_gates(self.output_norm(o), None, self.norm_gate(p)) * p.swish.sigmoid(), weights)

    def step_terms(self) -> StepTerms:
        gate = self.gate_down_proj, self.gate_up_proj
        projections = self.decay_down_proj, self.b_proj
        return StepTerms("channel delta", "unit_length", projections, self.A_log, self.dt_bias, decay_up=self.decay_up_proj, gate=gate)
