"""The demo's pictures: accuracy over steps, and a report of who wins which token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headmax.analysis import report, style
from headmax.analysis.gates import trace
from headmax.analysis.style import pyplot
from headmax.data.mqar import MQAR

if TYPE_CHECKING:
    from headmax import HeadmaxForCausalLM
    from headmax.demo.recall import Run

COLOURS = {"plain": "#7d7f86", "uniform": "#e69f00", "softmax": "#0072b2"}


def draw(runs: dict[str, Run], task: MQAR, seed: int, path: Path) -> None:
    """Held-out accuracy over training."""
    plt = pyplot()
    figure, curve = plt.subplots(figsize=(7, 3.6))
    for variant, run in runs.items():
        curve.plot(run.steps, run.accuracy, color=COLOURS[variant], label=f"{variant} ({run.accuracy[-1]:.3f})")
    curve.axhline(task.chance, color="black", linestyle=":", linewidth=1, label=f"chance ({task.chance:.3f})")
    curve.set(title=f"Associative recall of {task.num_pairs} pairs, seed {seed}", xlabel="training step", ylabel="accuracy", ylim=(0, 1.02))
    curve.legend()
    style.draw(figure, path)
    plt.close(figure)


def show_gates(model: HeadmaxForCausalLM, task: MQAR, seed: int, path: Path) -> None:
    """The report of one held-out sequence: the pairs, then the keys that ask for their values."""
    ids, pairs = task.held_out(seed).batch([0]).input_ids[0, : 3 * task.num_pairs], 2 * task.num_pairs
    first_value = task.vocab_size // 2
    names = [f"=v{i - first_value}" if i >= first_value else f" k{i}" + "?" * (n >= pairs) for n, i in enumerate(ids.tolist())]
    report.write(path, [trace(model, ids, names, f"Associative recall with softmax gates, seed {seed}")])
