"""The demo's picture: accuracy over steps, and who wins which token."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headmax.data.mqar import MQAR

if TYPE_CHECKING:
    from headmax.demo.recall import Run

COLOURS = {"plain": "#8a8f98", "uniform": "#d98e32", "softmax": "#2f6fd0"}


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the picture needs matplotlib: pip install 'headmax[plot]'")


def draw(runs: dict[str, Run], task: MQAR, seed: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    time = 3 * task.num_pairs
    tokens = task.held_out(seed).batch([0]).input_ids[:, :time]
    model = runs["softmax"].model
    assert model is not None
    with torch.no_grad():
        gates = model.eval()(tokens, return_gates=True, use_cache=False).gates
    names = [f"k{i}" if i < task.vocab_size // 2 else f"v{i - task.vocab_size // 2}" for i in tokens[0].tolist()]

    rows = 2 * len(gates)
    size = (max(8.0, 0.27 * time), 3.6 + 1.3 * rows)
    figure, axes = plt.subplots(1 + rows, 1, figsize=size, height_ratios=[3, *[1] * rows], layout="constrained")
    curve = axes[0]
    for variant, run in runs.items():
        curve.plot(run.steps, run.accuracy, color=COLOURS[variant], label=f"{variant} ({run.accuracy[-1]:.3f})", linewidth=2)
    curve.axhline(task.chance, color="black", linestyle=":", linewidth=1, label=f"chance ({task.chance:.3f})")
    curve.set(title=f"Associative recall of {task.num_pairs} pairs, seed {seed}", xlabel="training step", ylabel="accuracy", ylim=(0, 1.02))
    curve.legend(frameon=False)
    curve.spines[["top", "right"]].set_visible(False)
    panels = [(layer, kind, gate[0].T) for layer, pair in enumerate(gates) for kind, gate in zip(("read", "write"), pair, strict=True)]
    for panel, (layer, kind, gate) in zip(axes[1:], panels, strict=True):
        image = panel.imshow(gate, aspect="auto", cmap="Blues", vmin=0, vmax=1)
        panel.scatter(range(time), gate.argmax(0), marker="o", s=9, color="#d0402f")
        panel.axvline(2 * task.num_pairs - 0.5, color="black", linewidth=1)
        panel.set(title=f"layer {layer}, {kind} gate: the winner of each token is marked", ylabel="head", yticks=range(gate.shape[0]))
        panel.set_xticks(range(time), names, rotation=90, fontsize=6)
        figure.colorbar(image, ax=panel, pad=0.01)
    figure.savefig(path, dpi=130)
    plt.close(figure)
