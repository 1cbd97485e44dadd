"""The paper's language models: four backbones, their softmax twins, five scales, and the study of the number of heads."""

from __future__ import annotations

from functools import partial

from headmax.layers import HeadGateConfig
from headmax.models import HeadmaxConfig
from headmax.recipes.recipe import Recipe
from headmax.train import ComputeConfig, EvalConfig, OptimConfig, ScheduleConfig, TrainConfig

BACKBONES = {"transformer": "attention", "retnet": "retnet", "gla": "gla", "gdn": "gated_deltanet"}
SCALES = {"tiny": (2, 64), "80m": (16, 640), "110m": (18, 640), "170m": (24, 768), "340m": (24, 1024)}
"""Layers and hidden size. The paper's names mix conventions: 80M and 170M count without embeddings, 110M and 340M with one."""
HEADS_STUDY = (4, 8, 16)


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
"""What a laptop does in minutes: 2,000 steps of 8 short sequences."""


def recipe(backbone: str, scale: str, *, softmax: bool = False, num_heads: int | None = None) -> Recipe:
    """`backbone` at `scale`, with the paper's gates if `softmax`; `num_heads` gives the heads study."""
    layers, hidden = SCALES[scale]
    name = "softmax-" * softmax + f"{backbone}-{scale}" + (f"-h{num_heads}" if num_heads else "")
    model = HeadmaxConfig(
        mixer=BACKBONES[backbone],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_heads=num_heads or 4,
        head_gate=HeadGateConfig() if softmax else None,
    )
    return Recipe(name, model, TINY if scale == "tiny" else TrainConfig())


RECIPES = {
    **{f"{b}-{s}": partial(recipe, b, s) for b in BACKBONES for s in SCALES},
    **{f"softmax-{b}-{s}": partial(recipe, b, s, softmax=True) for b in BACKBONES if b != "transformer" for s in SCALES},
    **{
        f"{'softmax-' * soft}gla-110m-h{heads}": partial(recipe, "gla", "110m", softmax=soft, num_heads=heads)
        for soft in (False, True)
        for heads in HEADS_STUDY
    },
}
"""The recipes of this file, by name."""
