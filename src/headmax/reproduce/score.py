"""What a trained model answers to the prepared requests, as it is and after a short training on needles; scores come home in one file."""

from __future__ import annotations

import functools
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from headmax.eval import requests
from headmax.eval.requests import Request
from headmax.eval.score import REQUESTS, score
from headmax.eval.scores import ScoreFile
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
"""For each model a line that says whose scores follow, then those of a score file."""
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
        copy = HeadmaxForCausalLM(model.config)  # not compiled: there are too many shapes
        copy.load_state_dict(model.state_dict())
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        scorer = Scorer(copy.to(self.device, dtype), self.tokenizer, BATCH_TOKENS)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "scores.jsonl"
            score(scorer, asked, ScoreFile(path), lambda *_: None)
            text = json.dumps({"run": asdict(run), "tuned": tuned}) + "\n" + path.read_text()
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / SCORES).open("ab", buffering=0) as file:
            file.write(gzip.compress(text.encode()))
        number = sum(map(len, asked.values()))
        return self._record(run, "needles answered" if tuned else "requests answered", number, "requests", seconds=time.monotonic() - begun)


def read_scores(path: Path, folder: Path) -> Iterator[tuple[Run, bool, ScoreFile]]:
    """(run, whether it was trained on needles, scores) of a file of scores; `folder` is for files that are read one by one."""
    run: Run | None = None
    tuned, lines = False, list[str]()

    def made() -> Iterator[tuple[Run, bool, ScoreFile]]:
        if run is not None:
            (folder / "scores.jsonl").write_text("".join(lines))
            yield run, tuned, ScoreFile(folder / "scores.jsonl")

    with gzip.open(path, "rt") as file:
        for line in file:
            if line.startswith('{"run"'):
                yield from made()
                header = json.loads(line)
                run, tuned, lines = Run(**header["run"]), header["tuned"], []
            else:
                lines.append(line)
    yield from made()
