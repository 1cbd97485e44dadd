"""One way to compare: run an op, collect outputs, states and every gradient, measure the norm-relative distance to the oracle."""

from functools import cache

import torch
from torch import Tensor

from headmax.ops.gated_delta_rule.spec import SPEC as GATED_DELTA_RULE
from headmax.ops.gla.spec import SPEC as GLA
from headmax.ops.linear_attention.spec import SPEC as LINEAR_ATTENTION
from headmax.ops.spec import Case, Spec

SPECS = {spec.name: spec for spec in (LINEAR_ATTENTION, GLA, GATED_DELTA_RULE)}


def distance(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|, NaN-proof: a NaN anywhere gives NaN, which passes no bound."""
    x, y = x.detach().double().cpu(), y.detach().double().cpu()
    return float((x - y).norm() / y.norm().clamp_min(1e-12))


def run(spec: Spec, inputs: dict, backend: str, seed: int = 1) -> dict[str, Tensor]:
    """Output, final state and the gradients of a random functional of both, by name."""
    inputs = {name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    o, state = spec.function(**inputs, return_state=True, backend=backend)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in (o, state)]
    differentiable = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    loss = (o * weights[0]).sum() + (state * weights[1]).sum()
    gradients = torch.autograd.grad(loss, list(differentiable.values()))
    return {"o": o, "state": state} | {f"d_{name}": g for name, g in zip(differentiable, gradients, strict=True)}


@cache
def oracle(name: str, case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """The float64 token-by-token recurrence, fed the inputs as `dtype` rounds them."""
    spec = SPECS[name]
    inputs = {key: x.double() if isinstance(x, Tensor) else x for key, x in spec.inputs(case, dtype, seed=seed).items()}
    return run(spec, inputs, "reference")
