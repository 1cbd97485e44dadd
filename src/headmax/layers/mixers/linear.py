"""Plain linear attention: no decay, a feature map on q and k."""

from __future__ import annotations

from torch import Tensor

from headmax.layers.feature_map import FeatureMap
from headmax.layers.feature_map import feature_map as make_feature_map
from headmax.layers.head_gate import HeadGateConfig
from headmax.layers.mixers.base import Projected, RecurrentMixer, Run, StepTerms, head_width
from headmax.layers.norm import OutputNormKind
from headmax.ops import linear_attention


class LinearAttention(RecurrentMixer):
    """S_t = S_{t-1} + (G^K_t φ(k_t))^T v_t ;  o_t = (G^Q_t φ(q_t)) S_t"""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = None,
        feature_map: FeatureMap = "identity",
        output_norm: OutputNormKind = "head",
        norm_eps: float = 1e-6,
        head_gate: HeadGateConfig | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            head_k_dim=head_width("head_k_dim", head_k_dim, hidden_size, num_heads),
            head_v_dim=head_width("head_v_dim", head_v_dim, hidden_size, num_heads),
            conv_size=conv_size,
            output_gate=False,
            output_norm=output_norm,
            norm_eps=norm_eps,
            head_gate=head_gate,
            backend=backend,
        )
        self.feature_map, self.feature_name = make_feature_map(feature_map), feature_map

    def recurrence(self, p: Projected, run: Run) -> tuple[Tensor, Tensor | None]:
        return run(linear_attention, self.feature_map(p.q), self.feature_map(p.k), p.v)

    def step_terms(self) -> StepTerms:
        return StepTerms("none", self.feature_name)
