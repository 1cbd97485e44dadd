"""A benchmark that reports no speed for a wrong answer."""

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


def test_unknown_peer() -> None:
    with pytest.raises(ValueError, match="unknown peer 'hff'; did you mean 'hf'"):
        kernels.bench(cases={}, peer="hff", dtype=torch.float32, device=torch.device("cpu"), rounds=1, say=print)
