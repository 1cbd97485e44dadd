"""Inputs, shapes and work of the gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One shape: scores per head, or from the hidden state where `heads_in` is None."""

    batch: int
    time: int
    heads: int
    dim: int
    heads_in: int | None
    temperature: float = 1.0
    scale: float = 1.0
    kind: str = "softmax"

    def inputs(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        rows = (self.batch, self.time) if self.heads_in is None else (self.batch, self.time, self.heads_in)
        x, weight = torch.randn(*rows, self.dim, generator=generator), torch.randn(self.heads, self.dim, generator=generator)
        return x.to(device, dtype), (weight * self.dim**-0.5).to(device, dtype)

    def flops(self) -> int:
        return 2 * self.batch * self.time * self.heads * self.dim

    def bytes_moved(self, itemsize: int) -> int:
        """x and weight read once, the gate written once in float32."""
        read = self.batch * self.time * (self.heads_in or 1) * self.dim + self.heads * self.dim
        return itemsize * read + 4 * self.batch * self.time * self.heads


CASES = (
    Case(2, 5, heads=4, dim=8, heads_in=4),
    Case(1, 1, heads=1, dim=1, heads_in=1),
    Case(1, 100, heads=4, dim=256, heads_in=4, temperature=0.5, scale=4.0),
    Case(2, 17, heads=6, dim=20, heads_in=2),
    Case(1, 33, heads=4, dim=1024, heads_in=None, scale=4.0),
    Case(1, 65, heads=16, dim=40, heads_in=16, kind="sigmoid"),
)
