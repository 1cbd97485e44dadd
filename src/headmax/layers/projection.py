"""Several matrices times the same hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.ops.registry import autocast_dtype

ALIGNMENT = 8
"""Rows of a joint matrix come in multiples of this: the matrix units want 16 bytes."""


def as_multiplied(matrix: Tensor, x: Tensor) -> Tensor:
    """A matrix in the dtype of its product with x."""
    return matrix.to(x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device) or x.dtype)  # autocast leaves float64 alone


def joint_product(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """x [..., E] times all matrices [n_i, E] in one product [..., Σ n_i, then zeros up to a multiple of ALIGNMENT].

    It reads x once and gives one gradient back, at the price of a copy of the matrices.
    """
    zero_rows = x.new_zeros(-sum(map(len, matrices)) % ALIGNMENT, x.shape[-1])
    return F.linear(x, torch.cat([as_multiplied(matrix, x) for matrix in (*matrices, zero_rows)]))
