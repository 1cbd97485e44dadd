"""Does an hour leave a trace? A run killed again and again beside one that is not, and the memory of training, serving and evaluation."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
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
    rest: float
    """Seconds between two evaluations, and between two rounds of conversations: what is left of the processors trains."""
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


MILESTONE = 400
"""Steps between two checkpoints that are kept."""
TRAINING = (
    *("mqar-softmax-gla", "--task.num-pairs", 8, "--batch-tokens", 49 * 32, "--model.hidden-size", 64, "--token-budget", 10**10),
    *("--checkpoint-every", 40, "--checkpoint.milestone-every", MILESTONE, "--eval.every", MILESTONE, "--eval.sequences", 8),
    *("--log.print-every", 10**6),
)
"""Small, quick steps, many checkpoints."""


def training(out: Path, device: str, *options: object) -> subprocess.Popen[bytes]:
    words = map(str, ("train", *TRAINING, "--out", out, "--device", device, *options))
    return subprocess.Popen([sys.executable, "-m", "headmax", *words], env=ENVIRONMENT, stdout=subprocess.DEVNULL)


STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)
"""By SIGTERM: saved, or not yet begun."""


def ended(process: subprocess.Popen[bytes], *expected: int) -> None:
    if process.wait(600) not in expected:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")


def last_step(run: Path) -> int:
    """Of the newest finished checkpoint."""
    return max([0, *map(checkpoint.step_of, checkpoint.list_checkpoints(run / "checkpoints"))])


def numbers(run: Path, steps: int) -> list[tuple[Any, ...]]:
    """What was measured in the first `steps`; times differ."""
    lines = itertools.islice(read_lines(run / "metrics.jsonl"), steps)
    return [(line["step"], line["loss"], line["grad_norm"], line.get("validation")) for line in lines]


def contents(folder: Path) -> dict[str, Any]:
    """All of a checkpoint: parameters, the optimizer's state, random states, and where the run is in its data."""
    held = checkpoint.Reader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in held.items() if isinstance(x, TensorStorageMetadata)
    }
    state |= dict.fromkeys(held.keys() - state.keys())
    checkpoint.load(folder, state, single_process=True)
    return state | {"progress": checkpoint.read_progress(folder)}


def equal(ours: Any, theirs: Any) -> bool:
    """Bit for bit: NaN is itself, 0 is not -0."""
    if isinstance(ours, torch.Tensor):
        same = isinstance(theirs, torch.Tensor) and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        return same and ours.numpy().tobytes() == theirs.numpy().tobytes()
    return bool(ours == theirs)


