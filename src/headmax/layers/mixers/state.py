"""The state of a recurrent layer: as values, and as slots that decoding updates in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headmax.ops.packing import Packing


class RecurrentState(NamedTuple):
    """All that a recurrent layer remembers, of constant size."""

    recurrent: Tensor
    """[sequences, heads, key, value]"""
    conv: tuple[Tensor, ...]
    """The last inputs of the short convolutions on q, k and v, [sequences, width - 1, channels]; empty without convolutions."""
    tokens: Tensor | None = None
    """[sequences] tokens read so far, where a mixer counts positions itself."""


class RecurrentSlots(NamedTuple):
    """The same as memory that is updated in place, one slot per sequence."""

    recurrent: Tensor
    """[slots, heads, key, value]"""
    inputs: Tensor | None
    """The convolutions' last inputs in one tensor, [slots, width - 1, channels of q, k and v]; None without convolutions."""
    channels: tuple[int, ...]
    """Channels of q, k and v in it."""

    @property
    def conv(self) -> tuple[Tensor, ...]:
        """As in RecurrentState: views."""
        return () if self.inputs is None else self.inputs.split(self.channels, dim=-1)

    @classmethod
    def of(cls, state: RecurrentState) -> RecurrentSlots:
        """A copy of a state."""
        inputs = torch.cat(state.conv, dim=-1) if state.conv else None
        return cls(state.recurrent.clone(memory_format=torch.contiguous_format), inputs, tuple(x.shape[-1] for x in state.conv))

    def rows(self, rows: slice) -> RecurrentSlots:
        """Some of the slots: views."""
        return RecurrentSlots(self.recurrent[rows], None if self.inputs is None else self.inputs[rows], self.channels)

    def state(self) -> RecurrentState:
        """The same memory as a state."""
        return RecurrentState(self.recurrent, self.conv)

    def update_conv(self, conv: tuple[Tensor, ...]) -> RecurrentSlots:
        """Stores the convolutions' new inputs; returns the slots."""
        for own, new in zip(self.conv, conv, strict=True):
            own.copy_(new)
        return self

    def store(self, state: RecurrentState | RecurrentSlots) -> None:
        torch._foreach_copy_([self.recurrent, *self.conv], [state.recurrent, *state.conv])


def check_inputs(mixer: str, x: Tensor, state: object, packing: object, mask: object) -> None:
    """What a recurrent mixer is called with beside x [B,T,E]."""
    if state is not None and not isinstance(state, RecurrentState | RecurrentSlots):
        raise ValueError(f"{mixer}: state must be a RecurrentState or RecurrentSlots, got a {type(state).__name__}: one of another layer?")
    if packing is not None and not isinstance(packing, Packing):
        raise ValueError(f"{mixer}: packing must be a Packing, such as Packing(cu_seqlens), got a {type(packing).__name__}")
    if isinstance(mask, Tensor) and mask.shape != x.shape[:2]:
        raise ValueError(f"{mixer}: mask must be [batch, time] = {list(x.shape[:2])}, got {list(mask.shape)}")
