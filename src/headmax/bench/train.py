"""Time and memory of whole training steps, plain, with gates and of peers, in one run."""

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

STEP_QUEUE_CYCLES = 100_000_000
"""Clock cycles (about 50 ms) to queue launches, as in a training loop, which does not wait for the previous step."""
Models = Mapping[tuple[str, str], Callable[[], nn.Module]]
"""(impl, variant) → builder of a model. They share a process and are interleaved."""


@dataclass(frozen=True)
class Plan:
    """What one process measures."""

    recipe: str
    """The plain backbone's recipe; with gates, it is softmax-<recipe>."""
    grid: Sequence[tuple[int, int]]
    """(length, batch size) pairs."""
    rounds: int


def ours(name: str, compiled: bool = True) -> nn.Module:
    model = HeadmaxForCausalLM(recipes.get(name).model)
    if compiled:
        model.model.compile_blocks()
    return model


def fla(recipe: str, compiled: bool = False) -> nn.Module:
    """flash-linear-attention's model with the recipe's sizes and all its fusions. Its residual stream is bfloat16, like ours.

    If `compiled`, block by block, its ops stay outside the compiled graphs.
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
    peer = getattr(fla.models, f"{name}ForCausalLM")(getattr(fla.models, f"{name}Config")(**settings))
    peer.model.embeddings.register_forward_hook(lambda module, args, output: output.to(torch.bfloat16))
    if compiled:
        for block in peer.model.layers:
            block.compile()
    return peer


def groups(recipe: str, peer: str) -> dict[str, Models]:
    """Models to measure, by process."""
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

    Peers too run as the trainer's steps do: gradients as one CUDA graph, the update as another.
    """

    def __init__(self, model: nn.Module) -> None:
        torch.manual_seed(0)
        self.model = model.to("cuda").train()
        self.vocab: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.tokens = torch.empty(0)
        self.mixed = next(model.parameters()).dtype == torch.float32

    def shape(self, length: int, batch: int) -> None:
        """Sets the shape of tokens, with new graphs."""
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

    def resident_bytes(self) -> int:
        """Memory of the model and its optimizer between steps."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self.tokens]
        tensors += [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.is_cuda]
        return sum(x.numel() * x.element_size() for x in tensors)

    def peak_memory(self) -> int:
        """Peak memory of a step without that of other models, including captures of graphs, which allocate their memory."""
        torch.cuda.synchronize()
        other_models = torch.cuda.memory_allocated() - self.resident_bytes()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARMUP_CALLS + 2):
            self()
        return torch.cuda.max_memory_allocated() - other_models


def prepare(models: Models, length: int, batch: int) -> dict[tuple[str, str], Step]:
    """The models' steps, each run once. As a training run has a single shape, blocks are compiled for each point of the grid separately."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    steps = {}
    for key, build in models.items():
        steps[key] = step = Step(build())
        step.shape(length, batch)
        step()
        torch.cuda.synchronize()
    return steps


def measure(plan: Plan, models: Models) -> Iterator[Record]:
    """All records of a process: the grid, with models interleaved."""
    make, device = Recorder("train", "cuda"), torch.device("cuda")
    ceilings = Ceilings.of(device)
    assert ceilings is not None
    yield make("8192x8192x8192 bf16", "torch", "matmul", ceilings.flops / 1e12, "TFLOP/s")
    steps = prepare(models, *plan.grid[0])
    for length, batch in plan.grid:
        yield from point(make, plan, steps, length, batch, ceilings.flops)


def point(make: Recorder, plan: Plan, steps: Mapping[tuple[str, str], Step], length: int, batch: int, rate: float) -> Iterator[Record]:
    """A length and batch size; `rate` is the FLOP/s of large products."""
    import triton

    case, peaks = f"{plan.recipe} {length}x{batch}", {}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for key, step in steps.items():
        step.shape(length, batch)
        peaks[key] = step.peak_memory()
    for _ in range(plan.rounds):
        for key, step in steps.items():
            times[key].append(seconds(step, torch.device("cuda"), STEP_QUEUE_CYCLES))
    for (impl, variant), step in steps.items():
        taken = statistics.median(times[impl, variant])
        size = sum(p.numel() for p in step.model.parameters())
        extra: dict[str, Any] = {"rounds": plan.rounds, "ahead": STEP_QUEUE_CYCLES, "parameters": size, "triton": triton.__version__}
        extra |= {"fastest": min(times[impl, variant]), "slowest": max(times[impl, variant])}
        yield make(case, impl, f"{variant}/tokens per second", length * batch / taken, "tokens/s", None, **extra)
        yield make(case, impl, f"{variant}/peak memory", peaks[impl, variant] / 2**30, "GiB")
        yield make(case, impl, f"{variant}/MFU", 6 * size * length * batch / taken / rate, "of the measured matmul rate")
    if len(steps) == 2:
        ratio, interval = paired(times["headmax", "softmax"], times["headmax", "plain"])
        yield make(case, "headmax", "softmax over plain/time", ratio, "ratio", interval=interval)
        memory = peaks["headmax", "softmax"] / peaks["headmax", "plain"]
        yield make(case, "headmax", "softmax over plain/memory", memory, "ratio")


def bench(plan: Plan, processes: Mapping[str, Models], limit: float, say: Callable[[str], None]) -> Iterator[Record]:
    """Measures each process, one after the other on the same GPU."""
    for name, models in processes.items():
        say(f"{plan.recipe}: {name}")
        yield from isolated(measure, plan, models, limit=limit, say=say)
