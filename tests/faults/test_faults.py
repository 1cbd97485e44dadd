"""Bad inputs, kills, full disks and two processes at once, over all commands: a sample here, all of them by `make test-faults`."""

import random
from pathlib import Path

import pytest

from headmax import records
from headmax_cli.commands import COMMANDS
from tests.faults import bad, disturbed, place, suite


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place.make(tmp_path_factory.mktemp("faults") / "place")


def failed(cases: list[suite.Case], template: Path) -> list[suite.Outcome]:
    return [outcome for outcome in suite.run_all(cases, template, workers=1) if outcome.verdict in suite.FAILED]


def test_bad_inputs_of_every_command(template: Path) -> None:
    every = bad.all_of(seed=0, each=1)
    assert len(every) > 300
    assert {case.command for case in every} == set(COMMANDS)
    assert not failed(suite.sample(every, len(every) // 10, seed=0), template)


@pytest.mark.parametrize("kind", ["kill", "no room", "two at once"])
def test_disturbed_commands(kind: str, template: Path) -> None:
    commands = random.Random(kind).sample(sorted(set(disturbed.WRITERS) - {"curves", "bench kernels"}), 4)
    assert not failed([disturbed.Disturbed(kind, command, seed) for seed, command in enumerate(commands)], template)


def test_what_is_wrong_is_found(template: Path, tmp_path: Path) -> None:
    """The judges see a bad input that is taken, and an output that is not what it should be."""
    taken = bad.Bad("env", "nothing bad", ("env",))
    assert suite.run(taken, template, tmp_path / "a").verdict == "wrong"
    shadow = place.copy(template, tmp_path / "b")
    (shadow / "mine.html").unlink()
    (shadow / "out").mkdir()
    writer = disturbed.WRITERS["eval tables"]
    assert [kind for kind, _ in disturbed.problems(template, shadow, writer, [{"t.md": ""}], [])] == ["lost", "wrong"]


def test_the_table_of_the_docs_is_that_of_the_records() -> None:
    root = Path(__file__).parents[2]
    assert suite.table(list(records.read(root / "lab/results/faults.jsonl"))) in (root / "SECURITY.md").read_text()


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_all_of_them(seed: int, template: Path) -> None:
    assert not failed(suite.all_of(seed), template)
