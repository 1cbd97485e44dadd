"""Multi-query associative recall (Zoology): key-value pairs, then every key again, in random order, asking for its value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headmax.data.source import Batch


@dataclass(frozen=True)
class MQAR:
    """k_1 v_1 ... k_n v_n, then the n keys shuffled: 3n tokens, of which the last n are answered where they stand.

    Keys are the lower half of the vocabulary, all different; values are drawn from the upper half. One token more ends a
    sample, so that the last answer too has a place after its query.
    """

    num_pairs: int = 16
    """Key-value pairs to remember."""
    vocab_size: int = 64
    """Keys and values together."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_pairs <= self.vocab_size // 2:
            raise ValueError(f"MQAR: num_pairs must be between 1 and vocab_size / 2 = {self.vocab_size // 2}, got {self.num_pairs}")

    @property
    def length(self) -> int:
        return 3 * self.num_pairs + 1

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def samples(self, seed: int) -> MQARSamples:
        return MQARSamples(self, seed)

    def held_out(self, seed: int) -> MQARSamples:
        """Samples that training on `seed` does not see."""
        return MQARSamples(self, seed + 1_000_000_007)


class MQARSamples:
    """A source of samples: number i depends on the seed and i alone."""

    def __init__(self, task: MQAR, seed: int) -> None:
        self.task, self.seed = task, seed
        self.vocab_size, self.length = task.vocab_size, task.length

    @property
    def identity(self) -> dict[str, str | int]:
        about = {"seed": self.seed, "num_pairs": self.task.num_pairs, "vocab_size": self.vocab_size}
        return {"task": "mqar", "generator": "philox", **about}

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples: [B, 3n + 1], labelled with the answer after each query."""
        half, n = self.vocab_size // 2, self.task.num_pairs
        bits = self._bits(np.asarray(indices), half + 2 * n)
        keys, order = bits[:, :half].argsort(1)[:, :n], bits[:, half : half + n].argsort(1)  # random numbers sorted: a shuffle
        values = half + (bits[:, half + n : half + 2 * n] % (self.vocab_size - half)).astype(np.int64)
        tokens = np.zeros((len(keys), self.length), dtype=np.int64)
        labels = np.full_like(tokens, -100)
        tokens[:, 0 : 2 * n : 2], tokens[:, 1 : 2 * n : 2], tokens[:, 2 * n : 3 * n] = keys, values, np.take_along_axis(keys, order, 1)
        labels[:, 2 * n + 1 :] = np.take_along_axis(values, order, 1)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), None)

    def _bits(self, indices: np.ndarray, number: int) -> np.ndarray:
        """`number` random numbers of 64 bits, or a few more, for each sample: a stretch of its own of one counter-based generator."""
        stretch = -(-number // 4)  # Philox makes four a count
        neighbours = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
        drawn = [np.random.Philox(key=self.seed, counter=int(run[0]) * stretch).random_raw(4 * stretch * len(run)) for run in neighbours]
        return np.concatenate(drawn).reshape(len(indices), 4 * stretch)
