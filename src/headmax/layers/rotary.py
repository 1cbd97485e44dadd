"""Rotary position embedding, half-split."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headmax.ops.checks import compute_dtype
from headmax.ops.registry import Lazy, dispatch, register


class Rotary(NamedTuple):
    """Cosine and sine of every position's angles, [batch or 1, time, 1, dim / 2]: computed once, used by every layer."""

    cos: Tensor
    sin: Tensor


class RotarySettings(NamedTuple):
    """What a layer's angles depend on, apart from the positions."""

    dim: int
    base: float

    def at(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Rotary:
        """The angles position * base^(-2i/dim) at positions [batch or 1, time], whatever the dtype of their cosines, computed in float64:
        at position 10^6 a float32 holds the angle to a sixteenth."""
        half, wide = self.dim // 2, torch.float32 if positions.device.type == "mps" else torch.float64  # which MPS has not
        frequency = self.base ** (-torch.arange(half, device=positions.device, dtype=wide) / half)
        angle = (positions.to(wide).unsqueeze(-1) * frequency).unsqueeze(2)
        return Rotary(angle.cos().to(compute_dtype(dtype)), angle.sin().to(compute_dtype(dtype)))


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates the pair (x_i, x_{i + D/2}) of each head by its position's i-th angle; further channels of x [B,T,H,...] stay as they are."""
    cos, sin = rotary
    turning, rest = x.tensor_split((2 * cos.shape[-1],), dim=-1)
    first, second = turning.to(compute_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.cat([(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest], dim=-1)


def _split_rotary(product: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    qk, rest = product.tensor_split((2 * heads * width,), dim=-1)
    q, k = (rotate(x.unflatten(-1, (heads, width)), Rotary(cos, sin)) for x in qk.chunk(2, dim=-1))
    return q, k, rest


register(
    "split_rotary",
    {"reference": _split_rotary, "triton": Lazy("headmax.ops.kernels.rotary", "split_rotary", needs="triton", interpreted=True)},
)


def split_rotary(product: Tensor, rotary: Rotary, heads: int, width: int, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Splits product [B,T,2 H D + ...] into q and k [B,T,H,D], rotated, and the rest."""
    return dispatch("split_rotary", backend, product)(product, *rotary, heads, width)
