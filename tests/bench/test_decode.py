"""The decoding benchmark, on a model so small that only its bookkeeping is tested."""

from typing import Any

import pytest
import torch

from headmax.bench import decode
from headmax.generate import Engine

PLAN: dict[str, Any] = {"batches": [1, 2], "prompts": [4, 9], "decoded": [3], "peer_tokens": 4, "rounds": 2}
KINDS: dict[str, Any] = {"dtype": torch.float32, "state_dtype": torch.float32, "device": "cpu"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "STEPS", 2)


def test_the_two_models_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(decode.measure(decode.Plan("gla-tiny", "headmax", **PLAN, **KINDS)))
    cases = {(record.case, record.metric) for record in found}
    for batch in (1, 2):
        for prompt in (4, 9):
            for name in ("gla-tiny", "softmax-gla-tiny"):
                assert (f"{name} batch {batch} context {prompt}", "latency per token") in cases
            assert (f"gla-tiny batch {batch} context {prompt}", "softmax over plain/latency") in cases
    assert ("softmax-gla-tiny batch 1 context 4 decoded 3", "end to end") in cases
    assert all(record.value > 0 for record in found)
    assert capsys.readouterr().out.count("\n") == len(found)


@pytest.mark.parametrize(("group", "impl"), [("transformer", "headmax"), ("generate", "hf"), ("llama", "hf")])
def test_peers(group: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headmax import HeadmaxModel

    monkeypatch.setattr(HeadmaxModel, "compile_blocks", lambda self: None)
    plan = PLAN | {"batches": [1], "prompts": [4], "decoded": [], "peer_tokens": 24}
    found = list(decode.measure(decode.Plan("gla-tiny", group, **plan, **KINDS)))
    assert {(record.impl, record.metric) for record in found} == {(impl, "latency per token"), (impl, "tokens per second")}


def test_bytes_are_weights_once_and_states_twice() -> None:
    engine = Engine(decode.ours("softmax-gla-tiny", "cpu", torch.float32), max_batch=3)
    weights = sum(p.numel() for p in engine.model.parameters())
    state = 2 * 4 * 8 * 16  # layers, heads, key, value
    assert decode.step_bytes(engine, 3) == 4 * (weights + 2 * 3 * state)
