"""One command, one commit: parts are done once, resumed, and never mixed."""

from pathlib import Path

import pytest
import torch

from headmax import records
from headmax.bench.kernels import SPECS
from headmax.ops.spec import Case
from lab.bench import eager
from lab.bench.record_set import Part, State, publish, record_set, run
from tests import command_line
from tests.command_line import Called

COMMIT, OTHER = "0123456789ab", "ba9876543210"


def part(name: str, how: str = "well") -> Part:
    return Part(name, "kernels_h200.jsonl", ("tests.lab.part", name, how), seconds=60)


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parts' records name."""
    monkeypatch.setenv("COMMIT", COMMIT)


def test_a_part_that_failed_is_tried_again_and_the_others_are_not(tmp_path: Path) -> None:
    said: list[str] = []
    assert not run([part("a"), part("b", "fails")], tmp_path, COMMIT, None, said.append)
    assert said == ["[1/2] a", "[2/2] b", "b: no records, see above; rerun to try again"]
    written = (tmp_path / "a.jsonl").stat().st_mtime_ns
    assert run([part("a"), part("b")], tmp_path, COMMIT, None, said.append)
    assert said[3:] == ["[2/2] b"]
    assert (tmp_path / "a.jsonl").stat().st_mtime_ns == written
    assert [r.case for path in publish([part("a"), part("b")], tmp_path, tmp_path) for r in records.read(path)] == ["a", "b"]


def test_no_part_starts_that_would_outlast_the_budget(tmp_path: Path) -> None:
    said: list[str] = []
    assert not run([part("a")], tmp_path, COMMIT, 30, said.append)
    assert said == ["a takes about 60 s, 30 s are left: rerun to resume"]
    with pytest.raises(ValueError, match="lacks a: rerun to resume"):
        publish([part("a")], tmp_path, tmp_path)


def test_commits_do_not_mix(tmp_path: Path) -> None:
    State(COMMIT, {"a": 1.0}).save(tmp_path)
    with pytest.raises(ValueError, match=f"holds records of commit {COMMIT}, this is {OTHER}"):
        run([part("a")], tmp_path, OTHER, None, print)
    with pytest.raises(ValueError, match="commit or stash first"):
        run([part("a")], tmp_path, COMMIT + "+", None, print)
    records.write(tmp_path / "a.jsonl", [records.Record("kernels", "a", "headmax", "time", 1.0, "ms", "cpu", OTHER, "2026-01-01")])
    with pytest.raises(ValueError, match=f"has records of commit {OTHER}, not {COMMIT}"):
        publish([part("a")], tmp_path, tmp_path)


def test_every_part_of_the_set_is_a_command_that_takes_these_options(lab: Called) -> None:
    """Each is called with one option too many, the only one that it refuses."""
    parts = record_set()
    assert len({part.name for part in parts}) == len(parts)
    for part in {tuple(word for word in part.command if not word.isdigit()): part for part in parts}.values():
        program, *words = part.command
        done = (lab if program == "lab" else command_line.run)(*words, "--out", "x.jsonl", "--no-such-option")
        assert done.returncode == 2
        assert "--no-such-option" in done.stderr
        assert not [word for word in words if word.startswith("--") and word in done.stderr], done.stderr


def test_uncompiled_steps_and_op_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "CALLS", 2)
    calls = list(eager.op_calls("cpu", Case(time=8, key=8, value=8), rounds=1))
    assert [r.metric for r in calls] == [f"{op}/host time, {kind}" for op in SPECS for kind in ("no gradients", "with gradients")]
    plan = eager.Plan("gla-tiny", ((16, 1),), 1, "cpu")
    threads = torch.get_num_threads()
    found = list(eager.steps(plan, {name: lambda name=name: eager.ours(name, False) for name in ("gla-tiny", "softmax-gla-tiny")}))
    assert torch.get_num_threads() == threads
    assert [(r.case, r.unit) for r in found if r.metric.endswith("step")] == [("gla-tiny 16x1", "ms"), ("softmax-gla-tiny 16x1", "ms")]
    assert all(r.value > 0 for r in found + calls)
