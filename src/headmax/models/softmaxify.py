"""Competition for a model that is already trained: gates that start as 1, and learn from there."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from headmax.layers import HeadGateConfig
from headmax.layers.head_gate import HeadGate
from headmax.layers.mixers import RecurrentMixer
from headmax.models.configuration import HeadmaxConfig
from headmax.models.fla import FLAMixer, is_fla
from headmax.models.qwen import QwenGatedDeltaNet, is_qwen

START = HeadGateConfig(scale="heads", init_std=0.0, read_position="after_norm")
"""Uniform gates times the number of heads: exactly what the model computed before."""


def gates_of(model: nn.Module) -> list[HeadGate]:
    return [module for module in model.modules() if isinstance(module, HeadGate)]


def softmaxify(model: nn.Module, gate: HeadGateConfig = START, *, train: Literal["all", "gates"] = "all") -> nn.Module:
    """Gives every recurrent layer of `model` head gates, in place, and returns it: headmax models, flash-linear-attention's, and
    transformers' Qwen3-Next.

    With the default gates it computes what it did before. train="gates" freezes everything else. A headmax model is saved and loaded as
    ever; into another, softmaxify it again before loading the weights, since its class knows of no gates.
    """
    if train not in ("all", "gates"):
        raise ValueError(f"softmaxify: train must be 'all' or 'gates', got {train!r}")
    if not isinstance(gate, HeadGateConfig):
        raise ValueError(f"softmaxify: gate must be a HeadGateConfig, got {gate!r}")
    if gates_of(model):
        raise ValueError(f"softmaxify: this {type(model).__name__} has gates already")
    ours = [module for module in model.modules() if isinstance(module, RecurrentMixer)]
    swaps = [
        (parent, name, child) for parent in model.modules() for name, child in parent.named_children() if is_qwen(child) or is_fla(child)
    ]
    if not ours and not swaps:
        raise ValueError(
            f"softmaxify: {type(model).__name__} has no layer to put gates on; it knows headmax's recurrent mixers, transformers' "
            "Qwen3-Next, and flash-linear-attention's RetNet, GLA and Gated DeltaNet"
        )
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    config_of = {module: owner.config for owner in models for module in owner.modules()}  # that of the innermost model
    if any(is_fla(child) and child not in config_of for _, _, child in swaps):
        raise ValueError(f"softmaxify: {type(model).__name__} has no config, where the settings of flash-linear-attention's layers are")
    for mixer in ours:
        mixer.add_head_gate(gate)
    for parent, name, child in swaps:
        setattr(parent, name, QwenGatedDeltaNet(child, gate) if is_qwen(child) else FLAMixer(child, config_of[child], gate))
    for owner in models:
        if gates_of(owner):
            owner.config.head_gate = gate if isinstance(owner.config, HeadmaxConfig) else dataclasses.asdict(gate)
    if train == "gates":
        model.requires_grad_(False)
        for module in gates_of(model):
            module.requires_grad_()
    return model
