"""How far do logits move when states are kept in bfloat16? Two engines fed the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax import HeadmaxForCausalLM
from headmax.bench import decode
from headmax.generate import Engine
from headmax.records import Record, Recorder


def measure(recipe: str, count: int, device: str, dtype: torch.dtype) -> Iterator[Record]:
    """Over `count` random tokens of a model at random weights, after a sixteenth of them and every doubling."""
    make = Recorder("decode", device)
    model = decode.ours(recipe, device, dtype)
    tokens, marks = torch.tensor(decode.random_tokens(model, count)), [count >> n for n in range(4, -1, -1)]
    for fed, largest, divergence in drift(model, tokens, torch.bfloat16, marks):
        yield make(f"{recipe} after {fed} tokens", "headmax", "bfloat16 state/logits apart", largest, "at most", KL=divergence)


def drift(model: HeadmaxForCausalLM, tokens: Tensor, state_dtype: torch.dtype, marks: Sequence[int]) -> Iterator[tuple[int, float, float]]:
    """How far logits move when the state is kept in `state_dtype` rather than float32, tokens [n] being given.

    Yields (tokens fed, largest difference of a logit, mean KL divergence in nats) since the last mark.
    """
    narrow, wide = (Engine(model, max_batch=1, state_dtype=kind) for kind in (state_dtype, torch.float32))
    first = wide.prefill(tokens[:1].tolist())
    apart, spread = [], []
    pairs = zip(narrow.forced([first], tokens[None, 1:]), wide.forced([first], tokens[None, 1:]), strict=True)
    for fed, (ours, exact) in enumerate(pairs, 2):
        apart.append((ours - exact).abs().amax())
        spread.append(F.kl_div(ours.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="sum"))
        if fed in marks:
            yield fed, float(torch.stack(apart).amax()), float(torch.stack(spread).mean())
            apart, spread = [], []
