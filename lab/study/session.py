"""The next trials of the plan, one after the other, while there is time: what is recorded is skipped, and each makes one record."""

from __future__ import annotations

import functools
import json
import math
import shutil
import signal
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headmax import records
from headmax.data.dataset import TokenShards
from headmax.data.source import Source
from headmax.eval import requests
from headmax.eval.scoring import Scorer
from headmax.models import HeadmaxConfig, HeadmaxForCausalLM
from headmax.records import Record, Recorder
from headmax.train import TrainConfig
from headmax.train.evaluate import evaluate
from headmax.train.faults import Interrupted, TrainingError
from headmax.train.loading import load_tokenizer
from headmax.train.metrics import Line, read_lines
from headmax.train.parallel import find_device
from headmax.train.trainer import training
from lab import RESULTS
from lab.study import corpus, trials
from lab.study.needles import NEEDLES, NeedleRows
from lab.study.norms import NormProbe
from lab.study.trials import Trial

SUITE = "study"
RECORDS = RESULTS / "study.jsonl"
"""Trials that the repository holds."""
LOSS, ACCURACY = "validation loss", "accuracy"
"""What a record's value is, of language and recall."""
CURVE = 32
"""Points of a recorded loss curve."""
MARGIN = 1.05
"""On what a trial is expected to take."""
FIRST = {"tokens_per_second": 450_000.0, "startup": 100.0, "examination": 90.0}
"""What is expected of a device of which nothing is recorded."""
WARM = 20.0
"""Seconds before the first steps of a model that this process has compiled."""
SETTLING = 5
"""First steps of a run, in which kernels are compiled."""
SCORE_TOKENS = 65_536
"""Of questions in one forward pass."""
MOST_COMPILED = 4096
"""Variants of the blocks' code, which all models of a session share."""
MOST_NOISE = 0.02
"""Relative difference of the noise check above which nothing else is trained."""


@dataclass
class Clock:
    """The seconds that may be used."""

    budget: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.budget - (time.monotonic() - self.begun)

    def stop_in_time(self, line: Line) -> None:
        """Asks the trainer for a stop, as a signal does, where no time is left; it saves, and goes on in the next call."""
        if self.left <= 0 and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Texts:
    """The unpacked data, and what a pass over it takes."""

    folder: Path

    @functools.cached_property
    def validation(self) -> TokenShards:
        return TokenShards(self.folder, length=trials.LENGTH, seed=0, split="valid")

    @functools.cached_property
    def pass_steps(self) -> int:
        return TokenShards(self.folder, length=trials.LENGTH, seed=0).num_samples // trials.BATCH

    @functools.cached_property
    def questions(self) -> dict[str, list[requests.Request]]:
        return requests.read(self.folder / corpus.QUESTIONS)

    @functools.cached_property
    def answers(self) -> dict[str, list[str]]:
        return json.loads((self.folder / corpus.ANSWERS).read_text())

    @functools.cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)


def recorded(path: Path) -> dict[Trial, Record]:
    """The trials of a file of records; of one that is recorded twice, the first."""
    found: dict[Trial, Record] = {}
    for record in records.read(path):
        if record.suite == SUITE and "trial" in record.extra:
            found.setdefault(Trial(**record.extra["trial"]), record)
    return found


def outcomes(found: Iterable[tuple[Trial, Record]]) -> dict[Trial, float]:
    """What decisions are made on: the loss or accuracy of each trial, NaN where it failed."""
    return {trial: math.nan if record.extra.get("error") else record.value for trial, record in found}


def source_of(trial: Trial, texts: Texts | None) -> tuple[Source, Source]:
    """What it trains on, in the seed's order, and what it is validated on."""
    if trial.task is not None:
        return trial.task.samples(trial.seed), trial.task.held_out(trial.seed)
    assert texts is not None
    return TokenShards(texts.folder, length=trials.LENGTH, seed=trial.seed), texts.validation


def initial(trial: Trial, vocab_size: int) -> dict[str, torch.Tensor]:
    """The parameters of its plain twin, which all gates of a seed and start have in common."""
    with torch.random.fork_rng([]):
        torch.manual_seed(trial.seed)
        return HeadmaxForCausalLM(replace(trial, gates="plain").model(vocab_size)).state_dict()


