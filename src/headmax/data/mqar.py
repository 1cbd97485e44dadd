"""Multi-query associative recall (Zoology): key-value pairs, then every key again, in random order, asking for its value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MQAR:
    """k_1 v_1 ... k_n v_n, then the n keys shuffled: 3n tokens, of which the last n are answered where they stand.

    Keys are the lower half of the vocabulary, all different; values are drawn from the upper half.
    """

    num_pairs: int = 8
    vocab_size: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.num_pairs <= self.vocab_size // 2:
            raise ValueError(f"MQAR: num_pairs must be between 1 and vocab_size / 2 = {self.vocab_size // 2}, got {self.num_pairs}")

    @property
    def time(self) -> int:
        return 3 * self.num_pairs

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tokens [size, 3n], answers [size, n] to the last n tokens), fresh from the generator."""
        half, n = self.vocab_size // 2, self.num_pairs
        keys = torch.rand(size, half, generator=generator).argsort(dim=-1)[:, :n]
        values = torch.randint(half, self.vocab_size, (size, n), generator=generator)
        order = torch.rand(size, n, generator=generator).argsort(dim=-1)
        pairs = torch.stack([keys, values], dim=-1).flatten(1)
        return torch.cat([pairs, keys.gather(1, order)], dim=1), values.gather(1, order)
