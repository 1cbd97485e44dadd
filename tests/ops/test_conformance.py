"""Every op x backend x shape x dtype: outputs, states and all gradients against the float64 oracle."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headmax.ops.spec import Case, Spec, covering_cases

from .oracle import SPECS, distance, each, oracle, run

BOUNDS = {
    torch.float64: {"forward": 1e-10, "backward": 1e-10},
    torch.float32: {"forward": 2e-5, "backward": 1e-4},
    torch.bfloat16: {"forward": 5e-3, "backward": 1e-2},
}
CASES = [pytest.param(name, case, id=f"{name}-{case}") for name, spec in SPECS.items() for case in spec.cases]


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("name", "case"), CASES)
def test_chunkwise_agrees_with_the_oracle(name: str, case: Case, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    expected = oracle(name, case, dtype)
    actual = run(spec, spec.inputs(case, dtype), "chunkwise")
    assert actual["o"].dtype == dtype
    assert actual["state"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for key, x in actual.items():
        bound = BOUNDS[dtype]["backward" if key.startswith("d_") else "forward"]
        assert distance(x, expected[key]) <= bound, f"{key}: {distance(x, expected[key]):.2e} > {bound}"


ON_A_GPU = [case for case in CASES if case.values[1].key <= 256]
ON_A_GPU += [pytest.param("kda", case, id=f"kda-{case}") for case in covering_cases() if case.key <= 256 and case not in SPECS["kda"].cases]
INTERPRETED = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name, spec in SPECS.items()
    for case in spec.cases
    if case.time <= 151 and case.key <= 96 and case.gates in ("", "both", "read")
]
WIDE = Case(batch=2, time=300, heads=1, key=136, value=24, gates="both", initial_state=True)
LONG_CHUNKS = [
    pytest.param(case, id=str(case))
    for case in (
        *(replace(WIDE, decay=decay) for decay in ("none", "head", "soft", "mixed")),
        replace(WIDE, batch=1, lengths=(1, 127, 129, 43), decay="mixed"),
    )
]


def moved(name: str, case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """How far the exact results move, at most of four times, when every input moves by less than one rounding of `dtype`.

    No kernel can do better: a sum that nearly cancels, such as the gradient of a decay, may move further than any fixed bound.
    """
    return nudged(SPECS[name], SPECS[name].inputs(case, dtype, device), dtype)


def nudged(spec: Spec, inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """`moved`, of these inputs."""
    generator, exact, step = torch.Generator().manual_seed(2), spec.oracle(inputs), torch.finfo(dtype).eps / 2

    def nudge(x: torch.Tensor) -> torch.Tensor:
        return x.double() * (1 + step * (2 * torch.rand(x.shape, generator=generator).to(x.device) - 1))

    others = [spec.oracle({key: nudge(x) if torch.is_tensor(x) else x for key, x in inputs.items()}) for _ in range(4)]
    return {key: max(distance(other[key], x) for other in others) for key, x in exact.items()}


def check(name: str, case: Case, dtype: torch.dtype, device: str) -> None:
    spec = SPECS[name]
    inputs = spec.inputs(case, dtype, device)
    expected = oracle(name, case, dtype) if device == "cpu" else spec.oracle(inputs)
    errors = {key: distance(x, expected[key]) for key, x in run(spec, inputs, "triton").items()}
    bounds = BOUNDS.get(dtype, BOUNDS[torch.bfloat16])
    limits = {key: bounds["backward" if key.startswith("d_") else "forward"] for key in errors}
    over = [key for key, error in errors.items() if not error <= limits[key]]
    if over and dtype != torch.float32:
        least = moved(name, case, dtype, device)
        over = [key for key in over if not errors[key] <= 2 * least[key]]
    assert not over, "; ".join(f"{key}: {errors[key]:.2e} > {limits[key]}" for key in over)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU; test_triton_on_the_gpu covers one")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("name", "case"), INTERPRETED)
def test_triton_kernels_under_the_interpreter(name: str, case: Case, dtype: torch.dtype) -> None:
    """With the roundings of a GPU's matrix units, see tests/interpreter.py."""
    pytest.importorskip("triton")
    check(name, case, dtype, "cpu")


@pytest.mark.parametrize("case", LONG_CHUNKS)
def test_wide_heads_have_long_chunks(case: Case) -> None:
    pytest.importorskip("triton")
    from headmax.ops.kernels.tiles import chunk_length

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.empty(0, dtype=torch.bfloat16, device=device)
    assert [chunk_length(x, width) for width in (128, case.key)] == [64, 128]
    check("linear_attention", case, torch.bfloat16, device)


