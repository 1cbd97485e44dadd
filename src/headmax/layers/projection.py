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


def bare(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether it may be computed elsewhere: an adapter in its place, such as LoRA's, must be called itself, and so must what has hooks."""
    if module is None or type(module) is not kind:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def joins(*projections: nn.Module | None) -> bool:
    """Whether these are taken in one product: bare matrices, in a compiled training graph."""
    return in_training_graph() and all(bare(p, nn.Linear) and p.bias is None for p in projections)  # type: ignore[union-attr]


def as_multiplied(matrix: Tensor, x: Tensor) -> Tensor:
    """A matrix in the dtype of its product with x."""
    return matrix.to(x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device) or x.dtype)  # autocast leaves float64 alone


def joint_product(x: Tensor, projections: Sequence[nn.Linear], rows: Tensor | None = None) -> tuple[Tensor, list[int]]:
    """x [..., E] times all matrices at once, those `rows` [n, E] at the end, and how many columns are whose; any beyond are 0."""
    matrices = [*(p.weight for p in projections), *([] if rows is None else [rows])]
    sizes = list(map(len, matrices))
    spare = x.new_zeros(-sum(sizes) % ALIGNMENT, x.shape[-1])
    return F.linear(x, torch.cat([as_multiplied(matrix, x) for matrix in (*matrices, spare)])), sizes


def project(x: Tensor, projections: Sequence[nn.Linear], rows: Tensor | None = None) -> tuple[list[Tensor], Tensor | None]:
    """x [..., E] times each matrix, and times further `rows` [n, E], None without any.

    A compiled training step takes one product, which reads x once and gives one gradient back. Otherwise the matrices would have to be
    copied together first, so that each is multiplied by itself, and there must be no rows.
    """
    if not joins(*projections):
        return [p(x) for p in projections], None
    product, sizes = joint_product(x, projections, rows)
    parts = product[..., : sum(sizes)].split(sizes, dim=-1)
    return list(parts[: len(projections)]), None if rows is None else parts[-1]
