"""How a model is trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainConfig:
    """AdamW on a cosine, counted in tokens; the defaults are the paper's, and GLA's recipe where the paper points there."""

    token_budget: int = 15_000_000_000
    """Tokens to train on."""
    warmup_tokens: int = 500_000_000
    """Tokens over which the learning rate rises from its minimum to its peak."""
    sequence_length: int = 4096
    """Tokens per sequence."""
    batch_tokens: int = 524_288
    """Tokens per optimizer step, over all devices."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    min_learning_rate: float = 3e-5
    """Learning rate at the first and the last step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's moments."""
    weight_decay: float = 0.1
    """On matrices only, not on norms and biases."""
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Of initialisation and data order."""
