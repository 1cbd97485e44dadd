"""How fast are the ops, forward and backward, beside a peer at the same shapes in the same run?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headmax.bench.timing import interleaved, median, peak_memory
from headmax.ops.gated_delta_rule.spec import SPEC as GATED_DELTA_RULE
from headmax.ops.gla.spec import SPEC as GLA
from headmax.ops.linear_attention.spec import SPEC as LINEAR_ATTENTION
from headmax.ops.registry import suggest
from headmax.ops.spec import Case, distance
from headmax.records import Record, Recorder

SPECS = {spec.name: spec for spec in (LINEAR_ATTENTION, GLA, GATED_DELTA_RULE)}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float64: 1e-10}


@dataclass(frozen=True)
class Contender:
    """An implementation of an op: called with the op's keyword arguments, returns (o, state)."""

    impl: str
    op: str
    function: Callable[..., tuple[Tensor, Any]]


def ours(op: str, backend: str = "auto") -> Contender:
    return Contender("headmax", op, lambda **inputs: SPECS[op].function(**inputs, return_state=True, backend=backend))


def transformers_gated_delta_rule() -> Contender:
    """Hugging Face transformers' own chunked gated delta rule in plain PyTorch (Qwen3-Next)."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as dispatching

    torch_chunk_gated_delta_rule = inspect.unwrap(dispatching)  # else it calls flash-linear-attention where that is installed

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, normalize_qk: bool) -> tuple[Tensor, Any]:
        return torch_chunk_gated_delta_rule(q, k, v, g=log_decay, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=normalize_qk)

    return Contender("hf", "gated_delta_rule", run)


PEERS: dict[str, Callable[[], list[Contender]]] = {"none": list, "hf": lambda: [transformers_gated_delta_rule()]}


def error(contender: Contender, case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Distance of output, state and gradients to the float64 oracle, the largest of them, on a short sequence of that shape."""
    spec = SPECS[contender.op]
    inputs = spec.inputs(replace(case, batch=1, time=min(case.time, 200)), dtype, device)
    expected, actual = spec.oracle(inputs), spec.evaluate(inputs, contender.function)
    return max(distance(actual[name], expected[name]) for name in expected)


def step(contender: Contender, case: Case, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A forward and backward pass on inputs made once."""
    inputs = SPECS[contender.op].inputs(case, dtype, device)
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor)]
    d_output = torch.randn(case.batch, case.time, case.out_heads, case.value).to(device, dtype)

    def run() -> object:
        o, _ = contender.function(**inputs)
        return torch.autograd.grad(o, leaves, d_output)

    return run


def bench(
    *, case: Case, lengths: tuple[int, ...], peer: str, dtype: torch.dtype, device: torch.device, rounds: int, say: Callable[[str], None]
) -> list[Record]:
    """Times all ops and the peer at `case`, and our ops again at each of `lengths` (a peer whose cost is not linear would never end)."""
    if peer not in PEERS:
        raise ValueError(f"unknown peer {peer!r}{suggest(peer, PEERS)}")
    make = Recorder("kernels", device)
    contenders = [*PEERS[peer](), *map(ours, SPECS)]
    records = []
    for contender in contenders:
        off = error(contender, case, dtype, device)
        say(f"{contender.impl} {contender.op}: {off:.1e} from the float64 oracle")
        if not off <= TOLERANCE[dtype]:
            raise ValueError(
                f"{contender.impl} {contender.op} is {off:.1e} from the oracle (allowed {TOLERANCE[dtype]:.0e}): no speed is reported"
            )
        records.append(make(str(case), contender.impl, f"{contender.op}/error", off, "relative"))

    steps = {f"{c.impl}/{c.op}": step(c, case, dtype, device) for c in contenders}
    say(f"timing {case}, {rounds} rounds")
    for name, times in interleaved(steps, device, rounds).items():
        impl, op = name.split("/")
        records.append(make(str(case), impl, f"{op}/forward+backward", 1e3 * median(times), "ms", rounds=rounds, best=1e3 * min(times)))
    for time in lengths:
        longer = replace(case, time=time)
        for contender in map(ours, SPECS):
            say(f"timing {contender.op} at T={time}")
            run = step(contender, longer, dtype, device)
            memory = peak_memory(run, device)
            times = interleaved({"": run}, device, max(3, rounds // 2), warmup=0)[""]
            records.append(make(str(longer), "headmax", f"{contender.op}/time per token", 1e6 * median(times) / time, "us"))
            if memory is not None:
                records.append(make(str(longer), "headmax", f"{contender.op}/memory per token", memory / time, "bytes"))
    return records
