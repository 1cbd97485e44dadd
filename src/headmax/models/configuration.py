"""The one place that maps a model to and from JSON."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from transformers import PreTrainedConfig

from headmax.layers import MIXERS, HeadGateConfig
from headmax.layers.feature_map import FEATURE_MAPS
from headmax.layers.mlp import swiglu_width
from headmax.layers.norm import OutputNormKind
from headmax.ops.registry import BACKENDS, suggest

ELSEWHERE = {
    **dict.fromkeys(("num_layers", "num_layer", "n_layers", "n_layer", "depth"), "num_hidden_layers"),
    **dict.fromkeys(("d_model", "dim", "n_embd", "embed_dim"), "hidden_size"),
    "n_head": "num_heads",
}
"""What other libraries call a field."""
LARGEST = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 2**24),
    **dict.fromkeys(("num_heads", "head_k_dim", "head_v_dim", "num_v_heads"), 2**16),
    "num_hidden_layers": 10_000,
}
"""Sizes a hundred times those of any model there is."""
OPTIONAL = {"intermediate_size", "head_k_dim", "head_v_dim", "num_v_heads"}
MAX_RATIO, MAX_CONV = 1000, 1024


def _is(kind: type, value: object) -> bool:
    """Whether this is a number of that kind: integers are floats too, truth values are neither."""
    return isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)


class HeadmaxConfig(PreTrainedConfig):
    """A model of any mixer, with or without head gates. What is not given takes the mixer's own default."""

    model_type = "headmax"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_attention_heads": "num_heads"}

    mixer: str | list[str] = "gla"
    """"linear", "retnet", "gla", "gated_deltanet", "attention", or a list with one entry per layer."""
    hidden_size: int = 1024
    """Width of the residual stream."""
    num_hidden_layers: int = 24
    """Number of blocks."""
    num_heads: int = 4
    """Number of heads of every mixer."""
    vocab_size: int = 32_000
    """Size of the vocabulary."""
    head_gate: HeadGateConfig | dict | None = None
    """The softmax over heads; None is the plain backbone."""
    head_k_dim: int | None = None
    """Width of a head's query and key: hidden_size / heads unless given, half of that for GLA and Gated DeltaNet.
    In a hybrid this is the width of the recurrent layers; attention layers keep hidden_size / heads."""
    head_v_dim: int | None = None
    """Width of a head's value: hidden_size / heads unless given, twice that for RetNet."""
    num_v_heads: int | None = None
    """Number of value heads, if more than key heads (Gated DeltaNet)."""
    mlp_ratio: float | None = None
    """Width of the SwiGLU layer as a multiple of hidden_size, before the usual factor 2/3: 4 unless given, 2 for RetNet."""
    intermediate_size: int | None = None
    """Width of the SwiGLU layer; overrides mlp_ratio."""
    conv_size: int | None = None
    """Width of the short convolution on q, k and v; 0 for none. Unless given, 4 for Gated DeltaNet and none elsewhere."""
    feature_map: str | None = None
    """Feature map on q and k of linear, RetNet and GLA: "identity" (unless given), "relu", "elu", "silu", "softmax"."""
    output_norm: str = "head"
    """Norm of the read-out: per head, as in the original backbones; joint over all heads; or none."""
    norm_eps: float = 1e-6
    """Epsilon of every norm, added to the mean square."""
    rotary_base: float = 10_000.0
    """Base of the rotary position embeddings (RetNet, attention)."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
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
        self._check()
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        self._check_numbers()
        for name, known in (("output_norm", get_args(OutputNormKind)), ("feature_map", FEATURE_MAPS), ("backend", BACKENDS)):
            value = getattr(self, name)
            if value is not None and value not in list(known):
                raise ValueError(f"HeadmaxConfig: unknown {name} {value!r}{suggest(value, known)}")
        if not isinstance(self.mixer, str | list | tuple):
            raise ValueError(f"HeadmaxConfig: mixer must be a name or a list with one name per layer, got {self.mixer!r}")
        names = [self.mixer] if isinstance(self.mixer, str) else list(self.mixer)
        for name in names:
            if name not in list(MIXERS):
                raise ValueError(f"HeadmaxConfig: unknown mixer {name!r}{suggest(name, MIXERS)}")
        if not isinstance(self.mixer, str) and len(names) != self.num_hidden_layers:
            raise ValueError(f"HeadmaxConfig: mixer lists {len(names)} layers, num_hidden_layers is {self.num_hidden_layers}")
        if not isinstance(self.head_gate, HeadGateConfig | None):
            raise ValueError(f"HeadmaxConfig: head_gate must be a HeadGateConfig, a dict of its fields or None, got {self.head_gate!r}")
        present = set(names)
        for field, users in (
            ("head_gate", set(MIXERS) - {"attention"}),
            ("num_v_heads", {"gated_deltanet"}),
            ("feature_map", {"linear", "retnet", "gla"}),
            ("head_v_dim", set(MIXERS) - {"attention"}),
            ("conv_size", set(MIXERS) - {"attention"}),
        ):
            if getattr(self, field) is not None and not present & users:
                raise ValueError(f"HeadmaxConfig: {field} has no use in a model of {', '.join(sorted(present))} layers; leave it None")

    def _check_numbers(self) -> None:
        """Sizes and settings that some model could have; the rest would run out of memory, or compute nothing but NaN."""
        for name, largest in LARGEST.items():
            value, optional = getattr(self, name), name in OPTIONAL
            if not (_is(int, value) or (optional and value is None)) or (value is not None and value < 1):
                raise ValueError(f"HeadmaxConfig: {name} must be a positive integer{' or None' if optional else ''}, got {value!r}")
            if value is not None and value > largest:
                raise ValueError(f"HeadmaxConfig: {name} must be at most {largest:,}, got {value:,}")
        if self.conv_size is not None and not (_is(int, self.conv_size) and self.conv_size != 1 and 0 <= self.conv_size <= MAX_CONV):
            raise ValueError(f"HeadmaxConfig: conv_size must be 0 for none or at least 2, got {self.conv_size!r} (at most {MAX_CONV})")
        if self.mlp_ratio is not None and not (_is(float, self.mlp_ratio) and 0 < self.mlp_ratio <= MAX_RATIO):
            raise ValueError(f"HeadmaxConfig: mlp_ratio must be a positive number up to {MAX_RATIO:,} or None, got {self.mlp_ratio!r}")
        for name in ("tie_word_embeddings", "use_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"HeadmaxConfig: {name} must be True or False, got {getattr(self, name)!r}")
        if self.fused is not None and not isinstance(self.fused, bool):
            raise ValueError(f"HeadmaxConfig: fused must be True, False or None, got {self.fused!r}")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            several = value if name == "eos_token_id" and isinstance(value, list) else [] if value is None else [value]
            if not all(_is(int, token) and abs(token) < 2**63 for token in several):
                raise ValueError(f"HeadmaxConfig: {name} must be the number of a token or None, got {value!r}")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"HeadmaxConfig: pad_token_id {self.pad_token_id} is not in the vocabulary of {self.vocab_size}")
        for name in ("norm_eps", "rotary_base"):
            value = getattr(self, name)
            if not (_is(float, value) and 0 < value < math.inf):
                raise ValueError(f"HeadmaxConfig: {name} must be {'finite' if value == math.inf else 'positive'}, got {value!r}")
        if not (_is(float, self.initializer_range) and 0 <= self.initializer_range < math.inf):
            raise ValueError(f"HeadmaxConfig: initializer_range must be finite and not negative, got {self.initializer_range!r}")

    @property
    def mixers(self) -> list[str]:
        """The mixer of each layer."""
        return [self.mixer] * self.num_hidden_layers if isinstance(self.mixer, str) else list(self.mixer)

    def mixer_arguments(self, name: str) -> dict[str, Any]:
        """The plain arguments of a mixer of that name in this model."""
        arguments: dict[str, Any] = {"hidden_size": self.hidden_size, "num_heads": self.num_heads}
        if name == "attention":
            only = set(self.mixers) == {"attention"}
            return arguments | {"head_dim": self.head_k_dim if only else None, "rotary_base": self.rotary_base}
        shared = ("head_k_dim", "head_v_dim", "output_norm", "norm_eps", "head_gate", "backend")
        arguments |= {field: getattr(self, field) for field in shared}
        if self.conv_size is not None:
            arguments["conv_size"] = self.conv_size or None
        if self.feature_map is not None and name != "gated_deltanet":
            arguments["feature_map"] = self.feature_map
        if name == "gated_deltanet":
            arguments["num_v_heads"] = self.num_v_heads
        if name == "retnet":
            arguments["rotary_base"] = self.rotary_base
        return arguments

    def mlp_width(self, name: str) -> int:
        """SwiGLU width beside a mixer of that name."""
        ratio = self.mlp_ratio if self.mlp_ratio is not None else (2.0 if name == "retnet" else 4.0)
        return self.intermediate_size or swiglu_width(self.hidden_size, ratio)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        if isinstance(self.head_gate, HeadGateConfig):
            output["head_gate"] = dataclasses.asdict(self.head_gate)
        return output


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
