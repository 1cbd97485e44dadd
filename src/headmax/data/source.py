"""What a trainer trains on: a stream of samples that can be entered at any number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from headmax.ops.packing import Packing


class Batch(NamedTuple):
    """Samples laid side by side, on the CPU."""

    input_ids: Tensor
    """[B, T] int64; [1, B*T] where documents are kept apart."""
    labels: Tensor
    """The same shape, -100 where there is no loss. Not shifted: the model shifts, as Hugging Face does."""
    packing: Packing | None
    """Where sequences begin in a row of B*T tokens whose documents are kept apart; else None."""
    position_ids: Tensor | None = None
    """[1, T] of a piece of each sample: where it lies; a packing knows that itself."""
    shift_labels: Tensor | None = None
    """Of a piece: what its tokens predict."""

    def map(self, change: Callable[[Tensor | Packing], Tensor | Packing]) -> Batch:
        """With `change` of all that is there."""
        return Batch(*(x if x is None else change(x) for x in self))  # type: ignore[arg-type]


class Source(Protocol):
    """Sample i is the same whoever asks, for all i >= 0, over as many epochs as it takes."""

    vocab_size: int
    """The smallest vocabulary that holds all its tokens."""
    length: int
    """Tokens per sample."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples, in this order."""
        ...

    @property
    def identity(self) -> dict[str, str | int]:
        """What must not change between a run and its resumption."""
        ...
