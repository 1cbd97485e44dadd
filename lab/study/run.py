"""Runs one after the other, in one process that keeps its compiled kernels: what is recorded is skipped, and time is kept."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headmax import records
from headmax.data.dataset import TokenShards
from headmax.data.mqar import MQAR
from headmax.data.source import Batch, Source
from headmax.models import HeadmaxForCausalLM
from headmax.records import Record, Recorder
from headmax.train.faults import DeviceLost, Interrupted, TrainingError, check_device
from headmax.train.metrics import Line, read_lines
from headmax.train.parallel import find_device
from headmax.train.trainer import fit
from lab import RESULTS
from lab.study.runs import Run, runs
from lab.study.score import Examiner

SUITE = "reproduction"
RECORDS = RESULTS / "reproduction.jsonl"
"""Runs that the repository holds."""
DONE = "seconds"
"""The last record of a run."""
POINTS = 32
"""Of a recorded loss curve."""
MARGIN = 1.1
"""On what a run is expected to take."""
SLOW = 5
"""First steps of a run, in which kernels are compiled."""


class OutOfTime(Exception):
    """A run would not end in time."""


@dataclass
class Clock:
    """The seconds that may be used."""

    budget: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.budget - (time.monotonic() - self.begun)

    def expects(self, run: Run, found: Sequence[Record], device: str) -> float:
        """What the run will take by what was recorded on this device: the same of another seed, or else the usual for its work."""
        taken = {Run(**r.extra["run"]): r.value for r in found if r.metric == DONE and r.device == device}
        same = [seconds for other, seconds in taken.items() if replace(other, seed=run.seed) == run]
        rates = [seconds / work(other) for other, seconds in taken.items() if other.kind == run.kind]
        return MARGIN * (max(same) if same else work(run) * statistics.median(rates or [0.0]))

    def watch(self, steps: int) -> Callable[[Line], None]:
        """For what a run shows: gives it up when its end is out of reach, judged by the steps after the first few."""
        before: list[float] = []

        def show(line: Line) -> None:
            before.append(time.monotonic())
            taken = [after - first for first, after in zip(before[SLOW:], before[SLOW + 1 :], strict=False)]
            if self.left < (steps - line["step"]) * (statistics.median(taken[-SLOW:]) if taken else 0.0):
                raise OutOfTime

        return show


def work(run: Run) -> float:
    """In proportion to a run's arithmetic."""
    layers, hidden = map(int, run.size.split("x"))
    return run.steps * (12 * layers * hidden**2 + 32_000 * hidden * (run.kind == "text"))


class Kept:
    """A source whose batches are kept: all variants of a seed read the same."""

    def __init__(self, source: Source) -> None:
        self.vocab_size, self.length, self.identity = source.vocab_size, source.length, source.identity
        self.batch: Callable[[Sequence[int]], Batch] = functools.cache(source.batch)


@functools.lru_cache(maxsize=1)
def recall_sources(task: MQAR, seed: int) -> tuple[Source, Source]:
    return Kept(task.samples(seed)), Kept(task.held_out(seed))


def sources(run: Run, length: int, data: Path | None) -> tuple[Source, Source]:
    """What it trains on, in the seed's order, and what it is validated on, the same for all."""
    task = run.task()
    if task is not None:
        return recall_sources(task, run.seed)
    assert data is not None
    return TokenShards(data, length=length, seed=run.seed), TokenShards(data, length=length, seed=0, split="valid")


def recorded(paths: Iterable[Path]) -> list[Record]:
    return [record for path in paths for record in records.read(path) if record.suite == SUITE]


def finished(found: Iterable[Record]) -> set[Run]:
    return {Run(**record.extra["run"]) for record in found if record.metric == DONE}


def best(rates: Sequence[Run], found: Iterable[Record]) -> Run | None:
    """The run of the lowest validation loss, when all are recorded."""
    found = list(found)
    losses = {Run(**r.extra["run"]): r.value for r in found if r.metric == "validation loss"}
    return min(rates, key=lambda rate: losses.get(rate, math.inf)) if finished(found).issuperset(rates) else None


def chosen(run: Run, found: Iterable[Record]) -> float:
    """The learning rate: the run's own, or the one at which the plain model of its backbone came to the lowest validation loss."""
    if run.lr is not None:
        return run.lr
    rates, found = run.rates(), list(found)
    if (taken := best(rates, found)) is None:
        part, tried = "rates" if run.kind == "text" else "recall-rates", len(finished(found).intersection(rates))
        raise ValueError(f"{run.name}: {tried} of {len(rates)} learning rates were tried with {run.backbone}; run {part} first")
    return taken.lr  # type: ignore[return-value]


def train(run: Run, lr: float, data: Path | None, folder: Path, device: str, show: Callable[[Line], None]) -> HeadmaxForCausalLM:
    """Trains it; parameters that its plain twin has too start as the twin's do."""
    config = replace(run.train(lr), device=device)
    source, validation = sources(run, config.sequence_length, data)
    torch.manual_seed(run.seed)
    start = HeadmaxForCausalLM(run.twin.model(source.vocab_size)).state_dict()
    return fit(run.model(source.vocab_size), config, source, folder, validation=validation, start=start, show=show)


