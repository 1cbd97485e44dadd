"""Where an answer ends."""

from __future__ import annotations

from typing import Any

from headmax.models import HeadmaxForCausalLM


def end_tokens(model: HeadmaxForCausalLM, tokenizer: Any) -> frozenset[int]:
    """Those that end a text: the model's and the tokenizer's."""
    ends = model.generation_config.eos_token_id
    tokens = [*(ends if isinstance(ends, list) else [ends]), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(token for token in tokens if token is not None)
