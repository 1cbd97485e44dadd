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
    shape = (case.heads,) if case.decay == "head" else (case.batch, case.time, case.heads)
    return {"log_decay": draw_decay(case, shape, generator)}


CASES = covering_cases({"decay": "head"})
SPEC = Spec(
    name="linear_attention",
    function=linear_attention,
    extra_inputs=_inputs,
    cases=CASES
    + tuple(replace(case, decay=decay) for decay in ("none", "soft", "mixed") for case in (CASES[1], CASES[3], CASES[8], CASES[9])),
    flops=lambda case: intra_inter_flops(case, intra=case.key + case.value, inter=2),
    extra_numbers=lambda case: case.batch * case.time * case.heads * (case.decay in ("soft", "mixed")),
)
