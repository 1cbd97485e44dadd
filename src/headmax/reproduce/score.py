"""What a trained model answers to the prepared requests, as it is and after a short training on needles; scores come home in one file."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headmax.eval import requests
from headmax.eval.requests import Request
from headmax.eval.score import REQUESTS, score
from headmax.eval.scores import Score, ScoreFile, Source
from headmax.eval.scoring import Scorer
from headmax.generate.terminal import load_tokenizer
from headmax.models import HeadmaxForCausalLM
from headmax.records import Record, Recorder
from headmax.reproduce import runs
from headmax.reproduce.needles import NEEDLES, NeedleRows
from headmax.reproduce.runs import Run
from headmax.train import EvalConfig
from headmax.train.metrics import read_lines
from headmax.train.trainer import fit

SCORES = "scores.jsonl.gz"
"""In a run's folder."""
NEEDLE_LR = 1e-3
BATCH_TOKENS = 65_536
"""Of the prepared requests in one forward pass."""


class Examiner:
    """Examines models with what `headmax reproduce prepare` put into a data folder."""

    def __init__(self, data: Path | None, out: Path, make: Recorder, device: torch.device) -> None:
        self.data, self.out, self.make, self.device = data or Path(), out, make, device

    @functools.cached_property
    def asked(self) -> dict[str, list[Request]]:
        return requests.read(self.data / REQUESTS)

    @functools.cached_property
    def needles(self) -> NeedleRows:
        return NeedleRows(self.data / NEEDLES)

    @functools.cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.data)

    def __call__(self, run: Run, model: HeadmaxForCausalLM) -> Iterator[Record]:
        if run.examined == "whole":
            yield self._score(run, model, self.asked, tuned=False)
            tuned, loss = self._tune(run, model)
            yield self._record(run, "needle training loss", loss, "nats")
            yield self._score(run, tuned, {task: asked for task, asked in self.asked.items() if task.startswith("niah")}, tuned=True)
        elif run.examined == "wikitext":
            yield self._score(run, model, {"wikitext": self.asked["wikitext"]}, tuned=False)

    def _record(self, run: Run, metric: str, value: float, unit: str, **extra: float) -> Record:
        return self.make(run.name, "headmax", metric, value, unit, run.seed, run=asdict(run), **extra)

    def _tune(self, run: Run, model: HeadmaxForCausalLM) -> tuple[HeadmaxForCausalLM, float]:
        """The model after a short training on needles, and its last loss on answers."""
        config = runs.text_training(runs.NEEDLE_STEPS, run.seed, NEEDLE_LR)
        config = replace(config, device=self.device.type, eval=EvalConfig(every=0))
        with tempfile.TemporaryDirectory() as folder:
            tuned = fit(model.config, config, self.needles, Path(folder), start=model.state_dict())
            losses = [line["loss"] for line in read_lines(Path(folder) / "metrics.jsonl")]
        return tuned, statistics.mean(losses[-max(1, runs.NEEDLE_STEPS // 10) :])

    def _score(self, run: Run, model: HeadmaxForCausalLM, asked: Mapping[str, Sequence[Request]], *, tuned: bool) -> Record:
        """Appends the answers to the file of scores."""
        begun = time.monotonic()
        with self.device:
            copy = HeadmaxForCausalLM(model.config)  # not compiled: there are too many shapes
        copy.load_state_dict(model.state_dict())
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        scorer = Scorer(copy.to(self.device, dtype), self.tokenizer, BATCH_TOKENS)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            answered = ScoreFile(Path(folder) / "scores.jsonl")
            score(scorer, asked, answered, lambda *_: None)
        write_scores(self.out / SCORES, Scores(run, tuned, scorer.source, answered.scores), asked)
        number = sum(map(len, asked.values()))
        return self._record(run, "needles answered" if tuned else "requests answered", number, "requests", seconds=time.monotonic() - begun)


@dataclass(frozen=True)
class Scores:
    """What one model answered."""

    run: Run
    tuned: bool
    """Whether it was trained on needles."""
    source: Source
    by_id: dict[str, Score]


def digest(asked: Sequence[Request]) -> str:
    return hashlib.sha256("".join(request.id for request in asked).encode()).hexdigest()[:16]


def write_scores(path: Path, scores: Scores, asked: Mapping[str, Sequence[Request]]) -> None:
    """Appends a member to a gzip file: a line that says whose scores follow, then a line a task, its scores in the requests' order."""
    header = {"run": asdict(scores.run), "tuned": scores.tuned, "source": asdict(scores.source)}
    lines = [header]
    lines += [{"task": t, "requests": digest(wanted), "scores": [_row(scores.by_id[r.id]) for r in wanted]} for t, wanted in asked.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(gzip.compress("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()))


def read_scores(path: Path, asked: Mapping[str, Sequence[Request]]) -> Iterator[Scores]:
    """What `write_scores` wrote, model by model, if it was these requests that were answered."""
    made: Scores | None = None
    with gzip.open(path, "rt") as file:
        for line in map(json.loads, file):
            if "run" in line:
                if made is not None:
                    yield made
                made = Scores(Run(**line["run"]), line["tuned"], Source(**line["source"]), {})
                continue
            wanted = asked.get(line["task"], [])
            if digest(wanted) != line["requests"]:
                raise ValueError(f"{path}: answers to other requests of {line['task']} than {REQUESTS} has now")
            assert made is not None
            made.by_id.update({r.id: Score(r.id, *row) for r, row in zip(wanted, line["scores"], strict=True)})
    if made is not None:
        yield made


def _row(score: Score) -> list[Any]:
    """A score without its id."""
    return [None, None, score.text] if score.logprob is None else [round(score.logprob, 4), score.hits]
