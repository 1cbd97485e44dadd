"""What the figures of a demo say in plain words, judged by how much recorded seeds differ."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headmax.demo.variants import RIVALS, VARIANTS

SEEDS = Path(__file__).with_name("seeds.json")
FEWEST_SEEDS = 3
"""Fewer say nothing about noise."""

Scores = dict[str, float]
"""The metric of every variant, for one seed."""


@dataclass(frozen=True)
class Metric:
    """What the variants are compared by."""

    record: str
    """Its name in records."""
    unit: str
    name: str
    """Its name in a sentence."""
    lower_is_better: bool = False

    def gain(self, scores: Scores, rival: str) -> float:
        """How much better softmax is; negative if worse."""
        gain = scores["softmax"] - scores[rival]
        return -gain if self.lower_is_better else gain

    def wins(self, seeds: Sequence[Scores], rival: str) -> int:
        """In how many seeds softmax is better."""
        return sum(self.gain(scores, rival) > 0 for scores in seeds)


def recorded_seeds(metric: Metric, case: str) -> list[Scores]:
    """The metric of a setting, one entry per seed that was recorded; `python -m lab package` puts them into the package."""
    found = json.loads(SEEDS.read_text())
    return next((one["seeds"] for one in found if (one["metric"], one["case"]) == (metric.record, case)), [])


def verdict(metric: Metric, scores: Scores, seeds: Sequence[Scores]) -> Iterator[str]:
    """One sentence per rival on this run, then one on the recorded seeds of the same settings, if there are any."""
    for rival in RIVALS:
        yield compare(metric, scores, seeds, rival)
    if seeds:
        means = ", ".join(f"{variant} {mean_and_range([s[variant] for s in seeds])}" for variant in VARIANTS)
        wins = " and ".join(f"than {rival} in {metric.wins(seeds, rival)}" for rival in RIVALS)
        yield f"Recorded {metric.name} over {len(seeds)} seeds: {means}. Softmax is better {wins} of {len(seeds)}."


def compare(metric: Metric, scores: Scores, seeds: Sequence[Scores], rival: str) -> str:
    """One sentence on softmax and a rival. Variants of a seed share data, so that their differences vary less than their scores."""
    gain = metric.gain(scores, rival)
    result = f"Softmax is {abs(gain):.3f} {'better' if gain > 0 else 'worse'} than {rival} in {metric.name}"
    if len(seeds) < FEWEST_SEEDS:
        return f"{result}; fewer than {FEWEST_SEEDS} seeds are recorded for these settings, so this may be chance."
    gains = [metric.gain(other, rival) for other in seeds]
    noise = max(gains) - min(gains)
    if abs(gain) <= noise:
        return f"{result}, within noise: this difference has a range of {noise:.3f} over {len(seeds)} recorded seeds."
    same = sum((other > 0) == (gain > 0) for other in gains)
    return f"{result}, beyond noise: this difference has a range of {noise:.3f} over {len(seeds)} recorded seeds, {same} of the same sign."


def mean_and_range(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
