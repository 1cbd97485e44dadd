"""Gated linear attention: a data-dependent decay per key channel."""

from __future__ import annotations

from torch import Tensor, nn

from headmax.layers.feature_map import FeatureMap
from headmax.layers.feature_map import feature_map as make_feature_map
from headmax.layers.head_gate import HeadGateConfig
from headmax.layers.log_decay import log_sigmoid
from headmax.layers.mixers.base import Projected, RecurrentMixer, Run, StepTerms, head_width
from headmax.layers.norm import OutputNormKind
from headmax.ops import gla


class GatedLinearAttention(RecurrentMixer):
    """S_t = diag(α_t) S_{t-1} + (G^K_t k_t)^T v_t ;  o_t = (G^Q_t q_t) S_t,  with log α_t = logsigmoid(W_2 W_1 x_t + b) / 16"""

    side = ("decay_down_proj",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = None,
        feature_map: FeatureMap = "identity",
        decay_rank: int = 16,
        decay_normalizer: float = 16.0,
        output_norm: OutputNormKind = "head",
        norm_eps: float = 1e-6,
        head_gate: HeadGateConfig | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            head_k_dim=head_width("head_k_dim", head_k_dim, hidden_size // 2, num_heads),
            head_v_dim=head_width("head_v_dim", head_v_dim, hidden_size, num_heads),
            conv_size=conv_size,
            output_norm=output_norm,
            norm_eps=norm_eps,
            head_gate=head_gate,
            backend=backend,
        )
        self.feature_map, self.feature_name = make_feature_map(feature_map), feature_map
        self.decay_normalizer = decay_normalizer
        self.decay_down_proj = nn.Linear(hidden_size, decay_rank, bias=False)
        self.decay_up_proj = nn.Linear(decay_rank, num_heads * self.head_k_dim, bias=True)

    def recurrence(self, p: Projected, run: Run) -> tuple[Tensor, Tensor | None]:
        decay = self.decay_up_proj(p.side[0]).unflatten(-1, (self.num_heads, self.head_k_dim))
        log_decay = log_sigmoid(decay, self.decay_normalizer, self.backend)
        return run(gla, self.feature_map(p.q), self.feature_map(p.k), p.v, log_decay)

    def step_terms(self) -> StepTerms:
        up = self.decay_up_proj
        return StepTerms("channel", self.feature_name, (self.decay_down_proj,), up.weight, up.bias, self.decay_normalizer)
