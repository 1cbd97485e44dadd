"""A benchmark that reports no speed for a wrong answer."""

from dataclasses import replace

import pytest
import torch

from headmax.bench import kernels
from headmax.ops.spec import Case

CASE = Case(time=70, heads=1, key=8, value=8)


def test_a_wrong_implementation_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.transformers_gated_delta_rule()
    assert right is not None

    def wrong(**inputs: object) -> tuple[torch.Tensor, object]:
        o, state = right.function(**inputs)
        return o * 1.001, state

    monkeypatch.setitem(kernels.PEERS, "wrong", lambda op: kernels.Contender("wrong", op, wrong))
    with pytest.raises(ValueError, match=r"wrong gated_delta_rule is .* from the oracle .*: no speed is reported"):
        kernels.bench(cases={"gated_delta_rule": CASE}, peer="wrong", dtype=torch.float32, device=torch.device("cpu"), rounds=1, say=print)


def test_a_peer_sees_the_timed_shape_first(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, times = kernels.transformers_gated_delta_rule(), []
    assert peer is not None

    def tuning(**inputs: torch.Tensor) -> tuple[torch.Tensor, object]:
        times.append(inputs["q"].shape[1])
        return peer.function(**inputs)

    monkeypatch.setitem(kernels.PEERS, "tuning", lambda op: kernels.Contender("tuning", op, tuning))
    cases = {"gated_delta_rule": replace(CASE, time=300)}
    kernels.bench(cases=cases, peer="tuning", dtype=torch.float32, device=torch.device("cpu"), rounds=1, say=print)
    assert times[0] == 300
    assert 200 in times, "the check against the oracle is on a short sequence"


def test_unknown_peer() -> None:
    with pytest.raises(ValueError, match="unknown peer 'hff'; did you mean 'hf'"):
        kernels.bench(cases={}, peer="hff", dtype=torch.float32, device=torch.device("cpu"), rounds=1, say=print)


def test_grouped_value_heads_and_packed_sequences_are_timed() -> None:
    """Beside transformers' delta rule, which wants a key head for every value head; and packed, without it."""
    case = Case(time=40, heads=2, value_heads=4, key=8, value=8)
    arguments = {"dtype": torch.float32, "device": torch.device("cpu"), "rounds": 1, "say": print}
    for one, peer, impls in ((case, "hf", {"hf", "headmax"}), (replace(case, time=400, lengths=(300, 100)), "none", {"headmax"})):
        found = kernels.bench(cases={"gated_delta_rule": one}, peer=peer, **arguments)
        assert {r.impl for r in found if r.metric == "gated_delta_rule/forward+backward"} == impls
        assert all(r.value <= 1e-4 for r in found if r.unit == "relative")
