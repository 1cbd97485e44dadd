"""The demos' pictures: training and held-out figures, and reports of who wins which token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headmax.analysis import report, style
from headmax.analysis.gates import encode, trace
from headmax.analysis.style import styled, subplots
from headmax.data.mqar import MQAR
from headmax.demo.corpus import Document
from headmax.demo.variants import COLOURS
from headmax.train.loading import load_tokenizer

if TYPE_CHECKING:
    from headmax import HeadmaxForCausalLM
    from headmax.demo.code import Result
    from headmax.demo.recall import Run
    from headmax.demo.text import Text

SMOOTH = 10
"""Steps whose losses are averaged in the picture."""
SHOWN = 600
"""Tokens of a file in the report."""


@styled()
def draw(runs: dict[str, Run], task: MQAR, seed: int, path: Path) -> None:
    """Held-out accuracy over training."""
    figure, curve = subplots(figsize=(7, 3.6))
    for variant, run in runs.items():
        curve.plot(run.steps, run.accuracy, color=COLOURS[variant], label=f"{variant} ({run.accuracy[-1]:.3f})")
    curve.axhline(task.chance, color="black", linestyle=":", linewidth=1, label=f"chance ({task.chance:.3f})")
    curve.set(title=f"Associative recall of {task.num_pairs} pairs, seed {seed}", xlabel="training step", ylabel="accuracy", ylim=(0, 1.02))
    curve.legend()
    style.draw(figure, path)


def show_gates(model: HeadmaxForCausalLM, task: MQAR, seed: int, path: Path) -> None:
    """The report of one held-out sequence: the pairs, then the keys that ask for their values."""
    ids, pairs = task.held_out(seed).batch([0]).input_ids[0, : 3 * task.num_pairs], 2 * task.num_pairs
    first_value = task.vocab_size // 2
    names = [f"=v{i - first_value}" if i >= first_value else f" k{i}" + "?" * (n >= pairs) for n, i in enumerate(ids.tolist())]
    report.write(path, [trace(model, ids, names, f"Associative recall with softmax gates, seed {seed}")])


@styled()
def draw_code(results: dict[str, Result], seed: int, path: Path) -> None:
    """Training loss over steps, a running mean, and bits per byte of the held-out files."""
    figure, (curve, dots) = subplots(1, 2, figsize=(9, 3.6), width_ratios=(2, 1))
    for variant, result in results.items():
        losses = [line["loss"] for line in result.lines]
        means = [sum(losses[max(0, n - SMOOTH) : n]) / min(n, SMOOTH) for n in range(1, len(losses) + 1)]
        curve.plot([line["step"] for line in result.lines], means, color=COLOURS[variant], label=variant)
        dots.plot(result.bits, variant, "o", color=COLOURS[variant], markersize=9)
        dots.annotate(f"{result.bits:.3f}", (result.bits, variant), xytext=(0, 9), textcoords="offset points", ha="center")
    curve.set(title=f"Python's standard library, seed {seed}", xlabel="training step", ylabel=f"training loss, mean of {SMOOTH} steps")
    curve.legend()
    dots.set(title="Held-out files", xlabel="bits per byte (lower is better)", ylim=(len(results) - 0.5, -0.7))
    dots.margins(x=0.25)
    style.draw(figure, path)


def show_code(model: HeadmaxForCausalLM, text: Text, seed: int, path: Path) -> None:
    """The report of a piece of held-out code."""
    piece = held_out_code(text.corpus.valid)
    ids, tokens = encode(load_tokenizer(text.folder), piece.text)
    name = f"{piece.name}, held out, with softmax gates, seed {seed}"
    report.write(path, [trace(model, ids[:SHOWN], tokens[:SHOWN], name)])


def held_out_code(documents: tuple[Document, ...]) -> Document:
    """The held-out file with most functions, from its first one on."""
    marks = "def ", "class "
    file = max(documents, key=lambda document: document.text.count("\ndef "))
    lines = file.text.splitlines(keepends=True)
    first = next((n for n, line in enumerate(lines) if line.startswith(marks)), 0)
    return Document(file.name, "".join(lines[first:]))
