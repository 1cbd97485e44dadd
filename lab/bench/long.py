"""A sequence of a million tokens on one GPU: forward, backward and step by segments, beside its evaluation chunk by chunk.

What is before a segment reaches it through states of constant size. So all segments run forward once without gradients, and the states
between them are kept; then each runs again from its state, the last one first, and goes back with the gradient that the next segment has
for the state it was left. Memory is that of one segment, and within one each block keeps its inputs alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from headmax import HeadmaxForCausalLM, recipes
from headmax.layers.loss import IGNORED, linear_cross_entropy
from headmax.models.cache import HeadmaxCache
from headmax.records import Record, Recorder
from headmax.train.optim import build_optimizer, clip

AGREEMENT = 1e-3
"""Between the losses of two ways to cut a sequence, relative; in bfloat16 they round differently."""


@dataclass(frozen=True)
class Plan:
    recipe: str
    tokens: int
    segment: int
    """Tokens of a training pass."""
    chunk: int
    """Tokens of a pass of the evaluation."""
    device: str
    dtype: torch.dtype


def run_segment(
    model: HeadmaxForCausalLM, ids: Tensor, start: int, stop: int, states: list[tuple | None]
) -> tuple[Tensor, list[tuple | None]]:
    """The mean loss over the whole sequence ids [1,T], as far as tokens start, ..., stop - 1 predict, and the states that these leave."""
    cache = HeadmaxCache(len(states))
    for layer, state in zip(cache.layers, states, strict=True):
        if state is not None:
            layer.advance(state, start)
    hidden = model.model(ids[:, start:stop], past_key_values=cache, use_cache=True).last_hidden_state
    following = torch.cat([ids[:, start + 1 : stop + 1], ids.new_full((1, max(0, stop + 1 - ids.shape[1])), IGNORED)], 1)
    loss = linear_cross_entropy(hidden, model.lm_head.weight, following) / (ids.shape[1] - 1)
    return loss, [layer.state for layer in cache.layers]


def bounds(ids: Tensor, length: int) -> list[tuple[int, int]]:
    """Where segments of at most `length` tokens begin and end."""
    return list(pairwise([*range(0, ids.shape[1], length), ids.shape[1]]))


@torch.no_grad()
def evaluate(model: HeadmaxForCausalLM, ids: Tensor, chunk: int) -> Tensor:
    """The mean loss of ids [1,T], chunk by chunk."""
    states: list[tuple | None] = [None] * len(model.model.layers)
    total = torch.zeros((), device=ids.device, dtype=torch.float64)
    for start, stop in bounds(ids, chunk):
        loss, states = run_segment(model, ids, start, stop, states)
        total += loss
    return total


def add_gradients(model: HeadmaxForCausalLM, ids: Tensor, segment: int) -> Tensor:
    """The mean loss of ids [1,T]; its gradients are added to the parameters'."""
    if any(model.model.uses_attention):
        raise ValueError("long: attention layers have no state of constant size to hand on")
    kept: list[list[tuple | None]] = [[None] * len(model.model.layers)]
    with torch.no_grad():
        for start, stop in bounds(ids, segment)[:-1]:
            kept.append(run_segment(model, ids, start, stop, kept[-1])[1])
    total = torch.zeros((), device=ids.device, dtype=torch.float64)
    gradients: list[Tensor | None] = []
    for start, stop in reversed(bounds(ids, segment)):
        before = tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()), kept.pop())
        loss, after = run_segment(model, ids, start, stop, before)
        left = [(x, d) for x, d in zip(floating(after), gradients, strict=True) if d is not None] if gradients else []
        torch.autograd.backward([loss, *(x for x, _ in left)], [None, *(d for _, d in left)])
        gradients = [x.grad for x in floating(before)]
        total += loss.detach()
    return total


def floating(states: list[tuple | None]) -> list[Tensor]:
    return [x for x in tree_leaves(states) if isinstance(x, Tensor) and x.is_floating_point()]


def measure(plan: Plan) -> Iterator[Record]:
    """One step: its loss beside the evaluation's, time and memory; RuntimeError where they differ."""
    recipe, device = recipes.get(plan.recipe), torch.device(plan.device)
    torch.manual_seed(0)
    model = HeadmaxForCausalLM(recipe.model)
    nn.Module.to(model, device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = build_optimizer(model, replace(recipe.train.optim, name="adamw"))
    ids = torch.randint(0, recipe.model.vocab_size, (1, plan.tokens), device=device, generator=torch.Generator(device).manual_seed(1))
    narrow = torch.autocast(device.type, torch.bfloat16, enabled=plan.dtype == torch.bfloat16)
    with narrow:
        expected = evaluate(model, ids, plan.chunk)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    with narrow:
        loss = add_gradients(model, ids, plan.segment)
    norm = clip(model, recipe.train.optim.grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    if not (loss.isfinite() and norm.isfinite() and abs(loss - expected) <= AGREEMENT * expected):
        raise RuntimeError(
            f"the loss by segments is {loss.item():.6f}, chunk by chunk {expected.item():.6f}; norm of the gradient {norm.item()}"
        )
    taken = time.perf_counter() - begun
    with narrow:
        later = evaluate(model, ids, plan.chunk)
    make, case = Recorder("long", device.type), f"{plan.recipe} {plan.tokens}x1"
    about = {"segment": plan.segment, "chunk": plan.chunk, "dtype": str(plan.dtype).removeprefix("torch.")}
    yield make(case, "headmax", "loss", loss.item(), "nats", 0, **about)
    yield make(case, "headmax", "loss/chunk by chunk", expected.item(), "nats", 0, **about)
    yield make(case, "headmax", "loss/after the step", later.item(), "nats", 0, **about)
    yield make(case, "headmax", "gradient norm", norm.item(), "1", 0, **about)
    yield make(case, "headmax", "step", taken, "s", 0, **about)
    if device.type == "cuda":
        yield make(case, "headmax", "peak memory", torch.cuda.max_memory_allocated(device) / 2**30, "GiB", 0, **about)
