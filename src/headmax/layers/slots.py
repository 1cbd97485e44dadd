"""What the layers remember while decoding, at fixed addresses: one slot per sequence, as a CUDA graph needs it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headmax.layers.block import Block
from headmax.layers.mixers.attention import Attention, AttentionState
from headmax.layers.mixers.base import RecurrentState
from headmax.layers.rotary import Rotary, RotarySettings


class Place(NamedTuple):
    """Where the tokens of a step stand, one per slot from the first on; made once, used by every layer."""

    position: Tensor
    """[slots] how many tokens come before."""
    rotary: dict[RotarySettings | None, Rotary | None]
    """The angles there, for each setting in the model."""
    seen: Tensor | None
    """[slots, 1, 1, length] which keys an attention layer may look at; None without one."""


class RecurrentSlots:
    """States of constant size; the convolutions' inputs of q, k and v lie side by side in one tensor."""

    def __init__(self, block: Block, slots: int, state_dtype: torch.dtype) -> None:
        mixer, weight = block.mixer, block.mixer.q_proj.weight
        sizes = (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
        self.recurrent = weight.new_zeros(slots, *sizes, dtype=state_dtype)  # type: ignore[operator]
        self.channels = [conv.weight.shape[0] for conv in mixer.convs or ()]  # type: ignore[union-attr]
        self.conv: Tensor | None = None
        if self.channels:
            self.conv = weight.new_zeros(slots, mixer.convs[0].width - 1, sum(self.channels))  # type: ignore[operator, index, union-attr]

    def state(self, rows: slice) -> RecurrentState:
        """Some slots as a mixer takes them: views, no copies."""
        return RecurrentState(self.recurrent[rows], () if self.conv is None else self.conv[rows].split(self.channels, dim=-1))

    def store(self, rows: slice, state: RecurrentState) -> None:
        own = self.state(rows)
        own.recurrent.copy_(state.recurrent)
        for mine, new in zip(own.conv, state.conv, strict=True):
            mine.copy_(new)


class AttentionSlots:
    """Keys and values of up to `length` tokens."""

    def __init__(self, block: Block, slots: int, length: int) -> None:
        weight, width = block.mixer.q_proj.weight, block.mixer.head_dim
        self.keys = weight.new_zeros(slots, weight.shape[0] // width, length, width)  # type: ignore[operator]
        self.values = torch.zeros_like(self.keys)

    def store(self, rows: slice, state: AttentionState) -> None:
        length = state.keys.shape[2]
        self.keys[rows, :, :length].copy_(state.keys)
        self.values[rows, :, :length].copy_(state.values)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        """What one more token [slots, H, 1, D] reads, itself included: [slots, H * D]."""
        count = q.shape[0]
        keys, values = self.keys[:count], self.values[:count]
        at = place.position.view(-1, 1, 1, 1).expand_as(k)
        keys.scatter_(2, at, k.to(keys.dtype))
        values.scatter_(2, at, v.to(values.dtype))
        o = torch.nn.functional.scaled_dot_product_attention(q.to(keys.dtype), keys, values, attn_mask=place.seen)
        return o.flatten(1)


Slots = RecurrentSlots | AttentionSlots


def make_slots(block: Block, slots: int, state_dtype: torch.dtype, length: int | None) -> Slots:
    if not isinstance(block.mixer, Attention):
        return RecurrentSlots(block, slots, state_dtype)
    assert length is not None
    return AttentionSlots(block, slots, length)


def plain_step(block: Block, x: Tensor, slots: Slots, place: Place) -> Tensor:
    """The block's own forward on one token of each of the first sequences, x [slots, E]; the state is put back where it was."""
    mixer, rows = block.mixer, slice(0, x.shape[0])
    if isinstance(slots, AttentionSlots):
        h = block.mixer_norm(x).unsqueeze(1)
        q, k, v = mixer.heads(mixer.q_proj(h), mixer.k_proj(h), mixer.v_proj(h), place.rotary[mixer.rotary])
        x = x + mixer.o_proj(slots.attend(q, k, v, place))
        return x + block.mlp(block.mlp_norm(x))
    hidden, state, _ = block(x.unsqueeze(1), state=slots.state(rows), return_state=True, positions=place.rotary[mixer.rotary])
    slots.store(rows, state)
    return hidden.squeeze(1)
