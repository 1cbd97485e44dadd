"""One way to compare with the float64 oracle: outputs, states and every gradient."""

from functools import cache

import torch
from torch import Tensor

from headmax.ops.gated_delta_rule.spec import SPEC as GATED_DELTA_RULE
from headmax.ops.gla.spec import SPEC as GLA
from headmax.ops.linear_attention.spec import SPEC as LINEAR_ATTENTION
from headmax.ops.spec import Case, Spec, distance

SPECS = {spec.name: spec for spec in (LINEAR_ATTENTION, GLA, GATED_DELTA_RULE)}

__all__ = ["SPECS", "distance", "oracle", "run"]


def run(spec: Spec, inputs: dict, backend: str) -> dict[str, Tensor]:
    return spec.evaluate(inputs, lambda **arguments: spec.function(**arguments, return_state=True, backend=backend))


@cache
def oracle(name: str, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    return SPECS[name].oracle(SPECS[name].inputs(case, dtype))
