"""The gates of a model alone, as files: an adapter of a few hundred kilobytes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from headmax import durable, fields
from headmax.layers import HeadGateConfig
from headmax.layers.head_gate import HeadGate
from headmax.models.accelerate import check_model
from headmax.models.fla import FLAMixer
from headmax.models.softmaxify import gateable, gates_of, softmaxify
from headmax.models.weights import read_file, read_metadata, read_weights

WEIGHTS, SETTINGS, MODEL_SETTINGS = "gates.safetensors", "gates.json", "config.json"
LAYER = re.compile(r"layers\.(\d+)\..*?(\w+)$")
"""Number and last name: what a gate's name keeps where save_pretrained renames the layers."""


def save_gates(model: nn.Module, folder: Path | str) -> None:
    """Saves the head gates of a model alone, as gates.safetensors and gates.json (their settings, and the model they fit).

    Args:
        model: a model with head gates; merge PEFT adapters first.
        folder: where to write.
    """
    check_model("save_gates", model)
    root, folder = _root(model), Path(folder)
    gates = gates_of(root)
    if not gates:
        raise ValueError(f"save_gates: this {type(model).__name__} has no gates; softmaxify gives it some")
    if wrapped := [name for name in gates if not name.endswith("head_gate")]:
        raise ValueError(
            f"save_gates: {wrapped[0]} is PEFT's copy of a gate: call merge_and_unload() first, or save it with save_pretrained"
        )
    known = {
        "model_type": root.config.model_type,
        "base_model": root.config._name_or_path,
        "head_gate": dataclasses.asdict(_settings(root)),
    }
    if any(x.is_meta for gate in gates.values() for x in gate.parameters()):
        raise ValueError("save_gates: the gates are on the meta device, where they have no values: load them first")
    weights = {f"{name}.{last}": x.detach().cpu().contiguous() for name, gate in gates.items() for last, x in gate.named_parameters()}
    if useless := next((name for name, x in weights.items() if not x.isfinite().all()), None):
        raise ValueError(f"save_gates: {useless} holds NaN or infinity: load_gates would refuse it")
    text = json.dumps(known, indent=2) + "\n"
    durable.write(folder / WEIGHTS, save(weights, metadata={"settings": _digest(text)}))
    durable.write(folder / SETTINGS, text)


def load_gates(model: nn.Module, folder: Path | str) -> nn.Module:
    """Adds saved head gates to a model, in place.

    Args:
        model: a model of the type and size that the gates were saved from.
        folder: what `save_gates` wrote, or `save_pretrained` of a softmaxified model.

    Returns:
        The same model.

    Raises:
        ValueError: if the gates do not fit; the model is then unchanged.
    """
    check_model("load_gates", model)
    root, folder = _root(model), Path(folder)
    file = folder / SETTINGS if (folder / SETTINGS).exists() else folder / MODEL_SETTINGS
    known = durable.read_json(file)
    if known.get("head_gate") is None:
        raise ValueError(f"{file}: no head_gate there; load_gates takes a folder of save_gates, or of a softmaxified model")
    try:
        gate = fields.build(HeadGateConfig, known["head_gate"])
    except ValueError as error:
        raise ValueError(f"{file}: head_gate: {error}") from error
    kind = getattr(getattr(root, "config", None), "model_type", type(root).__name__)
    if known.get("model_type") != kind:
        raise ValueError(f"load_gates: {folder} has gates of a {known.get('model_type')} model, this is a {kind}")
    expected = _expected(root, gate)
    if file.name == SETTINGS:
        weights, written = read_file(folder / WEIGHTS), read_metadata(folder / WEIGHTS).get("settings")
        if written not in (None, _digest(durable.read_text(file))):
            raise ValueError(f"{folder}: {WEIGHTS} and {SETTINGS} are not of one save_gates; save the gates again")
    else:
        names = {_place(name): name for name in expected}
        weights = {names.get(_place(name), name): x for name, x in read_weights(folder, ".head_gate.").items()}
    _check(folder, weights, expected)
    if not gates_of(root):
        softmaxify(root, gate)
    parameters = dict(root.named_parameters())
    with torch.no_grad():
        for name, x in weights.items():
            parameters[name].copy_(x)
    return model


def _digest(settings: str) -> str:
    """By which the two files know each other: who dies between them leaves one of the gates before."""
    return hashlib.sha256(settings.encode()).hexdigest()


def _root(model: nn.Module) -> Any:
    """The transformers model inside wrappers, such as PEFT's; names are its own."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _settings(root: Any) -> HeadGateConfig:
    gate = root.config.head_gate
    return gate if isinstance(gate, HeadGateConfig) else fields.build(HeadGateConfig, gate)


def _place(name: str) -> tuple[str, ...] | str:
    match = LAYER.search(name)
    return name if match is None else match.groups()


def _expected(root: Any, gate: HeadGateConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the gates' weights in this model, which has gates of these settings or none."""
    gates: dict[str, HeadGate] = gates_of(root)
    if gates and _settings(root) != gate:
        raise ValueError(f"load_gates: the model has gates of other settings, {_settings(root)}; those of the folder are {gate}")
    if not gates:
        like = torch.empty(0, device="meta")
        for name, taker in gateable(root):
            inner = ".mixer" if isinstance(taker, FLAMixer) else ""
            gates[f"{name}{inner}.head_gate"] = gate.build(**taker.gate_sizes(), like=like)
    return {f"{name}.{last}": tuple(x.shape) for name, each in gates.items() for last, x in each.named_parameters()}


def _check(folder: Path, weights: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    problems = [f"it has no {name}" for name in expected if name not in weights]
    problems += [f"this model has no {name}" for name in weights if name not in expected]
    problems += [
        f"{name} is {list(x.shape)}, this model's is {list(expected[name])}"
        for name, x in weights.items()
        if name in expected and tuple(x.shape) != expected[name]
    ]
    problems += [f"{name} holds NaN or infinity" for name, x in weights.items() if not x.isfinite().all()]
    problems += [f"{name} is {x.dtype}" for name, x in weights.items() if not x.is_floating_point()]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"load_gates: the gates in {folder} are not of this model: {problems[0]}{more}")
