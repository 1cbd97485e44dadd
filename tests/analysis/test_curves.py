"""A run as records and as a figure."""

import json
from pathlib import Path

import pytest

from headmax import records
from headmax.cli.train import curves
from tests.train.small import Walks, train


def test_a_run_becomes_records_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = tmp_path / "run", tmp_path / "training.jsonl"
    train(run, max_steps=30, eval_every=10, validation=Walks(seed=1))
    curves(run, out=tmp_path / "pictures", name="walks", record=file)
    assert [Path(line.split()[-1]).name for line in capsys.readouterr().out.splitlines()] == ["walks.png", "walks.svg"]
    assert "gradient norm" in (tmp_path / "pictures" / "walks.svg").read_text()
    found = {record.metric: record for record in records.read(file)}
    summary, lines = (
        json.loads((run / "summary.json").read_text()),
        [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()],
    )
    assert found["training loss"].extra["curve"] == [[line["tokens"], round(line["loss"], 4)] for line in lines]
    assert found["tokens per second"].value == pytest.approx(10 * 192 / sum(line["seconds"] for line in lines[20:]))
    assert [tokens for tokens, _ in found["validation perplexity"].extra["curve"]] == [1920, 3840, 5760]
    assert len(found["write gate entropy"].extra["layers"]) == 2
    assert found["loss spikes"].commit == summary["commit"]
    with pytest.raises(ValueError, match=r"no summary.json, which `headmax train` writes when a run ends; give the --out folder"):
        curves(tmp_path)


def test_long_runs_are_downsampled() -> None:
    from headmax.analysis.curves import downsample

    lines = [{"tokens": n, "loss": float(n)} for n in range(1, 1001)]
    curve = downsample(lines, "loss", max)
    assert len(curve) == 200
    assert curve[0] == (5, 5.0)
    assert curve[-1] == (1000, 1000.0)
