"""Configuration of a mixer: its settings, and its properties that other modules need."""

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
    """Settings of the model that are passed to its mixers."""

    norm_eps: float
    head_gate: HeadGateConfig | None
    backend: str


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """Settings of one kind of mixer, and how to build it. `MIXERS` lists all kinds by name."""

    name: ClassVar[str]
    """In configurations: "gated_deltanet"."""
    title: ClassVar[str]
    """In tables and figures: "Gated DeltaNet"."""
    recipe: ClassVar[str]
    """In names of recipes: "gdn"."""
    language: ClassVar[bool] = True
    """Whether it has recipes of language models, not only of the recall task."""
    hidden_per_head: ClassVar[int | None] = None
    """Hidden channels per head in its language-model recipes, with at least 4 heads; 4 heads unless given, as in the paper."""
    recipe_gate: ClassVar[HeadGateConfig] = HeadGateConfig.paper()
    """The gates of its recipes `softmax-*`: the paper's."""
    gated: ClassVar[bool] = True
    """Whether it takes head gates."""
    mlp_ratio: ClassVar[float] = 4.0
    """Width of the block's SwiGLU layer as a multiple of the hidden size, before the usual factor 2/3."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Names of its matrices."""
    fla: ClassVar[tuple[str, str, str] | None] = None
    """Its names in flash-linear-attention: model_type, prefix of the model classes, and the layer's class."""

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
        """From a model's settings, as far as they concern it; `alone` if all layers are of this kind."""
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
    """What all recurrent mixers share."""

    spec: ClassVar[Spec]
    """Of the op: the function, its shapes and FLOPs."""
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj")
    expand_k: ClassVar[float] = 1.0
    """Total key width over the hidden size, where `head_k_dim` is not given."""
    expand_v: ClassVar[float] = 1.0
    """Total value width over the hidden size, where `head_v_dim` is not given."""
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
        """Heads of queries and keys in a model with `num_heads`."""
        return num_heads

    def value_heads(self, num_heads: int) -> int:
        """Heads of values in a model with `num_heads`."""
        return num_heads


@dataclass(frozen=True, kw_only=True)
class FeatureMapConfig(RecurrentConfig):
    """Mixers with a feature map on q and k."""

    feature_map: FeatureMap = "identity"
