"""Several matrices times the same hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.ops.recompute import in_training_graph

ALIGNMENT = 8
"""Rows a joint matrix is filled up to: the matrix units want 16 bytes."""


def joins(*projections: nn.Module | None) -> bool:
    """Whether these are taken in one product: plain matrices (an adapter, such as LoRA's, must be called itself), in a compiled graph."""
    return in_training_graph() and all(type(p) is nn.Linear and p.bias is None for p in projections)


def project(x: Tensor, projections: Sequence[nn.Linear], rows: Sequence[Tensor] = ()) -> list[Tensor]:
    """x [..., E] times each matrix, and times each of further `rows` [n, E].

    A compiled training step takes one product, which reads x once and gives one gradient back. Otherwise the matrices would have to be
    copied together first, so that each is multiplied by itself.
    """
    if not joins(*projections):
        return [*(p(x) for p in projections), *(F.linear(x, r) for r in rows)]
    weights = [*(p.weight for p in projections), *rows]
    sizes = [len(w) for w in weights]
    joint = F.pad(torch.cat(weights), (0, 0, 0, -sum(sizes) % ALIGNMENT))
    return list(F.linear(x, joint)[..., : sum(sizes)].split(sizes, dim=-1))
