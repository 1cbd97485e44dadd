"""The one place that maps a model to and from JSON."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn
from transformers import PreTrainedConfig

from headmax.fields import Positive, Range, check_settings, suggest
from headmax.layers import LORA_TARGETS, MIXERS, AttentionConfig, HeadGateConfig
from headmax.layers.feature_map import FeatureMap
from headmax.layers.mixers import MixerConfig
from headmax.layers.mixers.config import ConvSize, Width
from headmax.layers.mlp import swiglu_width
from headmax.layers.norm import OutputNormKind
from headmax.models.stub import AUTO_MAP, write_stub
from headmax.ops.registry import Backend

ELSEWHERE = {
    **dict.fromkeys(("num_layers", "num_layer", "n_layers", "n_layer", "depth"), "num_hidden_layers"),
    **dict.fromkeys(("d_model", "dim", "n_embd", "embed_dim"), "hidden_size"),
    "n_head": "num_heads",
}
"""What other libraries call a field."""
Size = Annotated[int, Range(1, 2**24, "a positive integer")]
Token = Annotated[int, Range(-(2**63), 2**63, "the number of a token")]
Fraction = Annotated[float, Range(0, math.inf, "a finite number of at least 0")]
Ratio = Annotated[float, Range(math.ulp(0.0), 1000, "a positive number")]
TYPES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "vocab_size"), Size),
    "intermediate_size": Size | None,
    "num_hidden_layers": Annotated[int, Range(1, 10_000, "a positive integer")],
    "num_heads": Width,
    **dict.fromkeys(("head_k_dim", "head_v_dim", "num_v_heads"), Width | None),
    "conv_size": ConvSize | None,
    "feature_map": FeatureMap | None,
    "output_norm": OutputNormKind,
    "mlp_ratio": Ratio | None,
    **dict.fromkeys(("norm_eps", "rotary_base"), Positive),
    "initializer_range": Fraction,
    **dict.fromkeys(("output_init", "down_init"), Fraction | Literal["depth"]),
    **dict.fromkeys(("tie_word_embeddings", "use_cache"), bool),
    "fused": bool | None,
    **dict.fromkeys(("bos_token_id", "pad_token_id"), Token | None),
    "eos_token_id": Token | list[Token] | None,
    "backend": Backend,
}
"""What the fields may be: sizes up to a hundred times those of any model there is, and nothing that computes but NaN."""
OF_MIXERS = ("head_k_dim", "head_v_dim", "num_v_heads", "conv_size", "feature_map", "output_norm", "rotary_base")
"""Settings of mixers that a model may have for all of them, where it names them."""


class HeadmaxConfig(PreTrainedConfig):
    """A model of any mixer, with or without head gates. Fields that are not given take the mixer's defaults."""

    model_type = "headmax"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_attention_heads": "num_heads"}
    auto_map = AUTO_MAP

    mixer: str | MixerConfig | list[str | MixerConfig] = "gla"
    """"linear", "retnet", "gla", "gated_deltanet", "kda", "mamba2", "attention", or a list with one entry per layer; in Python also a
    mixer's own settings, such as GLAConfig(decay_rank=32)."""
    hidden_size: int = 1024
    """Width of the residual stream."""
    num_hidden_layers: int = 24
    """Number of blocks."""
    num_heads: int = 4
    """Number of heads of every mixer."""
    vocab_size: int = 32_000
    """Size of the vocabulary."""
    head_gate: HeadGateConfig | dict | None = None
    """Settings of the head gates; None for the plain backbone."""
    head_k_dim: int | None = None
    """Width of a head's query and key: hidden_size / heads unless given, half of that for GLA and Gated DeltaNet, 128 for Mamba-2.
    In a hybrid this is the width of the recurrent layers; attention layers keep hidden_size / heads."""
    head_v_dim: int | None = None
    """Width of a head's value: hidden_size / heads unless given, twice that for RetNet and Mamba-2."""
    num_v_heads: int | None = None
    """Number of value heads, if more than key heads (Gated DeltaNet)."""
    mlp_ratio: float | None = None
    """Width of the SwiGLU layer as a multiple of hidden_size, before the usual factor 2/3: 4 unless given, 2 for RetNet, 3 for Mamba-2."""
    intermediate_size: int | None = None
    """Width of the SwiGLU layer; overrides mlp_ratio."""
    conv_size: int | None = None
    """Width of the short convolution on q, k and v; 0 for none. Unless given, 4 for Gated DeltaNet, KDA and Mamba-2, none elsewhere."""
    feature_map: str | None = None
    """Feature map on q and k of linear, RetNet and GLA: "identity" (unless given), "relu", "elu", "silu", "softmax"."""
    output_norm: str = "head"
    """Norm of the heads' outputs: per head, as in the original backbones; joint over all heads; or none. Mamba-2's is joint unless
    Mamba2Config says otherwise."""
    norm_eps: float = 1e-6
    """Epsilon of every norm, added to the mean square."""
    rotary_base: float = 10_000.0
    """Base of the rotary position embeddings (RetNet, attention)."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    output_init: float | str = 1.0
    """Factor on the initial weights of the mixers' output projections; "depth" is 1 / sqrt(2 x layers)."""
    down_init: float | str = 1.0
    """Factor on the initial weights of the MLPs' down projections; "depth" is 1 / sqrt(2 x layers)."""
    tie_word_embeddings: bool = True
    """Share the weights of embedding and output layer."""
    use_cache: bool = True
    """Return the states for decoding."""
    pad_token_id: int | None = None
    """Token that pads short sequences."""
    bos_token_id: int | None = 1
    """Token that starts a text."""
    eos_token_id: int | list[int] | None = 2
    """Token that ends a text."""
    backend: str = "auto"
    """Implementation of the ops: "auto", "reference", "chunkwise", "triton" or "fla"."""
    fused: bool | None = None
    """Run norms, projections and MLP as fused ops; on a GPU unless given."""

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_misspelt(kwargs)
        for alias in set(kwargs) & set(self.attribute_map):
            setattr(self, self.attribute_map[alias], kwargs.pop(alias))
        if isinstance(self.head_gate, dict):
            known = {field.name for field in dataclasses.fields(HeadGateConfig)}
            for name in set(self.head_gate) - known:
                raise ValueError(f"HeadmaxConfig: head_gate has no field {name!r}{suggest(name, known)}")
            self.head_gate = HeadGateConfig(**self.head_gate)
        entries = self.mixer if isinstance(self.mixer, list | tuple) else [self.mixer]
        parsed = [parse_mixer(entry) for entry in entries]
        self.mixer = parsed if isinstance(self.mixer, list | tuple) else parsed[0]
        self._check()
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        check_settings("HeadmaxConfig", vars(self), TYPES)
        if isinstance(self.mixer, list) and len(self.mixer) != self.num_hidden_layers:
            raise ValueError(f"HeadmaxConfig: mixer lists {len(self.mixer)} layers, num_hidden_layers is {self.num_hidden_layers}")
        if not isinstance(self.head_gate, HeadGateConfig | None):
            raise ValueError(f"HeadmaxConfig: head_gate must be a HeadGateConfig, a dict of its fields or None, got {self.head_gate!r}")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"HeadmaxConfig: pad_token_id {self.pad_token_id} is not in the vocabulary of {self.vocab_size}")
        entries = self.mixer if isinstance(self.mixer, list) else [self.mixer]
        named = [MIXERS[entry] for entry in entries if isinstance(entry, str)]  # the others have their own settings
        here = ", ".join(sorted({kind.name for kind in named})) or "configured"
        for name in self.given_to_mixers():
            if not any(name in kind.types() for kind in named):
                raise ValueError(f"HeadmaxConfig: {name} has no use in a model of {here} layers; leave it None")
        if self.head_gate is not None and not any(kind.gated for kind in self.mixers):
            raise ValueError(f"HeadmaxConfig: head_gate has no use in a model of {here} layers; leave it None")

    def given_to_mixers(self) -> dict[str, Any]:
        """Settings of mixers that are not the default; where they are, a mixer has its own."""
        return {name: value for name in OF_MIXERS if (value := getattr(self, name)) != getattr(HeadmaxConfig, name)}

    @property
    def mixers(self) -> list[MixerConfig]:
        """The settings of each layer's mixer."""
        entries = self.mixer if isinstance(self.mixer, list) else [self.mixer] * self.num_hidden_layers
        alone = len({entry if isinstance(entry, str) else entry.name for entry in entries}) == 1
        given = self.given_to_mixers()
        return [MIXERS[entry].of_model(given, alone) if isinstance(entry, str) else entry for entry in entries]

    @property
    def layer_types(self) -> list[str]:
        """Of each layer, as transformers names them."""
        return [mixer.layer_type for mixer in self.mixers]

    @property
    def sliding_window(self) -> int | None:
        """The widest window of its attention layers, if any has one."""
        return max((mixer.window for mixer in self.mixers if isinstance(mixer, AttentionConfig) and mixer.window), default=None)

    def init_factor(self, given: float | str) -> float:
        """What `output_init` or `down_init` come to in this model."""
        return (2 * self.num_hidden_layers) ** -0.5 if isinstance(given, str) else given

    def mlp_width(self, mixer: MixerConfig) -> int:
        """SwiGLU width beside a mixer."""
        ratio = mixer.mlp_ratio if self.mlp_ratio is None else self.mlp_ratio
        return self.intermediate_size or swiglu_width(self.hidden_size, ratio)

    def build_mixer(self, mixer: MixerConfig) -> nn.Module:
        """The module of one of `mixers`."""
        gate = self.head_gate if isinstance(self.head_gate, HeadGateConfig) else None
        return mixer.build(self.hidden_size, self.num_heads, norm_eps=self.norm_eps, head_gate=gate, backend=self.backend)

    def to_dict(self) -> dict[str, Any]:
        """PEFT asks for it before it looks for the targets of a LoRA that names none."""
        tell_peft()
        output = super().to_dict() | {"auto_map": AUTO_MAP}
        if isinstance(self.head_gate, HeadGateConfig):
            output["head_gate"] = dataclasses.asdict(self.head_gate)
        if isinstance(self.mixer, list):
            output["mixer"] = [entry if isinstance(entry, str) else entry.to_dict() for entry in self.mixer]
        elif isinstance(self.mixer, MixerConfig):
            output["mixer"] = self.mixer.to_dict()
        return output

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """config.json, and the module that it names for `trust_remote_code=True`."""
        if not os.path.isfile(save_directory):  # transformers says what is wrong
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            write_stub(Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub, **kwargs)


