"""Sizes of a recipe's model: parameters, gate parameters, and state per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headmax.layers import HeadGate
from headmax.layers.mixers.attention import AttentionState
from headmax.models import HeadmaxForCausalLM
from headmax.recipes.recipe import Recipe


@dataclass(frozen=True)
class Summary:
    parameters: int
    """All parameters, tied embeddings counted once."""
    body_parameters: int
    """Without embeddings."""
    gate_parameters: int
    state_bytes: int
    """State of recurrent layers per sequence: recurrent states in float32, the rest in bfloat16."""
    token_bytes: int
    """Cache of attention layers per token, in bfloat16."""


def summarize(recipe: Recipe) -> Summary:
    """Builds the model on the meta device and runs it on one token, without memory or arithmetic."""
    with torch.device("meta"):
        model = HeadmaxForCausalLM(recipe.model).bfloat16().eval()
        cache = model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
    parameters = sum(p.numel() for p in model.parameters())
    embeddings = {id(w): w.numel() for w in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    gates = sum(p.numel() for module in model.modules() if isinstance(module, HeadGate) for p in module.parameters())
    token_bytes = sum(x.nbytes for layer in cache.layers if isinstance(layer.state, AttentionState) for x in layer.state)
    return Summary(parameters, parameters - sum(embeddings.values()), gates, cache.nbytes() - token_bytes, token_bytes)
