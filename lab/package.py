"""What the package holds of the records, since a wheel has no others: measured steps for `headmax plan`, seeds for `headmax demo`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headmax import durable, records
from headmax.demo import code, recall, verdict
from headmax.demo.variants import VARIANTS
from headmax.demo.verdict import Metric, Scores
from headmax.plan import measured as plan
from headmax.plan.cards import card_of
from headmax.plan.measured import Measured
from headmax.records import Record
from lab import RESULTS

DEMO = RESULTS / "demo.jsonl"
METRICS = (code.METRIC, recall.METRIC)


def write() -> list[Path]:
    """Writes both files into the package."""
    made = contents()
    for path, content in made.items():
        durable.write(path, content)
    return list(made)


def contents() -> dict[Path, str]:
    """The files as the records give them."""
    found = [record for path in sorted(RESULTS.glob("train_*.jsonl")) for record in records.read(path)]
    steps = [asdict(step) for step in measured(found)]
    seeds = [{"metric": m.record, "case": case, "seeds": one} for m in METRICS for case, one in seed_scores(DEMO, m).items()]
    return {plan.MEASURED: lines(steps), verdict.SEEDS: lines(seeds)}


def lines(items: Iterable[dict[str, Any]]) -> str:
    """JSON, an item a line."""
    return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in items) + "\n]\n"


def measured(found: Iterable[Record]) -> Iterator[Measured]:
    """The training steps of ours on cards that `headmax plan` knows."""
    ours = [r for r in found if r.suite == "train" and r.impl == "headmax"]
    peaks = {(r.device, r.case, r.metric.split("/")[0]): r.value * 2**30 for r in ours if r.metric.endswith("/peak memory")}
    for r in ours:
        variant, _, metric = r.metric.partition("/")
        card = card_of(r.device)
        if metric != "tokens per second" or card is None:
            continue
        plain, _, size = r.case.partition(" ")
        name = {"softmax": f"softmax-{plain}", "transformer": f"transformer-{plain.split('-')[-1]}"}.get(variant, plain)
        length, batch = map(int, size.split("x"))
        peak = peaks.get((r.device, r.case, variant))
        yield Measured(name, card, length, batch, length * batch / r.value, peak, f"{name} {size} on {r.device}, commit {r.commit}")


def seed_scores(path: Path, metric: Metric) -> dict[str, list[Scores]]:
    """The metric by recorded setting, one entry per seed for which all variants are recorded; later records replace earlier ones."""
    settings: dict[str, dict[int, Scores]] = defaultdict(lambda: defaultdict(dict))
    for r in records.read(path):
        if r.metric == metric.record and r.seed is not None:
            settings[r.case.rsplit(" ", 1)[0]][r.seed][r.extra["variant"]] = r.value
    return {case: [scores for scores in by_seed.values() if set(scores) == set(VARIANTS)] for case, by_seed in settings.items()}
