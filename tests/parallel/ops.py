"""Every recurrence over the ranks of a context group, beside one process."""

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from headmax.ops import Packing
from headmax.ops.spec import Case, Spec, distance
from tests.ops.oracle import SPECS
from tests.parallel.processes import everywhere


def splits(time: int, ranks: int) -> list[list[int]]:
    """As even as can be, uneven, and with pieces of one token: where each rank's tokens begin, and the end."""
    cut = random.Random(time)
    kinds = [[time * n // ranks for n in range(ranks + 1)], [0, *sorted(cut.sample(range(1, time), ranks - 1)), time]]
    return [*kinds, [*range(ranks), time], [0, *range(time - ranks + 1, time + 1)]]


def weighed(o: torch.Tensor, state: torch.Tensor, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """What the loss weighs outputs and states by."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, state))


def leaves(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def whole(spec: Spec, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """On one process."""
    inputs = leaves(inputs)
    o, state = spec.function(**inputs, return_state=True, backend="chunkwise")
    weights = weighed(o, state)
    ((o * weights[0]).sum() + (state * weights[1]).sum()).backward()
    return {"o": o.detach(), "state": state.detach()} | {f"d_{name}": x.grad for name, x in inputs.items() if torch.is_tensor(x)}


def errors(spec: Spec, inputs: dict[str, Any], bounds: list[int]) -> dict[str, float]:
    """How far this rank's piece is from its part of the whole."""
    expected, rank = whole(spec, inputs), dist.get_rank()
    weights = weighed(expected["o"], expected["state"])
    start, stop = bounds[rank : rank + 2]
    tokens, last = slice(start, stop), rank == len(bounds) - 2
    packing = inputs.get("cu_seqlens")
    mine = dict(inputs)
    for name, x in inputs.items():
        if torch.is_tensor(x) and x.ndim > 1 and name != "initial_state":
            mine[name] = x[:, tokens]
    rows, ended = slice(None), torch.full((len(expected["state"]),), last)
    if isinstance(packing, Packing):
        mine["cu_seqlens"] = packing.piece(start, stop)
        rows = mine["cu_seqlens"].rows
        begin, end = packing.cu_seqlens[:-1], packing.cu_seqlens[1:]
        ended = ((end > start) & (end <= stop) | (begin == end))[rows]
    if "initial_state" in inputs:
        mine["initial_state"] = inputs["initial_state"][rows]
    mine = leaves(mine)
    o, state = spec.function(**mine, return_state=True, context_group=dist.group.WORLD, backend="chunkwise")
    kept = ended.view(-1, 1, 1, 1)
    ((o * weights[0][:, tokens]).sum() + (state * weights[1][rows] * kept).sum()).backward()

    found = {"o": distance(o, expected["o"][:, tokens])}
    found["state"] = distance(state * kept, expected["state"][rows] * kept) if kept.any() else 0.0
    for name, x in mine.items():
        if not torch.is_tensor(x):
            continue
        gradient, all_of_it = torch.zeros_like(x) if x.grad is None else x.grad, expected[f"d_{name}"]
        if name == "initial_state":
            everyone = torch.zeros_like(all_of_it)
            everyone[rows] = gradient
            gradient = everyone
        if x.ndim > 1 and name != "initial_state":
            all_of_it = all_of_it[:, tokens]
        else:
            dist.all_reduce(gradient)
        found[f"d_{name}"] = float((gradient - all_of_it).norm() / expected[f"d_{name}"].norm())
    return found


def cases(name: str, ranks: int) -> list[Case]:
    """Of the op's own; KDA's covering cases are the delta rule's, of which it has but a few of its own."""
    packed = [case for case in SPECS["gated_delta_rule"].cases if name == "kda" and case.lengths and case.normalize]
    chosen = [case for case in (*SPECS[name].cases, *packed) if ranks < case.time <= 151 and case.key <= 96]
    return list(dict.fromkeys([*chosen, *(replace(case, decay="mixed") for case in chosen if case.lengths and case.initial_state)]))


def bytes_sent(spec: Spec, case: Case) -> int:
    """By forward and backward of one rank's call."""
    sent, gather = 0, dist.all_gather_into_tensor

    def count(everyone: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> object:
        nonlocal sent
        sent += x.nbytes
        return gather(everyone, x, group)

    with mock.patch.object(dist, "all_gather_into_tensor", count):
        errors(spec, spec.inputs(case, torch.float64), [case.time * n // dist.get_world_size() for n in range(dist.get_world_size() + 1)])
    return sent


def main(thorough: bool) -> dict[str, Any]:
    ranks, found = dist.get_world_size(), {}
    for name, spec in SPECS.items():
        for case in cases(name, ranks):
            inputs = spec.inputs(case, torch.float64)
            every = splits(case.time, ranks)
            for bounds in every if thorough else every[1:3] if case.lengths else every[1:2]:
                found[f"{name}-{case}-{'-'.join(map(str, bounds))}"] = errors(spec, inputs, bounds)
    lengths = [Case(time=time, key=8, value=16) for time in (16, 160)]
    return {"errors": everywhere(found), "bytes": {name: [bytes_sent(spec, case) for case in lengths] for name, spec in SPECS.items()}}
