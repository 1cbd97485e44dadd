"""From what runs brought home to the repository's records: those of training as they are, and metrics out of scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from headmax import records
from headmax.eval import requests, tables
from headmax.eval.requests import Request
from headmax.eval.run import Evaluation
from headmax.eval.score import REQUESTS
from headmax.records import Record
from lab import EVALUATIONS
from lab.study import run as running
from lab.study.prepare import evaluations
from lab.study.runs import Run
from lab.study.score import SCORES, Scores, read_scores

KEPT = {"answer_logprob"} | {column["metric"] for table in tables.PAPER["tables"] for column in table["columns"]}
"""Metrics that become records."""


def collect(outs: list[Path], data: Path, eval_data: Path, haystack: Path, say: Callable[[str], object]) -> int:
    """Adds what is new in folders that `python -m lab run` wrote to the repository's records. How many records that were."""
    number, asked = 0, requests.read(data / REQUESTS)
    for out in outs:
        known = running.finished(running.recorded([running.RECORDS]))
        fresh = [r for r in running.recorded([out / "records.jsonl"]) if Run(**r.extra["run"]) not in known]
        records.append(running.RECORDS, fresh)
        number += len(fresh)
    known = running.finished(running.recorded([running.RECORDS]))
    there = {(Run(**r.extra["run"]), r.extra["tuned"]) for r in records.read(EVALUATIONS) if "run" in r.extra}
    ways = evaluations(data, eval_data, haystack)
    for path in (out / SCORES for out in outs if (out / SCORES).exists()):
        for scores in read_scores(path, asked):
            if scores.run in known and (scores.run, scores.tuned) not in there:
                say(f"{scores.run.name} seed {scores.run.seed}" + ", after needles" * scores.tuned)
                made = list(measure(scores, asked, ways))
                records.append(EVALUATIONS, made)
                number += len(made)
                there.add((scores.run, scores.tuned))
    return number


def measure(scores: Scores, asked: Mapping[str, Sequence[Request]], ways: Mapping[str, Evaluation]) -> Iterator[Record]:
    """The metrics of all tasks whose requests were answered."""
    for task, evaluation in ways.items():
        if all(request.id in scores.by_id for request in asked[task]):
            found = evaluation.metrics([task], scores.by_id, lambda text: None)
            if evaluation.failures:
                raise ValueError(evaluation.failures[0])
            for record in evaluation.records(found, asked, scores.source, scores.run.name + "-needles" * scores.tuned):
                if record.metric in KEPT:
                    yield replace(record, extra=record.extra | {"run": asdict(scores.run), "tuned": scores.tuned})
