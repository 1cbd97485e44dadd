"""The gate itself, and what the paper proves about it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headmax.ops import head_gate, linear_attention
from headmax.ops.head_gate import split_gates
from headmax.ops.head_gate.spec import CASES, Case

from .oracle import distance

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gate_and_its_gradients_against_the_formula(case: Case, dtype: torch.dtype, device: str, backend: str) -> None:
    """In float64 by hand; bfloat16 inputs lose nothing more than their rounding, gradients lose it once again."""
    if backend == "triton" and (dtype == torch.float64 or (device == "cpu") == torch.cuda.is_available()):
        pytest.skip("kernels compute in float32, and are interpreted where there is no GPU")
    x, weight = (y.requires_grad_() for y in case.inputs(dtype, device))
    gate = head_gate(x, weight, case.temperature, case.scale, kind=case.kind, backend=backend)  # type: ignore[arg-type]
    assert gate.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wide, wide_weight = (y.detach().double().requires_grad_() for y in (x, weight))
    repeated = wide if case.heads_in is None else wide.repeat_interleave(case.heads // case.heads_in, dim=2)
    score = case.temperature * (repeated @ wide_weight.T if case.heads_in is None else (repeated * wide_weight).sum(-1))
    expected = case.scale * score.softmax(-1) if case.kind == "softmax" else 2 * case.scale / case.heads * score.sigmoid()
    assert distance(gate, expected) <= BOUNDS[dtype]
    direction = torch.randn(gate.shape, dtype=torch.float64, device=device)
    actual = torch.autograd.grad((gate.double() * direction).sum(), (x, weight))
    wanted = torch.autograd.grad((expected * direction).sum(), (wide, wide_weight))
    if case.heads > 1:
        for g, w in zip(actual, wanted, strict=True):
            assert distance(g, w) <= (5e-3 if dtype == torch.bfloat16 else 10 * BOUNDS[dtype])


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("number", "heads", "time"), [(2, 4, 70), (1, 6, 5), (2, 1, 1), (2, 16, 129)])
def test_gates_of_scores_that_a_product_gave(
    number: int, heads: int, time: int, kind: str, dtype: torch.dtype, device: str, backend: str
) -> None:
    """Columns of a wider matrix, as they lie there; one of two gates may be left unused."""
    if backend == "triton" and (device == "cpu") == torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no GPU")
    wide = (3 * torch.randn(2, time, 40, generator=torch.Generator().manual_seed(0))).to(device, dtype).requires_grad_()
    scores = wide[..., 5 : 5 + number * heads]
    gates = split_gates(scores, number, 0.7, 4.0, kind=kind, backend=backend)
    exact = wide.detach().double().requires_grad_()
    parts = 0.7 * exact[..., 5 : 5 + number * heads].unflatten(-1, (number, heads))
    expected = (4 * parts.softmax(-1) if kind == "softmax" else 8 / heads * parts.sigmoid()).unbind(-2)
    for gate, value in zip(gates, expected, strict=True):
        assert gate.dtype == torch.float32
        assert gate.is_contiguous()
        assert distance(gate, value) <= 2e-6
    if heads > 1 or kind == "sigmoid":
        for used in {number, 1}:
            direction = torch.randn(2, time, heads, dtype=torch.float64, device=device)
            losses = [sum((gate.double() * direction).sum() for gate in found[:used]) for found in (gates, expected)]
            actual, wanted = (
                torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss, leaf in zip(losses, (wide, exact), strict=True)
            )
            assert distance(actual, wanted) <= (5e-3 if dtype == torch.bfloat16 else 2e-5)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("temperature", [1.0, 0.0, -1.0])
def test_scores_of_single_tokens_that_lie_anywhere(temperature: float, backend: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = torch.randn(1, 5, 6, device=device).transpose(0, 1)
    (gate,) = split_gates(scores, 1, temperature, backend=backend)
    assert distance(gate, (temperature * scores.double()).softmax(-1)) <= 2e-6


def test_scores_that_make_no_gates_are_refused() -> None:
    scores = torch.randn(1, 5, 7)
    with pytest.raises(ValueError, match="scores of 7 channels do not split into 2 gates"):
        split_gates(scores, 2)
    with pytest.raises(ValueError, match="unknown kind 'sofmax'; did you mean 'softmax'"):
        split_gates(scores, 1, kind="sofmax")
    with pytest.raises(ValueError, match=r"split_gates: backend 'triton' cannot run here: it computes in float32, got torch\.float64"):
        split_gates(scores.double().to("cuda" if torch.cuda.is_available() else "cpu"), 1, backend="triton")


def test_work_of_the_gate_is_small() -> None:
    case = Case(8, 4096, heads=4, dim=256, heads_in=4)
    assert case.flops() == 2 * 8 * 4096 * 4 * 256
    assert case.bytes_moved(2) == 2 * (8 * 4096 * 4 * 256 + 4 * 256) + 4 * 8 * 4096 * 4


def test_several_gates_per_key_head() -> None:
    x, weight = torch.randn(2, 5, 2, 8), torch.randn(6, 8)
    assert distance(head_gate(x, weight), head_gate(x.repeat_interleave(3, dim=2), weight)) <= 1e-6


@given(heads=st.integers(1, 16), scale=st.floats(0.1, 16), spread=st.floats(0, 50), seed=st.integers(0, 99))
def test_gates_sum_to_their_scale(heads: int, scale: float, spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    gate = head_gate(spread * torch.randn(1, 3, heads, 4), torch.randn(heads, 4), scale=scale)
    assert (gate >= 0).all()
    torch.testing.assert_close(gate.sum(-1), torch.full((1, 3), scale), rtol=1e-5, atol=0)


def test_gradients_reach_input_and_weight() -> None:
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: head_gate(x, weight, 0.7, 4.0), (x, weight))


def entropy(p: torch.Tensor) -> torch.Tensor:
    return -(p * p.clamp_min(1e-300).log()).sum(-1)


def gates(scores: torch.Tensor, factor: float) -> torch.Tensor:
    """Gates for given scores through the public function: a one-wide head whose weight is 1."""
    return head_gate(scores[None, None, :, None] * factor, torch.ones(len(scores), 1, dtype=scores.dtype))[0, 0]


scores_strategy = st.lists(st.floats(-3, 3), min_size=2, max_size=8)


@given(seed=st.integers(0, 999), factor=st.floats(1e-3, 1e3))
def test_proposition_1_linear_attention_ignores_the_size_of_the_query(seed: int, factor: float) -> None:
    """With values that name their token, the op's last output is its attention weights."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 20, 1, 8, generator=generator, dtype=torch.float64).relu() for _ in range(2))
    names = torch.eye(20, dtype=torch.float64)[None, :, None]

    def weights(q: torch.Tensor) -> torch.Tensor:
        raw = linear_attention(q, k, names)[0][0, -1, 0]
        return raw / raw.sum()

    if (q[0, -1, 0] @ k[0, :, 0].T).sum() > 1e-6:
        assert (weights(q) - weights(factor * q)).abs().max() <= 1e-12
        assert abs(entropy(weights(q)) - entropy(weights(factor * q))) <= 1e-10


