"""transformers' models on our ops: which of its layers we know, and how each projects its input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from headmax.models.configuration import HeadmaxConfig
from headmax.models.forwards import Forward, GatedDelta, KimiDelta, Layer, Lightning, Mamba2, boundaries
from headmax.models.inputs import packing_of_positions


def _qwen3_next(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Key head after key head: its q and k, then v, z, b and a of its value heads."""
    each = layer.num_v_heads // layer.num_k_heads
    widths = [layer.head_k_dim, layer.head_k_dim, each * layer.head_v_dim, each * layer.head_v_dim]
    q, k, v, z = layer.in_proj_qkvz(x).unflatten(-1, (layer.num_k_heads, -1)).split(widths, dim=-1)
    b, a = layer.in_proj_ba(x).unflatten(-1, (layer.num_k_heads, -1)).split([each, each], dim=-1)
    return torch.cat([y.flatten(2) for y in (q, k, v)], dim=-1), z.flatten(2), b.flatten(2), a.flatten(2)


def _qwen3_5(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)


def _olmo_hybrid(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    return _qkv(layer, x), layer.g_proj(x), layer.b_proj(x), layer.a_proj(x)


def _qkv(layer: Any, x: Tensor) -> Tensor:
    return torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)


def _kimi_linear(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    return _qkv(layer, x), layer.g_b_proj(layer.g_a_proj(x))


def _bailing_hybrid(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    return _qkv(layer, x), layer.g_proj(x)


def _mamba2(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    return _split_mamba2(layer, layer.in_proj(x))


def _falcon_h1(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    return _split_mamba2(layer, layer.in_proj(x * layer.ssm_in_multiplier) * layer.mup_vector)


def _split_mamba2(layer: Any, projected: Tensor) -> tuple[Tensor, ...]:
    gate, mixed, dt = projected.split([layer.intermediate_size, layer.conv_dim, layer.num_heads], dim=-1)
    return mixed, gate, dt


def _minimax(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    return (layer.act_fn(layer.qkv_proj(x)),)


_QWEN3_5 = Layer(GatedDelta, _qwen3_5, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"), "out_proj")
_KIMI = Layer(KimiDelta, _kimi_linear, ("q_proj", "k_proj", "v_proj", "g_a_proj", "g_b_proj"), "o_proj")
_MAMBA2 = Layer(Mamba2, _mamba2, (), "out_proj")

LAYERS = {
    "Qwen3NextGatedDeltaNet": Layer(GatedDelta, _qwen3_next, ("in_proj_qkvz", "in_proj_ba", "norm", "out_proj"), "out_proj"),
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
    "Qwen4ExpTextGatedDeltaNet": _QWEN3_5,
    "OlmoHybridGatedDeltaNet": Layer(
        GatedDelta,
        _olmo_hybrid,
        ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "allow_neg_eigval", "o_norm", "o_proj"),
        "o_proj",
        "o_norm",
    ),
    "KimiLinearDeltaAttention": _KIMI,
    "Glm5NextTextLinearAttention": _KIMI,
    "BailingHybridDeltaAttention": Layer(KimiDelta, _bailing_hybrid, ("q_proj", "k_proj", "v_proj", "g_proj"), "o_proj"),
    "Mamba2Mixer": _MAMBA2,
    "BambaMixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Zamba2MambaMixer": _MAMBA2,
    "FalconH1Mixer": Layer(Mamba2, _falcon_h1, ("ssm_in_multiplier", "mup_vector", "mamba_rms_norm"), "out_proj"),
    "MiniMaxLightningAttention": Layer(Lightning, _minimax, ("act_fn", "qkv_proj"), "out_proj"),
}
"""transformers' classes of layers that run on our ops."""


def check_model(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function}: model must be a loaded model, got {model!r:.80}; AutoModelForCausalLM.from_pretrained loads one")


def forward_of(layer: nn.Module) -> Forward | None:
    """Ours, if the layer has it: as its `forward`, or where accelerate's hooks keep that."""
    held = (vars(layer).get(name) for name in ("_old_forward", "forward"))
    return next((forward for forward in held if isinstance(forward, Forward)), None)


def forwards(model: nn.Module) -> Iterator[tuple[str, Forward]]:
    """The layers that we know, by their names in the model: the forwards they have, or new ones that are not in place yet."""
    for name, layer in model.named_modules():
        kind = type(layer)
        if (about := LAYERS.get(kind.__name__)) is None or not kind.__module__.startswith("transformers."):
            continue
        if missing := [x for x in (*about.forward.reads, *about.reads) if not hasattr(layer, x)]:
            raise ValueError(
                f"{kind.__name__} of transformers {transformers.__version__} has no {', '.join(missing)}, which headmax reads; "
                "headmax is tested with transformers 5.17 and 5.22"
            )
        yield name, forward_of(layer) or about.forward(layer, about)


def owners_of(model: nn.Module) -> dict[nn.Module, PreTrainedModel]:
    """The innermost transformers model that each module belongs to."""
    return {module: owner for owner in model.modules() if isinstance(owner, PreTrainedModel) for module in owner.modules()}


def mark_packed_sequences(model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: whatever marks packed sequences, each layer is given `cu_seq_lens_q`, read from it once."""
    bounds = options.get("cu_seq_lens_q")
    if bounds is None:
        bounds = boundaries(seq_idx) if (seq_idx := options.get("seq_idx")) is not None else bounds_of_positions(inputs, options)
    return inputs, options if bounds is None else options | {"cu_seq_lens_q": bounds}


def bounds_of_positions(inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
    """Of `position_ids` [1,T] that restart, where transformers' attention layers, which alone are given them, take them for packed
    sequences: beside no mask and no cache."""
    positions, others = options.get("position_ids"), ("attention_mask", "past_key_values", "cache_params")
    tokens = next((x for x in (*inputs[:1], options.get("input_ids"), options.get("inputs_embeds")) if x is not None), None)
    if positions is None or tokens is None or positions.ndim != 2 or any(x is not None for x in (*inputs[1:], *map(options.get, others))):
        return None
    packing = packing_of_positions(positions, tokens.shape[0])
    return None if packing is None else packing.cu_seqlens


def install(model: nn.Module, found: Iterable[Forward]) -> None:
    """Puts the forwards in their layers' place, and their models on the lookout for packed sequences."""
    owners = owners_of(model)
    for forward in found:
        layer, owner = forward.layer, owners.get(forward.layer)
        setattr(layer, "_old_forward" if hasattr(layer, "_old_forward") else "forward", forward)
        if owner is not None and mark_packed_sequences not in owner._forward_pre_hooks.values():
            owner.register_forward_pre_hook(mark_packed_sequences, with_kwargs=True)


def accelerate(model: nn.Module) -> nn.Module:
    """Runs the linear-attention layers of a transformers model on headmax's ops, in place.

    Classes, weights, cache and outputs stay the same, on any device. Packed sequences, marked by `cu_seq_lens_q`, `seq_idx` or
    `position_ids` that restart, are kept apart.

    Args:
        model: a model of a supported type, such as Qwen3.5, Kimi-Linear, Mamba-2 or Nemotron-H.

    Returns:
        The same model.
    """
    check_model("accelerate", model)
    found = [forward for _, forward in forwards(model)]
    if not found and isinstance(getattr(model, "config", None), HeadmaxConfig):
        raise ValueError(f"accelerate: a {type(model).__name__} runs on headmax's ops as it is")
    if not found:
        raise ValueError(f"accelerate: {type(model).__name__} has no layer that headmax knows: {', '.join(LAYERS)}")
    install(model, found)
    return model
