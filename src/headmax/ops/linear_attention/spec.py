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
SPEC = Spec(
    name="linear_attention",
    function=linear_attention,
    extra_inputs=_inputs,
    cases=CASES
    + tuple(replace(case, decay=decay) for decay in ("none", "soft", "mixed") for case in (CASES[1], CASES[3], CASES[8], CASES[9]))
    + tuple(replace(CASES[n], value_heads=3 * CASES[n].heads, decay=decay) for n, decay in ((1, "head"), (3, "none"), (9, "mixed"))),
    flops=lambda case: intra_inter_flops(case, intra=case.key + case.value, inter=2),
    extra_numbers=lambda case: case.batch * case.time * case.out_heads * (case.decay in ("soft", "mixed")),
)
