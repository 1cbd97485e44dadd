"""The figures of docs/findings.md: what each shows, and in one line what is to be seen in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from scipy import stats

from headmax.analysis.style import COLOURS, subplots
from headmax.records import Record
from lab.study import trials
from lab.study.contrasts import LEVEL, MARGIN, NEEDLES, Study, percent_right, verdict
from lab.study.trials import EPS, PRIMARY, ROWS

GATES = {"plain": COLOURS[6], "uniform": COLOURS[1], "softmax": COLOURS[0]}
UNITS = {"nats": "nats per token; below 0 the first is better\nshaded: ±0.01", "points": "points of accuracy; above 0 the first is better"}
LENGTHS = ("1k", "2k", "4k", "8k")
"""Of S-NIAH."""


def bars(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the reach of its 95% interval."""
    reach = stats.t.ppf(1 - LEVEL / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean(values), float(reach)


def draw_contrasts(study: Study) -> Any:
    """A forest plot: every contrast that has two seeds, losses above accuracies."""
    groups = [[c for c in (study.primary, *study.secondary) if c.unit == unit and c.n > 1] for unit in ("nats", "points")]
    groups = [group for group in groups if group]
    sizes = [len(group) + 1.5 for group in groups]
    figure, axes = subplots(len(groups), 1, figsize=(7.2, 0.24 * sum(sizes) + 0.6), squeeze=False, height_ratios=sizes)
    for axis, group in zip(axes[:, 0], groups, strict=True):
        for place, contrast in enumerate(reversed(group)):
            low, high = contrast.interval()
            first = contrast is study.primary
            decided = (verdict(contrast) != "undecided" and contrast.complete) if first else study.corrected[contrast.name] < LEVEL
            colour = COLOURS[5] if first else COLOURS[0] if decided else COLOURS[6]
            axis.plot([low, high], [place, place], color=colour)
            axis.plot(
                [contrast.mean],
                [place],
                "o",
                color=colour,
                markersize=5,
                markerfacecolor=colour if decided else "white",
            )
        axis.axvline(0, color="#404040", linewidth=0.8)
        if group[0].unit == "nats":
            axis.axvspan(-MARGIN, MARGIN, color="#efece4", zorder=0)
        axis.set_yticks(range(len(group)), [f"{c.name} (n={c.n})" for c in reversed(group)], fontsize=7)
        axis.set_ylim(-0.7, len(group) - 0.3)
        axis.set_xlabel(UNITS[group[0].unit])
    return figure


def find_contrasts(study: Study) -> str | None:
    if not any(contrast.n > 1 for contrast in (study.primary, *study.secondary)):
        return None
    shown = sum(p < LEVEL for p in study.corrected.values())
    first = verdict(study.primary) if study.primary.complete else f"{study.primary.n} of {study.primary.planned} seeds"
    return (
        f"All contrasts with 95% intervals. Primary: {first}. Secondary: {shown} of {len(study.corrected)} differ from 0 after correction"
    )


def draw_losses(study: Study) -> Any:
    rows = [row for row in ROWS if any(study.arm(row, gates) for gates in row.seeds)]
    figure, axis = subplots(figsize=(6.4, 0.5 * len(rows) + 1.2))
    for place, row in enumerate(reversed(rows)):
        for n, (gates, colour) in enumerate(GATES.items()):
            if found := study.arm(row, gates):
                middle, reach = bars([record.value for record in found.values()])
                y = place + 0.22 * (1 - n)
                axis.errorbar(
                    [middle], [y], xerr=[reach], fmt="o", color=colour, markersize=5, label=gates if place == len(rows) - 1 else None
                )
    axis.set_yticks(range(len(rows)), [row.title for row in reversed(rows)])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_xlabel("validation loss, nats per token: mean and 95% interval over seeds")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def find_losses(study: Study) -> str | None:
    found = {f"{row.title}, {gates}": study.arm(row, gates) for row in ROWS for gates in row.seeds}
    losses = {name: mean(record.value for record in records.values()) for name, records in found.items() if records}
    if not losses:
        return None
    lowest = min(losses, key=lambda name: losses[name])
    return f"Validation loss by arm; lowest: {lowest}, {losses[lowest]:.3f}"


def draw_needles(study: Study) -> Any:
    figure, axes = subplots(1, 3, figsize=(7.2, 2.6), sharey=True)
    for axis, (title, prefix) in zip(axes, list(NEEDLES.items())[:3], strict=True):
        for gates, colour in GATES.items():
            found = list(study.arm(PRIMARY, gates).values())
            middle, reach = zip(*(bars([score(record, f"{prefix}_{length}") for record in found]) for length in LENGTHS), strict=True)
            axis.errorbar(range(len(LENGTHS)), middle, yerr=reach, fmt="o-", markersize=4, color=colour, label=gates, capsize=2)
        axis.set_xticks(range(len(LENGTHS)), LENGTHS)
        axis.set(title=title, ylim=(0, 100), xlabel="tokens")
    axes[0].set_ylabel("percent right")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def score(record: Record, task: str) -> float:
    right, asked = record.extra["right"][task]
    return 100 * right / asked


def find_needles(study: Study) -> str | None:
    found = {gates: study.arm(PRIMARY, gates).values() for gates in GATES}
    if not all(found.values()):
        return None
    each = "; ".join(f"{gates} {mean(percent_right(r, 'niah') for r in records):.1f}" for gates, records in found.items())
    return f"S-NIAH after needle texts, {PRIMARY.title}, percent right over all lengths: {each}"


def draw_why(study: Study) -> Any:
    figure, (left, right) = subplots(1, 2, figsize=(7.2, 2.8))
    for gates, colour in GATES.items():
        found = list(study.arm(PRIMARY, gates).values())
        if found:
            tokens = [point["tokens"] / 1e6 for point in found[0].extra["norms"]]
            layers = [mean(mean(point["rms"]) for point in points) for points in zip(*(r.extra["norms"] for r in found), strict=True)]
            left.plot(tokens, layers, color=colour, label=gates)
    left.axhline(1e-3, color="#404040", linewidth=0.8, linestyle=":")
    left.set(yscale="log", xlabel="million tokens", title="Input of the norm (dotted: √eps)", ylabel="root mean square")
    left.legend()
    for gates, found_by_eps in eps_losses(study).items():
        here = {eps: losses for eps, losses in found_by_eps.items() if losses}
        if here:
            middle, reach = zip(*map(bars, here.values()), strict=True)
            right.errorbar(list(here), middle, yerr=reach, fmt="o-", markersize=4, color=GATES[gates], capsize=2)
    right.set(xscale="log", xlabel="eps of the norms", title="Loss after 25M tokens", ylabel="validation loss")
    return figure


def eps_losses(study: Study) -> dict[str, dict[float, list[float]]]:
    """By gates and eps, over seeds."""
    found: dict[str, dict[float, list[float]]] = {gates: {eps: [] for eps in EPS} for gates in ("uniform", "softmax")}
    for trial in trials.eps_trials(study.done):
        if trial in study.done and not math.isnan(study.done[trial]):
            found[trial.gates][trial.eps].append(study.done[trial])
    return found


def find_why(study: Study) -> str | None:
    found = {gates: list(study.arm(PRIMARY, gates).values()) for gates in GATES}
    if not any(found.values()):
        return None
    last = {gates: mean(mean(r.extra["norms"][-1]["rms"]) for r in records) for gates, records in found.items() if records}
    return "Root mean square of what the output norm gets at the end of training: " + ", ".join(f"{g} {x:.2g}" for g, x in last.items())


@dataclass(frozen=True)
class Picture:
    title: str
    draw: Callable[[Study], Any]
    finding: Callable[[Study], str | None]
    """In one line, its alternative text; None where records are missing."""


FIGURES = {
    "contrasts": Picture("All contrasts", draw_contrasts, find_contrasts),
    "losses": Picture("Losses by arm", draw_losses, find_losses),
    "needles": Picture("Retrieval after needle texts", draw_needles, find_needles),
    "why": Picture("Why: the input of the norm", draw_why, find_why),
}
