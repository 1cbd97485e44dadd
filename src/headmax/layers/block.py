"""One layer: x + mixer(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from headmax.layers.mixers import MixerOutput
from headmax.layers.mlp import SwiGLU
from headmax.layers.norm import RMSNorm
from headmax.layers.projection import bare
from headmax.layers.rotary import Rotary
from headmax.ops.packing import Packing
from headmax.ops.recompute import in_training_graph

LORA_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"),
    *("decay_down_proj", "decay_up_proj", "a_proj", "b_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
"""The names of all matrices in a block, of any mixer: `LoraConfig(target_modules=list(LORA_TARGETS), modules_to_save=["head_gate"])`."""


class Block(GradientCheckpointingLayer):
    def __init__(self, mixer: nn.Module, hidden_size: int, intermediate_size: int, norm_eps: float = 1e-6, backend: str = "auto") -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(hidden_size, norm_eps, backend)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(hidden_size, norm_eps, backend)
        self.mlp = SwiGLU(hidden_size, intermediate_size, backend)

    def forward(
        self,
        x: Tensor,
        *,
        state: tuple | None = None,
        return_state: bool = False,
        positions: Tensor | Rotary | None = None,
        packing: Packing | None = None,
        mask: Tensor | None = None,
        return_gates: bool = False,
    ) -> MixerOutput:
        """As the mixer's; gates only if asked for, since what a compiled block returns has a gradient to be filled with zeros."""
        training = in_training_graph()
        x, normed = self.mixer_norm.beside(x) if training and bare(self.mixer_norm, RMSNorm) else (x, self.mixer_norm(x))
        mixed, state, gates = self.mixer(normed, state=state, return_state=return_state, positions=positions, packing=packing, mask=mask)
        if training and bare(self.mlp_norm, RMSNorm) and x.dtype == mixed.dtype:
            x, normed = self.mlp_norm.of_sum(x, mixed)
        else:
            x = x + mixed
            normed = self.mlp_norm(x)
        return MixerOutput(x + self.mlp(normed), state, gates if return_gates else None)
