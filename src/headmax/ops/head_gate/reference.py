"""The gate as the paper writes it."""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.checks import compute_dtype


def normalized(score: Tensor, temperature: float, scale: float, kind: str) -> Tensor:
    """Scores [..., H] as gates."""
    if kind == "sigmoid":
        return (2 * scale / score.shape[-1]) * torch.sigmoid(temperature * score)
    # divided by 1 / scale, so that scale H makes uniform gates exactly 1: in float32, 41 times 1 / 41 is not
    return torch.softmax(temperature * score, dim=-1) / (1 / scale)


def split_gates(scores: Tensor, number: int, temperature: float, scale: float, kind: str) -> list[Tensor]:
    each = scores.to(compute_dtype(scores.dtype)).chunk(number, dim=-1)
    return [normalized(score, temperature, scale, kind) for score in each]


def scores_of(x: Tensor, weight: Tensor) -> Tensor:
    dtype = compute_dtype(x.dtype)
    x, weight = x.to(dtype), weight.to(dtype)
    if x.ndim == 3:
        return x @ weight.T
    grouped = weight.unflatten(0, (x.shape[2], -1))
    return (x.unsqueeze(3) * grouped).sum(-1).flatten(2)  # a sum, not a product of matrices: a compiler fuses it


def head_gate(x: Tensor, weight: Tensor, temperature: float, scale: float, kind: str) -> Tensor:
    return normalized(scores_of(x, weight), temperature, scale, kind)
