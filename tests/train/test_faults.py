"""Signals, NaN, a full disk, unreadable data: a clear message, and the last checkpoint intact."""

import errno
import itertools
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headmax.data.source import Batch
from headmax.models import HeadmaxForCausalLM
from headmax.train import trainer
from headmax.train.checkpoint import list_checkpoints, problem
from headmax.train.faults import DeviceLost, Interrupted, NoMemory, PeerLost, TrainingError, check_device, check_peers
from headmax.train.metrics import Log, read_lines
from headmax.train.parallel import World
from tests.train.small import Walks, checkpoints, command, finish, losses, parameters, poisoned, start, torchrun, train, wait_for_step


def test_sigterm_saves_and_leaves_with_its_status(tmp_path: Path) -> None:
    process = start(*command(tmp_path, "--max-steps", "1000000"))
    wait_for_step(tmp_path, 6, process)
    process.terminate()
    output = finish(process, expected=143)
    step = losses(tmp_path)[-1][0]
    assert f"headmax: SIGTERM: saved at step {step}; rerun the same command to resume" in output
    assert checkpoints(tmp_path)[-1] == f"step-{step:08}"
    assert problem(list_checkpoints(tmp_path / "checkpoints")[-1]) is None
    assert "Traceback" not in output


def test_sigint_too_and_the_handlers_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="SIGINT: saved at step 4") as stopped:  # the step under way is finished
        train(tmp_path, show=lambda line: line["step"] in (2, 3) and os.kill(os.getpid(), signal.SIGINT))
    assert stopped.value.exit_status == 130
    assert checkpoints(tmp_path) == ["step-00000004"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.distributed
def test_a_signal_to_one_process_stops_all_at_the_same_step(tmp_path: Path) -> None:
    process = torchrun(*command(tmp_path, "--max-steps", "1000000", "--parallel", "fsdp"))
    wait_for_step(tmp_path, 6, process)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGTERM)
    output = finish(process, expected=1)
    step = losses(tmp_path)[-1][0]
    assert output.count(f"SIGTERM: saved at step {step}") == 2
    assert "exitcode  : 143" in output
    assert checkpoints(tmp_path)[-1] == f"step-{step:08}"
    assert problem(list_checkpoints(tmp_path / "checkpoints")[-1]) is None


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    train(tmp_path / "four", max_steps=4)
    with poisoned(4 * 4 + 1):  # four micro-batches a step
        train(tmp_path / "five", max_steps=5)
    lines = list(read_lines(tmp_path / "five" / "metrics.jsonl"))
    assert [line["skipped"] for line in lines] == [False] * 4 + [True]
    assert lines[4]["loss"] is None
    assert torch.equal(parameters(tmp_path / "four"), parameters(tmp_path / "five"))
    train(tmp_path / "five", max_steps=8)
    assert [line["skipped"] for line in read_lines(tmp_path / "five" / "metrics.jsonl")][5:] == [False] * 3


def test_too_many_skipped_steps_stop_the_run_and_name_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config) -> HeadmaxForCausalLM:
        model = HeadmaxForCausalLM(config)
        calls = iter(range(10**6))
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda m, i, output: output * (1.0 if next(calls) < 24 else float("inf")))
        return model

    monkeypatch.setattr(trainer, "HeadmaxForCausalLM", build)
    with pytest.raises(TrainingError) as error:
        train(tmp_path, checkpoint_every=5, max_skipped_steps=3)
    text = str(error.value)
    assert "stopped at step 9: 3 steps were skipped (max_skipped_steps); not finite: " in text
    assert "the first activation is the output of model.layers.1.mlp.down_proj, 1536 of 1536 values" in text
    assert "nearest to the loss model.norm.weight" in text
    assert checkpoints(tmp_path) == ["step-00000005"]