def describe(run: Run, lr: float, folder: Path, model: HeadmaxForCausalLM, make: Recorder) -> Iterator[Record]:
    """What a finished training's folder tells."""
    lines, summary = list(read_lines(folder / "metrics.jsonl")), json.loads((folder / "summary.json").read_text())

    def record(metric: str, value: float, unit: str, **extra: Any) -> Record:
        return make(run.name, "headmax", metric, value, unit, run.seed, run=asdict(run), **extra)

    measured = [line["validation"] for line in lines if "validation" in line]
    about = {"lr": lr, "tokens": summary["tokens"], "parameters": sum(p.numel() for p in model.parameters())}
    about["data"] = json.loads((folder / "config.json").read_text())["data"]
    yield record("validation loss", measured[-1]["loss"], "nats", **about)
    if "accuracy" in measured[-1]:
        found = [one["accuracy"] for one in measured]
        yield record("accuracy", found[-1], "fraction", curve=[round(x, 4) for x in found])
        yield record("mean accuracy over training", statistics.mean(found), "fraction")
        return
    curve = thinned(lines)
    yield record("training loss", curve[-1][1], "nats", curve=curve)
    for name, found in summary["stability"].items():
        yield record(name.replace("_", " "), found["count"], "steps", steps=found["steps"])
    norms = [line["grad_norm"] for line in lines if not line["skipped"]]
    yield record("largest gradient norm", max(norms[len(norms) // 10 :]), "", median=statistics.median(norms))  # after the warm-up
    yield record("skipped steps", len(summary["skipped_steps"]), "steps")
    gates: Line = next((line["gates"] for line in reversed(lines) if "gates" in line), {})
    if gates:
        rounded = {name: {**gate, "share": [round(x, 4) for x in gate["share"]]} for name, gate in gates.items()}
        yield record("gate entropy", statistics.mean(gate["entropy"] for gate in gates.values()), "of an even split", gates=rounded)
        yield record("dead heads", sum(len(gate["dead"]) for gate in gates.values()), "heads")


def thinned(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """The loss over tokens: means of neighbouring steps, at most POINTS of them."""
    each = -(-len(lines) // POINTS)
    groups = [[line for line in lines[n : n + each] if not line["skipped"]] for n in range(0, len(lines), each)]
    return [(group[-1]["tokens"], round(statistics.mean(line["loss"] for line in group), 4)) for group in groups if group]


def shared(wanted: Sequence[Run], mine: int, number: int) -> list[Run]:
    """What one of `number` processes takes: all seeds and learning rates of a model go to the same one, which then compiles it once."""
    models = list(dict.fromkeys(replace(run, seed=0, lr=None) for run in wanted))
    return [run for run in wanted if models.index(replace(run, seed=0, lr=None)) % number == mine]


def compiling_every_model() -> contextlib.AbstractContextManager[None]:
    """Blocks of many models share their code, of which torch compiles few variants otherwise."""
    return torch._dynamo.config.patch(recompile_limit=4096, accumulated_recompile_limit=4096)


def execute(
    parts: Sequence[str],
    *,
    data: Path | None,
    out: Path,
    budget: float,
    share: tuple[int, int],
    device: str | None,
    say: Callable[[str], object],
) -> int:
    """Runs the parts' runs that no record has yet, of every share[1]-th model from share[0] on, while there is time. How many are left."""
    place, file = find_device(device), out / "records.jsonl"
    clock, make = Clock(budget), Recorder(SUITE, place)
    examiner = Examiner(data, out, make, place)
    wanted, done = shared(runs(parts), *share), finished(recorded([RECORDS, file]))
    if data is None and any(run.kind == "text" for run in wanted):
        raise ValueError("--data must name a folder that `python -m lab prepare` completed: language models train on text")
    left, broken = [run for run in wanted if run not in done], 0
    say(f"{len(wanted) - len(left)} of {len(wanted)} runs are recorded already")
    while left:
        run, found = left[0], recorded([RECORDS, file])
        lr = chosen(run, found)
        if clock.expects(run, recorded([file]), make.device) > clock.left:  # what was recorded long ago ran otherwise
            break
        begun, made = time.monotonic(), list[Record]()
        with compiling_every_model(), tempfile.TemporaryDirectory() as folder:
            try:
                model = train(run, lr, data, Path(folder), place.type, clock.watch(run.steps))
                made += describe(run, lr, Path(folder), model, make)
                made += examiner(run, model)
            except OutOfTime:
                break
            except TrainingError as error:  # a model that cannot be trained is a result
                made.append(make(run.name, "headmax", "failed", 1, "runs", run.seed, run=asdict(run), error=str(error)))
            except (Interrupted, DeviceLost, ValueError, OSError):
                raise
            except Exception:  # not the model's doing, such as no memory left: the others go on, this one another time
                check_device(place, run.name)
                say(f"{run.name} seed {run.seed} broke off:\n{traceback.format_exc()}")
                broken += 1
                left.pop(0)
                continue
        seconds = time.monotonic() - begun
        records.append(file, [*made, make(run.name, "headmax", DONE, seconds, "s", run.seed, run=asdict(run))])
        left.pop(0)
        results = ", ".join(f"{r.metric} {r.value:.4g}" for r in made if r.metric in ("validation loss", "accuracy", "failed"))
        failures = "".join(f"; {failure}" for r in made for failure in r.extra.get("failures", ()))
        say(f"{run.name} seed {run.seed}: {results}{failures}; {seconds:.0f} s, {len(left)} runs and {clock.left:.0f} s left")
    return len(left) + broken
