"""How far do logits move when states are kept in bfloat16, or all is computed in it? Engines fed the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax import HeadmaxForCausalLM
from headmax.bench import decode
from headmax.generate import Engine, PrefixState
from headmax.layers.mixers.base import RecurrentState
from headmax.ops.spec import distance
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


@dataclass(frozen=True)
class Kept:
    """How a prefix is read: the model's dtype, and the one its recurrent states are rounded to between two pieces of the text."""

    dtype: torch.dtype
    state: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, {str(self.state).removeprefix('torch.')} state"


NEAR = 16
"""Tokens between a state that was rounded and the logits that are compared: most states have forgotten it a piece later."""
KEPT = tuple(Kept(*pair) for pair in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)))


def measure_prefix(recipe: str, count: int, piece: int, device: str) -> Iterator[Record]:
    """`count` random tokens through one prefix state, in pieces; against the same model in float64, after every doubling."""
    make = Recorder("long runs", device)
    model = decode.ours(recipe, device, torch.float32)
    tokens, marks = torch.tensor(decode.random_tokens(model, count)), {piece << n for n in range(64)} | {count}
    for fed, apart in prefix_drift(model, tokens, piece, marks):
        for kept, (state, logits) in apart.items():
            case = f"{recipe}, {fed} tokens through a prefix"
            yield make(case, "headmax", f"{kept}/apart from float64", state, "of the state", piece=piece, **logits)


def prefix_drift(
    model: HeadmaxForCausalLM, tokens: Tensor, piece: int, marks: set[int]
) -> Iterator[tuple[int, dict[Kept, tuple[float, dict[str, Any]]]]]:
    """At each mark, of every way to keep a prefix: how far its states are from float64's, and what of the logits since the last mark."""
    exact = Engine(copy.deepcopy(model).double(), prefill_chunk=piece, state_dtype=torch.float64)
    engines = {kept: Engine(copy.deepcopy(model).to(kept.dtype), prefill_chunk=piece) for kept in KEPT}  # type: ignore[arg-type]
    truth: PrefixState | None = None
    prefixes: dict[Kept, PrefixState | None] = dict.fromkeys(engines)
    seen: dict[Kept, list[tuple[float, float, float]]] = {kept: [] for kept in engines}
    for start in range(0, len(tokens), piece):
        fed = min(start + piece, len(tokens))
        cut = max(start, fed - NEAR)
        for part in filter(None, (tokens[start:cut].tolist(), tokens[cut:fed].tolist())):
            truth = exact.prefill(part, truth)
            prefixes = {kept: rounded(engine.prefill(part, prefixes[kept]), kept.state) for kept, engine in engines.items()}
        assert truth is not None
        theirs = truth.logits.double()
        for kept, read in prefixes.items():
            assert read is not None
            ours = read.logits.double()
            divergence = F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="sum")
            seen[kept].append((float((ours - theirs).abs().amax()), float(theirs.abs().amax()), float(divergence)))
        if fed in marks:
            yield fed, {kept: (states_apart(prefixes[kept], truth), summed(seen[kept])) for kept in engines}
            seen = {kept: [] for kept in engines}


def summed(seen: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    apart, logits, divergence = zip(*seen, strict=True)
    return {"logits apart": max(apart), "largest logit": max(logits), "KL": sum(divergence) / len(seen)}


def states_apart(ours: PrefixState | None, exact: PrefixState) -> float:
    """|S - S*| / |S*| of the layer where it is largest."""
    assert ours is not None
    pairs = zip(ours.states, exact.states, strict=True)
    return max(distance(x.recurrent, y.recurrent) for x, y in pairs if isinstance(x, RecurrentState) and isinstance(y, RecurrentState))


def rounded(prefix: PrefixState, dtype: torch.dtype) -> PrefixState:
    """With recurrent states that `dtype` can hold."""
    states = (
        x._replace(recurrent=x.recurrent.to(dtype).to(x.recurrent.dtype)) if isinstance(x, RecurrentState) else x for x in prefix.states
    )
    return replace(prefix, states=tuple(states))
