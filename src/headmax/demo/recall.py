"""The demonstration: one tiny backbone trained three times on associative recall, and what the gates made of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from headmax import HeadmaxForCausalLM, durable, records
from headmax.data.mqar import MQAR
from headmax.demo.variants import RECORDS, VARIANTS, mean, seed_scores
from headmax.recipes.recall import recall_model, recall_training
from headmax.train.loading import is_run
from headmax.train.metrics import Line
from headmax.train.trainer import fit

METRIC = "mean accuracy over training"
DEMO = durable.Owner(
    "an earlier demo",
    lambda folder: (
        any((folder / name).is_dir() for name in VARIANTS) and all(is_run(folder / name) for name in VARIANTS if (folder / name).exists())
    ),
)


@dataclass
class Run:
    """One variant's training: accuracy on held-out sequences at the steps where it was measured."""

    steps: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    model: HeadmaxForCausalLM | None = None


def run(*, seed: int, heads: int, pairs: int, key: int, steps: int, out: Path, record: Path | None) -> None:
    """Trains the variants on the same data from the same seed, draws the picture, prints the table and what earlier seeds gave."""
    from headmax.analysis.style import require_matplotlib
    from headmax.demo.figure import draw, show_gates

    require_matplotlib()
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    durable.claim(out, DEMO)
    if record is not None:
        records.check(record)
    console = Console()
    task = MQAR(num_pairs=pairs, vocab_size=64)
    case = f"mqar pairs={pairs} heads={heads} key={key} steps={steps}"
    console.print(
        f"Associative recall: {pairs} key-value pairs, then each key asks for its value ({3 * pairs} tokens, chance {task.chance:.3f})."
    )
    runs: dict[str, Run] = {}
    settings = replace(recall_training(task, steps=steps, seed=seed), device="cpu", checkpoint_every=0)
    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TextColumn("accuracy {task.fields[accuracy]:.3f}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bars = {variant: progress.add_task(variant, total=steps, accuracy=0.0, start=False) for variant in VARIANTS}
        for variant, bar in bars.items():
            progress.start_task(bar)
            run = runs[variant] = Run()

            def show(line: Line, run: Run = run, bar: TaskID = bar) -> None:
                if "validation" in line:
                    run.steps.append(line["step"])
                    run.accuracy.append(line["validation"]["accuracy"])
                    progress.update(bar, accuracy=run.accuracy[-1])
                progress.update(bar, completed=line["step"])

            shutil.rmtree(out / variant, ignore_errors=True)
            model = recall_model("linear", task, head_gate=VARIANTS[variant], num_heads=heads, head_k_dim=key)
            source, held_out = task.samples(seed), task.held_out(seed)
            run.model = fit(model, settings, source, out / variant, validation=held_out, show=show)

    make = records.Recorder("demo", "cpu")
    made = [
        make(f"{case} {variant}", "headmax", metric, value, unit, seed, variant=variant, pairs=pairs, heads=heads, key=key, steps=steps)
        for variant, r in runs.items()
        for metric, value, unit in (("accuracy", r.accuracy[-1], "fraction"), (METRIC, mean(r.accuracy), "fraction"))
    ]
    (out / "records.jsonl").unlink(missing_ok=True)
    records.append(out / "records.jsonl", made)
    if record is not None:
        records.append(record, made)
    draw(runs, task, seed, out / "demo.png")
    assert runs["softmax"].model is not None
    show_gates(runs["softmax"].model, task, seed, out / "report.html")

    table = Table("", "accuracy", "mean over training", title=f"after {steps} steps, seed {seed}", title_justify="left", box=None)
    for variant, r in runs.items():
        table.add_row(variant, f"{r.accuracy[-1]:.3f}", f"{mean(r.accuracy):.3f}")
    console.print(table)
    console.print(verdict({variant: mean(r.accuracy) for variant, r in runs.items()}))
    for line in earlier_seeds(RECORDS):
        console.print(line, soft_wrap=True)
    console.print(f"Picture: {out / 'demo.png'}. Who wins each token: open {out / 'report.html'} in a browser.", soft_wrap=True)


def verdict(score: dict[str, float]) -> str:
    """Plain words on who learnt faster, by mean accuracy over training."""
    rivals = {name: value for name, value in score.items() if name != "softmax"}
    best = max(rivals, key=lambda name: rivals[name])
    if score["softmax"] > rivals[best]:
        return (
            f"Here the softmax gates learnt faster than both plain and uniform (ahead of {best} by {score['softmax'] - rivals[best]:.3f})."
        )
    return f"Here the softmax gates did not win: {best} learnt faster, by {rivals[best] - score['softmax']:.3f}."


def earlier_seeds(path: Path) -> Iterator[str]:
    """One line per recorded setting: over how many seeds softmax was ahead of each rival, and the mean accuracies."""
    for case, scores in seed_scores(path, METRIC).items():
        ahead = " and ".join(f"of {rival} in {sum(s['softmax'] > s[rival] for s in scores)}" for rival in ("plain", "uniform"))
        means = ", ".join(f"{variant} {mean([s[variant] for s in scores]):.3f}" for variant in VARIANTS)
        yield f"Recorded, {case}: softmax ahead {ahead} of {len(scores)} seeds ({means})."
