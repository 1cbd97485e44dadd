"""Checkpoints of flash-linear-attention become headmax folders and back: every setting mapped or refused, every weight bit for bit."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from headmax import durable
from headmax.fields import suggest
from headmax.layers.mixers import MIXERS, AttentionConfig, GatedDeltaNetConfig, MixerConfig, RecurrentMixer
from headmax.layers.mixers.config import FeatureMapConfig, RecurrentConfig
from headmax.layers.mlp import swiglu_width
from headmax.models.configuration import HeadmaxConfig, parse_config
from headmax.models.stub import write_stub
from headmax.models.weights import check_shapes, read_weights

MIXER_OF = {kind.fla[0]: kind for kind in MIXERS.values() if kind.fla is not None}
"""The mixer that an FLA model_type is."""
SHARED = ("hidden_size", "num_hidden_layers", "num_heads", "vocab_size", "norm_eps", "initializer_range", "tie_word_embeddings")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "use_cache")
INERT = {"attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "max_position_embeddings"}
"""Settings of FLA that choose an implementation and change no result (positions there are a hint, rotary has no limit)."""
ONLY = {
    "hidden_act": "swish",
    "attn": None,
    "elementwise_affine": True,
    "use_l2warp": False,
    "attnres_block_size": None,
    "use_output_gate": True,
    "use_gate": True,
    "output_gate_activation": "swish",
    "allow_neg_eigval": False,
    "clamp_min": None,
    "use_gk": True,
    "use_gv": False,
    "qkv_bias": False,
    "qk_norm": False,
}
"""Settings of FLA that have one value here; any other is refused by name."""
MAPPED = {"expand_k", "expand_v", "hidden_ratio", "intermediate_size", "use_short_conv", "conv_size", "feature_map"}
MAPPED |= {"head_dim", "num_v_heads", "num_kv_heads", "rope_theta", "share_conv_kernel", "torch_dtype", "window_size"}
NUMBERS = ("hidden_size", "num_heads", "intermediate_size", "hidden_ratio", "expand_k", "expand_v", "head_dim", "conv_size", "rope_theta")
"""Settings that sizes are computed from."""
FEATURE_MAPS = {None: "identity", "relu": "relu", "silu": "silu", "swish": "silu"}
COPIED = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "generation_config.json", "chat_template*")

NAMES = {
    "model.embeddings.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "attn_norm.weight": "mixer_norm.weight",
    "mlp_norm.weight": "mlp_norm.weight",
    **{f"mlp.{x}_proj.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{f"attn.{x}_proj.weight": f"mixer.{x}_proj.weight" for x in "qkvgoab"},
    **{f"attn.{x}_conv1d.weight": f"mixer.convs.{n}.weight" for n, x in enumerate("qkv")},
    "attn.gk_proj.0.weight": "mixer.decay_down_proj.weight",
    "attn.gk_proj.1.weight": "mixer.decay_up_proj.weight",
    "attn.gk_proj.1.bias": "mixer.decay_up_proj.bias",
    "attn.A_log": "mixer.A_log",
    "attn.dt_bias": "mixer.dt_bias",
    "attn.g_norm.weight": "mixer.output_norm.norm.weight",  # where its norm is not fused
    "attn.o_norm.weight": "mixer.output_norm.norm.weight",  # of Gated DeltaNet
    "attn.g_norm_swish_gate.weight": "mixer.output_norm.norm.weight",
}
"""FLA's names and ours, those of a layer without its number."""


def config_from_fla(fla: Mapping[str, Any]) -> HeadmaxConfig:
    """The headmax configuration of an FLA config.json. ValueError lists every setting that has no counterpart."""
    kind = fla.get("model_type")
    if not isinstance(kind, str) or kind not in MIXER_OF:
        raise ValueError(f"model_type {kind!r} is not a model of flash-linear-attention that headmax has{suggest(kind, MIXER_OF)}")
    if refused := "; ".join(unknown_to_headmax(fla, kind)):
        raise ValueError(f"flash-linear-attention's {kind}: headmax cannot map {refused}")
    width = fla.get("intermediate_size") or swiglu_width(fla["hidden_size"], fla.get("hidden_ratio") or MIXER_OF[kind].mlp_ratio)
    fields: dict[str, Any] = {"intermediate_size": width, "tie_word_embeddings": False}
    fields |= {name: fla[name] for name in (*SHARED, *TOKENS) if name in fla}
    return HeadmaxConfig(**fields, **mixer_from_fla(fla, kind))


