"""Speed of the ops, forward and backward, compared with a peer at the same shapes in the same run; and gate overhead."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headmax.bench.timing import Ceilings, interleaved, kernel_times, paired, peak_memory
from headmax.ops.gated_delta_rule.spec import SPEC as GATED_DELTA_RULE
from headmax.ops.gla.spec import SPEC as GLA
from headmax.ops.kda.spec import SPEC as KDA
from headmax.ops.linear_attention.spec import SPEC as LINEAR_ATTENTION
from headmax.ops.registry import suggest
from headmax.ops.sequential import per_value_head
from headmax.ops.spec import Case, distance
from headmax.records import Record, Recorder

SPECS = {spec.name: spec for spec in (LINEAR_ATTENTION, GLA, GATED_DELTA_RULE, KDA)}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float64: 1e-10}
RECIPE_CASES = {
    "linear_attention": Case(batch=8, time=4096, heads=4, key=256, value=512, decay="head"),
    "gla": Case(batch=8, time=4096, heads=4, key=128, value=256),
    "gated_delta_rule": Case(batch=8, time=4096, heads=4, key=128, value=256),
    "kda": Case(batch=8, time=4096, heads=16, key=128, value=128),
}
"""Shapes in layers of the 340m recipes, and half of Kimi-Linear's heads, with 32k tokens per batch."""
CACHE_BYTES = 2**27
"""More than the L2 cache of a GPU."""


@dataclass(frozen=True)
class Contender:
    """An implementation of an op: called with the op's keyword arguments, returns (o, state)."""

    impl: str
    op: str
    function: Callable[..., tuple[Tensor, Any]]


def ours(op: str, backend: str = "auto") -> Contender:
    return Contender("headmax", op, lambda **inputs: SPECS[op].function(**inputs, return_state=True, backend=backend))


def fla(op: str) -> Contender:
    """flash-linear-attention's chunked kernel."""
    return Contender("fla", op, ours(op, "fla").function)


def transformers_gated_delta_rule(op: str = "gated_delta_rule") -> Contender | None:
    """Hugging Face transformers' chunked gated delta rule in plain PyTorch (Qwen3-Next)."""
    if op != "gated_delta_rule":
        return None
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as dispatching

    torch_chunk_gated_delta_rule = inspect.unwrap(dispatching)  # otherwise it calls flash-linear-attention, if installed

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, normalize_qk: bool) -> tuple[Tensor, Any]:
        q, k = per_value_head(q, v), per_value_head(k, v)
        return torch_chunk_gated_delta_rule(q, k, v, g=log_decay, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=normalize_qk)

    return Contender("hf", "gated_delta_rule", run)


PEERS: dict[str, Callable[[str], Contender | None]] = {"none": lambda op: None, "hf": transformers_gated_delta_rule, "fla": fla}


def trainable(case: Case) -> Callable[[str], bool]:
    """Whether an input needs a gradient: a decay per head is a constant of the architecture."""
    return lambda name: name != "log_decay" or case.decay != "head"


def error(contender: Contender, case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Largest distance of output, state and gradients to the float64 oracle, on a short sequence."""
    spec = SPECS[contender.op]
    inputs = spec.inputs(case.shortened(200), dtype, device)
    constants = {name: x for name, x in inputs.items() if not trainable(case)(name)}
    learned = {name: x for name, x in inputs.items() if name not in constants}
    expected, actual = spec.oracle(inputs), spec.evaluate(learned, lambda **x: contender.function(**x, **constants))
    return max(distance(actual[name], expected[name]) for name in actual)


class Steps:
    """The forward pass, and the forward and backward pass, on several inputs in turn, so that none is in the GPU's cache."""

    def __init__(self, contender: Contender, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        one = SPECS[contender.op].inputs(case, dtype, device)
        size = sum(x.numel() * x.element_size() for x in one.values() if isinstance(x, Tensor))
        copies = 1 if device.type == "cpu" else 1 + CACHE_BYTES // size
        needs_gradient = trainable(case)
        sets = []
        for _ in range(copies):
            inputs = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in one.items()}
            leaves = [x.requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor) and needs_gradient(name)]
            sets.append((inputs, leaves))
        self.sets, self.function = itertools.cycle(sets), contender.function
        self.d_output = torch.randn(case.batch, case.time, case.out_heads, case.value, device=device).to(dtype)

    def forward(self) -> object:
        inputs, _ = next(self.sets)
        with torch.no_grad():
            return self.function(**inputs)

    def both(self) -> object:
        inputs, leaves = next(self.sets)
        return torch.autograd.grad(self.function(**inputs)[0], leaves, self.d_output)


