"""SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from headmax.layers.fusion import intact
from headmax.layers.head_parallel import divide, shard_part
from headmax.layers.projection import product_matrices
from headmax.ops.registry import Lazy, dispatch, register


def swiglu_width(hidden_size: int, ratio: float) -> int:
    """Two thirds of ratio * hidden_size, rounded up to a multiple of 256."""
    return 256 * -(-int(hidden_size * ratio * 2 / 3) // 256)


def swish_gate(x: Tensor, gate: Tensor) -> Tensor:
    return F.silu(gate) * x


def _swiglu(joint: Tensor, down: Tensor) -> Tensor:
    gate, x = joint.chunk(2, dim=-1)
    return F.linear(swish_gate(x, gate), down)


register("swiglu", {"reference": _swiglu, "triton": Lazy("headmax.layers.triton_swiglu", "swiglu", needs="triton", interpreted=True)})


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    lora_targets = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, hidden_size: int, intermediate_size: int, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def set_tensor_mesh(self, mesh: DeviceMesh) -> None:
        """Splits the columns over the ranks of the mesh."""
        divide("intermediate_size", self.gate_proj.out_features, mesh.size())
        shard_part(self, mesh, "down_proj", ())

    def fusible(self) -> bool:
        return intact(self.gate_proj, self.up_proj, self.down_proj)

    def forward(self, x: Tensor, fused: bool = False) -> Tensor:
        if not fused:
            return self.down_proj(swish_gate(self.up_proj(x), self.gate_proj(x)))
        joint, down = product_matrices(x, [[self.gate_proj.weight, self.up_proj.weight], [self.down_proj.weight]])
        product, columns = F.linear(x, joint), 2 * self.gate_proj.weight.shape[0]
        product = product if product.shape[-1] == columns else product[..., :columns]  # without padding
        return dispatch("swiglu", self.backend, x)(product, down)
