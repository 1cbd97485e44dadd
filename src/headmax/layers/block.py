"""One layer: x + mixer(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from headmax.layers.fusion import Fusion, fusion_enabled, intact
from headmax.layers.head_parallel import run_mixer, run_mlp
from headmax.layers.mixers import MIXERS, MixerOutput
from headmax.layers.mixers.attention import AttentionSlots
from headmax.layers.mixers.state import RecurrentSlots
from headmax.layers.mlp import SwiGLU
from headmax.layers.norm import RMSNorm, residual_norm
from headmax.layers.padding import Padding
from headmax.layers.rotary import Rotary
from headmax.ops.packing import Packing

LORA_TARGETS = tuple(dict.fromkeys(name for kind in MIXERS.values() for name in kind.lora_targets)) + SwiGLU.lora_targets
"""The names of all matrices in a block, of any mixer: `LoraConfig(target_modules=list(LORA_TARGETS), modules_to_save=["head_gate"])`."""


class Block(GradientCheckpointingLayer):
    """`fused`: whether norms, projections and MLP run as fused ops; None means where kernels run, on a GPU."""

    tensor_group: ProcessGroup | None = None
    """Tensor parallelism: ranks with a share of the heads and of the MLP's columns each."""

    def __init__(
        self,
        mixer: nn.Module,
        hidden_size: int,
        intermediate_size: int,
        norm_eps: float = 1e-6,
        backend: str = "auto",
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.backend, self.fused = backend, fused
        self.mixer_norm = RMSNorm(hidden_size, norm_eps, backend)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(hidden_size, norm_eps, backend)
        self.mlp = SwiGLU(hidden_size, intermediate_size, backend)

    def set_tensor_mesh(self, mesh: DeviceMesh) -> None:
        """Splits mixer and MLP over the ranks of the mesh."""
        self.tensor_group = mesh.get_group()
        for part in (self.mixer, self.mlp):
            part.set_tensor_mesh(mesh)  # type: ignore[operator]

    def fusion(self, x: Tensor) -> Fusion:
        """What runs fused on x: the parts that are as they were built."""
        if not fusion_enabled(self.fused, self.backend, x):
            return Fusion()
        return Fusion(intact(self.mixer_norm, self.mlp_norm, kind=RMSNorm), self.mixer.fusible(), self.mlp.fusible())  # type: ignore[operator]

    def step_obstacle(self, x: Tensor) -> str | None:
        """Why the fused decoding step cannot run this block, or None."""
        if not fusion_enabled(self.fused, self.backend, x):
            return f"fused parts are off, or the model is on {x.device.type}"
        if (reason := self.mixer.step_obstacle()) is not None:  # type: ignore[operator]
            return reason
        if not (intact(self.mixer_norm, self.mlp_norm, kind=RMSNorm) and self.mlp.fusible()):
            return f"a part of a {type(self.mixer).__name__} block has been replaced"
        if any(module._forward_hooks or module._forward_pre_hooks for module in (self, self.mixer, self.mlp)):
            return "a block has hooks"
        weights = list(self.parameters())
        if any(isinstance(weight, DTensor) for weight in weights) or {w.dtype for w in weights if w.ndim > 1} != {x.dtype}:
            return f"weights are sharded, or not all of the dtype that is computed in, {x.dtype}"
        return "kernels compute in float32, the model is float64" if x.dtype == torch.float64 else None

    @torch.compiler.disable(reason="the fused decoding step launches kernels that cannot be traced")
    def step(self, x: Tensor, state: RecurrentSlots | AttentionSlots, positions: Rotary | None, mask: Tensor | None) -> Tensor:
        """`forward` on one token per sequence, x [rows, 1, E], as five kernels; the state is updated in place."""
        from headmax.layers.triton_block import block_step

        return block_step(self, x.squeeze(1), state, positions, mask).unsqueeze(1)

    def forward(
        self,
        x: Tensor,
        *,
        state: tuple | None = None,
        return_state: bool = False,
        positions: Tensor | Rotary | None = None,
        packing: Packing | None = None,
        mask: Tensor | Padding | None = None,
        return_gates: bool = False,
        fusion: Fusion | None = None,
    ) -> MixerOutput:
        """As the mixer's. Gates only if requested: an unused output of a compiled block costs a gradient of zeros."""
        norms, mixer, mlp, _ = self.fusion(x) if fusion is None else fusion
        residual, x = residual_norm(self.mixer_norm, x, None, norms)
        options = {"state": state, "return_state": return_state, "positions": positions, "packing": packing, "mask": mask}
        if self.tensor_group is None:
            x, state, gates = self.mixer(x, fused=mixer, **options)
        else:
            x, state, gates = run_mixer(self.mixer, self.tensor_group, x, return_gates, fused=mixer, **options)
        residual, x = residual_norm(self.mlp_norm, residual, x, norms)
        return MixerOutput(residual + run_mlp(self.mlp, self.tensor_group, x, mlp), state, gates if return_gates else None)
