"""Does an hour leave a trace? A run killed again and again beside one that is not, and the memory of training, serving and evaluation."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.data.tokenizer import train_bpe
from headmax.records import Record, Recorder
from headmax.serve.load import WORDS, Timing, Trace, play_over_http
from headmax.serve.process import server_process
from headmax.train import checkpoint
from headmax.train.metrics import read_lines

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PARTS = ("train", "serve", "eval")
SHARE = 0.02
"""Of its size that a process may gain in an hour and be called flat."""


@dataclass(frozen=True)
class Plan:
    seconds: float
    kills: int
    """Of the training run that is disturbed, at moments spread evenly over the time."""
    device: str
    parts: Sequence[str]
    every: float
    """Seconds between two readings of memory."""
    seed: int = 0


@dataclass
class Memory:
    """Of a process over time, what it has of its own: libraries and other files are the system's to drop."""

    process: subprocess.Popen[Any]
    seconds: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)

    def read(self, now: float) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.process.args!r} ended by itself with {self.process.returncode}")
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        self.seconds.append(now)
        self.mebibytes.append(round(int(status.split("RssAnon:")[1].split()[0]) / 1024, 2))

    def growth(self) -> tuple[float, float]:
        """MiB an hour and its standard error, by least squares once the first third is over: caches fill in the beginning."""
        start = len(self.seconds) // 3
        hours, values = np.array(self.seconds[start:]) / 3600, np.array(self.mebibytes[start:])
        (slope, offset), away = np.polyfit(hours, values, 1), hours - hours.mean()
        left = values - slope * hours - offset
        return float(slope), float((left @ left / max(1, len(hours) - 2) / (away @ away)) ** 0.5)


def training(out: Path, device: str, *options: object) -> subprocess.Popen[bytes]:
    """`headmax train`: small, quick steps, many checkpoints."""
    sizes = ["--task.num-pairs", 4, "--batch-tokens", 392, "--model.hidden-size", 128, "--token-budget", 10**10]
    every = [
        "--checkpoint-every",
        40,
        "--checkpoint.milestone-every",
        1000,
        "--eval.every",
        400,
        "--eval.sequences",
        8,
        "--log.print-every",
        10**6,
    ]
    words = ["train", "mqar-softmax-gla", "--out", out, "--device", device, *sizes, *every, *options]
    return subprocess.Popen([sys.executable, "-m", "headmax", *map(str, words)], env=ENVIRONMENT, stdout=subprocess.DEVNULL)


STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)
"""By SIGTERM: saved, or not yet begun."""


def ended(process: subprocess.Popen[bytes], *expected: int) -> None:
    if process.wait(600) not in expected:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")


def last_step(run: Path) -> int:
    """Of the newest finished checkpoint."""
    return max([0, *map(checkpoint.step_of, checkpoint.list_checkpoints(run / "checkpoints"))])


def taken(run: Path) -> list[tuple[Any, ...]]:
    """Every step with its numbers; times differ."""
    return [(line["step"], line["loss"], line["grad_norm"], line.get("validation")) for line in read_lines(run / "metrics.jsonl")]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint: parameters and the optimizer's state."""
    held = checkpoint.Reader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in held.items() if isinstance(x, TensorStorageMetadata)}
    checkpoint.load(folder, state, single_process=True)
    return state


class Disturbed:
    """A training run that is killed at moments drawn beforehand, whatever it is doing, and started again at once."""

    def __init__(self, run: Path, whole: Path, plan: Plan) -> None:
        draw = random.Random(plan.seed)
        self.run, self.whole, self.plan = run, whole, plan
        self.moments = sorted(draw.uniform(0, plan.seconds) for _ in range(plan.kills))
        self.inside, self.again = 0, 0
        """Kills inside the writing of a checkpoint, and steps that were taken again."""
        self.process = training(run, plan.device)

    def __enter__(self) -> Disturbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def look(self, now: float) -> None:
        if self.moments and now >= self.moments[0]:
            self.moments.pop(0)
            self.process.kill()
            ended(self.process, -9)
            self.inside += any((self.run / "checkpoints").glob("*.tmp"))
            self.again += max(0, len(taken(self.run)) - last_step(self.run))
            self.process = training(self.run, self.plan.device)
        elif self.process.poll() is not None:
            raise RuntimeError(f"the disturbed run ended by itself with {self.process.returncode}")

    def finish(self, other: subprocess.Popen[bytes]) -> tuple[bool, dict[str, Any]]:
        """Ends both: whether they are the same, and what was compared."""
        for process in (self.process, other):
            process.terminate()
            ended(process, *STOPPED)
        same, about = compare(self.run, self.whole)
        about |= {"kills": self.plan.kills - len(self.moments), "killed inside a write": self.inside, "steps taken again": self.again}
        return same, about


