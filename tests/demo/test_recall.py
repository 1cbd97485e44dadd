"""The recall demo: its outputs and a rerun."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headmax import records
from headmax.demo import outputs

Headmax = Callable[..., tuple[int, str, str]]


def test_outputs_and_a_rerun(tmp_path: Path, headmax: Headmax, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "THREADS", 1)
    command = ["demo", "recall", "--pairs", 2, "--heads", 2, "--key", 4, "--steps", 2, "--out", tmp_path / "out"]
    code, printed, errors = headmax(*command)
    assert code == 0, errors
    assert "After 2 steps, seed 0" in printed
    assert "in mean accuracy over training; fewer than 3 seeds are recorded" in printed
    measured = list(records.read(tmp_path / "out/records.jsonl"))
    assert len(measured) == 6
    assert {r.case for r in measured} == {f"mqar pairs=2 heads=2 key=4 steps=2 {v}" for v in ("plain", "uniform", "softmax")}
    assert all(r.seed == 0 and 0 <= r.value <= 1 for r in measured)
    assert (tmp_path / "out/demo.png").read_bytes().startswith(b"\x89PNG")
    assert "Associative recall with softmax gates, seed 0" in (tmp_path / "out/report.html").read_text()

    code, printed, errors = headmax(*command)
    assert code == 0, errors
    assert printed.count("reused") == 3
    assert list(records.read(tmp_path / "out/records.jsonl")) == measured
    assert headmax("demo", "--steps", 1, "--out", tmp_path / "out")[0] == 2, "the folder is the recall demo's"
