"""What a mixer is: its settings, and what others must know of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, Unpack, get_type_hints

from torch import nn

from headmax.fields import Range, check_settings
from headmax.layers.feature_map import FeatureMap
from headmax.layers.head_gate import HeadGateConfig
from headmax.layers.norm import OutputNormKind
from headmax.ops.spec import Spec

Width = Annotated[int, Range(1, 2**16, "a positive integer")]
ConvSize = Literal[0] | Annotated[int, Range(2, 1024, "a width of at least 2")]


class Shared(TypedDict, total=False):
    """Settings of a model that reach its mixers."""

    norm_eps: float
    head_gate: HeadGateConfig | None
    backend: str


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """Settings of one kind of mixer, and how to make it. `MIXERS` knows all kinds by name."""

    name: ClassVar[str]
    """In configurations: "gated_deltanet"."""
    title: ClassVar[str]
    """In tables and figures: "Gated DeltaNet"."""
    recipe: ClassVar[str]
    """In names of recipes: "gdn"."""
    language: ClassVar[bool] = True
    """Whether there are language-model recipes of it, beside those of recall."""
    hidden_per_head: ClassVar[int | None] = None
    """Channels of the hidden size to a head in its language-model recipes, of at least 4 heads; 4 unless given, as in the paper."""
    recipe_gate: ClassVar[HeadGateConfig] = HeadGateConfig.paper()
    """The gates of its recipes `softmax-*`: the paper's."""
    gated: ClassVar[bool] = True
    """Whether it takes head gates."""
    mlp_ratio: ClassVar[float] = 4.0
    """Width of the SwiGLU layer beside it as a multiple of the hidden size, before the usual factor 2/3."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Names of its matrices."""
    fla: ClassVar[tuple[str, str, str] | None] = None
    """What flash-linear-attention calls it: model_type, the start of the model class's name, and the layer's class."""

    def __post_init__(self) -> None:
        check_settings(type(self).__name__, vars(self), self.types())

    @classmethod
    @functools.cache
    def types(cls) -> dict[str, Any]:
        """What each setting may be."""
        hints = get_type_hints(cls, include_extras=True)
        return {field.name: hints[field.name] for field in dataclasses.fields(cls)}

    @classmethod
    def of_model(cls, settings: Mapping[str, Any], alone: bool) -> Self:
        """From those settings of a model that it has; `alone` if all layers are of this kind."""
        return cls(**{name: settings[name] for name in cls.types() if name in settings})

    @property
    def layer_type(self) -> str:
        """What transformers calls such a layer."""
        return "linear_attention"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the name, and what is not the default."""
        given = {x.name: getattr(self, x.name) for x in dataclasses.fields(self) if getattr(self, x.name) != x.default}
        return {"name": self.name} | given

    def build(self, hidden_size: int, num_heads: int, **options: Unpack[Shared]) -> nn.Module:
        """The mixer in a model of that size."""
        raise TypeError(f"{type(self).__name__} does not say how to build its mixer")


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(MixerConfig):
    """What all recurrent mixers have."""

    spec: ClassVar[Spec]
    """Of the op: the function, its shapes and FLOPs."""
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj")
    expand_k: ClassVar[float] = 1.0
    """Width of all keys over the hidden size, where `head_k_dim` is not given,"""
    expand_v: ClassVar[float] = 1.0
    """and of all values."""
    output_gate: ClassVar[bool] = True
    """Whether the output has a swish gate."""
    conv_bias: ClassVar[bool] = False
    """Whether the short convolutions have a bias."""

    head_k_dim: Width | None = None
    """Width of a head's query and key."""
    head_v_dim: Width | None = None
    """Width of a head's value."""
    conv_size: ConvSize = 0
    """Width of the short convolution on q, k and v; 0 for none."""
    output_norm: OutputNormKind = "head"
    """Norm of the read-out: per head, as in the original backbones; joint over all heads; or none."""

    def key_heads(self, num_heads: int) -> int:
        """Heads of queries and keys in a model of so many heads,"""
        return num_heads

    def value_heads(self, num_heads: int) -> int:
        """and those of values."""
        return num_heads


@dataclass(frozen=True, kw_only=True)
class FeatureMapConfig(RecurrentConfig):
    """Of mixers with a feature map on q and k."""

    feature_map: FeatureMap = "identity"
