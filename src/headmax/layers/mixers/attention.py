"""Softmax attention over tokens, for Transformer++ and for hybrids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from headmax.fields import Positive
from headmax.layers.fusion import intact
from headmax.layers.head_parallel import divide, shard_part
from headmax.layers.mixers.base import head_width
from headmax.layers.mixers.config import MixerConfig, Width
from headmax.layers.mixers.terms import MixerOutput
from headmax.layers.norm import RMSNorm
from headmax.layers.packed_attention import packed_attention
from headmax.layers.rotary import Rotary, RotarySettings, rotate
from headmax.ops.context import up_to_here
from headmax.ops.packing import Packing


class AttentionState(NamedTuple):
    """The key-value cache."""

    keys: Tensor
    """[batch, heads, seen, dim]"""
    values: Tensor


class AttentionSlots(NamedTuple):
    """Preallocated keys and values, which a decoding step writes in place."""

    keys: Tensor
    """[slots, heads, length, dim]"""
    values: Tensor
    position: Tensor
    """[slots] number of tokens in each, which is where the next one goes."""

    def rows(self, rows: slice) -> AttentionSlots:
        """Some of the slots: views."""
        return AttentionSlots(self.keys[rows], self.values[rows], self.position[rows])

    def store(self, state: AttentionState) -> None:
        length = state.keys.shape[2]
        self.keys[:, :, :length].copy_(state.keys)
        self.values[:, :, :length].copy_(state.values)

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values after writing those of one more token, k and v [slots, heads, 1, dim]."""
        at = self.position.clamp_max(self.keys.shape[2] - 1).view(-1, 1, 1, 1).expand_as(k)  # a sequence that has ended may run on
        return self.keys.scatter_(2, at, k), self.values.scatter_(2, at, v)

    def mask(self, window: int | None = None) -> Tensor:
        """[slots, 1, 1, length] keys that the next token may see: its own and those before it, at most `window` of them."""
        age = self.position[:, None] - torch.arange(self.keys.shape[2], device=self.keys.device)
        return ((age >= 0) if window is None else (age >= 0) & (age < window))[:, None, None]


