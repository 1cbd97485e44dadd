"""`python -m lab theory`: every experiment of experiments.py with its picture and its records."""

from __future__ import annotations

from pathlib import Path

import torch

from headmax import records
from headmax.analysis.style import COLOURS, WIDTH, save, styled, subplots
from headmax.layers import HeadGateConfig
from headmax.recipes.language import backbones
from headmax.records import Record, Recorder
from lab.study.earlier import LINEAR
from lab.theory import experiments

EPS = (1e-8, 1e-6, 1e-4, 1e-2)
CONSTANTS = {
    "plain": None,
    "uniform": HeadGateConfig(kind="uniform", read_position="query"),
    "uniform-read-after": HeadGateConfig(kind="uniform", read_position="after_norm", write=False),
}
"""Gates that are constant factors."""
LINES = dict(zip(experiments.PLACEMENTS, ("-", "--", "-.", ":"), strict=True))


@styled()
def reproduce(folder: Path) -> list[Record]:
    """Writes proposition1, theorem1, theorem2 and read_gate as PNG and SVG, and records.jsonl; returns the records."""
    make = Recorder("theory", "cpu")
    made = [
        *_proposition_1(make, folder),
        *_theorem_1(make, folder),
        *_theorem_2(make, folder),
        *_read_gate(make, folder),
        *_before_training(make),
    ]
    records.write(folder / "records.jsonl", made)
    return made


def _proposition_1(make: Recorder, folder: Path) -> list[Record]:
    found = experiments.proposition_1()
    figure, axes = subplots(figsize=(WIDTH, 3.2))
    for name, weights in found.weights.items():
        label = {"relu": "linear, φ = ReLU (homogeneous)", "elu": "linear, φ = elu + 1 (not homogeneous)"}.get(name, name)
        axes.plot(found.factors, experiments.entropy(weights), label=label)
    axes.set(xscale="log", xlabel="λ, the query's length", ylabel="entropy of the weights, bits", ylim=(0, None))
    axes.set_title("Proposition 1: linear attention cannot sharpen")
    axes.legend(loc="lower left")
    save(figure, folder, "proposition1")
    return [make(f"proposition 1, {name}", "headmax", "largest change of a weight", found.change(name), "") for name in found.weights]


def _theorem_1(make: Recorder, folder: Path) -> list[Record]:
    found, made = experiments.theorem_1(), []
    figure, axes = subplots(figsize=(WIDTH, 3.2))
    for name, scores in found.scores.items():
        bits = found.entropy(name)
        axes.plot(found.factors[1:], bits[1:], label=f"{name} → {float(experiments.entropy(experiments.limit_gate(scores))):.0f} bits")
        made.append(make(f"theorem 1, {name}", "headmax", "largest rise of entropy", float(bits.diff().max().clamp(min=0)), "bits"))
        distance = float((found.gates[name][-1] - experiments.limit_gate(scores)).abs().max())
        made.append(make(f"theorem 1, {name}", "headmax", "distance from the limit", distance, "", factor=float(found.factors[-1])))
    axes.set(xscale="log", xlabel="λ, the scores' size", ylabel="entropy of the gate, bits", ylim=(-0.05, None))
    axes.set_title("Theorem 1: the softmax over 8 heads sharpens; ties stay shared")
    axes.legend()
    save(figure, folder, "theorem1")
    return made


def _theorem_2(make: Recorder, folder: Path) -> list[Record]:
    found, some = experiments.theorem_2(), slice(1, None, 4)  # every fourth λ as a point makes a smaller file of the same picture
    figure, (upper, lower) = subplots(2, 1, figsize=(WIDTH, 5.6))
    for n in range(32):
        limit = float(found.limit[n])
        colour = {0.0: COLOURS[1], 1.0: COLOURS[0]}.get(limit, COLOURS[6])
        upper.plot(found.factors[1:], found.agreement[n, 1:], color=colour, linewidth=0.8, alpha=0.7)
    for colour, label in ((COLOURS[0], "same winner"), (COLOURS[1], "different winners"), (COLOURS[6], "a tie for the lead")):
        upper.plot([], [], color=colour, label=label)
    upper.set(xscale="log", xlim=(0.1, 100), xlabel="λ", ylabel="C(λ)", ylim=(-0.02, 1.02))
    upper.set_title("Theorem 2: C tends to the Kronecker delta")
    upper.legend(loc="center left")
    scaled, error = found.factors[some] * found.gap[:, None], found.error[:, some].clamp(min=1e-17)
    lower.scatter(scaled.flatten(), error.flatten(), s=2, color=COLOURS[4], linewidths=0, rasterized=True)
    line = torch.linspace(0, 45, 10, dtype=torch.float64)
    lower.plot(line, 14 * torch.exp(-line), color="#1d2026", linewidth=1.2, label="2 (H - 1) exp(-λ gap)")
    lower.set(yscale="log", xlim=(0, 45), ylim=(1e-17, 30), xlabel="λ · gap", ylabel="|C(λ) - δ|")
    lower.set_title("It stays within the bound")
    lower.legend()
    save(figure, folder, "theorem2")
    inside = (found.error - found.bound).max()
    finite = found.error[found.bound > 1e-12] / found.bound[found.bound > 1e-12]
    return [
        make(f"theorem 2, {len(found.limit)} pairs", "headmax", "largest |C - limit| less its bound", float(inside), ""),
        make(f"theorem 2, {len(found.limit)} pairs", "headmax", "largest |C - limit| over its bound", float(finite.max()), "ratio"),
    ]


def _read_gate(make: Recorder, folder: Path) -> list[Record]:
    gates = torch.logspace(-4, 0, 81, dtype=torch.float64)
    marks = torch.tensor([0.01, 0.1, 0.25, 1.0], dtype=torch.float64)
    figure, axes = subplots(figsize=(WIDTH, 4.4))
    made = []
    for placement in experiments.PLACEMENTS:
        for eps in EPS if placement == experiments.PLACEMENTS[0] else EPS[1:2]:
            curve = experiments.surviving(placement, gates, eps)
            label = f"{placement}, eps {eps:g}" if placement == experiments.PLACEMENTS[0] else placement
            axes.plot(gates, curve, LINES[placement], label=label)
            for size, value in zip(marks.tolist(), experiments.surviving(placement, marks, eps).tolist(), strict=True):
                made.append(make(f"read gate, {placement}", "headmax", "surviving part", value, "", eps=eps, gate=size, rms=1.0))
    axes.set(
        xscale="log", xlabel="gate, for a read-out of root mean square 1", ylabel="part of the read gate that survives", ylim=(-0.03, 1.05)
    )
    axes.set_title("A per-head norm divides the read gate out, up to eps")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    save(figure, folder, "read_gate")
    return made


def _before_training(make: Recorder) -> list[Record]:
    made = []
    for backbone in LINEAR:
        for name, gate in CONSTANTS.items():
            found = zip(("norm's input", "mixer's output"), experiments.before_training(backbones()[backbone].name, gate), strict=True)
            made += [make(f"before training, {backbone}, {name}", "headmax", what, size, "rms") for what, size in found]
    return made
