"""Competition for a model that is already trained: gates that start as 1, and learn from there."""

from __future__ import annotations

from typing import Literal

from torch import nn

from headmax.layers import HeadGateConfig
from headmax.layers.mixers import RecurrentMixer
from headmax.models.modeling import HeadmaxPreTrainedModel

START = HeadGateConfig(scale="heads", init_std=0.0, read_position="after_norm")
"""Uniform gates times the number of heads: exactly what the model computed before."""


def softmaxify(model: nn.Module, gate: HeadGateConfig = START, *, train: Literal["all", "gates"] = "all") -> nn.Module:
    """Gives every recurrent layer of `model` head gates, in place, and returns it.

    With the default gates it computes what it did before. train="gates" freezes everything else. Save it as ever: the gates are part
    of its configuration and of its weights.
    """
    if train not in ("all", "gates"):
        raise ValueError(f"softmaxify: train must be 'all' or 'gates', got {train!r}")
    if not isinstance(model, HeadmaxPreTrainedModel):
        raise ValueError(f"softmaxify: knows headmax models, got {type(model).__name__}; `headmax convert` makes one of a checkpoint")
    mixers = [module for module in model.modules() if isinstance(module, RecurrentMixer)]
    if not mixers:
        raise ValueError("softmaxify: the model has no recurrent layer to put gates on")
    for mixer in mixers:
        mixer.add_head_gate(gate)
    model.config.head_gate = gate
    if train == "gates":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".head_gate." in name)
    return model
