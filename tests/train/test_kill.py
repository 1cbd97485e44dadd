"""kill -9 at any moment, also inside the writing of a checkpoint: the run ends as if it had never been disturbed."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from headmax import durable
from headmax.train.checkpoint import list_checkpoints, step_of
from headmax.train.metrics import read_lines
from headmax.train.parallel import World
from headmax.train.trainer import RUN
from tests.train.small import command, finish, losses, parameters, start, torchrun, wait_for_step

EVERY = 4


def kill_inside_a_write(folder: Path, process: subprocess.Popen[str]) -> None:
    """As soon as an unfinished checkpoint shows."""
    old = {path.name for path in folder.glob("*.tmp")}  # of a run killed before; the new one clears it away
    while not {path.name for path in folder.glob("*.tmp")} - old:
        assert process.poll() is None, process.communicate()[0]
        if old and not any((folder / name).exists() for name in old):
            old = set()
    process.kill()
    process.communicate()
    assert list(folder.glob("*.tmp")), "the checkpoint was complete before the process died"


def kill_at_random(out: Path, process: subprocess.Popen[str], moment: random.Random) -> None:
    """Some time after its first step."""
    began = time.time()
    while not any(line["time"] > began for line in read_lines(out / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    time.sleep(moment.uniform(0, 0.5))
    process.kill()
    process.communicate()


def disturb(out: Path, whole: Path, kills: int) -> None:
    moment, resumed = random.Random(kills), 0
    for kill in range(kills):
        process = start(*command(out, "--max-steps", "1000000"))
        if kill % 3 == 1:
            kill_inside_a_write(out / "checkpoints", process)
        else:
            kill_at_random(out, process, moment)
        reached, saved = losses(out)[-1][0], [0, *map(step_of, list_checkpoints(out / "checkpoints"))][-1]
        assert saved >= resumed
        assert reached - saved <= 2 * EVERY, "more is lost than the last interval and the steps taken while a checkpoint was written"
        resumed = saved
    both = [start(*command(folder, "--max-steps", str(resumed + 10))) for folder in (out, whole)]
    output, _ = (finish(process) for process in both)
    assert resumed == 0 or f"resumed from step {resumed}" in output
    assert [step for step, *_ in losses(out)] == list(range(1, resumed + 11))
    assert losses(out) == losses(whole)
    assert torch.equal(parameters(out), parameters(whole))


def test_three_kills(tmp_path: Path) -> None:
    disturb(tmp_path / "run", tmp_path / "whole", kills=3)


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    disturb(tmp_path / "run", tmp_path / "whole", kills=20)


def kill_one_of_four(run: subprocess.Popen[str]) -> tuple[str, float]:
    """Which process, and when."""
    workers = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout.split()
    assert len(workers) == 4
    os.kill(int(workers[-1]), signal.SIGKILL)
    return workers[-1], time.time()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("options", [["strategy", "fsdp", "shard", "2"], ["context", "2", "tensor", "2"]], ids="-".join)
def test_one_of_four_is_killed_and_torchrun_restarts_all(options: list[str], tmp_path: Path) -> None:
    """The others end within a minute, all start again and go on from the last checkpoint; where no restart is left, the job ends."""
    spread = [word if n % 2 else f"--parallel.{word}" for n, word in enumerate(options)] + ["--max-steps", "30"]
    disturbed, whole = tmp_path / "run", tmp_path / "whole"
    finish(torchrun(*command(whole, *spread), ranks=4))
    run = torchrun("--max-restarts", "1", *command(disturbed, *spread), ranks=4)
    wait_for_step(disturbed, 9, run)
    first, killed = kill_one_of_four(run)
    wait_for_step(disturbed, max(step for step, *_ in losses(disturbed)) + 4, run)
    assert next(line["time"] for line in read_lines(disturbed / "metrics.jsonl") if line["time"] > killed + 1) - killed < 60
    second, killed = kill_one_of_four(run)
    output = finish(run, expected=1)
    assert time.time() - killed < 60
    assert f"failed (exitcode: -9) local_rank: 3 (pid: {first})" in output
    assert f"Signal 9 (SIGKILL) received by PID {second}" in output
    assert f"headmax: {disturbed}: rank " in output
    assert "lost its connection to another process, which may have been killed (Connection " in output
    assert "internal error" not in output
    output += finish(torchrun(*command(disturbed, *spread), ranks=4))
    assert output.count("resumed from step") == 2
    assert [line["step"] for line in read_lines(disturbed / "metrics.jsonl")] == list(range(1, 31))
    assert losses(disturbed) == losses(whole)
    assert torch.equal(parameters(disturbed), parameters(whole))


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = start(*command(tmp_path, "--max-steps", "1000000"))
    wait_for_step(tmp_path, 1, first)
    assert finish(start(*command(tmp_path)), expected=2) == f"headmax: {tmp_path}: another process is writing to it\n"
    assert first.poll() is None
    first.kill()
    first.communicate()
    finish(start(*command(tmp_path, "--max-steps", "1")))


def test_all_ranks_hear_that_a_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(World, "broadcast", lambda self, message: told.append(message) or told[0])
    with durable.sole_user(tmp_path):
        for rank in (0, 1):
            with (
                pytest.raises(ValueError, match="another process is writing to it"),
                World(rank, 2, torch.device("cpu"), None).sole_user(tmp_path, RUN),
            ):
                pass
    assert told[1] is None
