"""Training by segments: loss and gradients are those of the whole sequence, and the command runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headmax import records
from headmax.layers.mixers.mamba2 import Mamba2Config
from headmax.ops.spec import distance
from lab.bench import long
from tests.parallel.models import build


@pytest.mark.parametrize("mixer", ["retnet", "gla", "gated_deltanet", "kda", Mamba2Config(num_groups=4, head_k_dim=8)], ids=str)
def test_segments_are_the_sequence(mixer: Any) -> None:
    """70 tokens in segments of 20, the last one shorter; with activation checkpointing, as the command has it."""
    model, ids = build(mixer), torch.randint(0, 40, (1, 70), generator=torch.Generator().manual_seed(0))
    whole = model(ids, labels=ids).loss
    whole.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = long.add_gradients(model, ids, segment=20)
    assert distance(loss, whole) < 1e-12
    assert distance(long.evaluate(model, ids, chunk=9), whole) < 1e-12
    assert {name: distance(p.grad, expected[name]) < 1e-9 for name, p in model.named_parameters()} == dict.fromkeys(expected, True)


def test_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="attention layers have no state of constant size"):
        long.add_gradients(build(["gla", "attention"]), torch.zeros(1, 8, dtype=torch.long), 4)


def test_the_command_takes_a_step_and_checks_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.cli.bench import long as command

    command("softmax-gla-tiny", tokens=384, segment=128, chunk=64, device="cpu", dtype="float32", out=tmp_path / "long.jsonl")
    found = {record.metric: record.value for record in records.read(tmp_path / "long.jsonl")}
    assert found["loss"] == pytest.approx(found["loss/chunk by chunk"], rel=1e-5)
    assert found["loss/after the step"] < found["loss"]
    monkeypatch.setattr(long, "evaluate", lambda *_: torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="the loss by segments is"):
        command("softmax-gla-tiny", tokens=64, segment=32, chunk=16, device="cpu", dtype="float32")
