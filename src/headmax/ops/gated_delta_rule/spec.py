"""Inputs, shapes and work of the gated delta rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headmax.ops.gated_delta_rule import gated_delta_rule
from headmax.ops.spec import Case, Spec, covering_cases, draw_decay, intra_inter_flops


def _inputs(case: Case, generator: torch.Generator) -> dict[str, Any]:
    shape = (case.batch, case.time, case.out_heads)
    return {"log_decay": draw_decay(case, shape, generator), "beta": torch.rand(shape, generator=generator), "normalize_qk": case.normalize}


CASES = covering_cases()
SPEC = Spec(
    name="gated_delta_rule",
    function=gated_delta_rule,
    extra_inputs=_inputs,
    cases=CASES
    + tuple(replace(case, decay="mixed") for case in (CASES[1], CASES[3], CASES[8], CASES[9]))
    + tuple(replace(case, normalize=False) for case in (CASES[1], CASES[3], CASES[8], CASES[9]))
    + tuple(replace(case, value_heads=3 * case.heads) for case in (CASES[1], CASES[3], CASES[9])),
    # K K^T, Q K^T, the solve for V + K columns, the product with U; reading, erasing and writing the state
    flops=lambda case: intra_inter_flops(case, intra=3 * case.key + 2 * case.value, inter=3),
    extra_numbers=lambda case: 2 * case.batch * case.time * case.out_heads,
    transition=lambda case: case.key**2,
)
