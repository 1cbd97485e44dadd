"""Modules: the head gate, the mixers that carry it, and the block around them. Each is usable alone."""

from headmax.layers.block import LORA_TARGETS
from headmax.layers.head_gate import HeadGate, HeadGateConfig
from headmax.layers.mixers import MIXERS, Attention, GatedDeltaNet, GatedLinearAttention, LinearAttention, MixerOutput, RetNet

__all__ = [
    "LORA_TARGETS",
    "MIXERS",
    "Attention",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "HeadGate",
    "HeadGateConfig",
    "LinearAttention",
    "MixerOutput",
    "RetNet",
]
