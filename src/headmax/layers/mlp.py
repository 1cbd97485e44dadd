"""SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from headmax.ops.recompute import recomputed


def swiglu_width(hidden_size: int, ratio: float) -> int:
    """Two thirds of ratio * hidden_size, rounded up to a multiple of 256."""
    return 256 * -(-int(hidden_size * ratio * 2 / 3) // 256)


def swish_gate(x: Tensor, gate: Tensor) -> Tensor:
    return F.silu(gate) * x


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(recomputed(swish_gate, self.up_proj(x), self.gate_proj(x)))
