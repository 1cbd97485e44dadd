"""Every mixer on every mesh, every setting with every strategy, and runs that change their mesh: the steps of one process."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.train.small import Walks, finish, launch, losses, parameters, train

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1800)]

LR = {"optim_lr": 3e-3}
FSDP = {"parallel_strategy": "fsdp"}
CONTEXT, TENSOR = {"parallel_context": 2}, {"parallel_tensor": 2}
MESHES = {"cp2": (2, CONTEXT), "tp2": (2, TENSOR), "cp2-tp2": (4, CONTEXT | TENSOR), "fsdp2-cp2": (4, FSDP | CONTEXT)}
MESHES["fsdp2-tp2"] = (4, FSDP | TENSOR)
MIXERS = {"gla": "gla", "gdn": "gated_deltanet", "retnet": "retnet", "kda": "kda", "hybrid": ["gated_deltanet", "attention"]}
"""All with a softmax over heads."""
PATIENCE = 1500


def agree(one: Path, other: Path, steps: int, rtol: float = 2e-4) -> None:
    """Losses and norms of gradients."""
    expected, found = (torch.tensor(losses(run)) for run in (one, other))
    assert len(expected) == steps
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 steps of each mixer on one process."""
    folder = tmp_path_factory.mktemp("alone")
    for name, mixer in MIXERS.items():
        train(folder / name, **LR, model={"mixer": mixer}, checkpoint_final=False)
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mixer_takes_the_steps_of_one_process(mesh: str, alone: Path, tmp_path: Path) -> None:
    ranks, options = MESHES[mesh]
    plans = {name: {"model": {"mixer": mixer}, "checkpoint_final": False, **options} for name, mixer in MIXERS.items()}
    finish(launch([{"out": str(tmp_path / name), **LR, **plan} for name, plan in plans.items()], ranks), seconds=PATIENCE)
    for name in MIXERS:
        agree(alone / name, tmp_path / name, steps=50)


STRATEGIES = {"ddp": {}, "fsdp": FSDP, "context": CONTEXT, "tensor": TENSOR}
SETTINGS = {
    "plain": {"compute_micro_batch": 8},
    "accumulation": {"compute_micro_batch": 1},
    "checkpointing": {"compute_activation_checkpointing": True},
    "documents": {"documents": "separate"},
    "balance": {"gate_balance": 0.1},
    "muon": {"optim_name": "muon"},
    "both": {"compute_activation_checkpointing": True, "compute_micro_batch": 1, "documents": "separate"},
}


def test_settings_go_with_every_strategy(tmp_path: Path) -> None:
    """The table of docs/parallel.md, without compilation; kda and attention, whose exchanges are the largest."""
    hybrid = {"model": {"mixer": ["kda", "attention"]}, "max_steps": 5, "checkpoint_final": False}
    plans = {f"{way}-{name}": options | setting for way, options in STRATEGIES.items() for name, setting in SETTINGS.items()}
    assert plans.pop("context-balance")  # refused by name: tests/train/test_config.py
    spread = launch([{"out": str(tmp_path / name), **LR, **hybrid, **plan} for name, plan in plans.items()])
    for name, setting in SETTINGS.items():
        train(tmp_path / name, **LR, **hybrid, **setting, source=Walks(separate="documents" in setting))
    finish(spread, seconds=PATIENCE)
    for name in plans:
        agree(tmp_path / name.split("-")[1], tmp_path / name, steps=5)
    agree(tmp_path / "plain", tmp_path / "checkpointing", steps=5)
    agree(tmp_path / "plain", tmp_path / "accumulation", steps=5)


COMPILED = {"model": {"mixer": "retnet"}, "compute_compile": True, "max_steps": 3, "checkpoint_final": False}
AGAIN = {"compute_activation_checkpointing": True}


def test_compiled_blocks_go_with_every_strategy(tmp_path: Path) -> None:
    """By PyTorch's own compiler; FSDP also on a single process, and with activation checkpointing within what is compiled."""
    plans = {way: {**COMPILED, **options} for way, options in STRATEGIES.items()} | {"again": {**COMPILED, **FSDP, **AGAIN}}
    spread = launch([{"out": str(tmp_path / name), **LR, **plan} for name, plan in plans.items()])
    train(tmp_path / "eager", **LR, **{**COMPILED, "compute_compile": False})
    finish(spread, seconds=PATIENCE)
    finish(launch([{"out": str(tmp_path / "fsdp-on-one"), **LR, **COMPILED, **FSDP}], ranks=1), seconds=PATIENCE)
    for name in [*plans, "fsdp-on-one"]:
        agree(tmp_path / "eager", tmp_path / name, steps=3)


SPREAD = {"cp2-tp2": CONTEXT | TENSOR, "fsdp2-tp2": FSDP | TENSOR, "fsdp2-copies2": FSDP | {"parallel_shard": 2}}
STEPS, HALF = {"max_steps": 10}, {"max_steps": 5}


def test_checkpoints_fit_any_mesh(tmp_path: Path) -> None:
    """From one process to each mesh and back, from each mesh to the next, and bit for bit on the same one."""

    def plan(name: str, *options: dict) -> dict:
        return {"out": str(tmp_path / name), **LR, **{key: value for part in options for key, value in part.items()}}

    def copy(source: str, target: str) -> None:
        shutil.copytree(tmp_path / source, tmp_path / target)

    train(tmp_path / "one", **LR, **STEPS)
    train(tmp_path / "one-half", **LR, **HALF)
    names = list(SPREAD)
    for name in names:
        copy("one-half", f"one-to-{name}")
    first = [plan(f"one-to-{name}", SPREAD[name], STEPS) for name in names]
    first += [plan(name, SPREAD[name], STEPS) for name in names] + [plan(f"{name}-half", SPREAD[name], HALF) for name in names]
    finish(launch(first, 4), seconds=PATIENCE)
    pairs = list(zip(names, names[1:] + names[:1], strict=True))
    for name, following in pairs:
        copy(f"{name}-half", f"{name}-to-{following}")
        copy(f"{name}-half", f"{name}-to-one")
        train(tmp_path / f"{name}-to-one", **LR, **STEPS)
    second = [plan(f"{name}-half", SPREAD[name], STEPS) for name in names]
    second += [plan(f"{name}-to-{following}", SPREAD[following], STEPS) for name, following in pairs]
    finish(launch(second, 4), seconds=PATIENCE)
    for name, following in pairs:
        assert losses(tmp_path / f"{name}-half") == losses(tmp_path / name)
        assert torch.equal(parameters(tmp_path / f"{name}-half"), parameters(tmp_path / name))
        for run in (name, f"one-to-{name}", f"{name}-to-one", f"{name}-to-{following}"):
            agree(tmp_path / "one", tmp_path / run, steps=10, rtol=2e-5)
            torch.testing.assert_close(parameters(tmp_path / run), parameters(tmp_path / "one"), rtol=1e-4, atol=1e-5)
