"""What the study's records say of the plan's contrasts: paired differences over seeds, intervals, and verdicts by the plan's rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Literal

from scipy import stats

from headmax.records import Record
from lab.study import trials
from lab.study.session import outcomes
from lab.study.trials import PRIMARY, RECALL_SEEDS, ROWS, Row, Trial

MARGIN = 0.01
"""Of equivalence, in nats per token."""
LEVEL, POWER = 0.05, 0.8
NORMAL = stats.norm.ppf(1 - LEVEL / 2) + stats.norm.ppf(POWER)
"""Standard errors that a difference is from zero where it is found with this power by a test that knows the spread."""
MOST_SEEDS = 10_000
"""That `needed` looks for."""
NEEDLES = {"S-NIAH-1": "niah_single_1", "S-NIAH-2": "niah_single_2", "S-NIAH-3": "niah_single_3", "SQuAD": "squad"}
"""Tasks by the beginning of their names."""
RECALL_PAIRS = {
    "on the query": ("softmax", "uniform"),
    "after the norm": ("softmax-after", "uniform-after"),
    'scale "heads"': ("softmax-heads", "plain"),
    "sigmoid, on the query": ("sigmoid", "uniform"),
}
"""MQAR: gates and their control."""
Verdict = Literal["superior", "inferior", "equivalent", "superior and equivalent", "inferior and equivalent", "undecided"]


@dataclass(frozen=True)
class Contrast:
    """One kind of model less another, seed by seed."""

    name: str
    unit: Literal["nats", "points"]
    differences: Mapping[int, float]
    planned: int
    """Seeds."""

    @property
    def n(self) -> int:
        return len(self.differences)

    @property
    def mean(self) -> float:
        return mean(self.differences.values())

    @property
    def spread(self) -> float:
        """Standard deviation over seeds."""
        return stdev(self.differences.values())

    def interval(self, level: float = 1 - LEVEL) -> tuple[float, float]:
        """Of the mean, by Student's t."""
        reach = stats.t.ppf((1 + level) / 2, self.n - 1) * self.spread / math.sqrt(self.n)
        return self.mean - reach, self.mean + reach

    @property
    def p(self) -> float:
        """Of the paired t-test, two-sided."""
        if self.spread == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stats.t.sf(abs(self.mean) / self.spread * math.sqrt(self.n), self.n - 1))

    @property
    def complete(self) -> bool:
        return self.n >= self.planned


def equivalent(contrast: Contrast, margin: float = MARGIN) -> bool:
    """By two one-sided tests at 5%."""
    low, high = contrast.interval(1 - 2 * LEVEL)
    return -margin < low and high < margin


def verdict(contrast: Contrast) -> Verdict:
    """Of the primary contrast, by the plan's table; lower is better."""
    low, high = contrast.interval()
    if high < 0:
        return "superior and equivalent" if equivalent(contrast) else "superior"
    if low > 0:
        return "inferior and equivalent" if equivalent(contrast) else "inferior"
    return "equivalent" if equivalent(contrast) else "undecided"


def needed(spread: float, effect: float = MARGIN) -> int | None:
    """Seeds that find a difference of `effect` with 80% power in a paired t-test at 5%."""
    for n in range(max(2, math.ceil((NORMAL * spread / effect) ** 2)), MOST_SEEDS):
        critical, shift = stats.t.ppf(1 - LEVEL / 2, n - 1), effect / max(spread, 1e-12) * math.sqrt(n)
        if stats.nct.sf(critical, n - 1, shift) >= POWER:
            return n
    return None


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected for all of them together, in their order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        corrected[i] = largest
    return corrected


