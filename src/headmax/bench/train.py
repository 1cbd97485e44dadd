"""How long is a whole training step, and how much memory does it take? Ours, plain and with gates, beside peers, in one run."""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headmax import HeadmaxForCausalLM, recipes
from headmax.bench.isolated import isolated
from headmax.bench.timing import Ceilings, kernel_times, paired, seconds
from headmax.records import Record, Recorder
from headmax.train.graph import REHEARSALS, Replayed, ReplayedUpdate

STEP_AHEAD = 100_000_000
"""Clock cycles (about 50 ms) of launches ahead of the GPU, as in a training loop, which does not wait for the step before."""


@dataclass(frozen=True)
class Plan:
    """What one process measures."""

    recipe: str
    """The plain backbone's name; its twin is softmax-<recipe>."""
    group: str
    grid: Sequence[tuple[int, int]]
    rounds: int


def ours(name: str, compiled: bool = True) -> nn.Module:
    model = HeadmaxForCausalLM(recipes.get(name).model)
    if compiled:
        model.model.compile_blocks()
    return model


def fla(recipe: str) -> nn.Module:
    """flash-linear-attention's own model at the recipe's sizes, with every fusion it has. Its residual stream is bfloat16 like ours."""
    from fla.models import (
        GatedDeltaNetConfig,
        GatedDeltaNetForCausalLM,
        GLAConfig,
        GLAForCausalLM,
        RetNetConfig,
        RetNetForCausalLM,
    )

    model = recipes.get(recipe).model
    common = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_heads": model.num_heads,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": True,
        "fuse_cross_entropy": False,
        "fuse_linear_cross_entropy": True,
        "max_position_embeddings": 16384,
    }
    kind = recipe.split("-")[0]
    if kind == "gla":
        made = GLAForCausalLM(GLAConfig(**common))
    elif kind == "retnet":
        made = RetNetForCausalLM(RetNetConfig(**common))
    else:
        width = model.hidden_size // 2 // model.num_heads
        made = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**common, head_dim=width, expand_v=2.0))
    made.model.embeddings.register_forward_hook(lambda module, args, output: output.to(torch.bfloat16))
    return made


def compiled(model: nn.Module) -> nn.Module:
    """FLA's model, block by block; its ops stay outside of the graphs."""
    for block in model.model.layers:  # type: ignore[union-attr]
        block.compile()
    return model


