"""Inputs, shapes and work of gated linear attention."""

from __future__ import annotations

from dataclasses import replace

from headmax.ops.gla import gla
from headmax.ops.spec import Spec, covering_cases, draw_decay, intra_inter_flops

CASES = covering_cases()
SPEC = Spec(
    name="gla",
    function=gla,
    extra_inputs=lambda case, generator: {"log_decay": draw_decay(case, (case.batch, case.time, case.heads, case.key), generator)},
    cases=CASES + tuple(replace(case, decay="mixed") for case in (CASES[1], CASES[3], CASES[8], CASES[9])),
    flops=lambda case: intra_inter_flops(case, intra=case.key + case.value, inter=2),
    extra_numbers=lambda case: case.batch * case.time * case.heads * case.key,
    transition=lambda case: case.key,
)