@pytest.mark.parametrize("name", SPECS)
def test_triton_kernels_in_float16(name: str) -> None:
    pytest.importorskip("triton")
    check(name, SPECS[name].cases[1], torch.float16, "cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("name", "log_decay"), [(name, x) for name in ("linear_attention", "gated_delta_rule") for x in (-0.01, -4.6)])
def test_decays_gradients_are_as_near_as_their_inputs(name: str, log_decay: float, dtype: torch.dtype) -> None:
    """Kernels round states and writes to the inputs' dtype, which tells where decays are weak: then the gradient is a sum of many terms
    of both signs. It stays within four times what rounding the inputs once more would change."""
    pytest.importorskip("triton")
    spec, device = SPECS[name], "cuda" if torch.cuda.is_available() else "cpu"
    case = Case(time=130, heads=1, key=40, value=40, gates="both", initial_state=True)
    inputs = spec.inputs(case, dtype, device)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], log_decay)
    exact = spec.oracle(inputs)["d_log_decay"]
    assert distance(run(spec, inputs, "triton")["d_log_decay"], exact) <= 4 * nudged(spec, inputs, dtype)["d_log_decay"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("name", "case"), ON_A_GPU)
def test_triton_on_the_gpu(name: str, case: Case, dtype: torch.dtype) -> None:
    check(name, case, dtype, "cuda")


@pytest.mark.parametrize("name", SPECS)
def test_reference_in_float32_is_the_same_recurrence(name: str) -> None:
    spec, case = SPECS[name], SPECS[name].cases[9]
    for key, x in run(spec, spec.inputs(case), "reference").items():
        assert distance(x, oracle(name, case, torch.float32)[key]) <= 1e-4, key


@pytest.mark.parametrize(("name", "decay"), each([(0.0,), (-1e-4,), (-1.0,), (-100.0,), ("mixed",)], [("mixed",)]))
def test_any_decay_is_stable_over_65536_steps(name: str, decay: float | str) -> None:
    spec = SPECS[name]
    inputs = spec.inputs(Case(time=65_536, heads=1, key=4, value=4, gates="both", decay="mixed"))
    if decay != "mixed":
        inputs["log_decay"] = torch.full_like(inputs["log_decay"], decay)
    for key, x in run(spec, inputs, "chunkwise").items():
        assert x.isfinite().all(), key


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", ["reference", "chunkwise", "triton"])
def test_a_decay_to_nothing_forgets_all_that_came_before(name: str, backend: str) -> None:
    """exp(-inf) = 0; a decay that is no number must not pass for one."""
    if backend == "triton":
        pytest.importorskip("triton")
    spec, device = SPECS[name], "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    inputs = spec.inputs(Case(time=90, heads=1, key=20, value=24, gates="both", initial_state=True), device=device)
    inputs["log_decay"][:, 40] = -torch.inf
    actual = run(spec, inputs, backend)
    assert all(x.isfinite().all() for x in actual.values())
    tail = {key: x[:, 40:] if torch.is_tensor(x) and key != "initial_state" else x for key, x in inputs.items()} | {"initial_state": None}
    assert distance(actual["o"][:, 40:], spec.function(**tail, backend="reference")[0]) <= 2e-5
    inputs["log_decay"][:, 50] = torch.nan
    with torch.no_grad():
        assert not spec.function(**inputs, backend=backend)[0][:, 51:].isfinite().all()


@pytest.mark.parametrize("name", SPECS)
def test_decays_of_all_sizes_mixed_in_a_long_sequence_stay_exact(name: str) -> None:
    """Longer than one segment, steps of 0 and -100 side by side: cancellation or overflow would show here."""
    spec, case = SPECS[name], Case(time=5000, heads=1, key=4, value=4, gates="both", initial_state=True, decay="mixed")
    inputs = spec.inputs(case)
    with torch.no_grad():
        wide = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
        expected = spec.function(**wide, return_state=True, backend="reference")
    actual = run(spec, inputs, "chunkwise")
    assert distance(actual["o"], expected[0]) <= 2e-6
    assert distance(actual["state"], expected[1]) <= 2e-6
    assert all(x.isfinite().all() for x in actual.values())


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_cut_short_under_autocast(name: str) -> None:
    spec, case = SPECS[name], SPECS[name].cases[3]
    inputs = spec.inputs(case)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = spec.function(**inputs, backend="chunkwise")
    assert o.dtype == torch.float32
    assert distance(o, oracle(name, case, torch.float32)["o"]) <= 2e-5


@pytest.mark.parametrize("name", SPECS)
def test_non_contiguous_inputs(name: str) -> None:
    spec, case = SPECS[name], SPECS[name].cases[3]
    inputs = spec.inputs(case)
    strided = {key: x.transpose(0, -1).contiguous().transpose(0, -1) if torch.is_tensor(x) else x for key, x in inputs.items()}
    assert not strided["q"].is_contiguous()
    for key, x in run(spec, strided, "chunkwise").items():
        assert distance(x, oracle(name, case, torch.float32)[key]) <= 1e-4, key
