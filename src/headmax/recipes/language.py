"""The paper's language models: backbones with and without softmax gates at five scales, the study of head counts; and hybrids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headmax.layers import MIXERS, HeadGateConfig
from headmax.layers.mixers import AttentionConfig, GatedDeltaNetConfig, MixerConfig
from headmax.models import HeadmaxConfig
from headmax.recipes.recipe import Recipe
from headmax.train import ComputeConfig, EvalConfig, OptimConfig, ScheduleConfig, TrainConfig

SCALES = {"tiny": (2, 64), "80m": (16, 640), "110m": (18, 640), "170m": (24, 768), "340m": (24, 1024)}
"""Layers and hidden size. The paper's names mix conventions: 80M and 170M count without embeddings, 110M and 340M with one."""
HEADS_STUDY = (4, 8, 16)


def backbones() -> dict[str, type[MixerConfig]]:
    """Mixers for language models, by their names in recipes."""
    return {kind.recipe: kind for kind in MIXERS.values() if kind.language}


TINY = TrainConfig(
    token_budget=4_096_000,
    sequence_length=256,
    batch_tokens=2048,
    optim=OptimConfig(lr=3e-3),
    schedule=ScheduleConfig(warmup_tokens=204_800),
    compute=ComputeConfig(precision="float32"),
    checkpoint_every=200,
    eval=EvalConfig(every=200, sequences=16),
)
"""Minutes on a laptop: 2,000 steps of 8 short sequences."""


def named(softmax: bool, backbone: str, scale: str) -> str:
    return f"{'softmax-' if softmax else ''}{backbone}-{scale}"


def train_config(scale: str) -> TrainConfig:
    return TINY if scale == "tiny" else TrainConfig()


def recipe(backbone: str, scale: str, *, softmax: bool = False, num_heads: int | None = None) -> Recipe:
    """`backbone` at `scale`, with the gates of its recipes if `softmax`; `num_heads` is for the study of head counts."""
    layers, hidden = SCALES[scale]
    name = named(softmax, backbone, scale) + (f"-h{num_heads}" if num_heads else "")
    kind = backbones()[backbone]
    heads = 4 if kind.hidden_per_head is None else max(4, hidden // kind.hidden_per_head)
    model = HeadmaxConfig(
        mixer=kind.name,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_heads=num_heads or heads,
        head_gate=kind.recipe_gate if softmax else None,
    )
    return Recipe(name, model, train_config(scale))


def hybrid(scale: str, *, softmax: bool = False) -> Recipe:
    """Gated DeltaNet with attention in every fourth layer, including the last.

    Attention is as in Qwen3.5: grouped queries, normalised queries and keys, partial rotary embedding (a quarter), a sigmoid output gate.
    """
    layers, hidden = SCALES[scale]
    heads = max(4, hidden // 128)
    width = hidden // heads
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=max(1, heads // 4),
        head_k_dim=width,
        qk_norm=True,
        output_gate=True,
        rotary_dim=width // 4,
    )
    model = HeadmaxConfig(
        mixer=[attention if (layers - 1 - n) % 4 == 0 else GatedDeltaNetConfig.name for n in range(layers)],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_heads=4,
        head_gate=HeadGateConfig.paper() if softmax else None,
    )
    return Recipe(named(softmax, "hybrid", scale), model, train_config(scale))


def recipes() -> dict[str, Callable[[], Recipe]]:
    """The recipes of this file, by name."""
    known = backbones()
    return {
        **{named(False, b, s): partial(recipe, b, s) for b in known for s in SCALES},
        **{named(True, b, s): partial(recipe, b, s, softmax=True) for b, kind in known.items() if kind.gated for s in SCALES},
        **{
            f"{prefix}gla-110m-h{heads}": partial(recipe, "gla", "110m", softmax=bool(prefix), num_heads=heads)
            for prefix in ("", "softmax-")
            for heads in HEADS_STUDY
        },
        **{named(softmax, "hybrid", s): partial(hybrid, s, softmax=softmax) for softmax in (False, True) for s in SCALES},
    }