def compare(run: Path, whole: Path) -> tuple[bool, dict[str, Any]]:
    """Whether two runs are the same as far as both have come: the numbers of every step, and all tensors of the last checkpoint of both."""
    ours, theirs = taken(run), taken(whole)
    steps = min(len(ours), len(theirs))
    same = [steps > 0 and ours[:steps] == theirs[:steps]]
    common = {path.name for path in checkpoint.list_checkpoints(run / "checkpoints")} & {
        path.name for path in checkpoint.list_checkpoints(whole / "checkpoints")
    }
    about: dict[str, Any] = {"steps": steps, "steps of the other": len(theirs), "checkpoint compared": max(common, default=None)}
    if common:
        held, others = (tensors(folder / "checkpoints" / max(common)) for folder in (run, whole))
        same.append(held.keys() == others.keys() and all(torch.equal(x, others[name]) for name, x in held.items()))
        about["tensors"] = len(held)
    return all(same), about


def evaluations(model: str, device: str, work: str) -> None:
    """One evaluation after the other in this process, for ever."""
    from headmax.eval import terminal
    from headmax.eval.run import Settings

    torch.set_num_threads(1)
    tasks = ["mqar_4", *["niah_single_1_1k"] * (importlib.util.find_spec("lm_eval") is not None)]
    for number in range(10**9):
        place = terminal.Place(model, model, Path(work) / str(number), "tiny")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            settings = Settings(limit=4, seed=number, haystack="generated")
            failures = terminal.run(place, ",".join(tasks), settings, "all", None, device, None, None)
        if failures:
            sys.exit("\n".join(failures))
        shutil.rmtree(place.work)
        Path(work, "done").write_text(str(number + 1))


class Client(threading.Thread):
    """Conversations of two turns with a server, each at random over one of two documents, until `stop` is set."""

    def __init__(self, address: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.address, self.seed, self.stop, self.timings = address, seed, threading.Event(), list[Timing]()

    def run(self) -> None:
        for number in range(10**9):
            trace = Trace(8, 0.5, 2, 24, 12, documents=2, document=300, vocabulary=None, seed=self.seed + 1000 * number)
            self.timings += play_over_http(trace, self.address)
            if self.stop.is_set():
                return


def tiny_model(folder: Path) -> Path:
    """At random weights, with a tokenizer of its own."""
    torch.manual_seed(0)
    words = train_bpe([WORDS] * 3, 320)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "intermediate_size": 128,
        "vocab_size": words.vocab_size,
    }
    HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", head_gate=HeadGateConfig(), **sizes)).save_pretrained(folder)
    words.save(folder)
    return folder


def measure(plan: Plan, say: Callable[[str], object]) -> Iterator[Record]:
    """Everything at once, a process each, on one thread each."""
    make = Recorder("long runs", plan.device)
    memories: dict[str, Memory] = {}
    with tempfile.TemporaryDirectory(prefix="headmax-endure-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model, client, disturbed = tiny_model(folder / "model"), None, None
        if "serve" in plan.parts:
            options = ["--device", plan.device, "--prefix-cache", "16MiB", "--prefix-cache-host", "16MiB"]
            server, address = stack.enter_context(server_process(model, *options, environment=ENVIRONMENT))
            memories["serving"] = Memory(server)
            client = Client(address, plan.seed)
            client.start()
        if "eval" in plan.parts:
            words = [sys.executable, "-m", "lab.bench.endure", str(model), plan.device, str(folder / "eval")]
            (folder / "eval").mkdir()
            memories["evaluation"] = Memory(started(stack, subprocess.Popen(words, env=ENVIRONMENT)))
        if "train" in plan.parts:
            whole = started(stack, training(folder / "whole", plan.device))
            memories["training"] = Memory(whole)
            disturbed = stack.enter_context(Disturbed(folder / "run", folder / "whole", plan))
        watch(memories.values(), disturbed, plan, say)
        done: dict[str, dict[str, Any]] = {part: {} for part in memories}
        if client is not None:
            client.stop.set()
            done["serving"] = {"requests": len(client.timings), "failed": sum(timing.error is not None for timing in client.timings)}
        if "eval" in plan.parts:
            done["evaluation"] = {"evaluations": int((folder / "eval/done").read_text())}
        if disturbed is not None:
            done["training"] = {"steps": len(taken(folder / "whole"))}
        for part, memory in memories.items():
            slope, error = memory.growth()
            flat = slope + 2 * error <= SHARE * memory.mebibytes[-1]
            about = {"standard error": error, "flat": flat, "seconds": plan.seconds, **done[part]}
            yield make(f"memory of {part}", "headmax", "growth", slope, "MiB/h", plan.seed, **about, MiB=memory.mebibytes)
        if disturbed is not None:
            same, about = disturbed.finish(whole)
            yield make("training, killed", "headmax", "identical", float(same), "yes = 1", plan.seed, seconds=plan.seconds, **about)


def watch(memories: Iterable[Memory], disturbed: Disturbed | None, plan: Plan, say: Callable[[str], object]) -> None:
    """Reads the memory of all that runs and kills the disturbed run, until the time is over."""
    begun, readings = time.monotonic(), 0
    while (now := time.monotonic() - begun) < plan.seconds:
        if now >= readings * plan.every:
            readings += 1
            for memory in memories:
                memory.read(now)
            say(f"{now:6.0f} s, MiB: " + " ".join(f"{memory.mebibytes[-1]:.0f}" for memory in memories))
        if disturbed is not None:
            disturbed.look(now)
        time.sleep(0.05)


def started(stack: contextlib.ExitStack, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Killed at the end, if it is still there."""
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


if __name__ == "__main__":
    evaluations(*sys.argv[1:])