def test_divergence_is_diagnosed(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"not finite: the gradients of \d+ parameters, nearest to the loss model\.layers\.1\."):
        train(tmp_path, optim_lr=1e25, max_skipped_steps=2)


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "whole", max_steps=12)
    train(tmp_path / "run", max_steps=4)
    monkeypatch.setattr(Log, "sync", lambda self: None)
    with pytest.raises(TrainingError) as error:
        train(
            tmp_path / "run",
            max_steps=12,
            checkpoint_every=4,
            show=lambda line: line["step"] == 6 and monkeypatch.setattr(os, "fsync", full_disk),
        )
    monkeypatch.undo()
    why = r"\[Errno 28\] No space left on device \(.* MiB free\)"
    text = rf"cannot write a checkpoint to .*: {why}; the last complete one is step-00000004"
    assert re.fullmatch(text, str(error.value))
    assert checkpoints(tmp_path / "run") == ["step-00000004"]
    train(tmp_path / "run", max_steps=12)
    assert torch.equal(parameters(tmp_path / "run"), parameters(tmp_path / "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_full_disk_under_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(TrainingError, match=r"cannot continue training: .*No space left on device"):
        train(tmp_path, max_steps=3)


def test_a_gpu_that_fails_for_good_ends_the_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    check_device(torch.device("cpu"), "a run")
    with pytest.raises(DeviceLost, match=r"^a run: CUDA error: unspecified launch failure; completed work is saved, rerun to resume$"):
        check_device(torch.device("cuda"), "a run")


def test_a_lost_process_ends_the_run_in_one_line() -> None:
    gloo = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:12173. This is typically caused by a crash. More"
    two, other = World(1, 2, torch.device("cpu"), None), RuntimeError("shapes do not match")
    check_peers(other, two, "a run")
    check_peers(RuntimeError(gloo), World(0, 1, torch.device("cpu"), None), "a run")
    for error, cause in ((RuntimeError(gloo), "Connection closed by peer [10.0.0.7]:12173"), (dist.DistBackendError("NCCL\nmore"), "NCCL")):
        with pytest.raises(PeerLost) as lost:
            check_peers(error, two, "a run")
        why = f"rank 1 lost its connection to another process, which may have been killed ({cause})"
        assert str(lost.value) == f"a run: {why}; completed work is saved, rerun to resume"


def test_no_memory_says_what_to_make_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And loses nothing that was saved."""
    train(tmp_path / "whole", max_steps=8)
    forward, calls = HeadmaxForCausalLM.forward, itertools.count()

    def full(self: HeadmaxForCausalLM, *arguments: Any, **options: Any) -> Any:
        if next(calls) == 4 * 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return forward(self, *arguments, **options)

    monkeypatch.setattr(HeadmaxForCausalLM, "forward", full)
    with pytest.raises(NoMemory) as error:
        train(tmp_path / "run", max_steps=8, checkpoint_every=4)
    monkeypatch.undo()
    assert checkpoints(tmp_path / "run") == ["step-00000004"]
    ways = "a smaller --compute.micro-batch (now 2), --compute.activation-checkpointing, "
    ways += "or on several GPUs --parallel.strategy fsdp"
    assert str(error.value) == f"a step does not fit into memory: try {ways}. CUDA out of memory. Tried to allocate 2.00 GiB."
    train(tmp_path / "run", max_steps=8, compute_activation_checkpointing=True)
    torch.testing.assert_close(parameters(tmp_path / "run"), parameters(tmp_path / "whole"))


def test_unreadable_data_is_named(tmp_path: Path) -> None:
    class Torn(Walks):
        def batch(self, indices: Sequence[int]) -> Batch:
            if 77 in indices:
                raise OSError(errno.EIO, "Input/output error", "shard-00003.bin")
            return super().batch(indices)

    with pytest.raises(TrainingError, match=r"step 10: cannot read samples 76 to 77: .*Input/output error: 'shard-00003.bin'"):
        train(tmp_path, source=Torn(), checkpoint_every=4)
    assert checkpoints(tmp_path) == ["step-00000004", "step-00000008"]
    assert problem(list_checkpoints(tmp_path / "checkpoints")[-1]) is None
