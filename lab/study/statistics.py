"""The records of the reproduction, run by run: what was measured, how seeds spread, and what that says of a claim."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from headmax import records
from headmax.eval.tables import ERRORS, spread
from headmax.records import Record
from lab.study.run import SUITE
from lab.study.runs import GATES, LINEAR, PLACES, RECALL_SETTINGS, RECALL_STEPS, SEEDS, Run

Seeds = Mapping[int | None, float]
"""A number by seed."""
LOSS = "validation loss"
MISSING = "not measured"
HELD, OPPOSITE, FLOOR, FEW = "**held**", "**the opposite**", "cannot be told: both at chance", "too few seeds"
QUANTILES = {3: 4.30, 4: 3.18, 5: 2.78}
"""Of Student's t at 97.5%, by the number of seeds; fewer decide nothing."""
WORDS = {
    "plain": "no gates",
    **{kind: kind for kind in GATES},
    **{f"{kind}-after": f"{kind}, read gate after the norm" for kind in GATES},
    "uniform-read-after": "no gates, output x 1/H",
}
"""Variants as the page calls them. The last is a frozen read gate after the norm and no write gate: a plain model of smaller output."""


@dataclass(frozen=True)
class Results:
    """All records of a folder."""

    folder: Path

    @functools.cached_property
    def records(self) -> list[Record]:
        return [record for path in sorted(self.folder.glob("*.jsonl")) for record in records.read(path)]

    @functools.cached_property
    def records_of_runs(self) -> list[Record]:
        return [record for record in self.records if record.suite == SUITE]

    @functools.cached_property
    def _values(self) -> dict[str, dict[Run, Record]]:
        """By metric, then by run."""
        made: dict[str, dict[Run, Record]] = defaultdict(dict)
        for record in self.records:
            if record.suite == SUITE:
                made[record.metric][Run(**record.extra["run"])] = record
            elif record.suite == "eval" and "run" in record.extra:
                made[f"{record.case} {record.metric}" + " after needles" * record.extra["tuned"]][Run(**record.extra["run"])] = record
        return made

    def record(self, metric: str, run: Run) -> Record | None:
        return self._values.get(metric, {}).get(run)

    def seeds(self, metric: str, run: Run) -> dict[int | None, float]:
        """Of a run with any seed."""
        found = {seed: self.record(metric, replace(run, seed=seed)) for seed in SEEDS}
        return {seed: record.value for seed, record in found.items() if record is not None}

    def average(self, metrics: Sequence[str], run: Run) -> dict[int | None, float]:
        """Of several metrics, for the seeds that have them all."""
        each = [self.seeds(metric, run) for metric in metrics]
        return {seed: mean(one[seed] for one in each) for seed in each[0] if all(seed in one for one in each)}

    def paired(self, metric: str, run: Run, other: Run) -> dict[int | None, float]:
        """`run` less `other`, seed by seed, where they were trained on the same tokens."""
        same = {seed for seed in SEEDS if self._data(replace(run, seed=seed)) == self._data(replace(other, seed=seed))}
        return {seed: x for seed, x in less(self.seeds(metric, run), self.seeds(metric, other)).items() if seed in same}

    def _data(self, run: Run) -> object:
        """What tells its data from other; runs of old did not say."""
        record = self.record(LOSS, run)
        return record and record.extra.get("data")

    def at_chance(self, metrics: Sequence[str], run: Run) -> bool:
        """Whether the average of scores whose chance is zero is within its error of zero, or was not measured."""
        found = [[self.record(metric, replace(run, seed=seed)) for metric in metrics] for seed in SEEDS]
        scores = [record for each in found if all(each) for record in each if record is not None]
        error = math.sqrt(sum(record.extra["stderr"] ** 2 for record in scores))
        return sum(record.value for record in scores) <= ERRORS * error

    def recall(self, backbone: str, variant: str, other: str, metric: str = "accuracy") -> dict[int | None, float]:
        """A metric of one kind of gates less that of another, averaged over the settings of a seed if all are there."""
        found = [
            self.paired(metric, *(recall_run(backbone, kind, pairs, heads) for kind in (variant, other)))
            for pairs, heads in RECALL_SETTINGS
        ]
        return {seed: mean(one[seed] for one in found) for seed in found[0] if all(seed in one for one in found)}

    def rates_seeds(self, backbone: str, variant: str) -> set[int]:
        """The seeds that tried all rates at recall of 32 pairs with 4 heads."""
        return set(SEEDS).intersection(*(self.seeds(LOSS, rate) for rate in recall_run(backbone, "plain", 32, 4).rates(variant)))

    def at_own_rate(self, backbone: str, variant: str) -> Run | None:
        """There, the run at the rate whose mean loss over those seeds is the lowest."""
        rates, whole = recall_run(backbone, "plain", 32, 4).rates(variant), self.rates_seeds(backbone, variant)
        return min(rates, key=lambda rate: mean(self.seeds(LOSS, rate)[seed] for seed in whole)) if whole else None

    def recall_at_own_rates(self, backbone: str, variant: str, other: str) -> dict[int | None, float]:
        """There, the accuracy of one kind of gates less that of another, each at its own rate."""
        one, two = self.at_own_rate(backbone, variant), self.at_own_rate(backbone, other)
        seeds = self.rates_seeds(backbone, variant) & self.rates_seeds(backbone, other)
        found = {} if one is None or two is None else self.paired("accuracy", one, two)
        return {seed: x for seed, x in found.items() if seed in seeds}

    def repeats(self) -> list[float]:
        """There, how far apart the accuracies lie of a model, seed and rate that were trained twice, since two parts ask for them."""
        made = []
        for run in (replace(recall_run(b, v, 32, 4), seed=seed) for b in LINEAR for v in PLACES for seed in SEEDS):
            once = self.record("accuracy", run)
            loss = self.record(LOSS, run)
            again = None if loss is None else self.record("accuracy", replace(run, lr=loss.extra.get("lr")))
            made += [abs(once.value - again.value)] if once and again and again is not once else []
        return made

    @property
    def runs(self) -> set[Run]:
        """Those that are done."""
        return set(self._values.get("seconds", {}))


