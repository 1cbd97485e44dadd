"""How long is a whole training step, and how much memory does it take? Ours, plain and with gates, beside peers, in one run."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headmax import HeadmaxForCausalLM, recipes
from headmax.bench.isolated import isolated
from headmax.bench.timing import Ceilings, paired, seconds
from headmax.records import Record, Recorder
from headmax.train.graph import WARMUP_CALLS, Replayed, ReplayedUpdate

STEP_AHEAD = 100_000_000
"""Clock cycles (about 50 ms) of launches ahead of the GPU, as in a training loop, which does not wait for the step before."""
Models = Mapping[tuple[str, str], Callable[[], nn.Module]]
"""(impl, variant) and how to make it; they share a process and take turns."""


@dataclass(frozen=True)
class Plan:
    """What one process measures."""

    recipe: str
    """The plain backbone's name; its twin is softmax-<recipe>."""
    grid: Sequence[tuple[int, int]]
    """Lengths and batch sizes."""
    rounds: int


def ours(name: str, compiled: bool = True) -> nn.Module:
    model = HeadmaxForCausalLM(recipes.get(name).model)
    if compiled:
        model.model.compile_blocks()
    return model


def fla(recipe: str, compiled: bool = False) -> nn.Module:
    """flash-linear-attention's own model at the recipe's sizes, with every fusion it has. Its residual stream is bfloat16 like ours.

    Compiled block by block, its ops stay outside of the graphs.
    """
    import fla.models

    model, kind = recipes.get(recipe).model, recipe.split("-")[0]
    settings: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_heads": model.num_heads,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": True,
        "fuse_cross_entropy": False,
        "fuse_linear_cross_entropy": True,
        "max_position_embeddings": 16384,
    }
    if kind == "gdn":
        settings |= {"head_dim": model.hidden_size // 2 // model.num_heads, "expand_v": 2.0}
    name = {"gla": "GLA", "retnet": "RetNet", "gdn": "GatedDeltaNet"}[kind]
    made = getattr(fla.models, f"{name}ForCausalLM")(getattr(fla.models, f"{name}Config")(**settings))
    made.model.embeddings.register_forward_hook(lambda module, args, output: output.to(torch.bfloat16))
    for block in made.model.layers if compiled else ():
        block.compile()
    return made


def groups(recipe: str, peer: str) -> dict[str, Models]:
    """What is measured, by the name of the process."""
    peers: dict[str, Models] = {
        "fla": {("fla", "plain"): functools.partial(fla, recipe)},
        "fla-compiled": {("fla", "compiled"): functools.partial(fla, recipe, compiled=True)},
    }
    return {
        "headmax": {
            ("headmax", "plain"): functools.partial(ours, recipe),
            ("headmax", "softmax"): functools.partial(ours, f"softmax-{recipe}"),
        },
        **(peers if peer == "fla" else {}),
        "transformer": {("headmax", "transformer"): functools.partial(ours, f"transformer-{recipe.split('-')[1]}")},
    }


class Step:
    """One optimizer step on random tokens: float32 parameters (or the model's own dtype), bfloat16 compute, clipping, fused AdamW.

    Whosesoever the model is, it is replayed as the trainer's steps are: gradients as one CUDA graph, the update as another.
    """

    def __init__(self, model: nn.Module) -> None:
        torch.manual_seed(0)
        self.model = model.to("cuda").train()
        self.vocab: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.tokens = torch.empty(0)
        self.mixed = next(model.parameters()).dtype == torch.float32

    def shape(self, length: int, batch: int) -> None:
        """For tokens of this shape, with graphs of its own."""
        self.tokens = torch.randint(0, self.vocab, (batch, length), device="cuda")
        self.replayed = Replayed(self.gradients, self.model.parameters())
        self.replayed_update = ReplayedUpdate(self.advance, self.optimizer, self.replayed)

    def __call__(self) -> None:
        self.replayed_update(self.replayed(self.tokens))

    def gradients(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.mixed):
            loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    def advance(self, loss: Tensor) -> Tensor:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def own_bytes(self) -> int:
        """What the model and its optimizer hold between steps."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self.tokens]
        tensors += [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.is_cuda]
        return sum(x.numel() * x.element_size() for x in tensors)

    def peak_memory(self) -> int:
        """Bytes of a step, without what other models hold; a graph takes its memory when it is captured."""
        torch.cuda.synchronize()
        others = torch.cuda.memory_allocated() - self.own_bytes()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARMUP_CALLS + 2):
            self()
        return torch.cuda.max_memory_allocated() - others


def prepare(models: Models, length: int, batch: int) -> dict[tuple[str, str], Step]:
    """The models' steps, each run once. A run has one shape, which its graphs are made for: so has every point of the grid."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    steps = {}
    for key, build in models.items():
        steps[key] = step = Step(build())
        step.shape(length, batch)
        step()
        torch.cuda.synchronize()
    return steps


def measure(plan: Plan, models: Models) -> Iterator[Record]:
    """Everything one process measures: the grid, its models taking turns."""
    make, device = Recorder("train", "cuda"), torch.device("cuda")
    ceilings = Ceilings.of(device)
    assert ceilings is not None
    yield make("8192x8192x8192 bf16", "torch", "matmul", ceilings.flops / 1e12, "TFLOP/s")
    steps = prepare(models, *plan.grid[0])
    for length, batch in plan.grid:
        yield from point(make, plan, steps, length, batch, ceilings.flops)


def point(make: Recorder, plan: Plan, steps: Mapping[tuple[str, str], Step], length: int, batch: int, rate: float) -> Iterator[Record]:
    """One length and batch size; `rate` is the FLOP/s of large products."""
    import triton

    case, peaks = f"{plan.recipe} {length}x{batch}", {}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for key, step in steps.items():
        step.shape(length, batch)
        peaks[key] = step.peak_memory()
    for _ in range(plan.rounds):
        for key, step in steps.items():
            times[key].append(seconds(step, torch.device("cuda"), STEP_AHEAD))
    for (impl, variant), step in steps.items():
        taken = statistics.median(times[impl, variant])
        size = sum(p.numel() for p in step.model.parameters())
        how: dict[str, Any] = {"rounds": plan.rounds, "ahead": STEP_AHEAD, "parameters": size, "triton": triton.__version__}
        how |= {"fastest": min(times[impl, variant]), "slowest": max(times[impl, variant])}
        yield make(case, impl, f"{variant}/tokens per second", length * batch / taken, "tokens/s", None, **how)
        yield make(case, impl, f"{variant}/peak memory", peaks[impl, variant] / 2**30, "GiB")
        yield make(case, impl, f"{variant}/MFU", 6 * size * length * batch / taken / rate, "of the measured matmul rate")
    if len(steps) == 2:
        ratio, interval = paired(times["headmax", "softmax"], times["headmax", "plain"])
        yield make(case, "headmax", "softmax over plain/time", ratio, "ratio", interval=interval)
        memory = peaks["headmax", "softmax"] / peaks["headmax", "plain"]
        yield make(case, "headmax", "softmax over plain/memory", memory, "ratio")


def bench(plan: Plan, processes: Mapping[str, Models], limit: float, say: Callable[[str], None]) -> Iterator[Record]:
    """A process each, one after the other on the same card."""
    for name, models in processes.items():
        say(f"{plan.recipe}: {name}")
        yield from isolated(measure, plan, models, limit=limit, say=say)
