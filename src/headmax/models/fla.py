"""Layers of flash-linear-attention's models on our mixers: their weights, their cache, and gates if wanted."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from headmax.layers import MIXERS, HeadGateConfig
from headmax.layers.mixers import RecurrentMixer
from headmax.layers.mixers.state import RecurrentState
from headmax.models.convert import NAMES, config_from_fla
from headmax.ops.packing import Packing

LAYERS = tuple(kind.fla[2] for kind in MIXERS.values() if kind.gated and kind.fla is not None)
"""FLA's classes of layers that take gates here."""


def is_fla(module: nn.Module) -> bool:
    """By name, so that flash-linear-attention is not imported for it."""
    return type(module).__name__ in LAYERS and type(module).__module__.startswith("fla.")


class FLAMixer(nn.Module):
    """Takes the place of an FLA layer in FLA's model: our mixer on its very parameters, called and answering as FLA's layer does."""

    def __init__(self, theirs: Any, config: Any) -> None:
        super().__init__()
        ours = config_from_fla(config.to_dict())
        with torch.device("meta"):
            mixer = cast(RecurrentMixer, ours.build_mixer(ours.mixers[0]))
        for path, parameter in theirs.named_parameters():
            target = NAMES.get(f"attn.{path}", "").removeprefix("mixer.")
            if not target:
                raise ValueError(f"softmaxify: headmax has no parameter for {path} of {type(theirs).__name__}")
            if parameter.ndim == 3:  # a convolution: [D,1,W] there, [D,W] here, the same memory
                parameter = nn.Parameter(parameter.data.squeeze(1), requires_grad=parameter.requires_grad)
            owner, _, last = target.rpartition(".")
            setattr(mixer.get_submodule(owner), last, parameter)
        if missing := [path for path, parameter in mixer.named_parameters() if parameter.is_meta]:
            raise ValueError(f"softmaxify: {type(theirs).__name__} has nothing for {', '.join(missing)}")
        self.mixer, self.layer_idx = mixer, theirs.layer_idx

    def add_head_gate(self, gate: HeadGateConfig) -> None:
        self.mixer.add_head_gate(gate)

    def gate_sizes(self) -> dict[str, int]:
        return self.mixer.gate_sizes()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        time, bounds = hidden_states.shape[1], kwargs.get("cu_seqlens")
        packing = None if bounds is None else Packing.of(bounds, hidden_states.device, time)
        state, seen = None, 0
        if past_key_values is not None and len(past_key_values) > self.layer_idx:
            kept, seen = past_key_values[self.layer_idx], past_key_values.get_seq_length(self.layer_idx)
            if kept is not None and kept["recurrent_state"] is not None:
                state = RecurrentState(kept["recurrent_state"], kept["conv_state"] or ())
        # FLA's cache does not count the tokens of each packed sequence; RetNet, which needs that to go on, says so
        positions = torch.arange(seen, seen + time, device=hidden_states.device)[None] if packing is None else None
        hidden, new_state, _ = self.mixer(
            hidden_states,
            state=state,
            return_state=bool(use_cache) and past_key_values is not None,
            positions=positions,
            packing=packing,
            mask=None if attention_mask is None else attention_mask[:, -time:],
        )
        if new_state is not None:
            conv = new_state.conv or None
            past_key_values.update(recurrent_state=new_state.recurrent, conv_state=conv, layer_idx=self.layer_idx, offset=time)
        return hidden, None, past_key_values
