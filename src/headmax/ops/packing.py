"""Several sequences in one row of tokens, and the chunk layout that keeps them apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 64
"""Tokens per chunk in the packed layout; every chunked backend shares it."""


class Packing:
    """N sequences laid end to end in one row of T tokens, checked once and ready for every layer of a batch.

    `cu_seqlens` are the N+1 boundaries 0 = c_0 < c_1 < ... < c_N = T. Building a Packing reads them on the host;
    using it afterwards costs no synchronisation, and `torch.compile` treats the tables as ordinary inputs.
    """

    cu_seqlens: Tensor
    """[N+1] int64 boundaries, on the device."""
    sequence_ids: Tensor
    """[T] which sequence a token belongs to."""
    positions: Tensor
    """[T] a token's place in its own sequence."""
    chunk_tokens: Tensor
    """[num_chunks * CHUNK] the token in each slot of the chunked layout, T for an empty slot."""
    token_slots: Tensor
    """[T] the slot of each token: the inverse of `chunk_tokens`."""
    chunk_starts: Tensor
    """[N+1] int64 on the host: the first chunk of each sequence, and the number of chunks."""

    def __init__(self, cu_seqlens: Tensor | Sequence[int], device: torch.device | str | None = None) -> None:
        if isinstance(cu_seqlens, Tensor):
            if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
                raise ValueError(f"cu_seqlens must be a 1-D integer tensor, got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}")
            device = cu_seqlens.device if device is None else device
        bounds = torch.as_tensor(cu_seqlens, dtype=torch.int64).cpu()
        lengths = bounds.diff()
        if bounds.numel() < 2 or bounds[0] != 0 or (lengths <= 0).any():
            raise ValueError(f"cu_seqlens must rise strictly from 0, one step per sequence, got {_preview(bounds)}")
        chunks = (lengths + CHUNK - 1) // CHUNK
        starts = torch.cat([chunks.new_zeros(1), chunks.cumsum(0)])
        ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions = torch.arange(int(bounds[-1])) - bounds[ids]
        slots = starts[ids] * CHUNK + positions
        tokens = torch.full((int(starts[-1]) * CHUNK,), int(bounds[-1]))
        tokens[slots] = torch.arange(int(bounds[-1]))
        self.cu_seqlens = bounds.to(device, non_blocking=True)
        self.sequence_ids = ids.to(device, non_blocking=True)
        self.positions = positions.to(device, non_blocking=True)
        self.chunk_tokens = tokens.to(device, non_blocking=True)
        self.token_slots = slots.to(device, non_blocking=True)
        self.chunk_starts = starts

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return self.sequence_ids.shape[0]

    @classmethod
    def from_positions(cls, position_ids: Tensor) -> Packing | None:
        """The packing that positions restarting at 0 describe, as `DataCollatorWithFlattening` makes them; None if they never restart."""
        starts = (position_ids.flatten() == 0).nonzero().flatten()
        if starts.numel() < 2 or int(starts[0]) != 0:
            return None
        return cls(torch.cat([starts, starts.new_tensor([position_ids.numel()])]))

    def __repr__(self) -> str:
        return f"Packing({self.num_sequences} sequences, {self.num_tokens} tokens)"


def _preview(bounds: Tensor) -> str:
    values = bounds.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {', '.join(map(str, values[-3:]))}]"
