"""What the tests train: a small model on random walks, in processes of their own where that is the point."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.data.source import Batch
from headmax.ops import Packing, gated_delta_rule
from headmax.train import CheckpointConfig, ComputeConfig, EvalConfig, OptimConfig, ScheduleConfig, TrainConfig
from headmax.train.checkpoint import list_checkpoints
from headmax.train.loading import load_model
from headmax.train.metrics import read_lines
from headmax.train.trainer import fit

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


class Walks:
    """Sample i: a walk over the vocabulary in steps of -1, 0 or 1, by the seed and i."""

    def __init__(self, seed: int = 0, separate: bool = False) -> None:
        self.vocab_size, self.length, self.seed, self.separate = 48, 24, seed, separate

    @property
    def identity(self) -> dict[str, str | int]:
        return {"walks": self.seed}

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = []
        for index in indices:
            random = torch.Generator().manual_seed(1000 * self.seed + index)
            start, steps = (torch.randint(*ends, (n,), generator=random) for *ends, n in ((0, 48, 1), (-1, 2, self.length - 1)))
            rows.append(torch.cat([start, steps]).cumsum(0) % 48)
        ids = torch.stack(rows)
        if not self.separate:
            return Batch(ids, ids, None)
        row = ids.flatten()[None]  # each sample is two documents of unequal length
        return Batch(row, row, Packing(sorted({0, row.numel(), *range(0, row.numel(), 24), *range(10, row.numel(), 24)})))


def model_config(**changes: Any) -> HeadmaxConfig:
    fields = {"mixer": "gla", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 48, "intermediate_size": 32}
    return HeadmaxConfig(**fields | {"head_gate": HeadGateConfig()} | changes)


def train_config(**changes: Any) -> TrainConfig:
    """8 sequences a step, 2 at a time, 50 steps, everything by name: `compute_precision="bfloat16"` sets compute.precision."""
    config = TrainConfig(
        token_budget=50 * 192,
        sequence_length=24,
        batch_tokens=192,
        device="cpu",
        checkpoint_every=0,
        optim=OptimConfig(lr=1e-2),
        schedule=ScheduleConfig(warmup_tokens=10 * 192),
        compute=ComputeConfig(precision="float32", micro_batch=2),
        checkpoint=CheckpointConfig(keep_last=2),
        eval=EvalConfig(every=0, sequences=8),
    )
    for name, value in changes.items():
        part, _, field = name.partition("_")
        nested = hasattr(getattr(config, part, None), field)
        config = replace(config, **({part: replace(getattr(config, part), **{field: value})} if nested else {name: value}))
    return config


def train(
    out: Path,
    *,
    source: Any = None,
    validation: Any = None,
    model: dict[str, Any] | None = None,
    show: Callable[[dict[str, Any]], object] | None = None,
    **changes: Any,
) -> HeadmaxForCausalLM:
    """Trains in this process, on one thread: the sums are then the same everywhere."""
    torch.set_num_threads(1)
    return fit(model_config(**model or {}), train_config(**changes), source or Walks(), out, validation=validation, show=show)


@contextlib.contextmanager
def poisoned(call: int) -> Iterator[None]:
    """The loss of the model's forward pass number `call` is NaN, and with it all gradients of that step."""
    forward, calls = HeadmaxForCausalLM.forward, itertools.count(1)

    def poison(self: HeadmaxForCausalLM, *arguments: Any, **options: Any) -> Any:
        output = forward(self, *arguments, **options)
        output.loss = output.loss * (float("nan") if next(calls) == call else 1.0)
        return output

    with mock.patch.object(HeadmaxForCausalLM, "forward", poison):
        yield


@contextlib.contextmanager
def log_decays(number: int) -> Iterator[list[torch.Tensor]]:
    """The first so many that Gated DeltaNet computes."""
    seen: list[torch.Tensor] = []

    def watch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, *others: Any, **options: Any) -> Any:
        if len(seen) < number:
            seen.append(log_decay.detach().clone())
        return gated_delta_rule(q, k, v, log_decay, *others, **options)

    with mock.patch("headmax.layers.mixers.gated_deltanet.gated_delta_rule", watch):
        yield seen


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


def parameters(out: Path) -> torch.Tensor:
    """All parameters of a run's last checkpoint in one row."""
    return torch.cat([p.detach().flatten() for p in load_model(out).parameters()])


def checkpoints(out: Path) -> list[str]:
    return [path.name for path in list_checkpoints(out / "checkpoints")]


def command(out: Path, *options: str) -> list[str]:
    """`headmax train`: small, quick steps, a checkpoint every four."""
    sizes = ["--task.num-pairs", "5", "--batch-tokens", "392", "--model.hidden-size", "128", "--device", "cpu"]
    every = ["--checkpoint-every", "4", "--eval.every", "0", "--log.print-every", "1000"]
    return ["-m", "headmax", "train", "mqar-softmax-linear", "--out", str(out), *sizes, *every, *options]


def start(*arguments: str) -> subprocess.Popen[str]:
    """A Python process of its own, on one thread."""
    return subprocess.Popen([sys.executable, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def torchrun(*arguments: str, ranks: int = 2) -> subprocess.Popen[str]:
    return start("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", *arguments)


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until a running process has written its line."""
    while not any(line["step"] >= step for line in read_lines(out / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


def launch(plans: list[dict[str, Any]], ranks: int = 2) -> subprocess.Popen[str]:
    """Processes that train one plan after the other: arguments of `train`, `out` among them."""
    return torchrun("-m", "tests.train.small", json.dumps(plans), ranks=ranks)


def finish(process: subprocess.Popen[str], expected: int = 0, seconds: float = 300) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == expected, output
    return output


if __name__ == "__main__":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for plan in json.loads(sys.argv[1]):
        out, poison, number = Path(plan.pop("out")), plan.pop("poison_second_rank", 0), plan.pop("log_decays", 0)
        with poisoned(poison * dist.get_rank()), log_decays(number) as seen:
            train(out, **plan, source=Walks(separate=plan.get("documents") == "separate"))
        if number:
            torch.save(seen, out / f"log-decays-{dist.get_rank()}.pt")
    dist.destroy_process_group()
