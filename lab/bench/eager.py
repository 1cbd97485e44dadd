"""What a model costs that is not compiled: training steps by the wall clock, launches included, and the host's time of one op call."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from headmax.bench.isolated import isolated
from headmax.bench.kernels import SPECS
from headmax.bench.train import fla, ours
from headmax.ops.spec import Case
from headmax.records import Record, Recorder

CALLS = 200
"""Calls of an op in one round."""
HOST_CASE = Case(batch=1, time=64, heads=4, key=128, value=256, gates="both")
"""So short that the host is slower than the kernels."""


@dataclass(frozen=True)
class Plan:
    recipe: str
    """The plain backbone's name; its twin is softmax-<recipe>."""
    grid: Sequence[tuple[int, int]]
    """Lengths and batch sizes."""
    rounds: int
    device: str


class Step:
    """Forward, backward, clipping and AdamW as a user writes them: float32 parameters, bfloat16 compute."""

    def __init__(self, build: Callable[[], nn.Module], device: str) -> None:
        torch.manual_seed(0)
        self.model, self.device = build().to(device).train(), device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def __call__(self, tokens: Tensor) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def finish(device: str) -> None:
    """Waits for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def steps(plan: Plan, builds: dict[str, Callable[[], nn.Module]]) -> Iterator[Record]:
    """Models in turns; a round is a few steps without waiting in between, as a training loop runs them."""
    make = Recorder("eager", plan.device)
    models = {name: Step(build, plan.device) for name, build in builds.items()}
    for length, batch in plan.grid:
        tokens = torch.randint(0, 256, (batch, length), device=plan.device)
        times: dict[str, list[float]] = {name: [] for name in models}
        for n in range(plan.rounds + 1):  # the first compiles kernels
            for name, step in models.items():
                finish(plan.device)
                begin = time.perf_counter()
                for _ in range(3):
                    step(tokens)
                finish(plan.device)
                if n:
                    times[name].append((time.perf_counter() - begin) / 3)
        for name, found in times.items():
            taken = median(found)
            extra: dict[str, Any] = {"fastest": min(found), "slowest": max(found), "rounds": plan.rounds}
            case, impl = f"{name} {length}x{batch}", "fla" if name.startswith("fla ") else "headmax"
            yield make(case, impl, "not compiled/step", 1e3 * taken, "ms", **extra)
            yield make(case, impl, "not compiled/tokens per second", length * batch / taken, "tokens/s")


def op_calls(device: str, case: Case = HOST_CASE, rounds: int = 20) -> Iterator[Record]:
    """The host's time of a call, which does not wait for the GPU: the fastest round of many calls."""
    make = Recorder("eager", device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for name, spec in SPECS.items():
        for gradients in (False, True):
            inputs: dict[str, Any] = spec.inputs(case, dtype, device)
            for x in inputs.values():
                if gradients and isinstance(x, Tensor):
                    x.requires_grad_()
            call = functools.partial(spec.function, **inputs)
            call()
            times = []
            for _ in range(rounds):
                finish(device)
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call()
                times.append((time.perf_counter() - begin) / CALLS)
            kind = "with gradients" if gradients else "no gradients"
            yield make(str(case), "headmax", f"{name}/host time, {kind}", 1e6 * min(times), "us", median=1e6 * median(times))


def bench(plan: Plan, peer: bool, limit: float, say: Callable[[str], None]) -> Iterator[Record]:
    """Ours; then flash-linear-attention's model in a process of its own, where it has one."""
    say("op calls")
    yield from op_calls(plan.device)
    names = (plan.recipe, f"softmax-{plan.recipe}")
    builds = {"ours": {name: functools.partial(ours, name, False) for name in names}}
    if peer:
        builds["fla"] = {f"fla {plan.recipe}": functools.partial(fla, plan.recipe)}
    for group, models in builds.items():
        say(f"{plan.recipe}: {group}")
        yield from isolated(steps, plan, models, limit=limit, say=say)