class Study:
    """All records of the study, by trial."""

    def __init__(self, found: Mapping[Trial, Record]) -> None:
        self.found = found
        self.done = outcomes(found.items())

    def arm(self, row: Row, gates: str) -> dict[int, Record]:
        """By seed, the records of an arm at the rate that was chosen for it."""
        start = trials.start_of(row, self.done)
        if start is None:
            return {}
        base = row.trial(gates, 0, 0.0, start)
        rate = trials.chosen_rate(base, self.done)
        return {} if rate is None else self.seeds(replace(base, rate=rate), row.seeds.get(gates, 0))

    def seeds(self, trial: Trial, number: int) -> dict[int, Record]:
        tried = {seed: self.found.get(replace(trial, seed=seed)) for seed in range(number)}
        return {seed: record for seed, record in tried.items() if record is not None and "error" not in record.extra}

    def recall_arm(self, backbone: str, pairs: int, heads: int, gates: str) -> dict[int, Record]:
        base = trials.recall_arm(backbone, pairs, heads, gates)
        best = trials.most_accurate(trials.recall_rate_trials(base), self.done)
        return {} if best is None else self.seeds(best, RECALL_SEEDS)

    @functools.cached_property
    def primary(self) -> Contrast:
        arms = (self.arm(PRIMARY, gates) for gates in ("softmax", "uniform"))
        return Contrast(f"{PRIMARY.title}: softmax − uniform", "nats", differences(*arms, value=loss), PRIMARY.seeds["softmax"])

    @functools.cached_property
    def secondary(self) -> list[Contrast]:
        return [*self._losses(), *self._starts(), *self._needles(), *self._recall()]

    def _losses(self) -> Iterator[Contrast]:
        for row in ROWS:
            if row is not PRIMARY and "softmax" in row.seeds:
                for one, other in (("softmax", "uniform"), ("uniform", "plain")):
                    found = differences(self.arm(row, one), self.arm(row, other), value=loss)
                    yield Contrast(f"{row.title}: {one} − {other}", "nats", found, row.seeds[one])

    def _starts(self) -> Iterator[Contrast]:
        for scaled in ROWS:
            own = next((row for row in ROWS if (row.backbone, row.heads, row.start) == (scaled.backbone, scaled.heads, "own")), None)
            if scaled.start == trials.SCALED and own is not None:
                found = differences(self.arm(scaled, "plain"), self.arm(own, "plain"), value=loss)
                yield Contrast(f"{scaled.title.rsplit(',', 1)[0]}, plain: scaled − own start", "nats", found, own.seeds["plain"])

    def _needles(self) -> Iterator[Contrast]:
        for title, prefix in NEEDLES.items():
            for row in ROWS:
                if "softmax" in row.seeds:
                    value = functools.partial(percent_right, prefix=prefix)
                    found = differences(self.arm(row, "softmax"), self.arm(row, "uniform"), value=value)
                    yield Contrast(f"{title}, {row.title}: softmax − uniform", "points", found, row.seeds["softmax"])

    def _recall(self) -> Iterator[Contrast]:
        for backbone, title in (("gla", "GLA"), ("gdn", "Gated DeltaNet")):
            for pairs, heads in trials.measurable(backbone, self.done):
                for place, (one, other) in RECALL_PAIRS.items():
                    arms = (self.recall_arm(backbone, pairs, heads, gates) for gates in (one, other))
                    found = differences(*arms, value=lambda record: 100 * record.value)
                    yield Contrast(f"MQAR {pairs} pairs, {title}, {heads} heads, {place}", "points", found, RECALL_SEEDS)

    @functools.cached_property
    def corrected(self) -> dict[str, float]:
        """p of every secondary contrast that has two seeds, corrected for their number by Holm's method."""
        tested = [contrast for contrast in self.secondary if contrast.n > 1]
        return dict(zip((contrast.name for contrast in tested), holm([contrast.p for contrast in tested]), strict=True))


def loss(record: Record) -> float:
    return record.value


def percent_right(record: Record, prefix: str) -> float:
    """The mean over a task's lengths."""
    return mean(100 * right / asked for task, (right, asked) in record.extra["right"].items() if task.startswith(prefix))


def differences(one: Mapping[int, Record], other: Mapping[int, Record], *, value: Callable[[Record], float]) -> dict[int, float]:
    """Seed by seed, where both read the same tokens."""
    return {
        seed: value(one[seed]) - value(other[seed])
        for seed in one
        if seed in other and one[seed].extra["data"] == other[seed].extra["data"]
    }
