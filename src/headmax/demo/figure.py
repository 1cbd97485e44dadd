"""Figures of training and held-out results, and reports of which head wins which token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from headmax import HeadmaxForCausalLM
from headmax.analysis import report, style
from headmax.analysis.gates import encode, trace
from headmax.data.mqar import MQAR
from headmax.demo.corpus import Document
from headmax.demo.tokens import TokenizedCorpus
from headmax.demo.training import Trained
from headmax.demo.variants import COLOURS
from headmax.train.loading import load_tokenizer

SMOOTHING = 10
"""Steps in the running mean of the loss."""
REPORT_TOKENS = 600
"""Tokens of a file in the report."""


@style.styled()
def plot_code(trained: Mapping[str, Trained], bits: Mapping[str, float], seed: int, path: Path) -> None:
    """Training loss, and bits per byte of the held-out files."""
    figure, (curve, dots) = style.subplots(1, 2, figsize=(9, 3.6), width_ratios=(2, 1))
    for variant, result in trained.items():
        losses = [line["loss"] for line in result.lines]
        means = [sum(losses[max(0, n - SMOOTHING) : n]) / min(n, SMOOTHING) for n in range(1, len(losses) + 1)]
        curve.plot([line["step"] for line in result.lines], means, color=COLOURS[variant], label=variant)
        dots.plot(bits[variant], variant, "o", color=COLOURS[variant], markersize=9)
        dots.annotate(f"{bits[variant]:.3f}", (bits[variant], variant), xytext=(0, 9), textcoords="offset points", ha="center")
    curve.set(title=f"Python's standard library, seed {seed}", xlabel="training step", ylabel=f"training loss, mean of {SMOOTHING} steps")
    curve.legend()
    dots.set(title="Held-out files", xlabel="bits per byte (lower is better)", ylim=(len(trained) - 0.5, -0.7))
    dots.margins(x=0.25)
    style.draw(figure, path)


@style.styled()
def plot_recall(trained: Mapping[str, Trained], task: MQAR, seed: int, path: Path) -> None:
    """Held-out accuracy over training."""
    figure, curve = style.subplots(figsize=(7, 3.6))
    for variant, result in trained.items():
        steps, accuracies = list(result.accuracies), list(result.accuracies.values())
        curve.plot(steps, accuracies, color=COLOURS[variant], label=f"{variant} ({accuracies[-1]:.3f})")
    curve.axhline(task.chance, color="black", linestyle=":", linewidth=1, label=f"chance ({task.chance:.3f})")
    curve.set(title=f"Associative recall of {task.num_pairs} pairs, seed {seed}", xlabel="training step", ylabel="accuracy", ylim=(0, 1.02))
    curve.legend()
    style.draw(figure, path)


def report_code(model: HeadmaxForCausalLM, text: TokenizedCorpus, seed: int, path: Path) -> None:
    """Gates on an excerpt of held-out code."""
    excerpt = choose_excerpt(text.corpus.valid)
    ids, tokens = encode(load_tokenizer(text.folder), excerpt.text)
    name = f"{excerpt.name}, held out, with softmax gates, seed {seed}"
    report.write(path, [trace(model, ids[:REPORT_TOKENS], tokens[:REPORT_TOKENS], name)])


def choose_excerpt(documents: Iterable[Document]) -> Document:
    """The file with the most functions, from its first definition on."""
    file = max(documents, key=lambda document: document.text.count("\ndef "))
    lines = file.text.splitlines(keepends=True)
    first = next((n for n, line in enumerate(lines) if line.startswith(("def ", "class "))), 0)
    return Document(file.name, "".join(lines[first:]))


def report_recall(model: HeadmaxForCausalLM, task: MQAR, seed: int, path: Path) -> None:
    """Gates on a held-out sequence: the pairs, then the queries."""
    ids, pairs = task.held_out(seed).batch([0]).input_ids[0, : 3 * task.num_pairs], 2 * task.num_pairs
    first_value = task.vocab_size // 2

    def name(position: int, token: int) -> str:
        if token >= first_value:
            return f"=v{token - first_value}"
        return f" k{token}?" if position >= pairs else f" k{token}"

    names = [name(position, token) for position, token in enumerate(ids.tolist())]
    report.write(path, [trace(model, ids, names, f"Associative recall with softmax gates, seed {seed}")])