def unknown_to_headmax(fla: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Settings of FLA that headmax does not have: name, value, and what it has instead."""
    known = {*SHARED, *TOKENS, *INERT, *ONLY, *MAPPED, "model_type", *PreTrainedConfig().to_dict()}
    yield from (f"{name} (unknown)" for name in sorted(set(fla) - known) if not name.startswith("_"))
    heads = fla.get("num_heads")
    choices: dict[str, tuple[tuple[Any, ...], str]] = {name: ((value, "silu"), repr(value)) for name, value in ONLY.items()}
    choices["feature_map"] = (*FEATURE_MAPS,), ", ".join(map(repr, FEATURE_MAPS))
    if kind != "transformer":
        choices |= {"num_kv_heads": ((None, heads), f"num_heads {heads}"), "window_size": ((None,), "None")}
    if kind == "gated_deltanet":
        choices["use_short_conv"] = (True,), "True"
    if fla.get("use_short_conv", kind == "gated_deltanet"):
        choices["share_conv_kernel"] = (None, False), "False"
    for name, (values, only) in choices.items():
        if name in fla and fla[name] not in values:
            yield f"{name}={fla[name]!r} (only {only})"
    yield from (f"{name} (missing)" for name in ("hidden_size", "num_heads") if fla.get(name) is None)
    numbers = {name: fla[name] for name in NUMBERS if fla.get(name) is not None}
    yield from (f"{name}={value!r} (only positive numbers)" for name, value in numbers.items() if not is_positive(value))


def mixer_from_fla(fla: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of HeadmaxConfig that say which mixer it is."""
    mixer, conv_size = MIXER_OF[kind], fla.get("conv_size", 4)
    if kind == "transformer":
        base = fla.get("rope_theta") or 10_000.0
        return {"mixer": AttentionConfig(num_kv_heads=fla.get("num_kv_heads"), window=fla.get("window_size"), rotary_base=base)}
    if kind == "gated_deltanet":
        key = fla.get("head_dim") or 256
        widths = {"head_k_dim": key, "head_v_dim": int(key * (fla.get("expand_v") or 2.0)), "num_v_heads": fla.get("num_v_heads")}
        return {"mixer": mixer.name, "conv_size": conv_size} | widths
    total = [int(fla["hidden_size"] * (fla.get(name) or getattr(mixer, name))) for name in ("expand_k", "expand_v")]
    widths = {name: width // fla["num_heads"] for name, width in zip(("head_k_dim", "head_v_dim"), total, strict=True)}
    fields = {"mixer": mixer.name, "feature_map": FEATURE_MAPS[fla.get("feature_map")]}
    return fields | {"conv_size": conv_size if fla.get("use_short_conv") else 0} | widths


def is_positive(value: Any) -> bool:
    """Whether this is a number that a size can be computed from."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def expansion(width: int, of: int) -> float:
    """The factor that makes `width` of `of` in FLA, which cuts a product's fraction off."""
    factor = width / of
    return factor if int(of * factor) == width else math.nextafter(factor, math.inf)


def config_to_fla(config: HeadmaxConfig) -> dict[str, Any]:
    """The FLA config.json of a plain headmax model. ValueError lists every setting FLA does not have."""
    mixer, heads, hidden = config.mixers[0], config.num_heads, config.hidden_size
    refused = [] if config.head_gate is None else ["head_gate (flash-linear-attention has no head gates)"]
    if mixer.fla is None or any(other != mixer for other in config.mixers):
        refused.append(f"mixer={config.mixer!r} (only one of {', '.join(repr(kind.name) for kind in MIXER_OF.values())} in all layers)")
    refused += [f"{name}={value!r} (only {only})" for name, value, only in unknown_to_fla(mixer, hidden // heads)]
    if refused or mixer.fla is None:
        raise ValueError(f"flash-linear-attention cannot hold this model: {'; '.join(refused)}")
    kind, title, _ = mixer.fla
    fields = {"model_type": kind, "intermediate_size": config.mlp_width(mixer), "hidden_act": "swish", "fuse_norm": True}
    fields |= {name: getattr(config, name) for name in (*SHARED, *TOKENS)} | {"architectures": [f"{title}ForCausalLM"]}
    if isinstance(mixer, AttentionConfig):
        return fields | {"rope_theta": mixer.rotary_base, "num_kv_heads": mixer.num_kv_heads, "window_size": mixer.window}
    with torch.device("meta"):
        shape = cast(RecurrentMixer, config.build_mixer(mixer))  # its widths, defaults resolved
    key, value, conv_size = shape.head_k_dim, shape.head_v_dim, shape.config.conv_size
    if isinstance(mixer, GatedDeltaNetConfig):
        widths = {"head_dim": key, "expand_v": expansion(value, key), "num_v_heads": mixer.num_v_heads}
        return fields | widths | {"conv_size": conv_size}
    fields |= {"expand_k": expansion(key * heads, hidden), "expand_v": expansion(value * heads, hidden)}
    fields["feature_map"] = next(theirs for theirs, ours in FEATURE_MAPS.items() if ours == cast(FeatureMapConfig, mixer).feature_map)
    return fields | {"use_short_conv": bool(conv_size), "conv_size": conv_size or 4}


def unknown_to_fla(mixer: MixerConfig, head_dim: int) -> Iterator[tuple[str, Any, str]]:
    """Settings of a mixer that FLA does not have: name, value, and what it has instead."""
    if isinstance(mixer, AttentionConfig):
        if mixer.head_k_dim not in (None, head_dim):
            yield "head_k_dim", mixer.head_k_dim, "hidden_size / num_heads"
        for name in ("num_heads", "qk_norm", "output_gate", "rotary_dim"):
            if getattr(mixer, name):
                yield name, getattr(mixer, name), str(getattr(AttentionConfig(), name))
    if isinstance(mixer, RecurrentConfig) and mixer.output_norm != "head":
        yield "output_norm", mixer.output_norm, "'head'"
    if isinstance(mixer, FeatureMapConfig) and mixer.feature_map not in FEATURE_MAPS.values():
        yield "feature_map", mixer.feature_map, ", ".join(map(repr, dict.fromkeys(FEATURE_MAPS.values())))
    if isinstance(mixer, GatedDeltaNetConfig) and not mixer.conv_size:
        yield "conv_size", 0, "a short convolution"
    fixed = {"rotary_base": 10_000.0, "decay_rank": 16, "decay_normalizer": 16.0}
    for name, value in () if isinstance(mixer, AttentionConfig) else fixed.items():
        if getattr(mixer, name, value) != value:
            yield name, getattr(mixer, name), str(value)


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A weight's name on the other side; empty if it has none."""
    layer = match[0] if (match := re.match(r"model\.layers\.\d+\.", name)) else ""
    other = names.get(name.removeprefix(layer))
    return layer + other if other else ""


def weights_from_fla(weights: Mapping[str, Tensor], config: HeadmaxConfig) -> dict[str, Tensor]:
    """FLA's weights under our names and in our shapes, the same numbers. ValueError lists what is missing, left over or misshapen."""
    names = {name: renamed(name, NAMES) for name in weights}
    converted = {ours: weights[name].squeeze(1) if ".convs." in ours else weights[name] for name, ours in names.items() if ours}
    check_shapes(shapes_of(converted), config, [name for name, ours in names.items() if not ours])
    return converted


def weights_to_fla(weights: Mapping[str, Tensor], config: HeadmaxConfig) -> dict[str, Tensor]:
    """The reverse of `weights_from_fla`."""
    check_shapes(shapes_of(weights), config)
    names = {ours: theirs for theirs, ours in NAMES.items()}
    if isinstance(config.mixers[0], GatedDeltaNetConfig):
        names["mixer.output_norm.norm.weight"] = "attn.o_norm.weight"
    return {renamed(name, names): x.unsqueeze(1) if ".convs." in name else x for name, x in weights.items()}


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in weights.items()}


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all weights of a Hugging Face folder, in one or several safetensors files."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json there; give the folder that save_pretrained wrote")
    return durable.read_json(folder / "config.json"), read_weights(folder)


def write_folder(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], source: Path) -> None:
    """Writes what `read_folder` reads, and copies the tokenizer; nothing is written over."""
    from huggingface_hub import save_torch_state_dict

    with durable.new_folder(folder) as unfinished:
        save_torch_state_dict({name: x.contiguous() for name, x in weights.items()}, unfinished, metadata={"format": "pt"})
        for pattern in COPIED:
            for file in filter(Path.is_file, source.glob(pattern)):
                shutil.copy2(file, unfinished)
        if config.get("model_type") == HeadmaxConfig.model_type:
            write_stub(unfinished)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """What the weights are stored in, by its name in transformers since version 5 or the one before."""
    name = config.get("dtype") or config.get("torch_dtype")
    if name is not None and not (isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)):
        raise ValueError(f"dtype {name!r} in config.json is no dtype of torch; it should be float32, bfloat16 or float16")
    return name


def from_fla(source: Path | str, out: Path | str) -> None:
    """An FLA checkpoint folder becomes a headmax folder, which `AutoModelForCausalLM.from_pretrained` loads."""
    folder = Path(source)
    durable.claim(Path(out))
    config, weights = read_folder(folder)
    ours = config_from_fla(config)
    fields = ours.to_dict() | {"architectures": ["HeadmaxForCausalLM"], "dtype": dtype_of(config)}
    write_folder(Path(out), fields, weights_from_fla(weights, ours), folder)


def to_fla(source: Path | str, out: Path | str) -> None:
    """A headmax folder becomes one that flash-linear-attention loads."""
    folder = Path(source)
    durable.claim(Path(out))
    config, weights = read_folder(folder)
    if config.get("model_type") != HeadmaxConfig.model_type:
        raise ValueError(f"{folder}: model_type is {config.get('model_type')!r}, not a headmax model")
    ours = parse_config(config, folder / "config.json")
    theirs = config_to_fla(ours) | {"dtype": dtype_of(config)}
    write_folder(Path(out), theirs, weights_to_fla(weights, ours), folder)
