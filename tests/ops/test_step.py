"""`ops.step`: a few tokens after a state that moves on in place, against the float64 oracle."""

from dataclasses import replace

import pytest
import torch

from headmax import ops
from headmax.ops.spec import Case, Spec, distance
from headmax.ops.step import MOST_TOKENS, step

from .oracle import SPECS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
WITH_GATES = Case(batch=2, time=5, heads=3, key=20, value=40, gates="both", initial_state=True)
CASES = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name, decays in (
        ("linear_attention", ("none", "head", "soft", "mixed")),
        ("gla", ("soft", "mixed")),
        ("gated_delta_rule", ("soft",)),
    )
    for decay in decays
    for case in (
        replace(WITH_GATES, decay=decay),
        Case(time=1, heads=2, key=128, value=72, decay=decay, initial_state=True),
        Case(time=MOST_TOKENS, heads=1, key=16, value=16, decay=decay, gates="read", initial_state=True),
    )
]
CASES += [
    pytest.param("kda", case, id=f"kda-{case}")
    for case in (
        Case(batch=2, time=3, heads=1, key=20, value=40, value_heads=2, gates="both", initial_state=True, decay="mixed"),
        Case(time=1, heads=2, key=128, value=72, initial_state=True, normalize=False),
    )
]
CASES += [
    pytest.param(name, replace(WITH_GATES, value_heads=6, decay=decay, normalize=normalize), id=f"{name}-value_heads-{decay}-{normalize}")
    for name, decay, normalize in (
        ("gated_delta_rule", "soft", True),
        ("gated_delta_rule", "soft", False),
        ("linear_attention", "head", True),
        ("linear_attention", "soft", True),
    )
]
backends = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu if GPU else [])])


def split(spec: Spec, inputs: dict) -> tuple[list[torch.Tensor], torch.Tensor, dict]:
    """What `step` takes by position, the state, and the rest."""
    options = dict(inputs)
    state = options.pop("initial_state").clone()
    names = [name for name in ("q", "k", "v", "log_decay", "beta") if name in options]
    return [options.pop(name) for name in names], state, options


@backends
@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_recurrence_agrees_with_the_oracle(name: str, case: Case, backend: str) -> None:
    spec = SPECS[name]
    inputs = spec.inputs(case, device=DEVICE)
    expected, final = spec.function(
        **{k: x.double() if torch.is_tensor(x) else x for k, x in inputs.items()}, return_state=True, backend="reference"
    )
    tensors, state, options = split(spec, inputs)
    o = step(spec.function, *[x for x in tensors if x is not None], state=state, backend=backend, **options)
    assert distance(o, expected) <= 2e-6
    assert distance(state, final) <= 2e-6


@backends
def test_states_of_other_layouts_and_dtypes_move_on_in_place(backend: str) -> None:
    spec = SPECS["gla"]
    tensors, state, options = split(spec, spec.inputs(WITH_GATES, device=DEVICE))
    expected = step(ops.gla, *tensors, state=(after := state.clone()), backend=backend, **options)
    turned = state.transpose(2, 3).contiguous().transpose(2, 3)
    half = state.bfloat16()
    assert distance(step(ops.gla, *tensors, state=turned, backend=backend, **options), expected) <= 1e-6
    assert distance(turned, after) <= 1e-6
    assert distance(step(ops.gla, *tensors, state=half, backend=backend, **options), expected) <= 5e-3
    assert distance(half, after) <= 5e-3


def test_a_scale_and_strided_inputs_are_taken() -> None:
    q, k, v = (torch.randn(2, 3, 4, 24).transpose(1, 2)[..., :16] for _ in range(3))
    state = torch.zeros(2, 3, 16, 16)
    expected, final = ops.linear_attention(q, k, v, scale=0.3, return_state=True, backend="reference")
    for backend in ("reference", *(() if GPU else ("triton",))):
        memory = state.clone()
        assert distance(step(ops.linear_attention, q, k, v, state=memory, scale=0.3, backend=backend), expected) <= 1e-6
        assert distance(memory, final) <= 1e-6


def test_errors_name_the_argument() -> None:
    q = torch.randn(1, MOST_TOKENS + 1, 2, 4)
    with pytest.raises(ValueError, match=r"step: q has 17 tokens, a step takes 1 to 16: call linear_attention with an initial_state"):
        step(ops.linear_attention, q, q, q, state=torch.zeros(1, 2, 4, 4))
    q = q[:, :1]
    with pytest.raises(ValueError, match=r"step: state must be \[batch, heads, key, value\] = \[1, 2, 4, 4\] on cpu, got \[1, 2, 4, 3\]"):
        step(ops.linear_attention, q, q, q, state=torch.zeros(1, 2, 4, 3))
    many = torch.zeros(65_536, 1, 1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="step: backend 'triton' cannot run here: it takes at most 65,535 sequences, got 65,536"):
        step(ops.linear_attention, many, many, many, state=many.clone(), backend="triton")
    for backend in ("reference", *(() if GPU else ("triton",))):
        with pytest.raises(ValueError, match=r"gla: log_decay must be \[batch, time, heads, key\]"):
            step(ops.gla, q, q, q, torch.zeros(1, 1, 2), state=torch.zeros(1, 2, 4, 4), backend=backend)
        with pytest.raises(ValueError, match=r"linear_attention: write_gate must be \[batch, time, heads\] = \[1, 1, 2\], got \[1, 2\]"):
            step(ops.linear_attention, q, q, q, state=torch.zeros(1, 2, 4, 4), write_gate=torch.zeros(1, 2), backend=backend)
