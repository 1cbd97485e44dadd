"""Training that starts from given parameters."""

from pathlib import Path

import pytest
import torch

from headmax import HeadmaxForCausalLM
from headmax.train.trainer import fit
from tests.train.small import Walks, model_config, train_config


def test_given_parameters_take_the_place_of_random_ones(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = HeadmaxForCausalLM(model_config(head_gate=None)).state_dict()
    found = fit(
        model_config(), train_config(max_steps=1, optim_lr=1e-9, schedule_start_lr=1e-9), Walks(), tmp_path / "a", start=plain
    ).state_dict()
    for name, value in plain.items():
        assert torch.allclose(found[name], value, atol=1e-6), name
    assert set(found) - set(plain) == {f"model.layers.{n}.mixer.head_gate.{gate}_weight" for n in (0, 1) for gate in ("read", "write")}
    name = r"'model\.layers\.0\.mixer\.head_gate\.read_weight'"
    with pytest.raises(ValueError, match=f"start: 4 names are not parameters of the model, such as {name}"):
        fit(model_config(head_gate=None), train_config(), Walks(), tmp_path / "b", start=found)
