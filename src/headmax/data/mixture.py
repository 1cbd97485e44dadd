"""A mixture of sources: each sample comes from one of them, in given shares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

from headmax.data.permutation import permute
from headmax.data.source import Batch, Source
from headmax.ops.packing import Packing

ROUND = 1000
"""Samples over which every source has exactly its share."""


class Mixture:
    """A `Source` that draws from several, with shares that sum to 1.

    Every round of samples shuffles the order of the sources anew, and each source continues where it was, through its own epochs. So one
    number is a position in the mixture.
    """

    def __init__(self, sources: Sequence[Source], shares: Sequence[float], seed: int) -> None:
        if len({source.length for source in sources}) != 1:
            raise ValueError(
                f"the sources of a mixture must have samples of one length, got {sorted({source.length for source in sources})}"
            )
        if len(sources) != len(shares) or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"a mixture needs {len(sources)} positive shares that sum to 1, got {list(shares)}")
        self.sources, self.shares, self.seed = tuple(sources), tuple(shares), seed
        self.vocab_size, self.length = max(source.vocab_size for source in sources), sources[0].length
        self._bounds = np.round(np.cumsum([0.0, *shares]) * ROUND).astype(np.int64)
        """Positions at which the sources begin in a round before shuffling."""
        if (np.diff(self._bounds) < 1).any():
            raise ValueError(f"a mixture's shares must be at least {1 / ROUND}, got {min(shares)}")

    @property
    def identity(self) -> dict[str, str | int]:
        parts = json.dumps([[source.identity, share] for source, share in zip(self.sources, self.shares, strict=True)], sort_keys=True)
        return {"mixture": hashlib.sha256(parts.encode()).hexdigest(), "length": self.length, "seed": self.seed}

    def chosen(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(source, number in that source) of each sample."""
        rounds, places = np.divmod(np.asarray(indices, dtype=np.int64), ROUND)
        for number in np.unique(rounds):
            here = rounds == number
            places[here] = permute(places[here], ROUND, (self.seed, int(number)))
        which = np.searchsorted(self._bounds, places, side="right") - 1
        return which, rounds * np.diff(self._bounds)[which] + places - self._bounds[which]

    def batch(self, indices: Sequence[int]) -> Batch:
        which, numbers = self.chosen(indices)
        rows: list[Batch] = [self.sources[n].batch([int(number)]) for n, number in zip(which, numbers, strict=True)]
        if all(row.packing is None for row in rows):
            ids = torch.cat([row.input_ids for row in rows])
            same = all(row.labels is row.input_ids for row in rows)
            return Batch(ids, ids if same else torch.cat([row.labels for row in rows]), None)
        bounds = [torch.tensor([0, self.length]) if row.packing is None else row.packing.cu_seqlens for row in rows]
        starts = torch.cat([bound[:-1] + n * self.length for n, bound in enumerate(bounds)])
        ids = torch.cat([row.input_ids.reshape(1, -1) for row in rows], dim=1)
        labels = torch.cat([row.labels.reshape(1, -1) for row in rows], dim=1)
        return Batch(ids, labels, Packing(torch.cat([starts, torch.tensor([ids.shape[1]])])))
