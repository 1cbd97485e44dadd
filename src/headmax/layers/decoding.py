"""One token at a time, with what the layers remember at fixed addresses: one slot per sequence, as a CUDA graph needs it."""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.layers.block import Block
from headmax.layers.mixers.attention import Attention, AttentionState
from headmax.layers.mixers.base import RecurrentMixer, RecurrentState
from headmax.layers.rotary import Rotary, RotarySettings

WIDEST_KEY = 256
"""Channels of a head's key that a program of the mixer's kernel holds."""


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

    def __init__(self, mixer: RecurrentMixer, slots: int, state_dtype: torch.dtype) -> None:
        weight = mixer.q_proj.weight
        sizes = (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
        self.recurrent = weight.new_zeros(slots, *sizes, dtype=state_dtype)
        self.channels = [q.out_features for q in (mixer.q_proj, mixer.k_proj, mixer.v_proj)]
        self.conv = weight.new_zeros(slots, mixer.conv_size - 1, sum(self.channels)) if mixer.conv_size else None

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

    def __init__(self, mixer: Attention, slots: int, length: int) -> None:
        weight = mixer.q_proj.weight
        self.keys = weight.new_zeros(slots, weight.shape[0] // mixer.head_dim, length, mixer.head_dim)
        self.values = torch.zeros_like(self.keys)

    def store(self, rows: slice, state: AttentionState) -> None:
        length = state.keys.shape[2]
        self.keys[rows, :, :length].copy_(state.keys)
        self.values[rows, :, :length].copy_(state.values)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        """What one more token [slots, H, 1, D] reads, itself included: [slots, H * D]."""
        keys, values = self.keys[: len(q)], self.values[: len(q)]
        at = place.position.clamp_max(keys.shape[2] - 1).view(-1, 1, 1, 1).expand_as(k)  # a sequence that has ended may run on
        keys.scatter_(2, at, k)
        values.scatter_(2, at, v)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=place.seen).flatten(1)


Slots = RecurrentSlots | AttentionSlots


def make_slots(block: Block, slots: int, state_dtype: torch.dtype, length: int | None) -> Slots:
    if isinstance(block.mixer, RecurrentMixer):
        return RecurrentSlots(block.mixer, slots, state_dtype)
    assert isinstance(block.mixer, Attention)
    assert length is not None
    return AttentionSlots(block.mixer, slots, length)


def plain_step(block: Block, x: Tensor, slots: Slots, place: Place) -> Tensor:
    """The block's own forward on one token of each of the first sequences, x [slots, E]; the state is put back where it was."""
    mixer = block.mixer
    if isinstance(mixer, Attention):
        h, turn = block.mixer_norm(x).unsqueeze(1), place.rotary[mixer.rotary]
        assert isinstance(slots, AttentionSlots)
        assert turn is not None
        x = x + mixer.o_proj(slots.attend(*mixer.heads(mixer.q_proj(h), mixer.k_proj(h), mixer.v_proj(h), turn), place))
        return x + block.mlp(block.mlp_norm(x))
    assert isinstance(mixer, RecurrentMixer)
    assert isinstance(slots, RecurrentSlots)
    rows = slice(0, len(x))
    hidden, state, _ = block(x.unsqueeze(1), state=slots.state(rows), return_state=True, positions=place.rotary[mixer.rotary])
    slots.store(rows, state)
    return hidden.squeeze(1)


def unfit(block: Block) -> str | None:
    """Why a block cannot be fused (see triton_block.py), or None; it then decodes by its own forward."""
    mixer, weight = block.mixer, block.mlp.down_proj.weight
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if weight.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"kernels need a CUDA device, the model is on {weight.device.type}"
    if weight.dtype == torch.float64:
        return "kernels compute in float32, the model is float64"
    for name, module in block.named_modules():
        if name.endswith("_proj") and type(module) is not nn.Linear:
            return f"{name} is a {type(module).__name__}, not a plain matrix"
    if isinstance(mixer, RecurrentMixer):
        if type(mixer).step_terms is RecurrentMixer.step_terms:
            return f"{type(mixer).__name__} does not say how one token is decoded"
        if mixer.head_k_dim > WIDEST_KEY:
            return f"keys are at most {WIDEST_KEY} wide, got {mixer.head_k_dim}"
    return None
