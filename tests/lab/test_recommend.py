"""A recommendation follows from the records by its rule, and is not made where nothing can be told apart."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from headmax.records import Recorder, append
from lab.pages.recommend import Setting, default, recommendation, settings
from lab.study.runs import Run, runs
from lab.study.statistics import Results

MAKE = Recorder("reproduction", "cpu")


def said(folder: Path, effect: Callable[[Run], float], noise: float = 0.002, recall: Callable[[Run], float] | None = None) -> str:
    """Of made-up runs whose losses (and accuracies) differ by an effect, and from seed to seed."""

    def wobble(run: Run) -> float:
        return noise * ((7 * run.seed + 3 * len(run.variant) + 5 * len(run.name)) % 5 - 2)

    asked = runs(["language", "placement", "after"])
    made = [MAKE(r.name, "headmax", "validation loss", 4.0 + effect(r) + wobble(r), "", r.seed, run=asdict(r)) for r in asked]
    for r in runs(["recall-gate-rates"]) if recall is not None else []:
        made.append(MAKE(r.name, "headmax", "validation loss", r.lr or 0.0, "", r.seed, run=asdict(r)))
        made.append(MAKE(r.name, "headmax", "accuracy", 0.5 + recall(r) + wobble(r), "", r.seed, run=asdict(r)))
    append(folder / "reproduction.jsonl", made)
    return "\n".join(recommendation(Results(folder)))


def test_a_clear_winner_is_recommended(tmp_path: Path) -> None:
    text = said(tmp_path, after_norm, recall=lambda run: 0.0)
    assert '**Recommendation: `kind="softmax", read_position="after_norm", norm_eps=1e-06`** instead of `kind="softmax"' in text
    assert 'literal setting remains `kind="softmax", read_position="query", norm_eps=1e-06`' in text
    assert ["**better**" in cell for cell in winner(text)] == [True] * 3 + [False] * 3


def test_what_was_not_measured_everywhere_is_not_recommended(tmp_path: Path) -> None:
    text = said(tmp_path, after_norm)
    assert "**No recommendation yet: the default stays for want of measurements, `kind=" in text
    assert "Settings better in 2 columns and worse in none that were not measured in all: 1." in text
    assert [cell.strip() for cell in winner(text)[3:]] == [""] * 3, "what was not measured is empty"


def test_one_column_is_not_enough_and_is_named(tmp_path: Path) -> None:
    text = said(tmp_path, lambda run: -0.08 * (run.variant == "uniform" and run.backbone == "gla"), recall=lambda run: 0.0)
    assert '**The default stays, `kind="softmax"' in text
    assert "- Better than the default, GLA, % of perplexity: uniform, eps 1e-06 (−7." in text


def after_norm(run: Run) -> float:
    return -0.08 if run.variant == "softmax-after" and run.norm_eps == 1e-6 else 0.0


def winner(text: str) -> list[str]:
    """Its cells."""
    line = next(line for line in text.splitlines() if line.startswith("| softmax, read gate after the norm, eps 1e-06"))
    return line.split("|")[2:-1]


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_where_nothing_differs_the_default_stays(tmp_path: Path, noise: float) -> None:
    text = said(tmp_path, lambda run: 0.0, noise)
    assert "**The default stays, `kind=" in text
    assert (
        "Of 3 columns that have three seeds, gates frozen at 1/H did not differ significantly from gates that compete in\n3, better in 0"
        in text
    )
    assert "**worse**" not in text


def test_better_text_does_not_outweigh_worse_recall(tmp_path: Path) -> None:
    """The one that wins on text loses elsewhere; the next best is taken, and the lowest loss of those that may be."""
    effects = {"plain": -0.09, "uniform": -0.05, "sigmoid": -0.06}
    text = said(tmp_path, lambda run: effects.get(run.variant, 0.0), recall=lambda run: -0.3 * (run.variant == "plain"))
    assert '**Recommendation: `kind="sigmoid", read_position="query", norm_eps=1e-06`**' in text
    assert "**worse**" in next(line for line in text.splitlines() if line.startswith("| no gates, eps 1e-06"))


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    for variant, loss in (("softmax", 4.0), ("uniform", 3.0)):
        run = Run("gla", variant)
        append(tmp_path / "reproduction.jsonl", [MAKE(run.name, "headmax", "validation loss", loss, "", 0, run=asdict(run))])
    assert "Recommendation: not measured; the default stays." in "\n".join(recommendation(Results(tmp_path)))


def test_the_default_is_one_of_the_settings() -> None:
    assert default() in settings()
    assert str(Setting("plain", 1e-5)) == "`head_gate=None, norm_eps=1e-05`"
    assert len(settings()) == len(set(settings())) == 15