def tell_peft() -> None:
    """Puts this kind of model in PEFT's table of LoRA targets, if PEFT is there."""
    if (constants := sys.modules.get("peft.utils.constants")) is not None:
        constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault("headmax", list(LORA_TARGETS))


def parse_mixer(entry: object) -> str | MixerConfig:
    """One entry of `HeadmaxConfig.mixer`: a name, settings, or what `MixerConfig.to_dict` wrote."""
    if isinstance(entry, MixerConfig):
        return entry
    name = entry.get("name") if isinstance(entry, dict) else entry
    if not isinstance(name, str):
        raise ValueError(
            f"HeadmaxConfig: mixer must be a name, settings such as GLAConfig(), or a list with one per layer, got {entry!r:.80}"
        )
    if name not in MIXERS:
        raise ValueError(f"HeadmaxConfig: unknown mixer {name!r:.80}{suggest(name, MIXERS)}")
    if not isinstance(entry, dict):
        return name
    settings = {field: value for field, value in entry.items() if field != "name"}
    for field in settings:
        if field not in MIXERS[name].types():
            raise ValueError(f"{MIXERS[name].__name__}: unknown field {field!r:.80}{suggest(field, MIXERS[name].types())}")
    return MIXERS[name](**settings)


OWN = set(HeadmaxConfig.__annotations__)
"""Fields that a headmax model depends on."""


def refuse_misspelt(names: Iterable[str]) -> None:
    """Hugging Face would keep a misspelt field as an attribute that nothing reads."""
    fields = {field.name for field in dataclasses.fields(HeadmaxConfig)}
    for name in set(names) - fields:
        close = [ELSEWHERE[name]] if name in ELSEWHERE else difflib.get_close_matches(name, fields, n=1, cutoff=0.8)
        if close and not name.endswith("_token_id"):
            raise ValueError(f"HeadmaxConfig: unknown field {name!r}; did you mean {close[0]!r}?")


def parse_config(fields: Mapping[str, Any], path: Path) -> HeadmaxConfig:
    """Of a config.json, read from `path`. What is transformers' own in there is left out: it would set attributes, unchecked."""
    known = OWN | set(HeadmaxConfig.attribute_map)
    try:
        refuse_misspelt(fields)
        return HeadmaxConfig(**{name: value for name, value in fields.items() if name in known})
    except ValueError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