def naive_gates(model: nn.Module, recipe: str) -> nn.Module:
    """The gates put on FLA's layers by hand: a softmax over heads multiplied onto q and k (onto o and v for the delta rule)."""
    import fla.layers.gated_deltanet
    import fla.layers.gla
    import fla.layers.multiscale_retention

    places = {
        "gla": (fla.layers.gla, "chunk_gla"),
        "retnet": (fla.layers.multiscale_retention, "chunk_retention"),
        "gdn": (fla.layers.gated_deltanet, "chunk_gated_delta_rule"),
    }
    kind = recipe.split("-")[0]
    module, name = places[kind]
    config = recipes.get(recipe).model
    width = config.hidden_size // config.num_heads // (1 if kind == "retnet" else 2)
    weights = nn.ParameterList(0.02 * torch.randn(config.num_heads, width) for _ in range(2 * config.num_hidden_layers))
    plain, layer = getattr(module, name), itertools.cycle(range(config.num_hidden_layers))

    def gate(x: Tensor, weight: Tensor) -> Tensor:
        return torch.softmax((x * weight).sum(-1).float(), -1).unsqueeze(-1).to(x.dtype)

    def gated(*, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        n = next(layer)
        read, write = gate(q, weights[2 * n]), gate(k, weights[2 * n + 1])
        if kind == "gdn":
            o, state = plain(q=q, k=k, v=v * write, **others)
            return o * read, state
        return plain(q=q * read, k=k * write, v=v, **others)

    setattr(module, name, gated)
    model.gate_weights = weights
    return model


def models(plan: Plan) -> dict[tuple[str, str], Callable[[], nn.Module]]:
    """(impl, variant) and how to make it, for a group that shares a process."""
    return {
        "headmax": {
            ("headmax", "plain"): lambda: ours(plan.recipe),
            ("headmax", "softmax"): lambda: ours(f"softmax-{plan.recipe}"),
        },
        "fla": {("fla", "plain"): lambda: fla(plan.recipe)},
        "fla-compiled": {("fla", "compiled"): lambda: compiled(fla(plan.recipe))},
        "fla-bfloat16": {("fla", "bfloat16 parameters"): lambda: fla(plan.recipe).to(torch.bfloat16)},
        "fla-gates": {("fla", "softmax"): lambda: naive_gates(fla(plan.recipe), plan.recipe)},
        "cold eager": {("headmax", "eager"): lambda: ours(f"softmax-{plan.recipe}", compiled=False)},
        "cold compiled": {("headmax", "compiled"): lambda: ours(f"softmax-{plan.recipe}")},
        "transformer": {("headmax", "transformer"): lambda: ours(f"transformer-{plan.recipe.split('-')[1]}")},
    }[plan.group]


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


def measure(plan: Plan) -> Iterator[Record]:
    """Everything one process measures: first steps, then the grid, its models taking turns."""
    import triton

    make, device = Recorder("train", "cuda"), torch.device("cuda")
    # A run has one shape, and its graphs are made for that one: so are those of every point of the grid.
    torch._dynamo.config.automatic_dynamic_shapes = False
    ceilings = Ceilings.of(device)
    assert ceilings is not None
    rate = ceilings.flops
    yield make("8192x8192x8192 bf16", "torch", "matmul", rate / 1e12, "TFLOP/s")
    steps: dict[tuple[str, str], Step] = {}
    for (impl, variant), build in models(plan).items():
        step = Step(build())
        step.shape(*plan.grid[0])
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        steps[impl, variant] = step
        if plan.group.startswith("cold"):
            case = f"softmax-{plan.recipe} {plan.grid[0][0]}x{plan.grid[0][1]}"
            yield make(case, impl, f"{variant}/first step, empty caches", time.perf_counter() - begin, "s")
            return
    for length, batch in plan.grid:
        case = f"{plan.recipe} {length}x{batch}"
        peaks: dict[tuple[str, str], int] = {}
        times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
        for key, step in steps.items():
            step.shape(length, batch)
            torch.cuda.synchronize()
            others = torch.cuda.memory_allocated() - own_bytes(step)
            torch.cuda.reset_peak_memory_stats()
            for _ in range(REHEARSALS + 2):
                step()  # a graph takes its memory when it is captured
            peaks[key] = torch.cuda.max_memory_allocated() - others
        for _ in range(plan.rounds):
            for key, step in steps.items():
                times[key].append(seconds(step, device, STEP_AHEAD))
        for (impl, variant), step in steps.items():
            taken = statistics.median(times[impl, variant])
            edges = {"fastest": min(times[impl, variant]), "slowest": max(times[impl, variant])}
            size = sum(p.numel() for p in step.model.parameters())
            how = {"rounds": plan.rounds, "ahead": STEP_AHEAD, "parameters": size, "triton": triton.__version__} | edges
            yield make(case, impl, f"{variant}/tokens per second", length * batch / taken, "tokens/s", None, **how)
            yield make(case, impl, f"{variant}/peak memory", peaks[impl, variant] / 2**30, "GiB")
            yield make(case, impl, f"{variant}/MFU", 6 * size * length * batch / taken / rate, "of the measured matmul rate")
        if (length, batch) == plan.grid[0]:
            for (impl, variant), times_of in device_times(steps).items():
                for kind, (taken, launches) in times_of.items():
                    yield make(case, impl, f"{variant}/device time/{kind}", 1e3 * taken, "ms", launches=launches)
        if len(steps) == 2:
            ratio, interval = paired(times["headmax", "softmax"], times["headmax", "plain"])
            yield make(case, "headmax", "softmax over plain/time", ratio, "ratio", interval=interval)
            memory = peaks["headmax", "softmax"] / peaks["headmax", "plain"]
            yield make(case, "headmax", "softmax over plain/memory", memory, "ratio")


def device_times(steps: Mapping[tuple[str, str], Step], rounds: int = 5) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Seconds on the GPU and launches of each kind of kernel in a step: the median of rounds in which the models take turns."""
    found: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {key: {} for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            sums: dict[str, tuple[float, float]] = {}
            for name, (taken, launches) in kernel_times(step, 1).items():
                before = sums.get(kind := kind_of(name), (0.0, 0.0))
                sums[kind] = before[0] + taken, before[1] + launches
            for kind, pair in sums.items():
                found[key].setdefault(kind, []).append(pair)
    return {key: {kind: sorted(pairs)[len(pairs) // 2] for kind, pairs in kinds.items()} for key, kinds in found.items()}


def kind_of(kernel: str) -> str:
    """What a kernel of a step is there for, by its name and, if it is ours, by where it is written."""
    if any(part in kernel for part in ("nvjet", "gemm", "cutlass")):
        return "matrix products"
    if kernel.startswith("triton_"):
        return "compiled passes"
    for module in ("ops", "layers"):
        if any(hasattr(m, kernel) for name, m in list(sys.modules.items()) if name.startswith(f"headmax.{module}.")):
            return f"headmax.{module}"
    return "optimizer and others"


def own_bytes(step: Step) -> int:
    """What a model and its optimizer hold between steps."""
    tensors = [*step.model.parameters(), *step.model.buffers(), step.tokens]
    tensors += [x for state in step.optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.is_cuda]
    return sum(x.numel() * x.element_size() for x in tensors)


def bench(
    recipe: str, groups: Sequence[str], grid: Sequence[tuple[int, int]], rounds: int, limit: float, say: Callable[[str], None]
) -> Iterator[Record]:
    """All groups, one after the other on the same card."""
    for group in groups:
        say(f"{recipe}: {group}")
        with tempfile.TemporaryDirectory() as empty:
            caches = {"TRITON_CACHE_DIR": empty, "TORCHINDUCTOR_CACHE_DIR": empty} if group.startswith("cold") else {}
            yield from isolated(measure, Plan(recipe, group, grid, rounds), limit=limit, say=say, environment=caches)
