"""Two processes under DDP and FSDP2, and with half of each sequence: the same run as on one, resumed bit for bit, and checkpoints that fit
any number of them."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from headmax import recipes
from headmax.train.metrics import read_lines
from tests.train.small import Walks, finish, launch, log_decays, losses, parameters, poisoned, train

pytestmark = pytest.mark.distributed

STEPS, HALF = 50, 25
LR = {"optim_lr": 3e-3}
SPREAD = ("ddp", "fsdp", "context", "tensor")
CONTEXT = {"parallel_strategy": "fsdp", "parallel_context": 2}
TENSOR = {"parallel_tensor": 2}
EVALUATED = {"eval_every": HALF}
NARROW = {"compute_precision": "bfloat16", "max_steps": 20}
DELTA = {"model": {"mixer": "gated_deltanet"}, "compute_precision": "bfloat16", "max_steps": 10}
FIRST_STEP = 4
"""Log-decays that one of two processes computes in a step: two micro-batches, two layers."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that these tests look at, made once: pytest's own workers share them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributed"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


def make(folder: Path) -> None:
    """Runs of one process, and of two: whole, and stopped half-way and resumed by other processes."""

    def plan(name: str, **changes: object) -> dict:
        return {"out": str(folder / name), **LR, **changes}

    both = [{"parallel": parallel} for parallel in ("ddp", "fsdp")]
    first = [plan(p["parallel"], **p, **EVALUATED) for p in both] + [plan(f"{p['parallel']}-half", **p, max_steps=HALF) for p in both]
    first += [plan(f"{p['parallel']}-narrow", **p, **NARROW) for p in both]
    first += [plan(f"{p['parallel']}-delta", **p, **DELTA, log_decays=FIRST_STEP) for p in both]
    for name, split in (("context", CONTEXT), ("tensor", TENSOR)):
        first += [plan(name, **split, **EVALUATED), plan(f"{name}-half", **split, max_steps=HALF)]
    two = launch(first)
    train(folder / "single", **LR, **EVALUATED)
    train(folder / "single-half", **LR, max_steps=HALF)
    train(folder / "single-narrow", **LR, **NARROW)
    with log_decays(2 * FIRST_STEP) as seen:
        train(folder / "single-delta", **LR, **DELTA)
    torch.save(seen, folder / "single-delta" / "log-decays.pt")
    finish(two)
    for name in SPREAD:
        shutil.copytree(folder / f"{name}-half", folder / f"{name}-on-one")
        shutil.copytree(folder / "single-half", folder / f"single-on-{name}")
    second = [plan(f"{p['parallel']}-half", **p) for p in both] + [plan(f"single-on-{p['parallel']}", **p) for p in both]
    second += [plan(f"{p['parallel']}-poisoned", **p, max_steps=5, poison_second_rank=6) for p in both]
    for name, split in (("context", CONTEXT), ("tensor", TENSOR)):
        second += [plan(f"{name}-half", **split), plan(f"single-on-{name}", **split)]
    two = launch(second)
    with poisoned(9):
        train(folder / "single-poisoned", **LR, max_steps=5)
    for name in SPREAD:
        train(folder / f"{name}-on-one", **LR)
    finish(two)


@pytest.mark.parametrize("name", SPREAD)
def test_resume_is_bit_identical(name: str, runs: Path) -> None:
    assert losses(runs / f"{name}-half") == losses(runs / name)
    assert torch.equal(parameters(runs / f"{name}-half"), parameters(runs / name))


