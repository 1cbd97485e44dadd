"""headmax: Softmax Linear Attention. A softmax over heads that lets the heads of a linear-attention layer compete."""

import headmax.early  # noqa: F401 - before PyTorch
from headmax import recipes
from headmax.layers import HeadGateConfig
from headmax.layers.mixers.outside import import_outside_mixers
from headmax.models import (
    HeadmaxCache,
    HeadmaxConfig,
    HeadmaxForCausalLM,
    HeadmaxForSequenceClassification,
    HeadmaxForTokenClassification,
    HeadmaxModel,
)
from headmax.models.accelerate import accelerate
from headmax.models.gates import load_gates, save_gates
from headmax.models.softmaxify import softmaxify
from headmax.ops import Packing

import_outside_mixers()

__version__ = "0.2.0"

__all__ = [
    "HeadGateConfig",
    "HeadmaxCache",
    "HeadmaxConfig",
    "HeadmaxForCausalLM",
    "HeadmaxForSequenceClassification",
    "HeadmaxForTokenClassification",
    "HeadmaxModel",
    "Packing",
    "accelerate",
    "load_gates",
    "recipes",
    "save_gates",
    "softmaxify",
]