def attention_mask(time: int, past: int, mask: Tensor | None, device: torch.device, window: int | None = None) -> Tensor | None:
    """True where query t may see key s, [batch or 1, 1, time, past + time]; None where causality says it all.

    `mask` [batch, past + time] is 0 where there is no token; a window counts tokens.
    """
    if window is not None and past == 0 and mask is None:
        return None  # what `packed_attention` knows
    if window is not None and past + time <= window:
        window = None
    if mask is None and window is None and (past == 0 or time == 1):
        return None
    keys = torch.arange(past + time, device=device)
    allowed = (keys <= keys[past:, None])[None, None]
    if window is not None:
        tokens = keys[None] if mask is None else mask.long().cumsum(-1)
        allowed = allowed & (tokens[:, past:, None] - tokens[:, None] < window).unsqueeze(1)
    if mask is not None:  # a padded query may see itself, so that no row is empty
        allowed = allowed & (mask[:, None, None, :].bool() | (keys == keys[past:, None]))
    return allowed


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries q [B,H,T,D] to keys and values [B,G,S,D]. Without a mask it is causal if T = S, and a single query sees all."""
    groups, time = k.shape[1], q.shape[2]
    if time == 1:  # the queries of a key head take the place of time
        return F.scaled_dot_product_attention(q.view(len(q), groups, -1, q.shape[-1]), k, v, attn_mask=mask).view_as(q)
    k, v = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and k.shape[2] == time)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Settings of softmax attention over tokens."""

    name, title, recipe = "attention", "Transformer++", "transformer"
    gated = False
    fla = ("transformer", "Transformer", "Attention")
    lora_targets = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj")

    num_heads: Width | None = None
    """Heads of queries: those of the model unless given."""
    num_kv_heads: Width | None = None
    """Heads of keys and values (grouped-query attention); as many as query heads unless given."""
    head_k_dim: Width | None = None
    """Width of a head."""
    window: Width | None = None
    """Sliding window: how many tokens a query sees, including itself; all before it unless given."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head."""
    output_gate: bool = False
    """Multiply the output by a sigmoid gate of the hidden state, as Qwen3.5 does."""
    rotary_dim: Width | None = None
    """Channels of a head with rotary positions; all unless given."""
    rotary_base: Positive = 10_000.0
    """Base of the rotary positions."""

    @classmethod
    def of_model(cls, settings: Mapping[str, Any], alone: bool) -> Self:
        """In a hybrid the model's head_k_dim is that of the recurrent layers."""
        return super().of_model({name: x for name, x in settings.items() if alone or name != "head_k_dim"}, alone)

    @property
    def layer_type(self) -> str:
        return "full_attention" if self.window is None else "sliding_attention"

    def build(self, hidden_size: int, num_heads: int, norm_eps: float = 1e-6, backend: str = "auto", **_: Any) -> Attention:
        return Attention(hidden_size, self.num_heads or num_heads, self, norm_eps, backend)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v per head, with rotary positions."""

    of_all_heads = ("q_norm", "k_norm")
    """Names of the parts that are not of single heads."""
    context_group: ProcessGroup | None = None
    """Context parallelism: ranks with consecutive pieces of equal length of every sequence; keys and values are gathered."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        config: AttentionConfig = AttentionConfig(),
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.config, self.window = config, config.window
        self.head_dim = head_width("head_k_dim", config.head_k_dim, hidden_size, num_heads)
        groups, turned = config.num_kv_heads or num_heads, config.rotary_dim or self.head_dim
        if num_heads % groups:
            raise ValueError(f"num_kv_heads must divide the {num_heads} heads, got {groups}")
        if turned % 2 or turned > self.head_dim:
            name = "head_k_dim" if config.rotary_dim is None else "rotary_dim"
            raise ValueError(f"{name} must be even for rotary positions, and rotary_dim at most head_k_dim {self.head_dim}; got {turned}")
        self.rotary = RotarySettings(turned, config.rotary_base)
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, groups * self.head_dim, bias=False)
        self.g_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False) if config.output_gate else None
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, norm_eps, backend) if config.qk_norm else None for _ in range(2))

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
        self.check_inputs(state, return_state, positions, packing, mask)
        past = state.keys.shape[2] if isinstance(state, AttentionState) else 0
        if positions is None:
            start = torch.arange(past, past + x.shape[1], device=x.device)
            positions = (start if packing is None else packing.positions)[None]
        rotary = positions if isinstance(positions, Rotary) else self.rotary.at(positions, x.dtype)
        if not isinstance(state, AttentionSlots) and (mask is None or mask.ndim == 2):
            mask = attention_mask(x.shape[1], past, mask, x.device, self.window)
        gate = None if self.g_proj is None else self.g_proj(x)
        o, new_state = self.read(self.q_proj(x), self.k_proj(x), self.v_proj(x), gate, rotary, state, mask, packing)
        return MixerOutput(self.o_proj(o), new_state if return_state else None, None)

    def check_inputs(
        self, state: tuple | None, return_state: bool, positions: Tensor | Rotary | None, packing: Packing | None, mask: Tensor | None
    ) -> None:
        """What packed sequences and pieces of sequences go together with."""
        if state is not None and not isinstance(state, AttentionState | AttentionSlots):
            raise ValueError(f"Attention: state must be an AttentionState or AttentionSlots, got a {type(state).__name__}")
        keeps_states = return_state or state is not None
        if packing is not None and keeps_states:
            raise ValueError("Attention: packed sequences leave no state, whose keys could not be told apart: run them one by one")
        if self.context_group is not None and (keeps_states or mask is not None):
            raise ValueError("context_group: pieces of sequences take no state and no mask, and leave no state")
        if self.context_group is not None and packing is None and positions is None:
            raise ValueError("Attention: positions must be given with a context_group, those of this rank's tokens, [batch or 1, time]")

    def read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        rotary: Rotary,
        state: AttentionState | AttentionSlots | None,
        mask: Tensor | None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, AttentionState | AttentionSlots]:
        """Attention of projections q, gate [B,T,H*D], k, v [B,T,G*D], continued from `state`: the output [B,T,H*D] and the new state."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        o, state = self.attention(rotate(q, rotary), rotate(k, rotary), v, state, mask, packing)
        return o.flatten(2) if gate is None else o.flatten(2) * gate.sigmoid(), state

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: AttentionState | AttentionSlots | None,
        mask: Tensor | None,
        packing: Packing | None,
    ) -> tuple[Tensor, AttentionState | AttentionSlots]:
        """o [B,T,H,D] of q [B,T,H,D] and of k, v [B,T,G,D] after those in `state`, and the new state."""
        time, group = q.shape[1], self.context_group
        if group is not None:
            k, v = up_to_here(torch.stack([k, v], 2), group).unbind(2)
        first = state is None or (isinstance(state, AttentionState) and not state.keys.shape[2])
        if group is not None or packing is not None or (self.window is not None and first and mask is None):
            o = packed_attention(q, k, v, packing, self.window)
            return o, AttentionState(*(x[:, -time:].transpose(1, 2) for x in (k, v)))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if isinstance(state, AttentionSlots):
            k, v = state.write(k, v)
            return attend(q, k, v, state.mask(self.window) if mask is None else mask).transpose(1, 2), state
        if state is not None:
            k, v = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
        return attend(q, k, v, mask).transpose(1, 2), AttentionState(k, v)

    def set_tensor_mesh(self, mesh: DeviceMesh) -> None:
        """Splits the heads over the ranks of the mesh."""
        for name, projection in (("heads", self.q_proj), ("key heads", self.k_proj)):
            divide(f"the {name} of Attention", projection.out_features // self.head_dim, mesh.size())
        shard_part(self, mesh, "o_proj", self.of_all_heads)

    def flops(self, length: int) -> float:
        """FLOPs of scores and output per token of a sequence of that length, forward."""
        seen = length / 2 if self.window is None or self.window > length else self.window * (1 - self.window / (2 * length))
        return 4.0 * seen * self.o_proj.in_features

    def slots(self, number: int, length: int, position: Tensor) -> AttentionSlots:
        """Empty slots for texts of `length` tokens."""
        weight = self.k_proj.weight
        keys = weight.new_zeros(number, weight.shape[0] // self.head_dim, length, self.head_dim)
        return AttentionSlots(keys, torch.zeros_like(keys), position)

    def step_obstacle(self) -> str | None:
        """As in the recurrent mixers."""
        own = [module for module in (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.o_proj) if module is not None]
        return None if intact(*own) else "a part of an Attention block has been replaced"

    def fusible(self) -> bool:
        return False
