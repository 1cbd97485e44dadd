"""Softmax attention over tokens, for Transformer++ and for hybrids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.fields import Positive
from headmax.layers.fusion import intact
from headmax.layers.mixers.base import MixerOutput, head_width
from headmax.layers.mixers.config import MixerConfig, Shared, Width
from headmax.layers.rotary import Rotary, RotarySettings, rotate
from headmax.ops.packing import Packing


class AttentionState(NamedTuple):
    """The key-value cache."""

    keys: Tensor
    """[batch, heads, seen, dim]"""
    values: Tensor


class AttentionSlots(NamedTuple):
    """Memory for keys and values of a given number of tokens, that a step writes to in place."""

    keys: Tensor
    """[slots, heads, length, dim]"""
    values: Tensor
    position: Tensor
    """[slots] how many tokens each has: where the next one goes."""

    def rows(self, rows: slice) -> AttentionSlots:
        """Some of the slots: views."""
        return AttentionSlots(self.keys[rows], self.values[rows], self.position[rows])

    def store(self, state: AttentionState) -> None:
        length = state.keys.shape[2]
        self.keys[:, :, :length].copy_(state.keys)
        self.values[:, :, :length].copy_(state.values)

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values with one more token's, k and v [slots, heads, 1, dim]."""
        at = self.position.clamp_max(self.keys.shape[2] - 1).view(-1, 1, 1, 1).expand_as(k)  # a sequence that has ended may run on
        return self.keys.scatter_(2, at, k), self.values.scatter_(2, at, v)

    def mask(self) -> Tensor:
        """[slots, 1, 1, length] which keys the next token may see: itself and those before it."""
        return (torch.arange(self.keys.shape[2], device=self.keys.device) <= self.position[:, None])[:, None, None]


def attention_mask(time: int, past: int, mask: Tensor | None, packing: Packing | None, device: torch.device) -> Tensor | None:
    """True where query t may see key s, [batch or 1, 1, time, past + time]; None where plain causality says it all."""
    if mask is None and packing is None and (past == 0 or time == 1):
        return None
    keys = torch.arange(past + time, device=device)
    allowed = (keys <= keys[past:, None])[None, None]
    if packing is not None:
        allowed = allowed & (packing.sequence_ids == packing.sequence_ids[:, None])
    if mask is not None:  # a padded query may see itself, so that no row is empty
        allowed = allowed & (mask[:, None, None, :].bool() | (keys == keys[past:, None]))
    return allowed


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Settings of softmax attention over tokens."""

    name, title, recipe = "attention", "Transformer++", "transformer"
    gated = False
    fla = ("transformer", "Transformer", "Attention")
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj")

    head_k_dim: Width | None = None
    """Width of a head."""
    rotary_base: Positive = 10_000.0
    """Base of the rotary positions."""

    @classmethod
    def of_model(cls, settings: Mapping[str, Any], alone: bool) -> Self:
        """In a hybrid the model's head_k_dim is that of the recurrent layers."""
        return super().of_model({name: x for name, x in settings.items() if alone or name != "head_k_dim"}, alone)

    def build(self, hidden_size: int, num_heads: int, **_: Unpack[Shared]) -> Attention:
        return Attention(hidden_size, num_heads, self)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v per head, with rotary positions."""

    def __init__(self, hidden_size: int, num_heads: int, config: AttentionConfig = AttentionConfig()) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_width("head_k_dim", config.head_k_dim, hidden_size, num_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_k_dim must be even for rotary positions, got {self.head_dim}")
        self.rotary = RotarySettings(self.head_dim, config.rotary_base)
        width = num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        state: AttentionState | AttentionSlots | None = None,
        return_state: bool = False,
        positions: Tensor | Rotary | None = None,
        packing: Packing | None = None,
        mask: Tensor | None = None,
        fused: bool = False,
    ) -> MixerOutput:
        """x [B,T,E] → MixerOutput. `mask` is 0 at padded keys, [B, seen + T], or a finished [B or 1, 1, T, seen + T]."""
        if packing is not None and (return_state or state is not None):
            raise ValueError("Attention: packed sequences leave no state, whose keys could not be told apart: run them one by one")
        past = state.keys.shape[2] if isinstance(state, AttentionState) else 0
        if positions is None:
            start = torch.arange(past, past + x.shape[1], device=x.device)
            positions = (start if packing is None else packing.positions)[None]
        rotary = positions if isinstance(positions, Rotary) else self.rotary.at(positions, x.dtype)
        if not isinstance(state, AttentionSlots) and (mask is None or mask.ndim == 2):
            mask = attention_mask(x.shape[1], past, mask, packing, x.device)
        o, new_state = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), rotary, state, mask)
        return MixerOutput(self.o_proj(o), new_state if return_state else None, None)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, state: AttentionState | AttentionSlots | None, mask: Tensor | None
    ) -> tuple[Tensor, AttentionState | AttentionSlots]:
        """What projections q, k, v [B,T,H*D] read, [B,T,H*D], after the keys and values of `state`; and all of these."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q, k, v = rotate(q, rotary).transpose(1, 2), rotate(k, rotary).transpose(1, 2), v.transpose(1, 2)
        if isinstance(state, AttentionSlots):
            k, v = state.write(k, v)
            mask = state.mask() if mask is None else mask
        elif state is not None:
            k, v = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and k.shape[2] == q.shape[2])
        return o.transpose(1, 2).flatten(2), state if isinstance(state, AttentionSlots) else AttentionState(k, v)

    def flops(self, length: int) -> float:
        """Of scores and read-out, per token of a sequence of that length, forward: to half of it on average."""
        return 2.0 * length * self.o_proj.in_features

    def slots(self, number: int, length: int, position: Tensor) -> AttentionSlots:
        """Empty slots for texts of `length` tokens."""
        weight = self.q_proj.weight
        keys = weight.new_zeros(number, weight.shape[0] // self.head_dim, length, self.head_dim)
        return AttentionSlots(keys, torch.zeros_like(keys), position)

    def step_obstacle(self) -> str | None:
        """As the recurrent mixers have it."""
        own = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        return None if intact(*own) else "a part of an Attention block has been replaced"

    def fusible(self) -> bool:
        return False
