"""What a trained model answers to the prepared requests, as it is and after a short training on needles; scores come home in one file."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmax import durable
from headmax.analysis.gates import Gate, trace
from headmax.data.dataset import TokenShards
from headmax.eval import requests
from headmax.eval.requests import Request
from headmax.eval.score import REQUESTS, score
from headmax.eval.scores import Score, ScoreFile, Source
from headmax.eval.scoring import Scorer
from headmax.models import HeadmaxForCausalLM
from headmax.records import Record, Recorder
from headmax.train import EvalConfig
from headmax.train.loading import load_tokenizer
from headmax.train.metrics import read_lines
from headmax.train.trainer import fit
from lab.study import runs
from lab.study.needles import NEEDLES, NeedleRows
from lab.study.runs import Run
from lab.study.wins import Tokens, information

SCORES = "scores.jsonl.gz"
"""In a run's folder."""
NEEDLE_LR = 1e-3
BATCH_TOKENS = 65_536
"""Of the prepared requests in one forward pass."""
WINS = "kind of token tells winner"
READ = 16
"""Held-out sequences on which heads are seen to win."""


class Examiner:
    """Examines models with what `python -m lab prepare` put into a data folder."""

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
            copy = self._copy(model)
            yield self._score(run, copy, self.asked, tuned=False)
            if run.learns_gates:
                yield self._wins(run, copy)
            tuned, loss = self._tune(run, model)
            yield self._record(run, "needle training loss", loss, "nats")
            needles = {task: asked for task, asked in self.asked.items() if task.startswith("niah")}
            yield self._score(run, self._copy(tuned), needles, tuned=True)
        elif run.examined == "wikitext":
            yield self._score(run, self._copy(model), {"wikitext": self.asked["wikitext"]}, tuned=False)

    def _record(self, run: Run, metric: str, value: float, unit: str, **extra: Any) -> Record:
        return self.make(run.name, "headmax", metric, value, unit, run.seed, run=asdict(run), **extra)

    def _copy(self, model: HeadmaxForCausalLM) -> HeadmaxForCausalLM:
        """To ask: not compiled, since there are too many shapes."""
        with self.device:
            copy = HeadmaxForCausalLM(model.config)
        copy.load_state_dict(model.state_dict())
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return copy.to(self.device, dtype).eval()  # type: ignore[arg-type]

    @functools.cached_property
    def text(self) -> tuple[Tensor, Tokens]:
        """Held-out sequences [sequences, time], and their tokens by kind."""
        ids = TokenShards(self.data, length=runs.LENGTH, seed=0, split="valid").batch(range(READ)).input_ids
        return ids, Tokens(ids.flatten(), self.tokenizer)

    def _wins(self, run: Run, model: HeadmaxForCausalLM) -> Record:
        """Which heads win what on held-out text, by gate; and how much of that a model tells that was not trained."""
        torch.manual_seed(run.seed)
        found, before = (self._won(one, run.name) for one in (model, self._copy(HeadmaxForCausalLM(model.config))))
        told, untrained = ({name: information(gate["kinds"]) for name, gate in gates.items()} for gates in (found, before))
        return self._record(run, WINS, statistics.mean(told.values()), "bits", gates=found, untrained=untrained)

    def _won(self, model: HeadmaxForCausalLM, name: str) -> dict[str, dict[str, list[list[Any]]]]:
        ids, tokens = self.text
        shares: dict[str, list[Tensor]] = defaultdict(list)
        for row in ids:
            for layer in trace(model, row, [""] * len(row), name).layers:
                for kind, gate in (("read", layer.read), ("write", layer.write)):
                    if gate is not None:
                        shares[f"{layer.index}/{kind}"].append(gate.shares)
        return {gate: tokens.wins(Gate(torch.cat(each))) for gate, each in shares.items()}

    def _tune(self, run: Run, model: HeadmaxForCausalLM) -> tuple[HeadmaxForCausalLM, float]:
        """The model after a short training on needles, and its last loss on answers."""
        config = runs.text_training(runs.NEEDLE_STEPS, run.seed, NEEDLE_LR)
        config = replace(config, device=self.device.type, eval=EvalConfig(every=0))
        with tempfile.TemporaryDirectory() as folder:
            tuned = fit(model.config, config, self.needles, Path(folder), start=model.state_dict())
            losses = [line["loss"] for line in read_lines(Path(folder) / "metrics.jsonl")]
        return tuned, statistics.mean(losses[-max(1, runs.NEEDLE_STEPS // 10) :])

    def _score(self, run: Run, model: HeadmaxForCausalLM, asked: Mapping[str, Sequence[Request]], *, tuned: bool) -> Record:
        """Appends the answers to the file of scores; a task that failed is left out and named."""
        begun = time.monotonic()
        scorer = Scorer(model, self.tokenizer, BATCH_TOKENS)
        with tempfile.TemporaryDirectory() as folder:
            answered = ScoreFile(Path(folder) / "scores.jsonl")
            failures = score(scorer, asked, answered, lambda *_: None)
        whole = {task: wanted for task, wanted in asked.items() if all(request.id in answered.scores for request in wanted)}
        write_scores(self.out / SCORES, Scores(run, tuned, scorer.source, answered.scores), whole)
        metric, number = "needles answered" if tuned else "requests answered", sum(map(len, whole.values()))
        return self._record(run, metric, number, "requests", seconds=time.monotonic() - begun, failures=failures)


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
    durable.append(path, gzip.compress("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()))


def read_scores(path: Path, asked: Mapping[str, Sequence[Request]]) -> Iterator[Scores]:
    """What `write_scores` wrote, model by model, if it was these requests that were answered; not what a killed process left unfinished."""
    made: Scores | None = None
    with contextlib.suppress(EOFError), gzip.open(path, "rt") as file:
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
