"""The token mixers. A new backbone is one file here and one line in the table."""

from headmax.layers.mixers.attention import Attention, AttentionConfig
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.mixers.config import MixerConfig
from headmax.layers.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from headmax.layers.mixers.gla import GatedLinearAttention, GLAConfig
from headmax.layers.mixers.kda import KDAConfig, KimiDeltaAttention
from headmax.layers.mixers.linear import LinearAttention, LinearAttentionConfig
from headmax.layers.mixers.mamba2 import Mamba2, Mamba2Config
from headmax.layers.mixers.retnet import RetNet, RetNetConfig
from headmax.layers.mixers.terms import MixerOutput

KINDS: tuple[type[MixerConfig], ...] = (
    AttentionConfig,
    LinearAttentionConfig,
    RetNetConfig,
    GLAConfig,
    GatedDeltaNetConfig,
    KDAConfig,
    Mamba2Config,
)
MIXERS: dict[str, type[MixerConfig]] = {kind.name: kind for kind in KINDS}
"""Every kind of mixer by name. One of your own: `MIXERS["mine"] = MineConfig`, in a module that your package names as an entry point of
the group "headmax.mixers" (docs/ecosystem.md)."""

__all__ = [
    "MIXERS",
    "Attention",
    "AttentionConfig",
    "GLAConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedLinearAttention",
    "KDAConfig",
    "KimiDeltaAttention",
    "LinearAttention",
    "LinearAttentionConfig",
    "Mamba2",
    "Mamba2Config",
    "MixerConfig",
    "MixerOutput",
    "RecurrentMixer",
    "RetNet",
    "RetNetConfig",
]
