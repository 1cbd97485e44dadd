"""Multi-query associative recall (Zoology): key-value pairs, then every key again, in random order, asking for its value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headmax.data.source import Batch


@dataclass(frozen=True)
class MQAR:
    """k_1 v_1 ... k_n v_n, then the n keys shuffled: 3n tokens, with the values as labels after the last n.

    Keys are distinct, from the lower half of the vocabulary; values are drawn from the upper half. One more token ends the
    sample, for the label after the last query.
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
        """Accuracy of guessing a value at random."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def samples(self, seed: int) -> MQARSamples:
        return MQARSamples(self, seed)

    def held_out(self, seed: int) -> MQARSamples:
        """Samples that training with `seed` never sees."""
        return MQARSamples(self, seed + 1_000_000_007)


class MQARSamples:
    """A source in which sample i depends on the seed and i alone."""

    def __init__(self, task: MQAR, seed: int) -> None:
        self.task, self.seed = task, seed
        self.vocab_size, self.length = task.vocab_size, task.length

    @property
    def identity(self) -> dict[str, str | int]:
        about = {"seed": self.seed, "num_pairs": self.task.num_pairs, "vocab_size": self.vocab_size}
        return {"task": "mqar", "generator": "philox", **about}

    def batch(self, indices: Sequence[int]) -> Batch:
        """[B, 3n + 1], labelled with the value after each query."""
        half, n = self.vocab_size // 2, self.task.num_pairs
        bits = self._bits(np.asarray(indices), half + 2 * n)
        keys, order = bits[:, :half].argsort(1)[:, :n], bits[:, half : half + n].argsort(1)  # sorting random numbers shuffles
        values = half + (bits[:, half + n : half + 2 * n] % (self.vocab_size - half)).astype(np.int64)
        tokens = np.zeros((len(keys), self.length), dtype=np.int64)
        labels = np.full_like(tokens, -100)
        tokens[:, 0 : 2 * n : 2], tokens[:, 1 : 2 * n : 2], tokens[:, 2 * n : 3 * n] = keys, values, np.take_along_axis(keys, order, 1)
        labels[:, 2 * n + 1 :] = np.take_along_axis(values, order, 1)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), None)

    def _bits(self, indices: np.ndarray, number: int) -> np.ndarray:
        """At least `number` random 64-bit numbers per sample, from its own counters of one counter-based generator."""
        counters = -(-number // 4)  # Philox draws four numbers per counter
        runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
        drawn = [np.random.Philox(key=self.seed, counter=int(run[0]) * counters).random_raw(4 * counters * len(run)) for run in runs]
        return np.concatenate(drawn).reshape(len(indices), 4 * counters)
