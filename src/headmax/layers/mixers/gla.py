"""Gated linear attention: a data-dependent decay per key channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from headmax.fields import Positive
from headmax.layers.feature_map import FEATURE_MAPS
from headmax.layers.log_decay import log_sigmoid
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.mixers.config import FeatureMapConfig, RecurrentConfig, Shared, Width
from headmax.layers.mixers.terms import Projected, Recurrence, StepTerms
from headmax.ops import gla
from headmax.ops.gla.spec import SPEC


@dataclass(frozen=True, kw_only=True)
class GLAConfig(FeatureMapConfig):
    """Settings of gated linear attention."""

    name, title, recipe = "gla", "GLA", "gla"
    spec = SPEC
    fla = ("gla", "GLA", "GatedLinearAttention")
    lora_targets = (*RecurrentConfig.lora_targets, "decay_down_proj", "decay_up_proj")
    expand_k = 0.5

    decay_rank: Width = 16
    """Rank of the projection to log-decays."""
    decay_normalizer: Positive = 16.0
    """Divisor of the log-decays."""

    def build(self, hidden_size: int, num_heads: int, **options: Unpack[Shared]) -> GatedLinearAttention:
        return GatedLinearAttention(hidden_size, num_heads, self, **options)


class GatedLinearAttention(RecurrentMixer):
    """S_t = diag(α_t) S_{t-1} + (G^K_t k_t)^T v_t ;  o_t = (G^Q_t q_t) S_t,  with log α_t = logsigmoid(W_2 W_1 x_t + b) / 16"""

    side = shared = ("decay_down_proj",)
    config: GLAConfig

    def __init__(self, hidden_size: int, num_heads: int, config: GLAConfig = GLAConfig(), **options: Unpack[Shared]) -> None:
        super().__init__(hidden_size, num_heads, config, **options)
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self.decay_down_proj = nn.Linear(hidden_size, config.decay_rank, bias=False)
        self.decay_up_proj = nn.Linear(config.decay_rank, num_heads * self.head_k_dim, bias=True)

    def recurrence(self, p: Projected) -> Recurrence:
        decay = self.decay_up_proj(p.side[0]).unflatten(-1, (self.num_heads, self.head_k_dim))
        log_decay = log_sigmoid(decay, self.config.decay_normalizer, self.backend)
        return Recurrence(gla, (self.feature_map(p.q), self.feature_map(p.k), p.v, log_decay))

    def step_terms(self) -> StepTerms:
        normalizer, up = self.config.decay_normalizer, self.decay_up_proj
        return StepTerms("channel", self.config.feature_map, (self.decay_down_proj,), normalizer=normalizer, decay_up=up)
