"""Figures hold what the records hold, and nothing else."""

from pathlib import Path

import pytest

from headmax import records
from lab import RESULTS
from lab.pages import figures


def write(path: Path, suite: str, rows: list[tuple[str, str, float, dict]]) -> None:
    make = records.Recorder(suite, "cpu")
    records.append(path, [make(case, "headmax", metric, value, "", **extra) for case, metric, value, extra in rows])


def test_each_figure_reads_its_records(tmp_path: Path) -> None:
    wikitext = [("gla-80m", 40.0), ("softmax-gla-80m", 38.0), ("gla-110m", 36.0), ("gla-110m-h8", 37.0), ("retnet-80m", 9.0)]
    write(tmp_path / "e.jsonl", "eval", [("wikitext", "word_perplexity", value, {"model": model}) for model, value in wikitext])
    write(tmp_path / "e.jsonl", "eval", [("lambada", "word_perplexity", 1.0, {"model": "gla-80m"})])
    steps = [("gla-340m 8192x4", "plain/peak memory", 30.0, {}), ("gla-340m 4096x8", "softmax/peak memory", 31.0, {})]
    write(tmp_path / "t.jsonl", "train", [*steps, ("gla-340m 4096x8", "transformer/tokens per second", 5.0, {})])
    write(tmp_path / "d.jsonl", "decode", [("gla-340m batch 1 context 1024 decoded 512", "end to end", 0.3, {})])
    write(tmp_path / "d.jsonl", "decode", [("gla-340m batch 1 context 1024 decoded 512", "end to end", 0.2, {})])
    found = [record for path in sorted(tmp_path.glob("*.jsonl")) for record in records.read(path)]
    lines = {name: figures.collect(figure, found)[0] for name, figure in figures.FIGURES.items()}
    assert lines == {
        "scaling": {"GLA": {80: 40.0, 110: 36.0}, "Softmax GLA": {80: 38.0}},
        "heads": {"GLA": {4: 36.0, 8: 37.0}},
        "memory": {"gla-340m": {"8192x4": 30.0}, "softmax-gla-340m": {"4096x8": 31.0}},
        "throughput": {"transformer-340m": {"4096x8": 5.0}},
        "latency": {"gla-340m": {512: 0.2}},
    }
    said = list(figures.reproduce(tmp_path / "out", tmp_path))
    assert len(said) == len(lines)
    for name in filter(lines.get, lines):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5_000
        assert (tmp_path / "out" / f"{name}.svg").exists()


def test_a_figure_without_records_says_so_and_is_not_drawn(tmp_path: Path) -> None:
    said = list(figures.reproduce(tmp_path / "out", tmp_path))
    assert [line.split(":")[0] for line in said] == list(figures.FIGURES)
    assert all("no records for it" in line for line in said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["memory", "throughput"])
def test_the_committed_records_give_figures(name: str, tmp_path: Path) -> None:
    found = [record for path in RESULTS.glob("*.jsonl") for record in records.read(path)]
    lines, device = figures.collect(figures.FIGURES[name], found)
    assert {"retnet-340m", "softmax-retnet-340m"} <= set(lines)
    assert "NVIDIA" in device
