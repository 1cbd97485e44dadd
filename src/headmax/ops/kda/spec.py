"""Inputs, shapes and work of Kimi delta attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headmax.ops.kda import kda
from headmax.ops.spec import Case, Spec, covering_cases, draw_decay, intra_inter_flops


def _inputs(case: Case, generator: torch.Generator) -> dict[str, Any]:
    shape = (case.batch, case.time, case.out_heads)
    log_decay = draw_decay(case, (*shape, case.key), generator)
    return {"log_decay": log_decay, "beta": torch.rand(shape, generator=generator), "normalize_qk": case.normalize}


STEEP = Case(time=70, heads=1, key=72, value=24, gates="both", initial_state=True, decay="mixed")
"""Two chunks that are not mild, with more keys than the kernels' tiles."""
PACKED = Case(time=73, heads=1, key=40, value=20, gates="both", initial_state=True, lengths=(0, 1, 0, 70, 2, 0))
WIDE = [case for case in covering_cases() if case.key in (128, 160, 256, 384)]
SPEC = Spec(
    name="kda",
    function=kda,
    extra_inputs=_inputs,
    cases=(
        Case(time=1, key=20, value=40, gates="both", initial_state=True),
        Case(batch=2, time=17, heads=1, key=40, value=80, value_heads=3, gates="both", normalize=False),
        Case(time=70, heads=1, key=96, value=192, gates="read", initial_state=True),
        STEEP,
        PACKED,
        *WIDE,
        replace(PACKED, decay="mixed"),
    ),
    # K K^T, Q K^T, the solve for V + K columns, the product with U; reading, erasing and writing the state
    flops=lambda case: intra_inter_flops(case, intra=3 * case.key + 2 * case.value, inter=3),
    extra_numbers=lambda case: case.batch * case.time * case.out_heads * (case.key + 1),
    transition=lambda case: case.key**2,
)
