"""The fault suite: `python -m tests.faults --seed 0 --record lab/results/faults.jsonl`, or `make test-faults`."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headmax import records
from headmax.tables import Table
from tests.faults import bad, disturbed, place
from tests.faults.called import headmax

Case = bad.Bad | disturbed.Disturbed
KINDS = ("bad input", "kill", "no room", "two at once")
GOOD, FAILED = ("refused", "taken", "recovered"), ("lost", "wrong", "traceback", "hang")
"""`taken`: a changed number that is as good as the one before."""


@dataclass(frozen=True)
class Outcome:
    case: Case
    verdict: str
    seen: str = ""

    @property
    def kind(self) -> str:
        return getattr(self.case, "kind", "bad input")


def judge(case: bad.Bad, folder: Path) -> Outcome:
    """Runs a command on a bad input and says what became of it."""
    if case.damage is not None:
        case.damage(folder)
    before = place.contents(folder)
    done = headmax(folder, *case.words, stdin=case.stdin, environment=dict(case.environment))
    after = place.contents(folder)
    changed = [name for name in before if after.get(name) != before[name]]
    if done.code is None:
        verdict = "hang"
    elif done.broke or (done.code and not done.refused):
        verdict = "traceback"
    elif changed and done.code:
        verdict = "lost"
    elif done.code == 0 and case.must:
        verdict = "wrong"
    else:
        verdict = "refused" if done.code else "taken"
    return Outcome(case, verdict, f"{changed} {done}")


def run(case: Case, template: Path, folder: Path) -> Outcome:
    """A case in a copy of the template."""
    place.copy(template, folder)
    try:
        if isinstance(case, bad.Bad):
            return judge(case, folder)
        problems = disturbed.disturb(case, template, folder)
        return Outcome(case, problems[0][0] if problems else "recovered", str(problems))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_all(cases: Sequence[Case], template: Path, workers: int = 2) -> Iterator[Outcome]:
    for command in sorted({case.command for case in cases if isinstance(case, disturbed.Disturbed)}):
        disturbed.reference(template, command)
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda item: run(item[1], template, template.parent / f"case-{item[0]}"), enumerate(cases))


def all_of(seed: int) -> list[Case]:
    return [*bad.all_of(seed, each=1), *disturbed.all_of(seed, each=4)]


def sample(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    return random.Random(seed).sample(cases, count)


def counted(outcomes: Sequence[Outcome], seed: int) -> list[records.Record]:
    """A record for each kind of fault and what can become of it."""
    record, counts = records.Recorder("faults", "cpu"), Counter((outcome.kind, outcome.verdict) for outcome in outcomes)
    commands = {kind: len({outcome.case.command for outcome in outcomes if outcome.kind == kind}) for kind in KINDS}
    return [
        record(kind, "headmax", verdict, counts[kind, verdict], "cases", seed=seed, commands=commands[kind])
        for kind in KINDS
        for verdict in (*GOOD, *FAILED)
    ]


def table(found: Sequence[records.Record]) -> str:
    """A row for each kind of fault and seed; failures are all of `FAILED`."""
    shown = Table(["fault (commands)", "seed", "cases", *GOOD, "failed"], align="l" + "r" * (3 + len(GOOD)))
    counts = {(record.case, record.seed, record.metric): int(record.value) for record in found}
    commands = {(record.case, record.seed): record.extra["commands"] for record in found}
    for (kind, seed), several in commands.items():
        row = [*(counts[kind, seed, verdict] for verdict in GOOD), sum(counts[kind, seed, verdict] for verdict in FAILED)]
        shown.rows.append([f"{kind} ({several})", *map(str, (seed, sum(row), *row))])
    return shown.markdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the cases and of the moments")
    parser.add_argument("--command", help="cases of this command alone")
    parser.add_argument("--record", type=Path, help="append the counts to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headmax-faults-") as folder:
        template = place.make(Path(folder) / "place")
        cases = [case for case in all_of(given.seed) if given.command in (None, case.command)]
        outcomes = []
        for outcome in run_all(cases, template):
            outcomes.append(outcome)
            if outcome.verdict in FAILED:
                print(f"{outcome.verdict}: {outcome.case.command}: {outcome.case.about}: {outcome.seen}", flush=True)
    found = counted(outcomes, given.seed)
    print(table(found))
    if given.record is not None:
        records.append(given.record, found)
    return int(any(outcome.verdict in FAILED for outcome in outcomes))