def recall_run(backbone: str, variant: str, pairs: int, heads: int) -> Run:
    return Run(backbone, variant, "2x128", heads, steps=RECALL_STEPS, pairs=pairs)


def less(mine: Seeds, theirs: Seeds) -> dict[int | None, float]:
    return {seed: mine[seed] - theirs[seed] for seed in mine if seed in theirs}


def percent(differences: Seeds) -> dict[int | None, float]:
    """Fractions as points."""
    return {seed: 100 * value for seed, value in differences.items()}


def relative(differences: Seeds) -> dict[int | None, float]:
    """Differences of loss as per cent of perplexity."""
    return {seed: 100 * math.expm1(value) for seed, value in differences.items()}


def perplexity(losses: Seeds) -> dict[int | None, float]:
    return {seed: math.exp(loss) for seed, loss in losses.items()}


def show(values: Seeds, digits: int = 2, sign: bool = False) -> str:
    """Mean ± standard deviation, and how many seeds where it is not all of them."""
    if not values:
        return MISSING
    return spread(values, digits, "+" if sign else "") + f" (n={len(values)})" * (len(values) < len(SEEDS))


def judge(differences: Seeds, wanted: int) -> str:
    """What differences say of a claim that they are negative (wanted -1) or positive (+1), in a few words."""
    values = list(differences.values())
    if not values:
        return MISSING
    if sign := told_apart(differences):
        return HELD if sign == wanted else OPPOSITE
    agree = sum(value * wanted > 0 for value in values)
    return f"{'no significant difference' if interval(differences) else FEW} ({agree} of {len(values)} seeds as claimed)"


def interval(differences: Seeds) -> tuple[float, float] | None:
    """Of the mean over seeds, at 95%; None where there are too few."""
    values = list(differences.values())
    if len(values) not in QUANTILES:
        return None
    middle, reach = mean(values), QUANTILES[len(values)] * stdev(values) / math.sqrt(len(values))
    return middle - reach, middle + reach


def told_apart(differences: Seeds) -> int:
    """The sign of the mean difference if its interval leaves out zero; else 0."""
    low, high = interval(differences) or (0.0, 0.0)
    return (low > 0) - (high < 0)