class Disturbed:
    """A training run that is killed at moments drawn beforehand, whatever it is doing, and started again at once, beside one left alone.

    The one left alone waits (SIGSTOP) while it is `MILESTONE` steps ahead.
    """

    def __init__(self, run: Path, whole: Path, plan: Plan) -> None:
        draw = random.Random(plan.seed)
        self.run, self.whole, self.plan = run, whole, plan
        self.moments = sorted(draw.uniform(0, plan.seconds) for _ in range(plan.kills))
        self.inside, self.again, self.starting = 0, 0, 0
        """Kills inside the writing of a checkpoint, steps that were taken again, and kills before the first step of a process."""
        self.other = training(whole, plan.device)
        self.start()

    def start(self, *options: object) -> None:
        self.begun, self.process = time.time(), training(self.run, self.plan.device, *options)

    def __enter__(self) -> Disturbed:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.process, self.other):
            process.kill()
            process.wait()

    def look(self, now: float) -> None:
        if self.moments and now >= self.moments[0]:
            self.moments.pop(0)
            self.process.kill()
            ended(self.process, -signal.SIGKILL)
            self.count()
            self.start()
        elif self.process.poll() is not None:
            raise RuntimeError(f"the disturbed run ended by itself with {self.process.returncode}")
        ahead = last_step(self.whole) - last_step(self.run)
        self.other.send_signal(signal.SIGSTOP if ahead >= MILESTONE else signal.SIGCONT)

    def count(self) -> None:
        """What the process that was just killed was doing."""
        self.inside += any((self.run / "checkpoints").glob("*.tmp"))
        last = deque(read_lines(self.run / "metrics.jsonl"), maxlen=1)
        if last and last[0]["time"] > self.begun:
            self.again += max(0, last[0]["step"] - last_step(self.run))
        else:
            self.starting += 1

    def finish(self) -> tuple[bool, dict[str, Any]]:
        """Brings both to the next milestone: whether they are the same there, and what was compared."""
        self.process.terminate()
        ended(self.process, *STOPPED)
        steps = (max(map(last_step, (self.run, self.whole))) // MILESTONE + 1) * MILESTONE
        self.other.send_signal(signal.SIGCONT)
        while last_step(self.whole) < steps:
            if self.other.poll() is not None:
                raise RuntimeError(f"the run left alone ended by itself with {self.other.returncode}")
            time.sleep(0.05)
        self.other.terminate()
        ended(self.other, *STOPPED)
        self.start("--max-steps", steps)
        ended(self.process, 0)
        same, about = compare(self.run, self.whole, steps)
        killed = {"kills": self.plan.kills - len(self.moments), "killed while starting": self.starting}
        return same, killed | {"killed inside a write": self.inside, "steps taken again": self.again} | about


def compare(run: Path, whole: Path, steps: int) -> tuple[bool, dict[str, Any]]:
    """Whether two runs have the same numbers in every step, and the same contents in all checkpoints that both kept, `steps` among them."""
    names = [{path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")} for folder in (run, whole)]
    common = sorted(names[0] & names[1])
    same = [numbers(run, steps) == numbers(whole, steps), f"step-{steps:08}" in common]
    tensors = 0
    for name in common:
        ours, theirs = (contents(folder / "checkpoints" / name) for folder in (run, whole))
        same.append(ours.keys() == theirs.keys() and all(equal(x, theirs[entry]) for entry, x in ours.items()))
        tensors += sum(isinstance(x, torch.Tensor) for x in ours.values())
    return all(same), {"steps": steps, "checkpoints compared": len(common), "tensors compared": tensors}


def evaluations(model: str, device: str, work: str, rest: str) -> None:
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
        time.sleep(float(rest))


class Client(threading.Thread):
    """Rounds of conversations of two turns with a server, each at random over one of two documents, until `stop` is set."""

    def __init__(self, address: str, seed: int, rest: float) -> None:
        super().__init__(daemon=True)
        self.address, self.seed, self.rest, self.stop, self.timings = address, seed, rest, threading.Event(), list[Timing]()

    def run(self) -> None:
        for number in range(10**9):
            trace = Trace(8, 0.5, 2, 24, 12, documents=2, document=300, vocabulary=None, seed=self.seed + 1000 * number)
            self.timings += play_over_http(trace, self.address)
            if self.stop.wait(self.rest):
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
            client = Client(address, plan.seed, plan.rest)
            client.start()
        if "eval" in plan.parts:
            words = [sys.executable, "-m", "lab.bench.endure", str(model), plan.device, str(folder / "eval"), str(plan.rest)]
            (folder / "eval").mkdir()
            memories["evaluation"] = Memory(started(stack, subprocess.Popen(words, env=ENVIRONMENT)))
        if "train" in plan.parts:
            disturbed = stack.enter_context(Disturbed(folder / "run", folder / "whole", plan))
            memories["training"] = Memory(disturbed.other)
        watch(memories.values(), disturbed, plan, say)
        done: dict[str, dict[str, Any]] = {part: {} for part in memories}
        if client is not None:
            if not client.is_alive():
                raise RuntimeError("the conversations with the server ended by themselves")
            client.stop.set()
            done["serving"] = {"requests": len(client.timings), "failed": sum(timing.error is not None for timing in client.timings)}
        if "eval" in plan.parts:
            done["evaluation"] = {"evaluations": int((folder / "eval/done").read_text())}
        if disturbed is not None:
            done["training"] = {"steps": last_step(folder / "whole")}
        for part, memory in memories.items():
            slope, error = memory.growth()
            flat = slope + 2 * error <= SHARE * memory.mebibytes[-1]
            about = {"standard error": error, "flat": flat, "seconds": plan.seconds, **done[part]}
            yield make(f"memory of {part}", "headmax", "growth", slope, "MiB/h", plan.seed, **about, MiB=memory.mebibytes)
        if disturbed is not None:
            same, about = disturbed.finish()
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
        time.sleep(0.2)


def started(stack: contextlib.ExitStack, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Killed at the end, if it is still there."""
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


if __name__ == "__main__":
    evaluations(*sys.argv[1:])
