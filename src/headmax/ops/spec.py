"""A test or benchmark case of a recurrence: its shape, its inputs, its work. Each op's `spec.py` adds what is its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headmax.ops.packing import Packing

CHUNK_FOR_FLOPS = 64
"""The work of a chunked algorithm depends on its chunk; figures are stated for this one."""


@dataclass(frozen=True)
class Case:
    """One shape worth testing or timing."""

    batch: int = 1
    time: int = 64
    heads: int = 2
    key: int = 20
    value: int = 40
    value_heads: int | None = None
    """Heads of v where they differ from those of q and k (not in GLA)."""
    gates: str = ""
    """Which gates there are: "", "read", "write" or "both"."""
    initial_state: bool = False
    lengths: tuple[int, ...] | None = None
    """Packed sequences: their lengths, which sum to `time`."""
    decay: str = "soft"
    """"none", "head", "soft" (0 to -1 a step), "mixed" (also steps of -100 and of 0)."""
    normalize: bool = True
    """Whether the op scales q and k to unit length (gated delta rule only)."""

    @property
    def out_heads(self) -> int:
        return self.value_heads or self.heads

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    def shortened(self, time: int) -> Case:
        """The same heads on one row of at most `time` tokens; packed sequences keep their proportions."""
        if self.time <= time or self.lengths is None:
            return replace(self, batch=1, time=min(self.time, time))
        others = [max(1, length * time // self.time) for length in self.lengths[1:]]
        return replace(self, batch=1, time=time, lengths=(time - sum(others), *others))

    def __str__(self) -> str:
        parts = [f"B{self.batch}T{self.time}H{self.heads}K{self.key}V{self.value}", self.decay]
        marks = {
            f"hv{self.value_heads}": self.value_heads,
            f"gates-{self.gates}": self.gates,
            "s0": self.initial_state,
            "packed": self.lengths,
            "raw": not self.normalize,
        }
        return "-".join(parts + [mark for mark, there in marks.items() if there])


@dataclass(frozen=True)
class Spec:
    """What tests and benchmarks need to know of an op."""

    name: str
    function: Callable[..., tuple[Tensor, Tensor | None]]
    extra_inputs: Callable[[Case, torch.Generator], dict[str, Any]]
    """The arguments beside q, k, v, gates and initial state."""
    cases: tuple[Case, ...]
    flops: Callable[[Case], int]
    """Multiply-adds x 2 of the forward pass, chunked by CHUNK_FOR_FLOPS."""
    extra_numbers: Callable[[Case], int]
    """How many numbers beside q, k, v, o the forward pass reads."""
    transition: Callable[[Case], int] | None = None
    """How many numbers of a head say what a piece of a sequence does to the state before it; None where the op takes no pieces."""

    def inputs(self, case: Case, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
        """Keyword arguments for the op, drawn anew from the seed. Gates, decay and beta stay float32 beside bfloat16 q, k, v."""
        generator = torch.Generator().manual_seed(seed)
        rows = (case.batch, case.time)
        made: dict[str, Any] = {
            "q": torch.randn(*rows, case.heads, case.key, generator=generator),
            "k": torch.randn(*rows, case.heads, case.key, generator=generator) * case.key**-0.5,
            "v": torch.randn(*rows, case.out_heads, case.value, generator=generator),
        }
        made |= self.extra_inputs(case, generator)
        for name in ("read_gate", "write_gate"):
            if case.gates in ("both", name.removesuffix("_gate")):
                made[name] = torch.randn(*rows, case.out_heads, generator=generator).softmax(-1)
        if case.initial_state:
            made["initial_state"] = torch.randn(case.sequences, case.out_heads, case.key, case.value, generator=generator)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for name, x in made.items():
            if isinstance(x, Tensor):
                made[name] = x.to(device, dtype if name in ("q", "k", "v") else wide)
        if case.lengths is not None:
            made["cu_seqlens"] = Packing([0, *accumulate(case.lengths)], device=device)
        return made

    def evaluate(self, inputs: Mapping[str, Any], function: Callable[..., tuple[Tensor, Any]], seed: int = 1) -> dict[str, Tensor]:
        """Output `o`, final `state`, and `d_<name>`: the gradient of a random functional of both for every tensor argument."""
        inputs = {name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        o, state = function(**inputs)
        generator = torch.Generator().manual_seed(seed)
        loss = torch.stack([(x * torch.randn(x.shape, generator=generator).to(x)).sum().double() for x in (o, state)]).sum()
        leaves = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return {"o": o.detach(), "state": state.detach()} | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}

    def oracle(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The same by the token-by-token recurrence in float64, on these inputs as they are rounded."""
        wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        return self.evaluate(wide, lambda **arguments: self.function(**arguments, return_state=True, backend="reference"))

    def bytes_moved(self, case: Case, itemsize: int) -> int:
        """The least traffic of the forward pass: every input read once, the output written once."""
        tokens = case.batch * case.time
        qkvo = tokens * 2 * (case.heads * case.key + case.out_heads * case.value)
        return qkvo * itemsize + 4 * self.extra_numbers(case)


def distance(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|; a NaN anywhere gives NaN, which is within no bound."""
    x, y = x.detach().double().cpu(), y.detach().double().cpu()
    return float((x - y).norm() / y.norm().clamp_min(1e-12))


def draw_decay(case: Case, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log-decays in (-1, 0]; "mixed" cuts some steps to -100 and holds others at 0."""
    soft = -torch.rand(shape, generator=generator)
    if case.decay != "mixed":
        return soft
    pick = torch.rand(shape, generator=generator)
    return soft.masked_fill(pick < 0.1, -100.0).masked_fill(pick > 0.7, 0.0)


def intra_inter_flops(case: Case, intra: int, inter: int) -> int:
    """`intra` products of C x C with K or V per chunk given as total width, `inter` products of K x V per token."""
    per_token = CHUNK_FOR_FLOPS * intra + 2 * inter * case.key * case.value
    return case.batch * case.time * case.out_heads * per_token


def covering_cases(variants: Mapping[str, Any] | None = None) -> tuple[Case, ...]:
    """Every length, width and feature at least once, long sequences with narrow heads: a covering set, not the full product."""
    extra = dict(variants or {})
    return (
        Case(time=1, key=20, value=40, gates="both", initial_state=True, **extra),
        Case(batch=2, time=17, heads=3, key=40, value=80, gates="both", **extra),
        Case(time=64, key=80, value=160, initial_state=True, **extra),
        Case(batch=2, time=100, heads=1, key=96, value=192, gates="both", initial_state=True, **extra),
        Case(time=100, heads=2, key=128, value=256, **extra),
        Case(time=65, heads=1, key=160, value=320, gates="read", **extra),
        Case(time=63, heads=1, key=192, value=384, gates="write", initial_state=True, **extra),
        Case(time=17, heads=1, key=256, value=512, gates="both", initial_state=True, **extra),
        Case(time=1000, heads=2, key=20, value=20, gates="both", initial_state=True, **extra),
        Case(time=151, heads=2, key=40, value=20, gates="both", initial_state=True, lengths=(0, 1, 17, 0, 64, 69, 0), **extra),
        Case(time=130, heads=2, key=20, value=40, lengths=(65, 65), **extra),
        Case(time=40, heads=2, key=20, value=40, gates="read", lengths=(3, 1, 5, 2, 7, 8, 8, 6), **extra),
        Case(time=17, heads=1, key=320, value=96, gates="both", **extra),
        Case(time=17, heads=1, key=384, value=128, initial_state=True, **extra),
        Case(time=33, heads=1, key=512, value=128, gates="write", **extra),
    )
