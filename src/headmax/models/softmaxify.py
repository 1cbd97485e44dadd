"""Competition for a model that is already trained: gates that start as 1, and learn from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from headmax.layers import HeadGateConfig
from headmax.layers.head_gate import HeadGate
from headmax.layers.mixers import RecurrentMixer
from headmax.models.accelerate import LAYERS, check_model, forwards, install, owners_of
from headmax.models.configuration import HeadmaxConfig
from headmax.models.fla import FLAMixer, is_fla
from headmax.models.forwards import Forward

START = HeadGateConfig(scale="heads", init_std=0.0, read_position="after_norm")
"""Uniform gates times the number of heads: exactly what the model computed before."""


def gates_of(model: nn.Module) -> dict[str, HeadGate]:
    """The gates by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HeadGate)}


def gateable(model: nn.Module) -> Iterator[tuple[str, RecurrentMixer | Forward | FLAMixer]]:
    """What takes gates, by name: headmax's mixers, and what would stand in for other libraries' layers, not in place yet."""
    owners = owners_of(model)
    for name, module in model.named_modules():
        if isinstance(module, RecurrentMixer):
            yield name, module
        elif is_fla(module):
            if module not in owners:
                raise ValueError(
                    f"softmaxify: {type(model).__name__} has no config, where the settings of flash-linear-attention's layers are"
                )
            yield name, FLAMixer(module, owners[module].config)
    yield from forwards(model)


def softmaxify(model: nn.Module, gate: HeadGateConfig = START, *, train: Literal["all", "gates"] = "all") -> nn.Module:
    """Adds head gates to every recurrent layer of a trained model, in place.

    A headmax model with gates is saved and loaded as before. Other classes have no gates, so that `from_pretrained` drops them;
    `load_gates(model, folder)` restores them.

    Args:
        model: a model of headmax or flash-linear-attention, or one of transformers that `accelerate` knows.
        gate: settings of the gates; with the default, gates start as exactly 1 and outputs stay the same.
        train: "all" trains the whole model, "gates" freezes everything else.

    Returns:
        The same model.
    """
    check_model("softmaxify", model)
    if train not in ("all", "gates"):
        raise ValueError(f"softmaxify: train must be 'all' or 'gates', got {train!r}")
    if not isinstance(gate, HeadGateConfig):
        raise ValueError(f"softmaxify: gate must be a HeadGateConfig, got {gate!r}")
    if gates_of(model):
        raise ValueError(f"softmaxify: this {type(model).__name__} has gates already")
    takers = dict(gateable(model))
    if not takers:
        raise ValueError(
            f"softmaxify: {type(model).__name__} has no layer to put gates on; it knows headmax's recurrent mixers, "
            f"flash-linear-attention's RetNet, GLA and Gated DeltaNet, and transformers' {', '.join(LAYERS)}"
        )
    for name, taker in takers.items():
        taker.add_head_gate(gate)
        if isinstance(taker, FLAMixer):
            model.set_submodule(name, taker)
    install(model, (taker for taker in takers.values() if isinstance(taker, Forward)))
    for owner in model.modules():
        if isinstance(owner, PreTrainedModel) and gates_of(owner):
            owner.config.head_gate = gate if isinstance(owner.config, HeadmaxConfig) else dataclasses.asdict(gate)
    if train == "gates":
        model.requires_grad_(False)
        for module in gates_of(model).values():
            module.requires_grad_()
    return model
