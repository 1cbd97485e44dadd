"""Samples out of a prepared folder: memory-mapped, shuffled over the whole of it, found by number."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from headmax.data.permutation import permute
from headmax.data.shards import INDEX, STARTS, Index, mapped, refuse_outside
from headmax.data.source import Batch
from headmax.ops.packing import Packing


class TokenShards:
    """A `Source` of windows of `length` tokens, which tile the shards laid end to end.

    Sample i is window p(i mod n) of the n there are, where p is a shuffle of its own in every epoch, i div n. So a place in the data is one
    number, a step's batch is the same samples on however many ranks, and going on after it needs nothing else.
    """

    def __init__(
        self,
        folder: Path,
        *,
        length: int,
        seed: int,
        documents: Literal["concatenate", "separate"] = "concatenate",
        split: Literal["train", "valid"] = "train",
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if documents not in ("concatenate", "separate"):
            raise ValueError(f"documents must be 'concatenate' or 'separate', got {documents!r}")
        folder = Path(folder)
        index = Index.read(folder)
        if not index.splits.get(split):
            there = " and ".join(name for name, shards in index.splits.items() if shards) or "no other"
            raise ValueError(f"{folder}: no split {split!r}, but {there}; `headmax data prepare` makes it with --valid or --valid-fraction")
        if index.tokens(split) < length:
            raise ValueError(f"{folder}: {index.tokens(split)} tokens in split {split!r}, fewer than one sample of {length}")
        self.vocab_size, self.length, self.seed, self.documents, self.split = index.vocab_size, length, seed, documents, split
        self.num_samples = index.tokens(split) // length
        """Per epoch; what does not fill a window at the end is left out."""
        self.folder, self.tokenizer_sha256, self.document_token = folder, index.tokenizer_sha256, index.document_token
        self._checksum = hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()
        shards = index.splits[split]
        self._bounds = [0, *accumulate(shard.tokens for shard in shards)]
        self._tokens = [mapped(folder / f"{shard.name}.tokens", index.dtype, shard.tokens) for shard in shards]
        self._starts = [mapped(folder / f"{shard.name}.documents", STARTS, shard.documents) for shard in shards]

    @property
    def identity(self) -> dict[str, str | int]:
        return {
            "index": self._checksum,
            "split": self.split,
            "length": self.length,
            "seed": self.seed,
            "documents": self.documents,
        }

    def batch(self, indices: Sequence[int]) -> Batch:
        """Samples by number. `labels` are `input_ids`, the same memory, unless documents are kept apart."""
        windows = self.windows(indices)
        rows = np.empty((len(windows), self.length), dtype=np.int64)
        bounds: list[np.ndarray] = []
        for n, start in enumerate((windows * self.length).tolist()):
            self._fill(rows[n], start, bounds if self.documents == "separate" else None, n * self.length)
        refuse_outside(self.folder, rows, self.vocab_size)
        if self.documents == "concatenate":
            input_ids = torch.from_numpy(rows)
            return Batch(input_ids, input_ids, None)
        begins, row = np.concatenate(bounds), rows.reshape(1, -1)
        if (np.diff(begins) <= 0).any() or begins[-1] >= row.size:
            raise ValueError(f"{self.folder}: documents do not begin one after the other; prepare the folder again")
        labels = row.copy()
        labels[0, begins] = -100
        return Batch(torch.from_numpy(row), torch.from_numpy(labels), Packing(torch.from_numpy(np.append(begins, row.size))))

    def windows(self, indices: Sequence[int]) -> np.ndarray:
        """Which window each sample is."""
        numbers = np.asarray(indices, dtype=np.int64)
        if numbers.ndim != 1 or not len(numbers) or numbers.min() < 0:
            raise ValueError(f"indices must be one or more numbers from 0 on, got {indices}")
        epochs, places = np.divmod(numbers, self.num_samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            places[chosen] = permute(places[chosen], self.num_samples, (self.seed, int(epoch)))
        return places

    def _fill(self, row: np.ndarray, start: int, bounds: list[np.ndarray] | None, offset: int) -> None:
        """The window from token `start` on, from as many shards as it takes; `bounds` gets where sequences begin, `offset` added."""
        if bounds is not None:
            bounds.append(np.array([offset]))
        shard, filled = bisect_right(self._bounds, start) - 1, 0
        while filled < len(row):
            at = start + filled - self._bounds[shard]
            piece = self._tokens[shard][at : at + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            if bounds is not None:
                starts = self._starts[shard]
                first, last = np.searchsorted(starts, [at + (filled == 0), at + len(piece)])
                bounds.append(starts[first:last] - at + filled + offset)
            filled, shard = filled + len(piece), shard + 1
