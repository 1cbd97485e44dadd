"""Muon beside AdamW, and the schedule that stays at its peak: resumed bit for bit, skipped on a NaN, the same however it is spread."""

from pathlib import Path

import pytest
import torch

from headmax import HeadmaxForCausalLM
from headmax.train import OptimConfig
from headmax.train.optim import build_optimizer, learning_rate
from tests.train.small import finish, launch, losses, model_config, parameters, poisoned, train, train_config

MUON = {"optim_name": "muon", "optim_lr": 3e-3, "schedule_shape": "wsd"}


def test_warm_up_stable_decay() -> None:
    config = train_config(schedule_shape="wsd", schedule_final_lr=0.0, schedule_decay_fraction=0.25, optim_lr=1.0, token_budget=192 * 40)
    rates = [learning_rate(config, step * config.batch_tokens) for step in (0, 5, 10, 20, 30, 35, 40, 50)]
    assert rates == pytest.approx([3e-5, (1 + 3e-5) / 2, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0])
    held = train_config(schedule_shape="wsd", schedule_decay_fraction=0.0, optim_lr=1.0)
    assert learning_rate(held, held.token_budget) == 1.0


@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet"])
def test_muon_takes_the_projections_of_blocks(mixer: str) -> None:
    model = HeadmaxForCausalLM(model_config(mixer=mixer, conv_size=4))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{names[id(p)] for p in group["params"]} for group in build_optimizer(model, OptimConfig("muon")).param_groups]
    assert sum(map(len, groups)) == len(names)
    assert {name.split(".")[-2] for name in groups[2]} >= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(name.startswith("model.layers.") and name.endswith("_proj.weight") for name in groups[2])
    assert "model.embed_tokens.weight" in groups[0]
    assert any("head_gate" in name for name in groups[0])
    assert any("convs" in name for name in groups[0])


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    train(tmp_path / "whole", **MUON, max_steps=12)
    train(tmp_path / "half", **MUON, max_steps=6)
    train(tmp_path / "half", **MUON, max_steps=12)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert torch.equal(parameters(tmp_path / "half"), parameters(tmp_path / "whole"))
    with pytest.raises(ValueError, match=r"optim.name was 'muon', is 'adamw'"):
        train(tmp_path / "half", **MUON | {"optim_name": "adamw"}, max_steps=14)


def test_a_nan_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path / "two", **MUON, max_steps=2)
    with poisoned(4 * 2 + 1):
        train(tmp_path / "three", **MUON, max_steps=3)
    assert torch.equal(parameters(tmp_path / "three"), parameters(tmp_path / "two"))


@pytest.mark.distributed
def test_two_processes_take_the_same_steps(tmp_path: Path) -> None:
    plans = {"ddp": {"parallel": "ddp"}, "fsdp": {"parallel": "fsdp"}, "context": {"parallel_strategy": "fsdp", "parallel_context": 2}}
    two = launch([{"out": str(tmp_path / name), **MUON, **plan, "max_steps": 20} for name, plan in plans.items()])
    train(tmp_path / "one", **MUON, max_steps=20)
    finish(two)
    for name in plans:
        found, expected = (torch.tensor(losses(tmp_path / run))[:, 1] for run in (name, "one"))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)  # its products are of bfloat16