@given(scores=scores_strategy, factors=st.lists(st.floats(0, 50), min_size=2, max_size=6))
def test_theorem_1_gate_entropy_falls_with_magnitude(scores: list[float], factors: list[float]) -> None:
    s = torch.tensor(scores, dtype=torch.float64)
    entropies = [entropy(gates(s, factor)) for factor in sorted(factors)]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(entropies))


@given(scores=scores_strategy)
def test_theorem_1_gate_tends_to_the_winner(scores: list[float]) -> None:
    s = torch.tensor(scores, dtype=torch.float64)
    lead = s.topk(2).values.diff().abs().item()
    gate = gates(s, 200.0)
    if lead > 0.2:
        assert gate[s.argmax()] >= 1 - len(scores) * 1e-17 - 1e-12
    winners = s == s.max()
    if (s[~winners] < s.max() - 0.2).all():  # ties share the gate equally
        torch.testing.assert_close(gate, winners.double() / winners.sum(), rtol=0, atol=1e-12)


@given(read=scores_strategy, write=scores_strategy, factor=st.floats(1, 60))
def test_theorem_2_agreement_tends_to_the_kronecker_delta(read: list[float], write: list[float], factor: float) -> None:
    heads = min(len(read), len(write))
    s_read, s_write = (torch.tensor(x[:heads], dtype=torch.float64) for x in (read, write))
    gap = min(s.topk(2).values.diff().abs().item() for s in (s_read, s_write))
    agreement = (gates(s_read, factor) * gates(s_write, factor)).sum().item()
    delta = float(s_read.argmax() == s_write.argmax())
    if gap > 0:
        assert abs(agreement - delta) <= 2 * (heads - 1) * torch.exp(torch.tensor(-factor * gap)).item() + 1e-12
