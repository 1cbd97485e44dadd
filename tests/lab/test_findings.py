"""The page of findings says what records say: by the plan's rules, and of what has no record that it was not run."""

import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from headmax import records
from headmax.records import Record, Recorder
from lab import RESULTS, ROOT

pytest.importorskip("scipy")
from scipy import stats

from lab.pages import findings
from lab.pages.findings_figures import FIGURES
from lab.study import trials
from lab.study.contrasts import Contrast, Study, equivalent, holm, needed, verdict
from lab.study.session import RECORDS, recorded
from lab.study.trials import PARTS, Trial

MAKE = Recorder("study", "cpu")
POINTS = [{"tokens": 1_000_000 * n, "rms": [0.1 / n, 0.2 / n], "loss": 5.0} for n in (1, 2)]


def record(trial: Trial, value: float) -> Record:
    right = {
        f"niah_single_{n}_{length}": (40 + 10 * (trial.gates == "softmax"), 80) for n in (1, 2, 3) for length in ("1k", "2k", "4k", "8k")
    }
    about = {"norms": POINTS, "rate": trial.rate, "seconds": 200.0, "data": {"index": "a", "seed": trial.seed}}
    about |= {"right": right | {"squad": (20 + trial.seed, 100)}} if trial.examined else {}
    return MAKE(
        trial.name, "headmax", "accuracy" if trial.pairs else "validation loss", value, "", trial.seed, trial=asdict(trial), **about
    )


def study(effect: float, noise: float = 0.002) -> Study:
    """All trials of the plan, whose softmax lowers the loss by `effect` on the uniform gates."""
    rng, found = random.Random(0), dict[Trial, Record]()
    for part in PARTS:
        while True:
            done = Study(found).done
            fresh = [trial for trial in dict.fromkeys(PARTS[part](done)) if trial not in found]
            if not fresh:
                break
            for trial in fresh:
                wobble = rng.gauss(0, noise)
                if trial.pairs:
                    value = (0.5 if trial.heads == 8 else 0.97) + wobble + 0.2 * (trial.gates == "softmax")
                else:
                    value = 3.5 + 0.01 * trial.seed + wobble + 0.1 * abs(math.log(trial.rate / 2e-3)) - effect * (trial.gates == "softmax")
                    value -= 0.05 * (trial.start != "own")
                found[trial] = record(trial, value)
    return Study(found)


@pytest.fixture(scope="module")
def whole() -> Study:
    return study(0.03)


def test_the_primary_contrast_by_the_plans_table() -> None:
    def contrast(*values: float) -> Contrast:
        return Contrast("", "nats", dict(enumerate(values)), len(values))

    assert verdict(contrast(-0.03, -0.02, -0.025, -0.028)) == "superior"
    assert verdict(contrast(-0.003, -0.002, -0.0025, -0.0028)) == "superior and equivalent"
    assert verdict(contrast(0.003, -0.002, 0.001, -0.001)) == "equivalent"
    assert verdict(contrast(0.03, 0.02, 0.025, 0.028)) == "inferior"
    assert verdict(contrast(0.03, -0.02, 0.025, -0.028)) == "undecided"
    assert not equivalent(contrast(0.03, -0.02, 0.025, -0.028))


def test_statistics_are_the_textbooks() -> None:
    values = [0.1, 0.3, -0.1, 0.2, 0.25]
    contrast = Contrast("", "nats", dict(enumerate(values)), 5)
    expected = stats.ttest_1samp(values, 0)
    assert contrast.p == pytest.approx(expected.pvalue)
    assert contrast.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert needed(0.01) == 10  # d = 1: the textbook's sample for 80% power in a paired test
    assert needed(0.02) == 34  # d = 0.5
    assert needed(100.0) is None


def test_the_answer(whole: Study) -> None:
    page = findings.render(whole)
    assert "**GLA, 16 heads, scaled start: softmax − uniform: −0.0" in page
    assert "n = 8: superior.** Competition helps at this scale" in page
    assert "not run yet" not in page
    assert len(page.splitlines()) < 90
    for name in FIGURES:
        assert f"](images/findings/{name}.svg)" in page
    assert "Primary: superior." in page
    assert "| MQAR 16 pairs, GLA, 8 heads, on the query | 8 of 8 | +20" in findings.tables(whole)
    undecided = findings.render(study(0.0, noise=0.05))
    assert "undecided.** Whether competition helps at this scale is open." in undecided
    assert "seeds for 80% power" in undecided


def test_nothing_is_concluded_early(whole: Study) -> None:
    last = [trial for trial in whole.found if trial.seed == 7 and trial.gates == "softmax" and not trial.pairs]
    page = findings.render(Study({trial: record for trial, record in whole.found.items() if trial not in last}))
    assert "softmax − uniform: not run yet** (7 of 8 seeds)" in page
    assert "superior" not in page


def test_seeds_that_read_other_tokens_are_no_pair(whole: Study) -> None:
    found = {t: replace(r, extra=r.extra | {"data": {"index": t.gates}}) for t, r in whole.found.items()}
    assert Study(found).primary.n == 0


def test_a_failed_training_neither_wins_a_rate_nor_counts(whole: Study) -> None:
    failed = next(t for t in whole.found if t.seed == trials.TUNING_SEED and t.gates == "softmax" and t.rate == 2e-3 and t.start != "own")
    found = whole.found | {failed: replace(whole.found[failed], value=0.0, extra=whole.found[failed].extra | {"error": "NaN"})}
    arm = replace(failed.arm, steps=None)
    assert trials.chosen_rate(arm, whole.done) == 2e-3
    assert trials.chosen_rate(arm, Study(found).done) != 2e-3


def test_pages_and_pictures(whole: Study, tmp_path: Path) -> None:
    records.write(tmp_path / "study.jsonl", whole.found.values())
    findings.write(tmp_path / "findings.md", tmp_path / "study.jsonl")
    assert (tmp_path / "findings.md").read_text() == findings.render(whole)
    assert "| GLA, 16 heads, scaled start | softmax | 0.002 | 8 of 8 | 3." in (tmp_path / findings.APPENDIX).read_text()
    assert {path.stem for path in (tmp_path / findings.IMAGES).iterdir()} == set(FIGURES)
    assert all("</svg>" in path.read_text() for path in (tmp_path / findings.IMAGES).iterdir())


@pytest.mark.parametrize(("name", "render"), [("findings.md", findings.render), (findings.APPENDIX, findings.tables)])
def test_the_repositorys_page_is_that_of_its_records(name: str, render: Callable[[Study], str]) -> None:
    assert (ROOT / "docs" / name).read_text() == render(Study(recorded(RECORDS))), "run python -m lab findings"
    assert RECORDS.parent == RESULTS
