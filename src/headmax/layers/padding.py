"""Padded batches: a padded token neither decays nor writes the state, and does not enter a convolution."""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.packing import Packing


class Padding:
    """The places of the tokens in a padded batch [batch, time], wherever the padding is, and their packing into one row."""

    def __init__(self, mask: Tensor) -> None:
        """`mask` [batch, time] is 1 where there is a token, 0 where there is none. It is read on the host."""
        if not ((mask == 0) | (mask == 1)).all():  # such as one that is added to scores, where 0 is a token
            raise ValueError(f"attention_mask must be 1 where there is a token and 0 where there is none, got {mask.unique()[:4].tolist()}")
        mask = mask.bool()
        self.shape = tuple(mask.shape)
        self.places = mask.flatten().nonzero().flatten()
        """[tokens] index of each token in the flattened batch."""
        self.lengths = mask.sum(1)
        """[batch] tokens of each row."""
        self.packing = None if self.empty else Packing(torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)]))
        """One sequence per row of the batch, empty for a row without tokens; None where no row has any."""

    @property
    def empty(self) -> bool:
        """Whether no row has a token."""
        return len(self.places) == 0

    @property
    def positions(self) -> Tensor:
        """[batch, time] number of tokens before each token in its row."""
        if self.packing is None:
            return torch.zeros(self.shape, dtype=torch.int64, device=self.places.device)
        return self.restore(self.packing.positions[None])

    @classmethod
    def of(cls, mask: Tensor | None) -> Padding | None:
        """None where nothing is padded."""
        if mask is not None and mask.is_meta:
            raise ValueError("attention_mask must have values to read, got one on the meta device: leave it out where nothing is padded")
        return None if mask is None or bool((mask == 1).all()) else cls(mask)

    def remove(self, x: Tensor) -> Tensor:
        """[batch, time, ...] → [1, tokens, ...]"""
        return x.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def restore(self, x: Tensor) -> Tensor:
        """[1, tokens, ...] → [batch, time, ...], zeros where there is no token."""
        batch, time = self.shape
        return x.new_zeros(batch * time, *x.shape[2:]).index_copy(0, self.places, x[0]).unflatten(0, (batch, time))
