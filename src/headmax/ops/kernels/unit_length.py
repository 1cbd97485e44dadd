"""Scaling to unit length in Triton: for other kernels, and, within the delta rule's op, of queries and keys."""

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
def inverse_length(b_x, eps):
    """1 / sqrt(Σ x^2 + eps) of a vector, by the fast instruction; the kernels below take a root and divide."""
    return tl.rsqrt(tl.sum(b_x * b_x, 0) + eps)


@triton.jit
def unit_length_kernel(x, y, rows, eps, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """y = x / sqrt(Σ x^2 + eps), row by row of [rows, K]."""
    o_r, o_k = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BK)
    m_x = (o_r[:, None] < rows) & (o_k[None, :] < K)
    b_x = tl.load(x + o_r[:, None] * K + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)  # [BR, BK]
    b_length = tl.sqrt(tl.sum(b_x * b_x, 1) + eps)
    tl.store(y + o_r[:, None] * K + o_k[None, :], (b_x / b_length[:, None]).to(y.dtype.element_ty), mask=m_x)


@triton.jit
def unit_length_gradient_kernel(x, d_y, d_x, rows, eps, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """d_x = (d_y - y <y, d_y>) / sqrt(Σ x^2 + eps), row by row of [rows, K]."""
    o_r, o_k = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BK)
    o_x, m_x = o_r[:, None] * K + o_k[None, :], (o_r[:, None] < rows) & (o_k[None, :] < K)
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)  # [BR, BK]
    b_dy = tl.load(d_y + o_x, mask=m_x, other=0.0).to(tl.float32)  # [BR, BK]
    b_scale = 1 / tl.sqrt(tl.sum(b_x * b_x, 1) + eps)
    b_y = b_x * b_scale[:, None]
    b_dx = (b_dy - b_y * tl.sum(b_y * b_dy, 1)[:, None]) * b_scale[:, None]
    tl.store(d_x + o_x, b_dx.to(d_x.dtype.element_ty), mask=m_x)


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
