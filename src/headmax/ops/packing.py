"""Several sequences in one row of tokens, and the chunk layout that keeps them apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

CHUNK = 64
"""Tokens per chunk, in every chunked backend but for LONG_CHUNK."""
LONG_CHUNK = 128
"""Tokens per chunk in linear attention's kernels for wide heads, whose state is so large that it had better be stored half as often."""
MOST = 2**40
"""Tokens, more than any memory holds."""
TABLES = ("slot_tokens", "token_slots", "chunk_table", "chunk_starts", "long_chunk_table", "long_chunk_starts")
DEVICE_TABLES = ("cu_seqlens", "sequence_ids", "positions", *TABLES)

_built = WeakIdKeyDictionary()
"""What `Packing.of` built, by the boundaries' tensor."""


class Packing:
    """N sequences laid end to end in one row of T tokens, checked once and ready for every layer of a batch.

    `cu_seqlens` are the N+1 boundaries 0 = c_0 <= c_1 <= ... <= c_N = T; where two are equal the sequence between is empty, and its
    final state is the one it began with. Building a Packing reads them on the host; using it afterwards costs no synchronisation, and
    `torch.compile` treats the tables as ordinary inputs. It does not change: `to` and `pin_memory` return another.
    """

    cu_seqlens: Tensor
    """[N+1] int64 boundaries, on the device."""
    sequence_ids: Tensor
    """[T] which sequence a token belongs to."""
    positions: Tensor
    """[T] a token's place in its own sequence."""
    longest: int
    """Tokens of the longest sequence."""
    size: int
    """Slots per chunk of the padded layout: CHUNK, or less where every sequence is shorter."""
    rows: slice = slice(None)
    """Which sequences of a longer row these are, where this is a piece of one."""
    slot_tokens: Tensor
    """[chunks * size] the token in each slot of the padded layout, T for an empty slot."""
    token_slots: Tensor
    """[T] the slot of each token: the inverse of `slot_tokens`."""
    slot_starts: Tensor
    """[N+1] int64 on the host: the first chunk of each sequence in the padded layout, and the number of chunks."""
    chunk_table: Tensor
    """[chunks, 2] first token and number of tokens of each chunk of CHUNK tokens, for kernels, which need no padding."""
    chunk_starts: Tensor
    """[N+1] the first of those chunks of each sequence, on the device."""
    long_chunk_table: Tensor
    long_chunk_starts: Tensor
    """The same for chunks of LONG_CHUNK tokens."""

    def __init__(self, cu_seqlens: Tensor | Sequence[int], device: torch.device | str | None = None, num_tokens: int | None = None) -> None:
        if isinstance(cu_seqlens, Tensor) and device is None:
            device = cu_seqlens.device
        bounds = _bounds(cu_seqlens)
        lengths = np.diff(bounds)
        if bounds.size < 2 or bounds[0] != 0 or (lengths < 0).any() or bounds[-1] == 0:
            raise ValueError(f"cu_seqlens must rise from 0, one step per sequence, to one token or more, got {_preview(bounds.tolist())}")
        total = int(bounds[-1])
        if total > MOST or total != (num_tokens or total):  # before tables of that many tokens are built
            raise ValueError(f"cu_seqlens must end at time = {num_tokens or 'the number of tokens'}, got {total}")
        ids = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(total) - np.repeat(bounds[:-1], lengths)

        self.longest = int(lengths.max())
        self.size = min(CHUNK, 1 << (self.longest - 1).bit_length())
        slot_starts = _starts(lengths, self.size)
        slots = np.repeat(slot_starts[:-1] * self.size, lengths) + positions
        tokens = np.full(slot_starts[-1] * self.size, total)
        tokens[slots] = np.arange(total)

        tables = [bounds, ids, positions, slot_starts, tokens, slots]
        for size in (CHUNK, LONG_CHUNK):
            first = np.flatnonzero(positions % size == 0)
            tables += [np.stack([first, np.minimum(bounds[1:][ids[first]] - first, size)], axis=1), _starts(lengths, size)]
        for name, table in zip(("cu_seqlens", "sequence_ids", "positions", "slot_starts", *TABLES), tables, strict=True):
            x = torch.from_numpy(table)
            setattr(self, name, x if device is None or name not in DEVICE_TABLES else x.to(device, non_blocking=True))

    def _with_tables(self, change: Callable[[Tensor], Tensor]) -> Packing:
        """The same packing with other device tables."""
        other = copy.copy(self)
        for name in DEVICE_TABLES:
            setattr(other, name, change(getattr(self, name)))
        return other

    def to(self, device: torch.device | str) -> Packing:
        """This packing with its device tables there, itself if they are already."""
        device = torch.device(device)
        return self if self.cu_seqlens.device == device else self._with_tables(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> Packing:
        """This packing with its device tables in pinned memory: `to` a GPU then does not wait."""
        return self._with_tables(torch.Tensor.pin_memory)

    def piece(self, start: int, stop: int) -> Packing:
        """The tokens from `start` to `stop` as one of several ranks holds them. Their positions go on counting, by which the ops know that
        a sequence has begun before; sequences without a token in here are left out, but for empty ones. It is built on the host.
        """
        first, last = self.cu_seqlens[:-1].tolist(), self.cu_seqlens[1:].tolist()
        if not 0 <= start < stop <= self.num_tokens:
            raise ValueError(f"Packing.piece: start and stop must lie in 0 to {self.num_tokens} in this order, got {start} and {stop}")
        here = [
            n
            for n, ends in enumerate(zip(first, last, strict=True))
            if max(start, ends[0]) < min(stop, ends[1])
            or (ends[0] == ends[1] and (start <= ends[0] < stop or ends[0] == stop == self.num_tokens))
        ]
        bounds = [max(start, first[here[0]]), *(min(stop, last[n]) for n in here)]
        piece = Packing([bound - start for bound in bounds], self.cu_seqlens.device)
        piece.positions[: bounds[1] - start] += start - first[here[0]]
        piece.rows = slice(here[0], here[0] + len(here))
        return piece

    def chunks(self, size: int) -> tuple[Tensor, Tensor]:
        """Where chunks of CHUNK or LONG_CHUNK tokens lie, and the first of each sequence."""
        return (self.chunk_table, self.chunk_starts) if size == CHUNK else (self.long_chunk_table, self.long_chunk_starts)

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return self.sequence_ids.shape[0]

    @classmethod
    def of(cls, cu_seqlens: Tensor | Sequence[int], device: torch.device, num_tokens: int) -> Packing:
        """The packing of a tensor handed to layer after layer: the first builds it, and it is kept until the tensor changes or goes."""
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.is_inference():  # does not tell when it changes
            return cls(cu_seqlens, device, num_tokens)
        key, known = (cu_seqlens._version, device), _built.get(cu_seqlens)
        if known is None or known[0] != key:
            known = _built[cu_seqlens] = key, cls(cu_seqlens, device, num_tokens)
        return known[1]

    @classmethod
    def from_positions(cls, position_ids: Tensor) -> Packing | None:
        """The packing of one row whose positions do not count on by one somewhere, as `DataCollatorWithFlattening` makes them, or None."""
        row = position_ids.flatten()
        breaks = (row.diff() != 1).nonzero().flatten() + 1
        if breaks.numel() == 0:
            return None
        return cls(torch.cat([breaks.new_zeros(1), breaks, breaks.new_tensor([row.numel()])]))

    def __repr__(self) -> str:
        return f"Packing({self.num_sequences} sequences, {self.num_tokens} tokens)"


def _bounds(cu_seqlens: Tensor | Sequence[int]) -> np.ndarray:
    """As int64 on the host, a copy. In numpy, as a loader builds one for every batch and torch would wake its threads for small tables."""
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.device.type == "meta" or cu_seqlens.layout != torch.strided):
        where = "on the meta device: give Packing(...).to('meta')" if cu_seqlens.device.type == "meta" else f"{cu_seqlens.layout}"
        raise ValueError(f"cu_seqlens must have numbers to read, got a tensor {where}")
    try:
        bounds = cu_seqlens if isinstance(cu_seqlens, Tensor) else torch.as_tensor(cu_seqlens)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # such as text, or numbers of more than 64 bits
        raise ValueError(f"cu_seqlens must be a 1-D integer tensor or a list of integers, got {cu_seqlens!r:.80}") from error
    integer = not (bounds.is_floating_point() or bounds.is_complex() or bounds.dtype == torch.bool)
    if bounds.ndim != 1 or not (integer or bounds.numel() == 0):
        raise ValueError(f"cu_seqlens must be a 1-D integer tensor, got {bounds.dtype} of shape {list(bounds.shape)}")
    return torch.asarray(bounds, dtype=torch.int64, device="cpu", copy=True).numpy()


def _starts(lengths: np.ndarray, size: int) -> np.ndarray:
    """The first chunk of each sequence when every sequence starts a chunk of its own, and the number of chunks."""
    return np.append(0, np.cumsum((lengths + size - 1) // size))


def _preview(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {', '.join(map(str, values[-3:]))}]"
