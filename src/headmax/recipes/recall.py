"""Associative recall (MQAR) in minutes: small models of every backbone, plain and with gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headmax.data.mqar import MQAR
from headmax.layers import MIXERS, HeadGateConfig
from headmax.models import HeadmaxConfig
from headmax.recipes.recipe import Recipe
from headmax.train import CheckpointConfig, ComputeConfig, EvalConfig, OptimConfig, ScheduleConfig, TrainConfig


def recall_model(
    mixer: str, task: MQAR, *, head_gate: HeadGateConfig | None, num_heads: int, head_k_dim: int | None = None
) -> HeadmaxConfig:
    """2 layers x 64 with a short convolution, with which a layer sees a key together with its value."""
    return HeadmaxConfig(
        mixer=mixer,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=num_heads,
        head_k_dim=head_k_dim,
        conv_size=None if mixer == "attention" else 4,
        vocab_size=task.vocab_size,
        head_gate=head_gate,
    )


def recall_training(task: MQAR, *, steps: int, seed: int = 0, lr: float = 3e-3, eval_every: int = 50) -> TrainConfig:
    """64 sequences per step, 50 steps of warm-up, then a constant learning rate; no weight decay."""
    tokens = 64 * task.length
    return TrainConfig(
        token_budget=steps * tokens,
        sequence_length=task.length,
        batch_tokens=tokens,
        seed=seed,
        optim=OptimConfig(lr=lr, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_tokens=min(49, steps) * tokens, start_lr=lr / 50, final_lr=lr),
        compute=ComputeConfig(precision="float32", micro_batch=64),
        checkpoint=CheckpointConfig(keep_last=1),
        eval=EvalConfig(every=eval_every, sequences=512, accuracy=True),
    )


def recall(backbone: str, *, softmax: bool = False) -> Recipe:
    """`backbone` on 16 pairs, with the gates of its recipes if `softmax`."""
    task = MQAR()
    kind = next(kind for kind in MIXERS.values() if kind.recipe == backbone)
    model = recall_model(kind.name, task, head_gate=kind.recipe_gate if softmax else None, num_heads=4)
    return Recipe(f"mqar-{'softmax-' if softmax else ''}{backbone}", model, recall_training(task, steps=2000), task)


def recipes() -> dict[str, Callable[[], Recipe]]:
    """The recipes of this file, by name."""
    return {
        **{f"mqar-{kind.recipe}": partial(recall, kind.recipe) for kind in MIXERS.values()},
        **{f"mqar-softmax-{kind.recipe}": partial(recall, kind.recipe, softmax=True) for kind in MIXERS.values() if kind.gated},
    }
