"""The trainer on a GPU: the same steps as on a CPU, nothing that waits for the device, and numbers that are read a step later."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from headmax import HeadmaxForCausalLM
from headmax.train.faults import TrainingError
from headmax.train.metrics import read_lines
from headmax.train.trainer import Trainer, fit
from tests.train.small import Walks, checkpoints, losses, model_config, parameters, poisoned, train_config
from tests.train.small import train as train_small
from tests.waiting import no_waiting

pytestmark = pytest.mark.gpu


def train(out: Path, *, model: dict[str, Any] | None = None, **changes: Any) -> None:
    train_small(out, model={"hidden_size": 128, "num_heads": 2} | (model or {}), **changes)


def test_the_same_steps_as_on_a_cpu(tmp_path: Path) -> None:
    train(tmp_path / "cpu", optim_lr=3e-3, max_steps=20)
    train(tmp_path / "cuda", optim_lr=3e-3, max_steps=20, device="cuda", compute_compile=False)
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "cuda"))[:, 1], torch.tensor(losses(tmp_path / "cpu"))[:, 1], rtol=1e-3, atol=0
    )


def test_compiled_in_bfloat16_with_validation_and_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cuda", "compute_precision": "bfloat16", "eval_every": 5, "checkpoint_every": 3, "optim_lr": 3e-3}
    for out, steps in (("whole", 20), ("half", 7), ("half", 20)):
        train(tmp_path / out, **settings, max_steps=steps, validation=Walks(seed=1))
    whole, half = (torch.tensor(losses(tmp_path / out))[:, 1] for out in ("whole", "half"))
    torch.testing.assert_close(half, whole, rtol=1e-2, atol=0)
    lines = list(read_lines(tmp_path / "half" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["step"] for line in lines if "validation" in line] == [5, 7, 10, 15, 20]
    assert all(0 < line["mfu"] < 1 and line["memory"] > 0 for line in lines)


def test_compiled_micro_batches_of_two_sizes(tmp_path: Path) -> None:
    for size in (8, 3):
        train(tmp_path / str(size), device="cuda", compute_precision="bfloat16", compute_micro_batch=size, max_steps=5)
    even, uneven = (torch.tensor(losses(tmp_path / str(size)))[:, 1] for size in (8, 3))
    torch.testing.assert_close(uneven, even, rtol=1e-2, atol=0)


def test_a_step_that_is_not_finite_is_skipped_on_the_device(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cuda", "compute_compile": False, "compute_cuda_graph": False}
    train(tmp_path / "four", **settings, max_steps=4)
    with poisoned(4 * 4 + 1):
        train(tmp_path / "five", **settings, max_steps=5)
    assert [line["skipped"] for line in read_lines(tmp_path / "five" / "metrics.jsonl")] == [False] * 4 + [True]
    assert checkpoints(tmp_path / "five") == ["step-00000005"]
    torch.testing.assert_close(parameters(tmp_path / "five"), parameters(tmp_path / "four"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("separate", [False, True])
def test_nothing_in_a_step_waits_for_the_device(separate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(name: str) -> None:
        method = getattr(Trainer, name)

        def checked(self: Trainer, *arguments: Any) -> Any:
            with no_waiting() if self.step > 1 else contextlib.nullcontext():  # kernels and optimizer are set up in the first
                return method(self, *arguments)

        monkeypatch.setattr(Trainer, name, checked)

    strict("add_gradients")
    strict("update")
    train(tmp_path, source=Walks(separate=separate), device="cuda", compute_precision="bfloat16", compute_compile=False, max_steps=6)
    assert len(losses(tmp_path)) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compute_precision": "bfloat16"},
        {"compute_compile": True, "compute_precision": "bfloat16"},
        {"gate_balance": 0.1},
        {"separate": True},
        *({"model": {"mixer": mixer, "conv_size": 4}} for mixer in ("gla", "retnet", "gated_deltanet")),
        {"model": {"mixer": "attention", "head_gate": None}},
    ],
    ids=str,
)
def test_a_graph_takes_the_same_steps(changes: dict[str, Any], tmp_path: Path) -> None:
    """Micro-batches of two shapes, validation in between. Documents kept apart are no graph though nothing was said against it."""
    settings: dict[str, Any] = {"device": "cuda", "compute_compile": False, "compute_micro_batch": 3, "max_steps": 12, "eval_every": 5}
    settings |= changes
    separate = settings.pop("separate", False)
    for graph in (None, False):
        source, held_out = Walks(separate=separate), Walks(seed=1)
        train(tmp_path / str(graph), **settings, source=source, compute_cuda_graph=graph, validation=held_out)
    eager, replayed = (torch.tensor(losses(tmp_path / str(graph)), dtype=torch.float64) for graph in (False, None))
    torch.testing.assert_close(replayed, eager, rtol=1e-6, atol=0)
    assert eager[:, 1].unique().numel() == 12


def test_a_graph_that_is_not_finite_is_diagnosed(tmp_path: Path) -> None:
    model = HeadmaxForCausalLM(model_config(hidden_size=128, num_heads=2))
    name, broken = next(iter(model.state_dict().items()))
    broken[0] = float("nan")
    config = train_config(device="cuda", compute_compile=False, max_skipped_steps=2)
    with pytest.raises(TrainingError, match=f"1 parameters, first {name}"):
        fit(model.config, config, Walks(), tmp_path, start={name: broken})
    assert [line["skipped"] for line in read_lines(tmp_path / "metrics.jsonl")] == [True, True]
