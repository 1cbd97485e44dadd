"""Interprets a demo's results in plain words, given the variation over recorded seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headmax.demo.variants import RIVALS, VARIANTS

SEEDS = Path(__file__).with_name("seeds.json")
FEWEST_SEEDS = 3
"""Fewer do not tell the noise."""

Scores = dict[str, float]
"""The metric of every variant, for one seed."""


@dataclass(frozen=True)
class Metric:
    """The metric to compare variants by."""

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
        """Number of seeds in which softmax is better."""
        return sum(self.gain(scores, rival) > 0 for scores in seeds)


def recorded_seeds(metric: Metric, case: str) -> list[Scores]:
    """The metric by recorded seed; `python -m lab package` updates them."""
    entries = json.loads(SEEDS.read_text())
    return next((entry["seeds"] for entry in entries if (entry["metric"], entry["case"]) == (metric.record, case)), [])


def verdict(metric: Metric, scores: Scores, seeds: Sequence[Scores]) -> Iterator[str]:
    """One sentence per rival about this run, then one about the recorded seeds with the same settings, if any."""
    for rival in RIVALS:
        yield compare(metric, scores, seeds, rival)
    if seeds:
        means = ", ".join(f"{variant} {mean_and_range([s[variant] for s in seeds])}" for variant in VARIANTS)
        wins = " and ".join(f"than {rival} in {metric.wins(seeds, rival)}" for rival in RIVALS)
        yield f"Recorded {metric.name} over {len(seeds)} seeds: {means}. Softmax is better {wins} of {len(seeds)}."


def compare(metric: Metric, scores: Scores, seeds: Sequence[Scores], rival: str) -> str:
    """One sentence about softmax and a rival. Variants share data per seed, so that differences vary less than scores."""
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
