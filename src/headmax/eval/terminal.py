"""`headmax eval`: runs the stages with progress bars, and prints a table of results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headmax import durable, records
from headmax.eval import names, requests
from headmax.eval.run import Evaluation, Settings, model_name
from headmax.eval.score import REQUESTS, SCORES, find_tokenizer, score_folder
from headmax.eval.scores import ScoreFile
from headmax.tables import Table
from headmax.train.loading import load_config
from headmax.train.parallel import World, join

RECORDS = "records.jsonl"
WORK = durable.Owner("an earlier evaluation", lambda folder: any((folder / name).is_file() for name in (REQUESTS, SCORES, RECORDS)))
Stage = Literal["all", "requests", "score", "metrics"]


@dataclass(frozen=True)
class Place:
    """The model to evaluate, and the folder for files."""

    checkpoint: str | Path
    tokenizer: str | Path
    work: Path
    name: str | None = None
    """The model's name in records."""


def make_requests(evaluation: Evaluation, tasks: Sequence[str], place: Place) -> None:
    """Stage 1: writes requests.jsonl, and prints a line for every task with truncated requests."""
    console = Console(stderr=True)
    with console.status("requests") as status:
        by_task = evaluation.requests(tasks, status.update)
    requests.write(place.work / REQUESTS, by_task)
    for task, asked in by_task.items():
        if (cut := requests.cut(asked))["requests"]:
            console.print(f"{task}: {cut['requests']:,} of {len(asked):,} requests truncated, by {cut['tokens']:,} tokens in total")


def make_scores(world: World, place: Place, dtype: str | None, batch_tokens: int | None) -> list[str]:
    """Stage 2: scores.jsonl; one line for each task that could not be scored."""
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not world.main) as progress:
        bars: dict[str, Any] = {}

        def say(task: str, done: int, total: int) -> None:
            if task not in bars:
                bars[task] = progress.add_task(task, total=total)
            progress.update(bars[task], completed=done)

        return score_folder(world, place.checkpoint, place.tokenizer, place.work, dtype, batch_tokens, say)


def make_metrics(evaluation: Evaluation, tasks: Sequence[str], place: Place, out: Path | None) -> None:
    """Stage 3: appends records, and prints a table of them."""
    asked, file = requests.read(place.work / REQUESTS), ScoreFile(place.work / SCORES)
    if file.source is None:
        raise FileNotFoundError(f"{place.work / SCORES}: no scores; make them with --stage score")
    remaining = [task for task in tasks if not any(line.startswith(f"task {task}: ") for line in evaluation.failures)]
    evaluation.failures += [f"task {task}: not in {place.work / REQUESTS}" for task in remaining if task not in asked]
    with Console(stderr=True).status("metrics") as status:
        metrics = evaluation.metrics([task for task in remaining if task in asked], file.scores, status.update)
    name = place.name or model_name(evaluation.config, Path(place.checkpoint).resolve().name)
    results = evaluation.records(metrics, asked, file.source, name)
    records.append(out or place.work / RECORDS, results)
    table = Table(["task", "metric", "value", "± standard error", "n"], title=name)
    for record in results:
        error = record.extra["stderr"]
        cells = [f"{record.value:.4f}", "" if error is None else f"{error:.4f}", str(record.extra["n"])]
        table.rows.append([record.case, record.metric, *cells])
    if results:
        Console(width=None if sys.stdout.isatty() else 120).print(table.terminal())


def run(
    place: Place,
    tasks: str,
    settings: Settings,
    stage: Stage,
    out: Path | None,
    device: str | None,
    dtype: str | None,
    batch_tokens: int | None,
) -> list[str]:
    """Runs a stage or all of them; one line for each task that could not be done, on the first rank."""
    records.check(out or place.work / RECORDS)
    config = load_config(place.checkpoint)
    wanted, failures = names.expand(tasks, config.vocab_size)
    if not wanted:
        return failures
    evaluation = Evaluation(config, find_tokenizer(place.tokenizer), settings, failures)
    with join(device) as world, world.sole_user(place.work, WORK):
        if stage in ("all", "requests"):
            world.first(lambda: make_requests(evaluation, wanted, place))
        if stage in ("all", "score"):
            failures += make_scores(world, place, dtype, batch_tokens)
        if stage in ("all", "metrics"):
            world.first(lambda: make_metrics(evaluation, wanted, place, out))
        return failures if world.main else []
