"""What our own pages show of training steps beside `headmax bench train`: first steps, kernels by kind, more ways to run the peer."""

from __future__ import annotations

import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headmax import recipes
from headmax.bench import train
from headmax.bench.isolated import isolated
from headmax.bench.timing import kernel_times
from headmax.bench.train import Models, Plan, Step, fla, ours, prepare
from headmax.records import Record, Recorder


def bench(plan: Plan, limit: float, say: Callable[[str], None]) -> Iterator[Record]:
    """Everything, one process after the other on the same card."""
    twin = f"softmax-{plan.recipe}"
    for variant, compiled in (("eager", False), ("compiled", True)):
        say(f"{plan.recipe}: first step, {variant}")
        models: Models = {("headmax", variant): functools.partial(ours, twin, compiled)}
        with tempfile.TemporaryDirectory() as empty:
            caches = {"TRITON_CACHE_DIR": empty, "TORCHINDUCTOR_CACHE_DIR": empty}
            yield from isolated(first_step, plan, models, limit=limit, say=say, environment=caches)
    processes = train.groups(plan.recipe, "fla") | peers(plan.recipe)
    yield from train.bench(plan, processes, limit, say)
    say(f"{plan.recipe}: kernels")
    yield from isolated(kernels, plan, processes["headmax"], limit=limit, say=say)


def peers(recipe: str) -> dict[str, Models]:
    """Further ways to run flash-linear-attention's model."""
    return {
        "fla-bfloat16": {("fla", "bfloat16 parameters"): functools.partial(bfloat16_parameters, recipe)},
        "fla-gates": {("fla", "softmax"): functools.partial(naive_gates, recipe)},
    }


def bfloat16_parameters(recipe: str) -> nn.Module:
    return fla(recipe).to(torch.bfloat16)


def naive_gates(recipe: str) -> nn.Module:
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
    model, config = train.fla(recipe), recipes.get(recipe).model
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


def first_step(plan: Plan, models: Models) -> Iterator[Record]:
    """Seconds of a first step, in a process whose caches are empty."""
    make, (length, batch) = Recorder("train", "cuda"), plan.grid[0]
    for (impl, variant), build in models.items():
        step = Step(build())
        step.shape(length, batch)
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken = time.perf_counter() - begin
        yield make(f"softmax-{plan.recipe} {length}x{batch}", impl, f"{variant}/first step, empty caches", taken, "s")


def kernels(plan: Plan, models: Models) -> Iterator[Record]:
    """Where the time of a step goes on the GPU."""
    make, (length, batch) = Recorder("train", "cuda"), plan.grid[0]
    for (impl, variant), times in device_times(prepare(models, length, batch)).items():
        for kind, (taken, launches) in times.items():
            yield make(f"{plan.recipe} {length}x{batch}", impl, f"{variant}/device time/{kind}", 1e3 * taken, "ms", launches=launches)


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


OF_LAYERS = ("conv", "decay", "loss", "norm", "rotary", "swiglu")
"""Files of ops/kernels whose kernels run in a layer, beside its recurrence and gates."""


def kind_of(kernel: str) -> str:
    """What a kernel of a step is there for, by its name and, if it is ours, by where it is written."""
    if any(part in kernel for part in ("nvjet", "gemm", "cutlass")):
        return "matrix products"
    if kernel.startswith("triton_"):
        return "compiled passes"
    for name, module in list(sys.modules.items()):
        if name.startswith("headmax.ops.kernels.") and hasattr(module, kernel):
            return "headmax.layers" if name.rpartition(".")[2] in OF_LAYERS else "headmax.ops"
    return "optimizer and others"