@pytest.mark.parametrize("name", [*SPREAD, *(f"{name}-on-one" for name in SPREAD), *(f"single-on-{name}" for name in SPREAD)])
def test_any_number_of_processes_takes_the_same_steps(name: str, runs: Path) -> None:
    one, other = losses(runs / "single"), losses(runs / name)
    assert len(one) == len(other) == STEPS
    assert one[-1][1] < 0.8 * one[0][1]
    torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=2e-5, atol=0.0)
    torch.testing.assert_close(parameters(runs / name), parameters(runs / "single"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_bfloat16_agrees(name: str, runs: Path) -> None:
    """Matrices are rounded by autocast, or by FSDP before they travel."""
    one, other = losses(runs / "single-narrow"), losses(runs / f"{name}-narrow")
    torch.testing.assert_close(torch.tensor(other)[:, 1], torch.tensor(one)[:, 1], rtol=1e-4, atol=0.0)
    torch.testing.assert_close(torch.tensor(other)[:, 1], torch.tensor(losses(runs / "single"))[:20, 1], rtol=0.02, atol=0.0)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_decays_gates_and_norms_stay_float32(name: str, runs: Path) -> None:
    """A_log rounded to bfloat16 is another model: every process starts from the very log-decays of a single one."""
    one = torch.load(runs / "single-delta" / "log-decays.pt")
    two = [x for rank in (0, 1) for x in torch.load(runs / f"{name}-delta" / f"log-decays-{rank}.pt")]
    assert len(one) == len(two) == 2 * FIRST_STEP
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    found, expected = (torch.tensor(losses(runs / run)) for run in (f"{name}-delta", "single-delta"))
    torch.testing.assert_close(found[:4], expected[:4], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)  # a last bit of float32 has turned one of bfloat16 by then


@pytest.mark.parametrize("name", SPREAD)
def test_gate_health_is_that_of_all_processes(name: str, runs: Path) -> None:
    one, other = ([line["gates"] for line in read_lines(runs / run / "metrics.jsonl") if "gates" in line] for run in ("single", name))
    assert len(one) == 2
    for before, after in zip(one, other, strict=True):
        assert set(after) == {"0/read", "0/write", "1/read", "1/write"}
        for gate, found in after.items():
            assert found["share"] == pytest.approx(before[gate]["share"], rel=1e-3)
            assert found["entropy"] == pytest.approx(before[gate]["entropy"], rel=1e-3)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_nan_on_one_process_skips_the_step_on_all(name: str, runs: Path) -> None:
    lines = list(read_lines(runs / f"{name}-poisoned" / "metrics.jsonl"))
    assert [line["step"] for line in lines if line["skipped"]] == [3]
    assert lines[2]["loss"] is None
    torch.testing.assert_close(parameters(runs / f"{name}-poisoned"), parameters(runs / "single-poisoned"), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_recipe_trains_alike_however_it_is_spread(tmp_path: Path) -> None:
    """gdn-tiny in bfloat16, 50 steps: DDP, FSDP and one process. What the order of sums changes, 50 steps of bfloat16 enlarge."""
    model = recipes.get("gdn-tiny").model
    size = {"hidden_size": model.hidden_size, "num_hidden_layers": model.num_hidden_layers, "intermediate_size": None, "head_gate": None}
    plan = DELTA | {"model": DELTA["model"] | size, "max_steps": STEPS, "optim_lr": recipes.get("gdn-tiny").train.optim.lr}
    two = launch([{"out": str(tmp_path / name), "parallel": name, "log_decays": FIRST_STEP, **plan} for name in ("ddp", "fsdp")])
    with log_decays(2 * FIRST_STEP) as one:
        train(tmp_path / "single", **plan)
    finish(two)
    for name in ("ddp", "fsdp"):
        other = [x for rank in (0, 1) for x in torch.load(tmp_path / name / f"log-decays-{rank}.pt")]
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
        found, expected = (torch.tensor(losses(tmp_path / run))[:, 1] for run in (name, "single"))
        assert len(found) == STEPS
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_mixers_train_alike_on_pieces_of_sequences(ranks: int, tmp_path: Path) -> None:
    """On four processes two shares of the batch, in two pieces each, of sharded models; documents laid end to end cross the pieces."""
    plans = {name: {"model": {"mixer": name}} for name in ("gla", "retnet", "gated_deltanet", "kda")}
    plans["hybrid"] = {"model": {"mixer": ["gated_deltanet", "attention"]}}
    plans["copies"] = {"model": {"mixer": "gla"}, "parallel_shard": ranks // 2}
    plans["packed"] = {"model": {"mixer": ["kda", "attention"]}, "documents": "separate"}
    spread = launch([{"out": str(tmp_path / f"{name}-spread"), **LR, **CONTEXT, **plan} for name, plan in plans.items()], ranks)
    for name, plan in plans.items():
        plan.pop("parallel_shard", None)
        train(tmp_path / name, **LR, **plan, source=Walks(separate="documents" in plan))
    finish(spread)
    for name in plans:
        one, other = (torch.tensor(losses(tmp_path / run)) for run in (name, f"{name}-spread"))
        assert len(one) == STEPS
        torch.testing.assert_close(other, one, rtol=2e-4, atol=0.0)


MESHES: dict[str, dict] = {
    "fsdp-gla": {"parallel_strategy": "fsdp"},
    "ddp-retnet": {"model": {"mixer": "retnet"}, "parallel_strategy": "ddp"},
    "context-gdn": {"model": {"mixer": "gated_deltanet"}, "parallel_context": 2},
    "checkpointed-kda": {"model": {"mixer": "kda"}, "parallel_strategy": "fsdp", "compute_activation_checkpointing": True},
    "packed-hybrid": {"model": {"mixer": ["gated_deltanet", "attention"]}, "parallel_strategy": "fsdp", "documents": "separate"},
    "balanced": {"parallel_strategy": "fsdp", "gate_balance": 0.1},
    "narrow": {"parallel_strategy": "fsdp", "model": {"mixer": "gated_deltanet"}, **NARROW},
    "muon": {"parallel_strategy": "fsdp", "optim_name": "muon"},
}


@pytest.mark.slow
def test_all_mixers_train_alike_with_their_heads_shared(tmp_path: Path) -> None:
    """Four processes: two share the heads, and the batch, the model or each sequence is shared by two such pairs."""
    spread = launch([{"out": str(tmp_path / f"{name}-spread"), **LR, **TENSOR, **plan} for name, plan in MESHES.items()], 4)
    for name, plan in MESHES.items():
        alone = {field: value for field, value in plan.items() if not field.startswith("parallel")}
        train(tmp_path / name, **LR, **alone, source=Walks(separate="documents" in plan))
    finish(spread)
    for name, plan in MESHES.items():
        one, other = (torch.tensor(losses(tmp_path / run)) for run in (name, f"{name}-spread"))
        assert len(one) == plan.get("max_steps", STEPS)
        if name == "narrow":  # partial sums are rounded to bfloat16 before they meet
            torch.testing.assert_close(other[:, 1], one[:, 1], rtol=5e-4, atol=0.0)
        else:
            torch.testing.assert_close(other, one, rtol=2e-4, atol=0.0)
