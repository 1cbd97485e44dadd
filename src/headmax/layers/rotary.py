"""Rotary position embedding, half-split."""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.checks import compute_dtype


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Turns the pair (x_i, x_{i + D/2}) of each head by the angle position * base^(-2i/D). x [B,T,H,D], positions [B or 1, T]."""
    half = x.shape[-1] // 2
    dtype = compute_dtype(x.dtype)
    frequency = base ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = (positions.to(dtype).unsqueeze(-1) * frequency).unsqueeze(2)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
