"""Modules: the head gate, the mixers that carry it, and the block around them. Each is usable alone."""

from headmax.layers.block import LORA_TARGETS
from headmax.layers.head_gate import HeadGate, HeadGateConfig
from headmax.layers.mixers import (
    MIXERS,
    Attention,
    AttentionConfig,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    GatedLinearAttention,
    GLAConfig,
    KDAConfig,
    KimiDeltaAttention,
    LinearAttention,
    LinearAttentionConfig,
    Mamba2,
    Mamba2Config,
    MixerOutput,
    RetNet,
    RetNetConfig,
)

__all__ = [
    "LORA_TARGETS",
    "MIXERS",
    "Attention",
    "AttentionConfig",
    "GLAConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedLinearAttention",
    "HeadGate",
    "HeadGateConfig",
    "KDAConfig",
    "KimiDeltaAttention",
    "LinearAttention",
    "LinearAttentionConfig",
    "Mamba2",
    "Mamba2Config",
    "MixerOutput",
    "RetNet",
    "RetNetConfig",
]
