"""Training data: samples addressed by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from headmax.ops.packing import Packing


class Batch(NamedTuple):
    """A batch of samples, on the CPU."""

    input_ids: Tensor
    """[B, T] int64; [1, B*T] if documents are separate."""
    labels: Tensor
    """The same shape, -100 where there is no loss. Not shifted: the model shifts, as Hugging Face does."""
    packing: Packing | None
    """Sequence boundaries in a row of B*T tokens with separate documents; else None."""
    position_ids: Tensor | None = None
    """[1, T], if tokens are a piece of each sample: their positions. A packing has its own."""
    shift_labels: Tensor | None = None
    """The same shape, if tokens are a piece of each sample: labels of the next tokens."""

    def map(self, change: Callable[[Tensor | Packing], Tensor | Packing]) -> Batch:
        """The batch with `change` applied to each field that is not None."""
        return Batch(*(x if x is None else change(x) for x in self))  # type: ignore[arg-type]


class Source(Protocol):
    """Sample i is always the same, for all i >= 0, over any number of epochs."""

    vocab_size: int
    """At least the largest token plus 1."""
    length: int
    """Tokens per sample."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples, in this order."""
        ...

    @property
    def identity(self) -> dict[str, str | int]:
        """What must be the same when a run is resumed."""
        ...
