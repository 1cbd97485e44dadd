"""Inputs, shapes and work of linear attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headmax.ops.linear_attention import linear_attention
from headmax.ops.spec import Case, Spec, covering_cases, draw_decay, intra_inter_flops


def _inputs(case: Case, generator: torch.Generator) -> dict[str, Any]:
    if case.decay == "none":
        return {"log_decay": None}
    shape = (case.out_heads,) if case.decay == "head" else (case.batch, case.time, case.out_heads)
    return {"log_decay": draw_decay(case, shape, generator)}


CASES = covering_cases({"decay": "head"})
GROUPED = (
    Case(batch=2, time=17, heads=2, key=24, value=40, value_heads=4, gates="both", decay="head"),
    Case(time=70, heads=1, key=40, value=80, value_heads=3, initial_state=True, decay="none"),
    Case(time=73, heads=1, key=40, value=20, value_heads=2, gates="both", initial_state=True, lengths=(0, 1, 0, 70, 2, 0), decay="mixed"),
)
"""Several value heads to a key head."""
SPEC = Spec(
    name="linear_attention",
    function=linear_attention,
    extra_inputs=_inputs,
    cases=CASES
    + tuple(replace(case, decay=decay) for decay in ("none", "soft", "mixed") for case in (CASES[1], CASES[3], CASES[8], CASES[9]))
    + GROUPED,
    flops=lambda case: intra_inter_flops(case, intra=case.key + case.value, inter=2),
    extra_numbers=lambda case: case.batch * case.time * case.out_heads * (case.decay in ("soft", "mixed")),
    transition=lambda _: 1,
)