def loss_curve(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """The training loss over tokens: means of neighbouring steps."""
    each = -(-len(lines) // CURVE)
    groups = [[line for line in lines[n : n + each] if not line["skipped"]] for n in range(0, len(lines), each)]
    return [(group[-1]["tokens"], round(statistics.mean(line["loss"] for line in group), 4)) for group in groups if group]


def gate_points(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Over training: validation loss on a few sequences, mean gate entropy, how many heads are dead."""
    points = []
    for line in lines:
        if "validation" in line:
            gates = list(line.get("gates", {}).values())
            health = {"entropy": statistics.mean(g["entropy"] for g in gates), "dead": sum(len(g["dead"]) for g in gates)} if gates else {}
            points.append({"tokens": line["tokens"], "loss": line["validation"]["loss"], **health})
    return points


@dataclass(frozen=True)
class Options:
    """What a session may do."""

    split: bool = False
    """Start a training that will not end in time too."""
    share: tuple[int, int] = (0, 1)
    """(i, n): take the i-th of n parts of all trials, so that n processes share a device."""

    def mine(self, trial: Trial) -> bool:
        return zlib.crc32(trial.name.encode()) % self.share[1] == self.share[0]


class Session:
    """Trials on one device, recorded in one file."""

    def __init__(
        self, data: Path | None, out: Path, file: Path, device: str, seconds: float, *, options: Options, say: Callable[[str], object]
    ) -> None:
        self.out, self.file, self.say, self.options = out, file, say, options
        self.device, self.clock = find_device(device), Clock(seconds)
        self.make = Recorder(SUITE, self.device)
        self.texts = None if data is None else Texts(corpus.unpack(data))
        self.compiled: set[tuple[object, ...]] = set()
        self.probe: NormProbe | None = None

    def run(self, part: str, most: int | None = None) -> int:
        """Trains and records what is next and fits. How many trials that is."""
        if part == "language" and self.texts is None:
            raise ValueError("--data must name a folder that `python -m lab study data` wrote: language models train on text")
        number = 0
        while number != most:
            found = recorded(self.file)
            trial = self.next(part, found)
            if trial is None:
                break
            try:
                record = self.measure(trial)
            except Interrupted:
                self.say(f"{trial.name}: stopped in time; the same command goes on with it where its folder still is")
                break
            records.append(self.file, [record])
            shutil.rmtree(self.out / trial.name, ignore_errors=True)
            number += 1
            told = record.extra.get("error") or f"{record.metric} {record.value:.4f}"
            self.say(f"{trial.name}: {told}; {record.extra['seconds']:.0f} s, {self.clock.left:.0f} s left")
        return number

    def next(self, part: str, found: dict[Trial, Record]) -> Trial | None:
        """The first trial in the plan's order that is not recorded and fits into the time that is left; or any that may be split."""
        done = outcomes(found.items())
        noise = trials.noise(done) if part == "language" else None
        if noise is not None and not noise < MOST_NOISE:
            raise ValueError(f"the noise check failed: two seeds differ by {noise:.1%}; change batch, rate or warm-up in the plan first")
        told = False
        for trial in dict.fromkeys(trials.PARTS[part](done)):
            if trial in done or not self.options.mine(trial):
                continue
            if part == "language" and noise is None and trial not in trials.noise_trials():
                break
            seconds = self.expected(trial, list(found.values()))
            if seconds < self.clock.left or (self.options.split and self.clock.left > seconds / 4):
                return trial
            if not told:
                told = True
                self.say(f"{trial.name} would take about {seconds:.0f} s, {self.clock.left:.0f} s are left: looking for a shorter one")
            if self.options.split:
                break
        return None

    def expected(self, trial: Trial, found: Sequence[Record]) -> float:
        """Seconds it will take, by what was measured on this device."""
        here = [r for r in found if r.device == self.make.device and not r.extra.get("error")]
        alike = [r for r in here if (r.extra["trial"]["backbone"], bool(r.extra["trial"]["pairs"])) == (trial.backbone, bool(trial.pairs))]
        if trial.task is not None:
            return MARGIN * max([r.extra["seconds"] for r in alike if r.extra["trial"]["pairs"] >= trial.pairs], default=0.0)
        speeds = [r.extra["tokens_per_second"] for r in alike]
        startups = [r.extra["startup"] for r in alike if r.extra["startup"] > WARM]
        startup = WARM if self.shape(trial) in self.compiled else max(startups, default=FIRST["startup"])
        tokens = self.steps(trial) * trials.LENGTH * trials.BATCH
        seconds = startup + tokens / (statistics.median(speeds) if speeds else FIRST["tokens_per_second"])
        if trial.examined:
            seconds += max([r.extra["examination"] for r in alike if "examination" in r.extra], default=FIRST["examination"])
        return MARGIN * seconds

    def steps(self, trial: Trial) -> int:
        assert self.texts is not None
        return trial.steps or self.texts.pass_steps

    def shape(self, trial: Trial) -> tuple[object, ...]:
        """What its kernels are compiled for."""
        return trial.backbone, trial.heads, trial.gates, trial.eps, trial.pairs

    def measure(self, trial: Trial) -> Record:
        """Trains, continues on needles and scores one trial."""
        begun = time.monotonic()
        text = trial.task is None
        source, validation = source_of(trial, self.texts)
        config = trial.train(0 if self.texts is None else self.texts.pass_steps)
        config = replace(config, device=self.device.type, checkpoint=replace(config.checkpoint, final=self.options.split))
        model_config = trial.model(source.vocab_size)
        folder = self.out / trial.name / "training"
        about: dict[str, Any] = {"trial": asdict(trial), "data": source.identity}
        metric, unit = (LOSS, "nats") if text else (ACCURACY, "fraction")
        try:
            model, score, seconds = self.fit(model_config, config, source, validation, folder, initial(trial, source.vocab_size))
            self.compiled.add(self.shape(trial))
        except TrainingError as error:  # a model that cannot be trained is a result; a disk that is full is none
            if isinstance(error.__cause__, OSError):
                raise
            about |= {"error": str(error), "seconds": time.monotonic() - begun}
            return self.make(trial.name, "headmax", metric, 0.0, unit, trial.seed, **about)
        lines = list(read_lines(folder / "metrics.jsonl"))
        about |= {"rate": trial.rate, "tokens": lines[-1]["tokens"], "parameters": sum(p.numel() for p in model.parameters())}
        about |= {"tokens_per_second": statistics.median(line["tokens_per_s"] for line in lines[SETTLING:] or lines)}
        about |= {"startup": max(0.0, seconds - sum(line["seconds"] for line in lines[SETTLING:])), "training_seconds": seconds}
        about |= {"points": gate_points(lines), "skipped": sum(line["skipped"] for line in lines)}
        if text:
            about |= {"curve": loss_curve(lines), "norms": self.probe.points if self.probe else [], "perplexity": math.exp(score["loss"])}
        if trial.examined:
            about |= self.examine(trial, model)
        about["seconds"] = time.monotonic() - begun
        return self.make(trial.name, "headmax", metric, score["loss" if text else "accuracy"], unit, trial.seed, **about)

    def fit(
        self,
        model: HeadmaxConfig,
        config: TrainConfig,
        source: Source,
        validation: Source | None,
        folder: Path,
        start: dict[str, torch.Tensor],
    ) -> tuple[HeadmaxForCausalLM, Line, float]:
        """A trained model, its scores on all of the held-out text, and the seconds that training took."""
        begun = time.monotonic()
        self.probe = NormProbe(model, validation, folder.with_name("norms.json")) if isinstance(validation, TokenShards) else None

        def show(line: Line) -> None:
            if "validation" in line and self.probe is not None:
                self.probe.look(trainer.model, line["tokens"])
            self.clock.stop_in_time(line)

        whole_run = training(model, config, source, folder, validation=validation, start=start, show=show)
        with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED, accumulated_recompile_limit=MOST_COMPILED), whole_run as trainer:
            trained = trainer.run()
            seconds = time.monotonic() - begun
            if validation is None:
                return trained, {}, seconds
            if not isinstance(validation, TokenShards):
                return trained, evaluate(trainer.replica, validation, config, trainer.world)[0], seconds
            whole = validation.num_samples // config.compute.micro_batch * config.compute.micro_batch
            everything = replace(config, eval=replace(config.eval, sequences=max(whole, 1)))
            return trained, evaluate(trainer.replica, validation, everything, trainer.world)[0], seconds

    def examine(self, trial: Trial, model: HeadmaxForCausalLM) -> dict[str, Any]:
        """SQuAD as the model is; S-NIAH after a continuation on needle texts. Right answers and questions, by task."""
        begun = time.monotonic()
        assert self.texts is not None
        asked = self.texts.questions
        scores = self.score(model, {"squad": asked["squad"]})
        config = trials.text_training(trials.NEEDLE_STEPS, trial.seed, trials.NEEDLE_RATE, trials.WARMUP_TOKENS)
        config = replace(config, device=self.device.type, eval=replace(config.eval, every=0))
        folder = self.out / trial.name / "needles"
        tuned, _, _ = self.fit(model.config, config, NeedleRows(self.texts.folder / NEEDLES), None, folder, model.state_dict())
        losses = [line["loss"] for line in read_lines(folder / "metrics.jsonl")]
        scores |= self.score(tuned, {task: each for task, each in asked.items() if task != "squad"})
        return {"right": scores, "needle_loss": statistics.mean(losses[-5:]), "examination": time.monotonic() - begun}

    def score(self, model: HeadmaxForCausalLM, asked: dict[str, list[requests.Request]]) -> dict[str, tuple[int, int]]:
        """[right, asked] by task, of a copy that is not compiled, since there are too many shapes."""
        assert self.texts is not None
        with self.device:
            copy = HeadmaxForCausalLM(model.config)
        copy.load_state_dict(model.state_dict())
        copy = copy.to(self.device, torch.bfloat16 if self.device.type == "cuda" else torch.float32).eval()  # type: ignore[arg-type]
        scorer = Scorer(copy, self.texts.tokenizer, SCORE_TOKENS)
        found = {}
        for task, each in asked.items():
            got = scorer.answers(each)
            if each[0].kind == "generate":
                right = sum(corpus.answered(self.texts.answers[r.id], got[r.id].text or "") for r in each)
            else:
                right = sum(got[r.id].hits == len(r.targets) for r in each)
            found[task] = (right, len(each))
        return found
