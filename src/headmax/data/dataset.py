"""Samples of a prepared folder: memory-mapped, globally shuffled, addressed by number."""

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
    """A `Source` of windows of `length` tokens, which tile the concatenated shards.

    Sample i is window p(i mod n) of n, where p is the shuffle of epoch i div n. So one number is a position in the data: a step has the
    same samples on any number of ranks, and resuming needs no other state.
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
            existing = " and ".join(name for name, shards in index.splits.items() if shards) or "none"
            raise ValueError(
                f"{folder}: no split {split!r}, only {existing}; give `headmax data prepare` --valid or --valid-fraction to make one"
            )
        if index.tokens(split) < length:
            raise ValueError(f"{folder}: {index.tokens(split)} tokens in split {split!r}, fewer than one sample of {length}")
        self.vocab_size, self.length, self.seed, self.documents, self.split = index.vocab_size, length, seed, documents, split
        self.num_samples = index.tokens(split) // length
        """Per epoch; an incomplete window at the end is left out."""
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
        """Samples by number. `labels` shares the memory of `input_ids`, unless documents are separate."""
        windows = self.windows(indices)
        rows = np.empty((len(windows), self.length), dtype=np.int64)
        bounds: list[np.ndarray] = []
        for n, start in enumerate((windows * self.length).tolist()):
            self._fill(rows[n], start, bounds if self.documents == "separate" else None, n * self.length)
        refuse_outside(self.folder, rows, self.vocab_size)
        if self.documents == "concatenate":
            input_ids = torch.from_numpy(rows)
            return Batch(input_ids, input_ids, None)
        starts, row = np.concatenate(bounds), rows.reshape(1, -1)
        if (np.diff(starts) <= 0).any() or starts[-1] >= row.size:
            raise ValueError(f"{self.folder}: documents do not begin in increasing order; prepare the folder again")
        labels = row.copy()
        labels[0, starts] = -100
        return Batch(torch.from_numpy(row), torch.from_numpy(labels), Packing(torch.from_numpy(np.append(starts, row.size))))

    def windows(self, indices: Sequence[int]) -> np.ndarray:
        """The window of each sample."""
        numbers = np.asarray(indices, dtype=np.int64)
        if numbers.ndim != 1 or not len(numbers) or numbers.min() < 0:
            raise ValueError(f"indices must be one or more numbers of at least 0, got {indices}")
        epochs, places = np.divmod(numbers, self.num_samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            places[chosen] = permute(places[chosen], self.num_samples, (self.seed, int(epoch)))
        return places

    def _fill(self, row: np.ndarray, start: int, bounds: list[np.ndarray] | None, offset: int) -> None:
        """Reads the window at token `start`, across shards. Appends to `bounds` where its sequences begin, plus `offset`."""
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
