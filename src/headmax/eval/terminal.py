"""`headmax eval`: the stages with progress, and a table of what came out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from headmax import records
from headmax.eval import names, requests
from headmax.eval.run import Evaluation, Settings, model_name, score
from headmax.eval.scores import ScoreFile
from headmax.eval.scoring import Scorer
from headmax.generate.terminal import load, load_tokenizer
from headmax.models import HeadmaxConfig

Stage = Literal["all", "requests", "score", "metrics"]


@dataclass(frozen=True)
class Place:
    """Whose evaluation, and where its files are."""

    checkpoint: Path
    tokenizer: Path
    work: Path
    device: str | None
    dtype: str | None
    name: str | None

    @property
    def requests(self) -> Path:
        return self.work / "requests.jsonl"

    @property
    def scores(self) -> Path:
        return self.work / "scores.jsonl"


def run(place: Place, tasks: str, settings: Settings, stage: Stage, out: Path | None, batch_tokens: int) -> list[str]:
    """Runs a stage or all of them; one line for each task that failed."""
    if not (place.checkpoint / "config.json").is_file():
        raise FileNotFoundError(f"{place.checkpoint}: no config.json there; give a folder that save_pretrained wrote")
    config = HeadmaxConfig.from_pretrained(place.checkpoint)
    wanted, failures = names.expand(tasks)
    if "mqar" in tasks.split(","):  # of the whole group, what the vocabulary has keys for
        wanted = [task for task in wanted if names.MQAR.get(task, 0) <= config.vocab_size // 2]
    try:
        tokenizer = load_tokenizer(place.tokenizer)
    except ValueError:  # recall needs none, and the tasks that need one say so
        tokenizer = None
    console = Console(stderr=True)
    evaluation = Evaluation(config, tokenizer, settings, failures)
    if stage in ("all", "requests"):
        with console.status("requests") as status:
            made = evaluation.requests(wanted, status.update if console.is_terminal else console.print)
        requests.write(place.requests, made)
        for task, asked in made.items():
            if (cut := requests.cut(asked))["requests"]:
                console.print(f"{task}: {cut['requests']:,} of {len(asked):,} requests were cut, by {cut['tokens']:,} tokens in all")
    if stage in ("all", "score"):
        _score(place, tokenizer, batch_tokens, console)
    if stage in ("all", "metrics"):
        asked = requests.read(place.requests)
        file = ScoreFile(place.scores)
        if file.source is None:
            raise FileNotFoundError(f"{place.scores}: no scores there; make them with --stage score")
        with console.status("metrics") as status:
            ready = [task for task in wanted if task in asked]
            evaluation.failures += [f"task {task}: not in {place.requests}" for task in wanted if task not in asked and stage == "metrics"]
            found = evaluation.metrics(ready, file.scores, status.update if console.is_terminal else console.print)
        name = place.name or model_name(config, place.checkpoint.resolve().name)
        made_records = evaluation.records(found, asked, file.source, name)
        records.append(out or place.work / "records.jsonl", made_records)
        _show(made_records, name)
    return evaluation.failures


def _score(place: Place, tokenizer: Any, batch_tokens: int, console: Console) -> None:
    device = place.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load(place.checkpoint, device, place.dtype and getattr(torch, place.dtype))
    asked, file = requests.read(place.requests), ScoreFile(place.scores)
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bars: dict[str, Any] = {}

        def say(task: str, done: int, total: int) -> None:
            if task not in bars:
                bars[task] = progress.add_task(task, total=total)
            progress.update(bars[task], completed=done)

        score(Scorer(model, tokenizer, batch_tokens), asked, file, say)


def _show(made: Sequence[records.Record], name: str) -> None:
    table = Table("task", "metric", "value", "± standard error", "n", title=name, title_justify="left", box=None)
    for record in made:
        error = record.extra["stderr"]
        table.add_row(record.case, record.metric, f"{record.value:.4f}", "" if error is None else f"{error:.4f}", str(record.extra["n"]))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
