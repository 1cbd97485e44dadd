"""What both demos compare, and what their recorded seeds gave."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from headmax import HeadGateConfig, records

VARIANTS = {"plain": None, "uniform": HeadGateConfig(kind="uniform"), "softmax": HeadGateConfig()}
"""No gates; gates frozen at their mean, the control; gates that compete, as in the paper."""
COLOURS = {"plain": "#7d7f86", "uniform": "#e69f00", "softmax": "#0072b2"}
RECORDS = records.RESULTS / "demo.jsonl"

Scores = dict[str, float]
"""One number of every variant."""


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def seed_scores(path: Path, metric: str) -> dict[str, list[Scores]]:
    """For each recorded setting what `metric` was, seed by seed; of a seed recorded twice the later one counts."""
    settings: dict[str, dict[int, Scores]] = defaultdict(lambda: defaultdict(dict))
    for r in records.read(path):
        if r.metric == metric and r.seed is not None:
            settings[r.case.rsplit(" ", 1)[0]][r.seed][r.extra["variant"]] = r.value
    return {case: [scores for scores in by_seed.values() if set(scores) == set(VARIANTS)] for case, by_seed in settings.items()}
