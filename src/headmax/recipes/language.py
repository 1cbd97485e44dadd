"""The paper's language models: four backbones, their softmax twins, five scales, and the study of the number of heads."""

from __future__ import annotations

from dataclasses import dataclass

from headmax.layers import HeadGateConfig
from headmax.models import HeadmaxConfig
from headmax.ops.registry import suggest
from headmax.train import TrainConfig

BACKBONES = {"transformer": "attention", "retnet": "retnet", "gla": "gla", "gdn": "gated_deltanet"}
SCALES = {"tiny": (2, 64), "80m": (16, 640), "110m": (18, 640), "170m": (24, 768), "340m": (24, 1024)}
"""Layers and hidden size. The paper's names mix conventions: 80M and 170M count without embeddings, 110M and 340M with one."""
HEADS_STUDY = (4, 8, 16)


@dataclass(frozen=True)
class Recipe:
    """A model and how to train it."""

    name: str
    model: HeadmaxConfig
    train: TrainConfig


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
    return Recipe(name, model, TrainConfig())


_TABLE = {
    **{f"{b}-{s}": (b, s, False, None) for b in BACKBONES for s in SCALES},
    **{f"softmax-{b}-{s}": (b, s, True, None) for b in BACKBONES if b != "transformer" for s in SCALES},
    **{f"{'softmax-' * soft}gla-110m-h{heads}": ("gla", "110m", bool(soft), heads) for soft in (0, 1) for heads in HEADS_STUDY},
}


def names() -> list[str]:
    """All recipe names."""
    return list(_TABLE)


def get(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in _TABLE:
        raise ValueError(f"unknown recipe {name!r}{suggest(name, _TABLE)}")
    backbone, scale, softmax, heads = _TABLE[name]
    return recipe(backbone, scale, softmax=softmax, num_heads=heads)
