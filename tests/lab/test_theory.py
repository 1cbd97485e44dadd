"""What the experiments must show."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headmax import records
from lab.theory import experiments, figures


def test_linear_attention_does_not_feel_the_querys_length() -> None:
    found = experiments.proposition_1()
    assert found.factors[-1] / found.factors[0] == pytest.approx(1e4)
    assert found.change("relu") < 1e-12
    assert float(experiments.entropy(found.weights["relu"]).std()) < 1e-12
    assert found.change("elu") > 1e-2  # the proposition asks for a homogeneous φ, and needs it
    softmax = experiments.entropy(found.weights["softmax attention"])
    assert (softmax.diff() < 1e-12).all()
    assert softmax[0] > 5.9
    assert softmax[-1] < 0.1


def test_the_gates_entropy_falls_with_the_scores_size_unless_all_tie() -> None:
    found = experiments.theorem_1()
    for name, scores in found.scores.items():
        bits = found.entropy(name)
        assert (bits.diff() <= 1e-14).all(), name
        assert bits[0] == pytest.approx(3.0)
        torch.testing.assert_close(found.gates[name][-1], experiments.limit_gate(scores), rtol=0, atol=1e-12)
    assert float(found.entropy("no tie")[-1]) == pytest.approx(0, abs=1e-12)
    assert float(found.entropy("two tie")[-1]) == pytest.approx(1.0)
    assert float(found.entropy("all tie")[-1]) == pytest.approx(3.0)


def test_its_slope_is_the_variance_of_the_scores() -> None:
    scores = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factors = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    gates = experiments.gate(scores, factors)
    (slope,) = torch.autograd.grad(experiments.entropy(gates).sum(), factors)
    variance = (gates * scores**2).sum(-1) - (gates * scores).sum(-1) ** 2
    torch.testing.assert_close(slope, -factors * variance / math.log(2))


def test_agreement_tends_to_the_kronecker_delta_within_its_bound() -> None:
    found = experiments.theorem_2()
    same = found.queries.argmax(-1) == found.keys.argmax(-1)
    untied = (experiments.winners(found.queries).sum(-1) == 1) & (experiments.winners(found.keys).sum(-1) == 1)
    torch.testing.assert_close(found.limit[untied], same[untied].double())
    assert 0 < int(untied.sum()) < len(untied)
    assert set(found.limit[~untied].tolist()) <= {0.0, 0.25, 0.5}
    assert (found.error <= found.bound + 1e-15).all()
    clear = found.gap > 0.5
    assert found.error[clear, -1].max() < 1e-15
    assert (found.agreement[:, 0] - 1 / 8).abs().max() < 1e-15  # λ = 0: no choice


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=6), st.floats(0, 50))
def test_the_bound_holds_with_and_without_ties(pairs: list[tuple[int, int]], factor: float) -> None:
    query, key = torch.tensor(pairs, dtype=torch.float64).T
    factors = torch.tensor([factor], dtype=torch.float64)
    agreement = (experiments.gate(query, factors) * experiments.gate(key, factors)).sum(-1)
    gap = torch.minimum(experiments.lead(query), experiments.lead(key))
    bound = experiments.agreement_bound(len(pairs), factors, gap)
    assert (agreement - experiments.agreement_limit(query, key)).abs() <= bound + 1e-14


def test_what_survives_of_the_read_gate() -> None:
    gates = torch.tensor([1e-4, 1e-3, 0.25, 1.0], dtype=torch.float64)
    for placement in experiments.PLACEMENTS[1:]:
        torch.testing.assert_close(experiments.surviving(placement, gates, 1e-6), torch.ones_like(gates))
    found = experiments.surviving(experiments.PLACEMENTS[0], gates, 1e-6)
    share = 1e-6 / gates**2  # eps over the mean square of what is normalised
    torch.testing.assert_close(found, 0.5 * torch.log2((1 + 4 * share) / (1 + share)))
    assert found[0] > 0.95
    assert found[-1] < 1e-5
    same = experiments.surviving(experiments.PLACEMENTS[0], 10 * gates, 1e-6, rms=0.1)
    torch.testing.assert_close(same, found)  # only eps / (g rms)² counts


def test_every_experiment_leaves_pictures_and_records(tmp_path: Path) -> None:
    made = figures.reproduce(tmp_path)
    for name in ("proposition1", "theorem1", "theorem2", "read_gate"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    assert list(records.read(tmp_path / "records.jsonl")) == made
    values = {(record.case, record.metric): record.value for record in made}
    assert values["proposition 1, relu", "largest change of a weight"] < 1e-12
    assert values["theorem 2, 200 pairs", "largest |C - limit| less its bound"] < 1e-15
