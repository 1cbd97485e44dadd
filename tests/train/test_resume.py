"""Stop and go on: the same losses and parameters, bit for bit, as if nothing had happened."""

import json
from pathlib import Path

import pytest
import torch

from headmax.train.config import fixed_settings
from headmax.train.loading import load_model
from headmax.train.metrics import read_lines
from headmax.train.trainer import model_settings, refuse_changes
from tests.train.small import Walks, checkpoints, losses, model_config, parameters, train, train_config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of 20 steps."""
    out = tmp_path_factory.mktemp("whole")
    train(out, max_steps=20)
    return out


def test_a_stopped_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    for steps in (5, 12, 20):
        train(tmp_path, max_steps=steps)
    assert losses(tmp_path) == losses(whole)
    assert [step for step, *_ in losses(whole)] == list(range(1, 21))
    assert torch.equal(parameters(tmp_path), parameters(whole))
    assert losses(whole)[-1][1] < 0.9 * losses(whole)[0][1]


def test_a_finished_run_stays_as_it_is(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_text()
    train(whole, max_steps=20)
    train(whole, max_steps=10)
    assert (whole / "metrics.jsonl").read_text() == before


def test_steps_after_the_checkpoint_are_taken_and_written_once(whole: Path, tmp_path: Path) -> None:
    train(tmp_path, max_steps=8)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(last | {"step": 9, "loss": 0.0, "grad_norm": 0.0}) + '\n{"step": 10, "lo')
    train(tmp_path, max_steps=20)
    assert losses(tmp_path) == losses(whole)


def test_a_run_of_0_1_resumes(whole: Path, tmp_path: Path) -> None:
    """Its config.json has "parallel": "fsdp" as a string, and so may a caller's TrainConfig."""
    train(tmp_path, max_steps=8)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["train"]["parallel"] == {"strategy": "ddp", "shard": None, "context": 1, "tensor": 1}
    (tmp_path / "config.json").write_text(json.dumps(written | {"train": written["train"] | {"parallel": "fsdp"}}))
    load_model(tmp_path)
    train(tmp_path, max_steps=20, parallel="fsdp")
    assert losses(tmp_path) == losses(whole)


def test_fields_that_a_later_version_added_have_had_their_defaults(tmp_path: Path) -> None:
    now = {"model": model_settings(model_config()), "train": json.loads(json.dumps(fixed_settings(train_config()))), "data": {}}
    added = {"optim.name", "optim.momentum", "schedule.shape", "schedule.decay_fraction"}
    before = now | {"train": {name: x for name, x in now["train"].items() if name not in added}}
    refuse_changes(before, now, tmp_path)
    with pytest.raises(ValueError, match=r"optim.name was 'adamw', is 'muon'"):
        refuse_changes(before, now | {"train": now["train"] | {"optim.name": "muon"}}, tmp_path)


@pytest.mark.parametrize("damage", ["flip", "shorten", "manifest", "remove"])
def test_a_broken_checkpoint_is_skipped_and_the_one_before_used(damage: str, whole: Path, tmp_path: Path, caplog) -> None:
    train(tmp_path, max_steps=12, checkpoint_every=6)
    assert checkpoints(tmp_path) == ["step-00000006", "step-00000012"]
    folder = tmp_path / "checkpoints" / "step-00000012"
    (file,) = folder.glob("*.distcp")
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "shorten":
        file.write_bytes(content[:-1])
    else:
        (folder / "manifest.json" if damage == "manifest" else file).unlink()
    load_model(tmp_path)
    train(tmp_path, max_steps=20)
    said = {"flip": "does not match its checksum", "shorten": "the manifest says", "manifest": "manifest.json", "remove": ".distcp"}
    assert caplog.text.count("step-00000012 is skipped: ") == 2
    assert said[damage] in caplog.text
    assert losses(tmp_path) == losses(whole)
    assert torch.equal(parameters(tmp_path), parameters(whole))


def test_the_newest_checkpoints_and_milestones_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000099.tmp").mkdir(parents=True)
    train(tmp_path, max_steps=11, checkpoint_every=2, checkpoint_milestone_every=4, checkpoint_keep_last=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"step-{n:08}" for n in (4, 8, 10, 11)]


def test_a_run_may_end_without_a_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, max_steps=3, checkpoint_final=False)
    assert checkpoints(tmp_path) == []
    assert len(losses(tmp_path)) == 3


def test_a_checkpoint_says_where_the_run_stands(whole: Path) -> None:
    progress = json.loads((whole / "checkpoints" / "step-00000020" / "train.json").read_text())
    assert {name: progress[name] for name in ("step", "tokens", "samples", "skipped", "ranks")} == {
        "step": 20,
        "tokens": 3840,
        "samples": 160,
        "skipped": 0,
        "ranks": 1,
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"optim_lr": 0.5}, "optim.lr was 0.01, is 0.5"),
        ({"token_budget": 19200}, "token_budget was 9600, is 19200"),
        ({"compute_precision": "bfloat16"}, "compute.precision was 'float32', is 'bfloat16'"),
        ({"model": {"num_heads": 2}}, "model.num_heads was 4, is 2"),
        ({"model": {"head_gate": {"kind": "sigmoid"}}}, "model.head_gate.kind was 'softmax', is 'sigmoid'"),
        ({"source": Walks(seed=7)}, "the data's walks was 0, is 7"),
    ],
)
def test_a_change_that_would_make_it_another_run_is_refused(change: dict, named: str, whole: Path) -> None:
    with pytest.raises(ValueError, match="holds a run with other settings") as error:
        train(whole, max_steps=30, **change)
    assert named in str(error.value)


def test_what_is_logged_saved_and_held_in_memory_may_change(whole: Path, tmp_path: Path) -> None:
    train(tmp_path, max_steps=10)
    changes = {"log_print_every": 3, "checkpoint_every": 4, "eval_every": 5, "compute_activation_checkpointing": True}
    train(tmp_path, max_steps=20, **changes, validation=Walks(seed=1))
    assert losses(tmp_path) == losses(whole)
    train(tmp_path, max_steps=25, compute_micro_batch=8)  # another order of summation
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl") if "validation" in line] == [15, 20]
