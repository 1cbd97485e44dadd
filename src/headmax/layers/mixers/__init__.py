"""The token mixers. A new backbone is one file here and one line in the table."""

from headmax.layers.mixers.attention import Attention
from headmax.layers.mixers.base import MixerOutput, RecurrentMixer
from headmax.layers.mixers.gated_deltanet import GatedDeltaNet
from headmax.layers.mixers.gla import GatedLinearAttention
from headmax.layers.mixers.linear import LinearAttention
from headmax.layers.mixers.retnet import RetNet

MIXERS: dict[str, type[RecurrentMixer] | type[Attention]] = {
    "linear": LinearAttention,
    "retnet": RetNet,
    "gla": GatedLinearAttention,
    "gated_deltanet": GatedDeltaNet,
    "attention": Attention,
}

__all__ = [
    "MIXERS",
    "Attention",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "LinearAttention",
    "MixerOutput",
    "RecurrentMixer",
    "RetNet",
]