def measure(
    op: str, case: Case, peer: str, dtype: torch.dtype, device: torch.device, rounds: int, gates: bool, lengths: tuple[int, ...]
) -> Iterator[Record]:
    """An op and its peer: errors, then times; then gate overhead, in pairs; then longer sequences."""
    make = Recorder("kernels", device)
    steps = yield from check_accuracy(make, op, case, peer, dtype, device)
    yield from measure_times(make, op, case, steps, dtype, device, rounds)
    if gates:
        yield from gate_overhead(make, op, case, steps["headmax"], dtype, device, rounds)
    for time in lengths:
        longer = replace(case, time=time)
        step = Steps(ours(op), longer, dtype, device)
        memory = peak_memory(step.both, device)
        seconds = interleaved({"": step.both}, device, max(3, rounds // 2), warmup=0)[""]
        yield make(str(longer), "headmax", f"{op}/time per token", 1e6 * median(seconds) / (time * case.batch), "us")
        if memory is not None:
            yield make(str(longer), "headmax", f"{op}/memory per token", memory / (time * case.batch), "bytes")


def check_accuracy(
    make: Recorder, op: str, case: Case, peer: str, dtype: torch.dtype, device: torch.device
) -> Generator[Record, None, dict[str, Steps]]:
    """Runs each implementation and yields its error; returns those that run. ValueError for an inaccurate one."""
    name, steps = str(case), {}
    for contender in (PEERS[peer](op), ours(op)):
        if contender is None:
            continue
        step = Steps(contender, case, dtype, device)
        try:
            step.forward()  # at full size first, as a peer may autotune on its first input
            step.both()
            deviation = error(contender, case, dtype, device)
        except RuntimeError as refused:
            if contender.impl == "headmax":
                raise
            yield make(name, contender.impl, f"{op}/refused", 1, "", reason=str(refused).splitlines()[0])
            continue
        yield make(name, contender.impl, f"{op}/error", deviation, "relative")
        if not deviation <= TOLERANCE[dtype]:
            allowed = f"(allowed {TOLERANCE[dtype]:.0e})"
            raise ValueError(f"{contender.impl} {op} is {deviation:.1e} from the oracle {allowed}: no speed is reported")
        steps[contender.impl] = step
    return steps


def measure_times(
    make: Recorder, op: str, case: Case, steps: Mapping[str, Steps], dtype: torch.dtype, device: torch.device, rounds: int
) -> Iterator[Record]:
    """Times of the forward pass, and of the forward and backward pass, with throughput."""
    name, ceilings = str(case), Ceilings.of(device)
    for metric, passes in (("forward", 1), ("forward+backward", 3)):
        functions = {impl: step.forward if passes == 1 else step.both for impl, step in steps.items()}
        for impl, seconds in interleaved(functions, device, rounds).items():
            taken = median(seconds)
            flops, moved = (passes * n for n in (SPECS[op].flops(case), SPECS[op].bytes_moved(case, dtype.itemsize)))
            extra: dict[str, Any] = {
                "rounds": rounds,
                "best": 1e3 * min(seconds),
                "TFLOP/s": flops / taken / 1e12,
                "GB/s": moved / taken / 1e9,
            }
            if ceilings is not None:
                import triton

                extra["triton"] = triton.__version__
                extra["roofline"] = max(flops / ceilings.flops, moved / ceilings.bytes) / taken
            yield make(name, impl, f"{op}/{metric}", 1e3 * taken, "ms", **extra)


def gate_overhead(
    make: Recorder, op: str, case: Case, plain: Steps, dtype: torch.dtype, device: torch.device, rounds: int
) -> Iterator[Record]:
    """The ratio of times with and without gates and, on a GPU, the time of each kernel."""
    name, gated = str(case), Steps(ours(op), replace(case, gates="both"), dtype, device)
    pairs = interleaved({"gated": gated.both, "plain": plain.both}, device, max(50, rounds), warmup=3)
    ratio, interval = paired(pairs["gated"], pairs["plain"])
    yield make(name, "headmax", f"{op}/gated over plain", ratio, "ratio", pairs=len(pairs["plain"]), interval=interval)
    if device.type == "cuda":
        without, with_gates = kernel_times(plain.both), kernel_times(gated.both)
        for kernel in dict.fromkeys((*without, *with_gates)):
            (base, once), (taken, launches) = (seconds.get(kernel, (0.0, 0.0)) for seconds in (without, with_gates))
            yield make(name, "headmax", f"{op}/{kernel}", 1e6 * base, "us", gated=1e6 * taken, launches=max(once, launches))


def bench(
    *,
    cases: Mapping[str, Case],
    peer: str,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    say: Callable[[str], None],
    gates: bool = False,
    lengths: tuple[int, ...] = (),
    limit: float | None = None,
) -> list[Record]:
    """Measures every op of `cases`; with a `limit` in seconds, each in a separate process."""
    from headmax.bench.isolated import isolated

    if peer not in PEERS:
        raise ValueError(f"unknown peer {peer!r}{suggest(peer, PEERS)}")
    measured: list[Record] = []
    for op, case in cases.items():
        say(f"{op} {case}")
        arguments = (op, case, peer, dtype, device, rounds, gates, lengths)
        measured += measure(*arguments) if limit is None else isolated(measure, *arguments, limit=limit, say=say)
    return measured
