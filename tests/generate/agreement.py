"""The engine's tokens beside Hugging Face's own decoding."""

from collections.abc import Sequence
from typing import Any

import torch

from headmax import HeadmaxForCausalLM
from headmax.generate import GREEDY, Engine, Request


def agreement(model: HeadmaxForCausalLM, engine: Engine, prompt: Sequence[int], count: int) -> tuple[int | None, float]:
    """Where the engine's greedy tokens first differ from Hugging Face `generate`'s, and by how much the model itself prefers
    the one over the other there: (None, 0.0) if they are the same."""
    ends = model.config.eos_token_id
    stop = [] if ends is None else [ends] if isinstance(ends, int) else ends
    mine = engine.generate(Request(prompt, max_new_tokens=count, sampling=GREEDY, stop_tokens=stop))[0].tokens
    ids = torch.tensor([list(prompt)], device=model.device)
    hugging_face: Any = model
    whole = hugging_face.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    theirs = whole[0, ids.shape[1] :].tolist()
    for n, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *mine[:n]]], device=model.device), logits_to_keep=1).logits[0, -1]
            return n, float((logits[a] - logits[b]).abs())
    return None, 0.0
