"""`headmax demo recall`: a tiny model trained three times on associative recall."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from headmax import records
from headmax.data.mqar import MQAR
from headmax.demo import figure
from headmax.demo.display import Display
from headmax.demo.outputs import demo_folder, write_records
from headmax.demo.training import Experiment, Trained, train
from headmax.demo.variants import VARIANTS
from headmax.demo.verdict import Metric, recorded_seeds, verdict
from headmax.recipes.recall import recall_model, recall_training
from headmax.tables import Table
from headmax.train.metrics import Line

METRIC = Metric("mean accuracy over training", "fraction", "mean accuracy over training")
"""The mean rewards faster learning."""


def run(*, seed: int, heads: int, pairs: int, key: int, steps: int, out: Path, record: Path | None) -> None:
    """Trains the variants on the same sequences, then shows results, a figure and a report."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    task, console = MQAR(num_pairs=pairs, vocab_size=64), Console()
    models = {variant: recall_model("linear", task, head_gate=gate, num_heads=heads, head_k_dim=key) for variant, gate in VARIANTS.items()}
    config = replace(recall_training(task, steps=steps, seed=seed), device="cpu", checkpoint_every=100)
    experiment = Experiment(models, config, task.samples(seed), task.held_out(seed))
    case = f"mqar pairs={pairs} heads={heads} key={key} steps={steps}"
    with demo_folder("headmax demo recall", out, record):
        console.print(
            f"Associative recall: {pairs} key-value pairs, then each key asks for its value ({3 * pairs} tokens, chance {task.chance:.3f})."
        )
        trained = train(experiment, out, Display(console, steps, describe))
        means = {variant: statistics.fmean(result.accuracies.values()) for variant, result in trained.items()}
        settings = {"pairs": pairs, "heads": heads, "key": key, "steps": steps}
        write_records(measurements(trained, means, case, seed, settings), out, record)
        print_results(trained, means, steps, seed, console)
        for line in verdict(METRIC, means, recorded_seeds(METRIC, case)):
            console.print(line, highlight=False, soft_wrap=True)
        figure.plot_recall(trained, task, seed, out / "demo.png")
        figure.report_recall(trained["softmax"].model, task, seed, out / "report.html")
    console.print(f"\nPicture: {out / 'demo.png'}", highlight=False, soft_wrap=True)
    console.print(f"Which head wins each token: open {out / 'report.html'}", highlight=False, soft_wrap=True)


def describe(line: Line) -> str:
    """Training loss and the latest held-out accuracy."""
    accuracy = f", accuracy {line['validation']['accuracy']:.3f}" if "validation" in line else ""
    return f"loss {line['loss']:.3f}{accuracy}"


def final_accuracy(result: Trained) -> float:
    return result.lines[-1]["validation"]["accuracy"]


def measurements(
    trained: Mapping[str, Trained], means: Mapping[str, float], case: str, seed: int, settings: Mapping[str, int]
) -> Iterator[records.Record]:
    """Accuracy of every variant, at the end and averaged over training."""
    make = records.Recorder("demo", "cpu")
    for variant, result in trained.items():
        for metric, value in (("accuracy", final_accuracy(result)), (METRIC.record, means[variant])):
            yield make(f"{case} {variant}", "headmax", metric, value, METRIC.unit, seed, variant=variant, **settings)


def print_results(trained: Mapping[str, Trained], means: Mapping[str, float], steps: int, seed: int, console: Console) -> None:
    table = Table(["", "accuracy", "mean over training"], title=f"After {steps} steps, seed {seed}")
    for variant, result in trained.items():
        table.rows.append([variant, f"{final_accuracy(result):.3f}", f"{means[variant]:.3f}"])
    console.print(table.terminal())
