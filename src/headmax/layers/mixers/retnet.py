"""RetNet: rotary positions and a fixed decay per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.fields import Positive
from headmax.layers.feature_map import FEATURE_MAPS
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.mixers.config import FeatureMapConfig, Shared
from headmax.layers.mixers.state import RecurrentSlots, RecurrentState
from headmax.layers.mixers.terms import Projected, Recurrence, StepTerms, Weights
from headmax.layers.rotary import Rotary, RotarySettings, rotate, turned
from headmax.ops import linear_attention
from headmax.ops.checks import compute_dtype
from headmax.ops.linear_attention.spec import SPEC
from headmax.ops.packing import Packing


@dataclass(frozen=True, kw_only=True)
class RetNetConfig(FeatureMapConfig):
    """Settings of RetNet."""

    name, title, recipe = "retnet", "RetNet", "retnet"
    spec = SPEC
    fla = ("retnet", "RetNet", "MultiScaleRetention")
    mlp_ratio, expand_v = 2.0, 2.0

    rotary_base: Positive = 10_000.0
    """Base of the rotary positions."""

    def build(self, hidden_size: int, num_heads: int, **options: Unpack[Shared]) -> RetNet:
        return RetNet(hidden_size, num_heads, self, **options)


def count_tokens(x: Tensor, state: RecurrentState | RecurrentSlots | None, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """The position of each token of x [B,T,E] in its sequence, [B or 1, T], and how many tokens each sequence then has."""
    positions = (torch.arange(x.shape[1], device=x.device) if packing is None else packing.positions)[None]
    lengths = torch.full(x.shape[:1], x.shape[1], device=x.device) if packing is None else packing.cu_seqlens.diff()
    if state is None:
        return positions, lengths
    if isinstance(state, RecurrentSlots) or state.tokens is None:
        raise ValueError("RetNet: positions must be given with a state that was made with positions, [batch or 1, time]")
    before = state.tokens[:, None] if packing is None else state.tokens[packing.sequence_ids]
    return positions + before, state.tokens + lengths


class RetNet(RecurrentMixer):
    """S_t = γ_h S_{t-1} + (G^K_t k_t)^T v_t ;  o_t = (G^Q_t q_t) S_t,  with γ_h = 1 - 2^(-5-h) and rotary q, k"""

    rotary: RotarySettings
    config: RetNetConfig

    def __init__(self, hidden_size: int, num_heads: int, config: RetNetConfig = RetNetConfig(), **options: Unpack[Shared]) -> None:
        super().__init__(hidden_size, num_heads, config, **options)
        if self.head_k_dim % 2:
            raise ValueError(f"head_k_dim must be even for rotary positions, got {self.head_k_dim}")
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self.rotary = RotarySettings(self.head_k_dim, config.rotary_base)
        self.rotates_products = config.feature_map == "identity" and not config.conv_size

    def project(self, x: Tensor, *, positions: Tensor | Rotary | None, weights: Weights | None, **options: Any) -> Projected:
        """With q and k after feature map and rotation; fused, a kernel rotates them on their way out of one product with the scores."""
        tokens = None
        if positions is None and self.context_group is not None and options["packing"] is None:
            raise ValueError("RetNet: positions must be given with a context_group, those of this rank's tokens, [batch or 1, time]")
        if positions is None:
            positions, tokens = count_tokens(x, options["state"], options["packing"])
        rotary = positions if isinstance(positions, Rotary) else self.rotary.at(positions, x.dtype)
        if weights is None or not self.rotates_products:
            p = super().project(x, positions=rotary, weights=weights, **options)
            return p._replace(q=rotate(self.feature_map(p.q), rotary), k=rotate(self.feature_map(p.k), rotary), tokens=tokens)
        q, k, rest = turned(F.linear(x, weights.joint), rotary, self.num_heads, self.head_k_dim, self.backend)
        read, write = self.gates(q, k, x, rest[..., : weights.columns[-2]] if weights.columns[-2] else None)
        v = self.product("v_proj", x, weights).unflatten(-1, (-1, self.head_v_dim))
        return Projected(q, k, v, (), self.output_gate(x, weights), read, write, (), tokens)

    def joint(self) -> list[str]:
        """Keys too where they are rotated on their way out of the product."""
        return ["q_proj", "k_proj"] if self.rotates_products else super().joint()

    def recurrence(self, p: Projected) -> Recurrence:
        return Recurrence(linear_attention, (p.q, p.k, p.v, self.log_decay(p.q.device, compute_dtype(p.q.dtype))))

    def log_decay(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """log γ_h, [heads]"""
        first = -5 - self.first_head
        return torch.arange(first, first - self.num_heads, -1, device=device, dtype=dtype).exp2().neg().log1p()

    def step_terms(self) -> StepTerms:
        return StepTerms("retnet", self.config.feature_map)
