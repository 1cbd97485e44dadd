"""One way to compare with the float64 oracle: outputs, states and every gradient."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headmax.ops.gated_delta_rule.spec import SPEC as GATED_DELTA_RULE
from headmax.ops.gla.spec import SPEC as GLA
from headmax.ops.kda.spec import SPEC as KDA
from headmax.ops.linear_attention.spec import SPEC as LINEAR_ATTENTION
from headmax.ops.spec import Case, Spec, distance

SPECS = {spec.name: spec for spec in (LINEAR_ATTENTION, GLA, GATED_DELTA_RULE, KDA)}

__all__ = ["SPECS", "distance", "each", "oracle", "run"]


def each(values: Sequence[Any], of_kda: Sequence[Any]) -> list[tuple[Any, ...]]:
    """(op, *value) for each op and value; KDA, whose kernels are mostly those of GLA and of the delta rule, has values of its own."""
    return [(name, *value) for name in SPECS for value in (of_kda if name == "kda" else values)]


def run(spec: Spec, inputs: dict, backend: str) -> dict[str, Tensor]:
    return spec.evaluate(inputs, lambda **arguments: spec.function(**arguments, return_state=True, backend=backend))


@cache
def oracle(name: str, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    return SPECS[name].oracle(SPECS[name].inputs(case, dtype))
