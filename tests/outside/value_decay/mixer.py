"""The mixer around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch.nn.functional as F
from torch import nn

from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.mixers.config import RecurrentConfig, Shared
from headmax.layers.mixers.terms import Projected, Recurrence

from .op import SPEC, value_decay


@dataclass(frozen=True, kw_only=True)
class ValueDecayConfig(RecurrentConfig):
    name, title, recipe = "value_decay", "Value decay", "vd"
    spec = SPEC
    lora_targets = (*RecurrentConfig.lora_targets, "decay_proj")

    normalizer: float = 16.0

    def build(self, hidden_size: int, num_heads: int, **options: Unpack[Shared]) -> ValueDecay:
        return ValueDecay(hidden_size, num_heads, self, **options)


class ValueDecay(RecurrentMixer):
    """S_t = S_{t-1} diag(α_t) + (G^K_t k_t)^T v_t ;  o_t = (G^Q_t q_t) S_t,  with log α_t = logsigmoid(W x_t) / 16"""

    side = ("decay_proj",)
    config: ValueDecayConfig

    def __init__(self, hidden_size: int, num_heads: int, config: ValueDecayConfig = ValueDecayConfig(), **options: Unpack[Shared]) -> None:
        super().__init__(hidden_size, num_heads, config, **options)
        self.decay_proj = nn.Linear(hidden_size, num_heads * self.head_v_dim, bias=False)

    def recurrence(self, p: Projected) -> Recurrence:
        log_decay = F.logsigmoid(p.side[0].unflatten(-1, (self.num_heads, -1))) / self.config.normalizer
        return Recurrence(value_decay, (p.q, p.k, p.v, log_decay))
