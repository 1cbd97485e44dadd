"""Softmax attention over tokens, for Transformer++ and for hybrids."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.layers.mixers.base import MixerOutput, head_width
from headmax.layers.rotary import Rotary, RotarySettings, rotate
from headmax.ops.packing import Packing


class AttentionState(NamedTuple):
    """The key-value cache."""

    keys: Tensor
    """[batch, heads, seen, dim]"""
    values: Tensor


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


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v per head, with rotary positions."""

    def __init__(self, hidden_size: int, num_heads: int, *, head_dim: int | None = None, rotary_base: float = 10_000.0) -> None:
        super().__init__()
        self.head_dim = head_width("head_k_dim", head_dim, hidden_size, num_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_k_dim must be even for rotary positions, got {self.head_dim}")
        self.rotary = RotarySettings(self.head_dim, rotary_base)
        width = num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        state: AttentionState | None = None,
        return_state: bool = False,
        positions: Tensor | Rotary | None = None,
        packing: Packing | None = None,
        mask: Tensor | None = None,
        fused: bool = False,
    ) -> MixerOutput:
        """x [B,T,E] → MixerOutput. `mask` is 0 at padded keys, [B, seen + T], or a finished [B or 1, 1, T, seen + T]."""
        if packing is not None and (return_state or state is not None):
            raise ValueError("Attention: packed sequences leave no state, whose keys could not be told apart: run them one by one")
        past = 0 if state is None else state.keys.shape[2]
        if positions is None:
            start = torch.arange(past, past + x.shape[1], device=x.device)
            positions = (start if packing is None else packing.positions)[None]
        rotary = positions if isinstance(positions, Rotary) else self.rotary.at(positions, x.dtype)
        q, k, v = self.heads(self.q_proj(x), self.k_proj(x), self.v_proj(x), rotary)
        if state is not None:
            k, v = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
        if mask is None or mask.ndim == 2:
            mask = attention_mask(x.shape[1], past, mask, packing, x.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and not past)
        hidden = self.o_proj(o.transpose(1, 2).flatten(2))
        return MixerOutput(hidden, AttentionState(k, v) if return_state else None, None)

    def fusible(self) -> bool:
        return False

    def heads(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """The projections [B,T,H*D] by head, q and k turned: [B,H,T,D]."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        return rotate(q, rotary).transpose(1, 2), rotate(k, rotary).transpose(1, 2), v.transpose(1, 2)
