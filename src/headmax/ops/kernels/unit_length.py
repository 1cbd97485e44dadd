"""Queries and keys scaled to unit length in Triton, within the delta rule's op."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2

ROWS = 32
"""Heads of tokens in a program's tile."""


@triton.jit
def unit_length_kernel(x, y, rows_in_all, eps, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """y = x / sqrt(Σ x^2 + eps), row by row."""
    rows, columns = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BK)
    inside = (rows[:, None] < rows_in_all) & (columns[None, :] < K)
    t_x = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(t_x * t_x, 1) + eps)
    tl.store(y + rows[:, None] * K + columns[None, :], (t_x / length[:, None]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def unit_length_gradient_kernel(x, d_y, d_x, rows_in_all, eps, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """d_x = (d_y - y <y, d_y>) / sqrt(Σ x^2 + eps)"""
    rows, columns = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BK)
    at, inside = rows[:, None] * K + columns[None, :], (rows[:, None] < rows_in_all) & (columns[None, :] < K)
    t_x = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    t_d = tl.load(d_y + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(t_x * t_x, 1) + eps)
    unit = t_x * scale[:, None]
    gradient = (t_d - unit * tl.sum(unit * t_d, 1)[:, None]) * scale[:, None]
    tl.store(d_x + at, gradient.to(d_x.dtype.element_ty), mask=inside)


def _launch(kernel, x: Tensor, *others: Tensor, eps: float) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    launch(kernel, (cdiv(rows, ROWS),), (x, *others, rows, eps), {"K": width, "BR": ROWS, "BK": power_of_2(width)})


def unit_length(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(Σ x^2 + eps) over the last axis, computed in float32; x is contiguous, and the result has no gradient of its own."""
    y = torch.empty_like(x)
    _launch(unit_length_kernel, x, y, eps=eps)
    return y


def unit_length_gradient(x: Tensor, d_y: Tensor, eps: float) -> Tensor:
    """d_x from d_y; both contiguous."""
    d_x = torch.empty_like(x)
    _launch(unit_length_gradient_kernel, x, d_y, d_x, eps=eps)
    return d_x
