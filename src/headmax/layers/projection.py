"""Several matrices times the same hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.ops.recompute import in_training_graph
from headmax.ops.registry import autocast_dtype

ALIGNMENT = 8
"""Rows a joint matrix is filled up to: the matrix units want 16 bytes."""


def joins(*projections: nn.Module | None) -> bool:
    """Whether these are taken in one product: plain matrices (an adapter, such as LoRA's, must be called itself), in a compiled graph."""
    return in_training_graph() and all(type(p) is nn.Linear and p.bias is None for p in projections)


def project(x: Tensor, projections: Sequence[nn.Linear], rows: Tensor | None = None) -> tuple[list[Tensor], Tensor | None]:
    """x [..., E] times each matrix, and times further `rows` [n, E], None without any.

    A compiled training step takes one product, which reads x once and gives one gradient back. Otherwise the matrices would have to be
    copied together first, so that each is multiplied by itself, and there must be no rows.
    """
    if not joins(*projections):
        return [p(x) for p in projections], None
    matrices = [*(p.weight for p in projections), *([] if rows is None else [rows])]
    sizes = list(map(len, matrices))
    spare = x.new_zeros(-sum(sizes) % ALIGNMENT, x.shape[-1])
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device) or x.dtype  # autocast leaves float64 alone
    joint = torch.cat([matrix.to(dtype) for matrix in (*matrices, spare)])
    products = F.linear(x, joint)[..., : sum(sizes)].split(sizes, dim=-1)
    return list(products[: len(projections)]), None if rows is None else products[-1]
