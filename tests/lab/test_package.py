"""What the package holds of the records is what they hold, and says so of the plan and the demos."""

from dataclasses import replace
from pathlib import Path

import pytest

from headmax import recipes, records
from headmax.demo.verdict import Metric
from headmax.plan.cards import CARDS
from headmax.plan.estimate import ideal, memory
from headmax.plan.measured import Measured, check, choose_efficiency
from headmax.plan.work import Work
from lab import package


def test_the_package_holds_what_the_records_give() -> None:
    for path, content in package.contents().items():
        assert path.read_text() == content, "run python -m lab package"


@pytest.fixture
def recorded() -> list[Measured]:
    """Records as `bench train` writes them, of a card twice as slow as the roofs say, some noise added."""
    make = records.Recorder("train", "cpu")
    made = []
    for length, batch, noise in ((2048, 16, 1.0), (4096, 8, 1.1), (8192, 4, 1.0)):
        for variant, name in (("plain", "gla-340m"), ("softmax", "softmax-gla-340m"), ("transformer", "transformer-340m")):
            work = Work.of(recipes.get(name), length)
            taken = 2 * noise * sum(ideal(work, CARDS["h200"], length * batch))
            case = f"gla-340m {length}x{batch}"
            made.append(make(case, "headmax", f"{variant}/tokens per second", length * batch / taken, "tokens/s"))
            made.append(make(case, "headmax", f"{variant}/peak memory", sum(memory(work, length * batch).values()) / 2**30 * 1.25, "GiB"))
            made.append(make(case, "fla", f"{variant}/tokens per second", 1.0, "tokens/s"))
    return list(package.measured(replace(r, device="NVIDIA H200") for r in made))


def test_records_give_the_efficiency_and_check_the_prediction(recorded: list[Measured]) -> None:
    assert {(m.recipe, m.card, m.length, m.batch) for m in recorded} == {
        (name, "h200", length, batch)
        for name in ("gla-340m", "softmax-gla-340m", "transformer-340m")
        for length, batch in ((2048, 16), (4096, 8), (8192, 4))
    }
    efficiency, source = choose_efficiency("softmax-gla-340m", "h200", 4096, recorded)
    assert efficiency == pytest.approx(0.5 / 1.1)
    assert source.startswith("measured (softmax-gla-340m 4096x8 on NVIDIA H200, commit ")
    assert choose_efficiency("softmax-gla-340m", "h100", 16384, recorded)[0] == pytest.approx(0.5)
    assert "on another GPU" in choose_efficiency("softmax-gla-340m", "h100", 4096, recorded)[1]
    assert "another model, " in choose_efficiency("retnet-340m", "h200", 4096, recorded)[1]
    assert "another size, " in choose_efficiency("softmax-gla-80m", "h200", 4096, recorded)[1]
    assert (
        "with or without gates, gla-340m"
        in choose_efficiency("softmax-gla-340m", "h200", 4096, [m for m in recorded if m.recipe == "gla-340m"])[1]
    )
    said = check("softmax-gla-340m", "h200", 4096, recorded)
    assert said is not None
    assert "(-9%)" in said  # 1 / 1.1, from the other lengths
    assert "(-20%)" in said  # 1 / 1.25, of memory
    assert check("softmax-gla-340m", "h100", 4096, recorded) is None


def test_the_later_record_of_a_seed_counts(tmp_path: Path) -> None:
    make, path = records.Recorder("demo", "cpu"), tmp_path / "records.jsonl"
    metric = Metric("m", "unit", "metric")
    for value in (1.0, 2.0):
        measured = [make(f"case {v}", "headmax", "m", value, "unit", 7, variant=v) for v in ("plain", "uniform", "softmax")]
        records.append(path, measured)
    records.append(path, [make("case plain", "headmax", "m", 3.0, "unit", 8, variant="plain")])  # a seed that is not complete
    assert package.seed_scores(path, metric) == {"case": [{"plain": 2.0, "uniform": 2.0, "softmax": 2.0}]}
