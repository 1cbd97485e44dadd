"""The earlier runs whose texts are known, by their records: small models of three seeds, at learning rates of the plain one."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headmax import records
from headmax.eval.tables import spread
from headmax.records import Record

SUITE, LOSS, MISSING = "reproduction", "validation loss", "not measured"
LINEAR, SEEDS, STEPS, RECALL_STEPS = ("gla", "retnet", "gdn"), (0, 1, 2), 384, 2000
TITLES = {"gla": "GLA", "retnet": "RetNet", "gdn": "GDN", "transformer": "Transformer++"}
SIZES, HEADS = ("4x256", "6x512", "10x768"), (4, 8, 16)
"""Layers x hidden size; numbers of heads of the middle one."""
RECALL_SETTINGS = ((16, 4), (32, 2), (32, 4), (32, 8), (64, 4))
"""Pairs and heads."""
WORDS = {
    "plain": "no gates",
    "softmax": "softmax",
    "uniform": "uniform",
    "softmax-after": "softmax, read gate after the norm",
    "uniform-after": "uniform, read gate after the norm",
}
"""Gates as the pages call them."""
Seeds = Mapping[int | None, float]
"""A number by seed."""


@dataclass(frozen=True)
class Run:
    """One training, as its records name it."""

    backbone: str
    variant: str = "plain"
    size: str = "6x512"
    heads: int = 4
    seed: int = 0
    steps: int = STEPS
    lr: float | None = None
    norm_eps: float = 1e-6
    pairs: int | None = None


@dataclass(frozen=True)
class Results:
    """All records of a folder."""

    folder: Path

    @functools.cached_property
    def records(self) -> list[Record]:
        return [record for path in sorted(self.folder.glob("*.jsonl")) for record in records.read(path)]

    @functools.cached_property
    def _values(self) -> dict[tuple[str, Run], Record]:
        return {(r.metric, Run(**r.extra["run"])): r for r in self.records if r.suite == SUITE}

    def record(self, metric: str, run: Run) -> Record | None:
        return self._values.get((metric, run))

    def seeds(self, metric: str, run: Run) -> dict[int | None, float]:
        """Of a run with any seed."""
        found = {seed: self.record(metric, replace(run, seed=seed)) for seed in SEEDS}
        return {seed: record.value for seed, record in found.items() if record is not None}

    def paired(self, run: Run, other: Run) -> dict[int | None, float]:
        """The loss of `run` less that of `other`, seed by seed, where they were trained on the same tokens; as per cent of perplexity."""
        pairs = {seed: tuple(self.record(LOSS, replace(x, seed=seed)) for x in (run, other)) for seed in SEEDS}
        return {
            seed: 100 * math.expm1(one.value - two.value)
            for seed, (one, two) in pairs.items()
            if one and two and one.extra["data"] == two.extra["data"]
        }


def recall_run(backbone: str, variant: str, pairs: int, heads: int) -> Run:
    return Run(backbone, variant, "2x128", heads, steps=RECALL_STEPS, pairs=pairs)


def perplexity(losses: Seeds) -> dict[int | None, float]:
    return {seed: math.exp(loss) for seed, loss in losses.items()}


def show(values: Seeds, digits: int = 2, sign: bool = False) -> str:
    """Mean ± standard deviation, and how many seeds where it is not all of them."""
    if not values:
        return MISSING
    few = f" (n={len(values)})" if len(values) < len(SEEDS) else ""
    return spread(values, digits, "+" if sign else "") + few
