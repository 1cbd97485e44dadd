"""Plain linear attention: no decay, a feature map on q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from headmax.layers.feature_map import FEATURE_MAPS
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.mixers.config import FeatureMapConfig, Shared
from headmax.layers.mixers.terms import Projected, Recurrence, StepTerms
from headmax.ops import linear_attention
from headmax.ops.linear_attention.spec import SPEC


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(FeatureMapConfig):
    """Settings of plain linear attention."""

    name, title, recipe = "linear", "Linear attention", "linear"
    spec = SPEC
    language, output_gate = False, False

    def build(self, hidden_size: int, num_heads: int, **options: Unpack[Shared]) -> LinearAttention:
        return LinearAttention(hidden_size, num_heads, self, **options)


class LinearAttention(RecurrentMixer):
    """S_t = S_{t-1} + (G^K_t φ(k_t))^T v_t ;  o_t = (G^Q_t φ(q_t)) S_t"""

    config: LinearAttentionConfig

    def __init__(
        self, hidden_size: int, num_heads: int, config: LinearAttentionConfig = LinearAttentionConfig(), **options: Unpack[Shared]
    ) -> None:
        super().__init__(hidden_size, num_heads, config, **options)
        self.feature_map = FEATURE_MAPS[config.feature_map]

    def recurrence(self, p: Projected) -> Recurrence:
        return Recurrence(linear_attention, (self.feature_map(p.q), self.feature_map(p.k), p.v))

    def step_terms(self) -> StepTerms:
        return StepTerms("none", self.config.feature_map)
