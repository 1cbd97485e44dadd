"""Figures hold what the records hold, and nothing else."""

import itertools
import math
from pathlib import Path

import pytest

from headmax import records
from lab import RESULTS
from lab.pages import figures
from lab.study.earlier import Results


def write(path: Path, suite: str, rows: list[tuple[str, str, float, dict]]) -> None:
    make = records.Recorder(suite, "cpu")
    records.append(path, [make(case, "headmax", metric, value, "", **extra) for case, metric, value, extra in rows])


def test_each_figure_reads_its_records(tmp_path: Path) -> None:
    wikitext = [("gla-80m", 40.0, 0), ("gla-80m", 42.0, 1), ("softmax-gla-80m", 38.0, 0), ("gla-110m-h8", 37.0, 0), ("retnet-80m", 9.0, 0)]
    write(
        tmp_path / "e.jsonl", "eval", [("wikitext", "word_perplexity", value, {"model": m, "run": {"seed": n}}) for m, value, n in wikitext]
    )
    write(tmp_path / "e.jsonl", "eval", [("lambada", "word_perplexity", 1.0, {"model": "gla-80m"})])
    steps = [("gla-340m 8192x8", "softmax/peak memory", 30.0, {}), ("gla-340m 4096x8", "softmax/peak memory", 31.0, {})]
    steps += [("gla-80m 4096x8", "softmax/peak memory", 9.0, {})]
    write(tmp_path / "t.jsonl", "train", [*steps, ("gla-340m 4096x8", "transformer/tokens per second", 5.0, {})])
    write(tmp_path / "d.jsonl", "decode", [("gla-340m batch 1 context 1024 decoded 512", "end to end", 0.3, {})])
    write(tmp_path / "d.jsonl", "decode", [("gla-340m batch 1 context 1024 decoded 512", "end to end", 0.2, {})])
    lines = {name: figures.collect(figure, Results(tmp_path)) for name, figure in figures.FIGURES.items()}
    assert lines == {
        "scaling": {"GLA": {80: [40.0, 42.0]}, "Softmax GLA": {80: [38.0]}},
        "heads": {"GLA": {8: [37.0]}},
        "differences": {},
        "speed": {},
        "memory": {"headmax, softmax gates": {("GLA", 8192, 8): [30.0], ("GLA", 4096, 8): [31.0]}},
        "throughput": {"Transformer++": {("Transformer++", 4096, 8): [5.0]}},
        "latency": {"no gates": {("GLA", 512): [0.2]}},
    }
    assert figures.mean_and_spread([40.0, 42.0]) == (41.0, pytest.approx(math.sqrt(2)))
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


def test_the_committed_records_give_figures_and_what_is_to_be_seen_in_them() -> None:
    results = Results(RESULTS)
    found = {name: figures.collect(figure, results) for name, figure in figures.FIGURES.items()}
    assert {len(values) for places in found["differences"].values() for values in places.values()} == {3}, "a point per seed"
    assert set(found["throughput"]) == {*figures.SERIES, figures.ATTENTION}
    said = {name: figures.FIGURES[name].finding(lines) for name, lines in found.items() if lines}
    assert (
        said["throughput"]
        == "Training throughput with softmax gates, as a multiple of flash-linear-attention's: GLA 1.76, RetNet 1.87, GDN 1.68"
    )
    assert said["differences"].endswith("against no gates, GDN; against gates frozen at 1/H, nowhere")
    assert said["speed"].endswith("1.54 times with no gates and 1.68 times with softmax gates")
    assert said["latency"] == "With softmax gates the time to decode one text changes by −2.3% to +5.2%"


def test_a_picture_has_its_bars_apart() -> None:
    """Where 15 series once shared 7 colours."""
    pytest.importorskip("matplotlib")
    picture = figures.FIGURES["throughput"].draw(figures.collect(figures.FIGURES["throughput"], Results(RESULTS)))
    bars = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_facecolor()) for bar in picture.axes[0].patches]
    assert len(bars) == 12
    assert len({colour for *_, colour in bars}) == 4
    assert all(right <= left for (_, right, _), (left, *_) in itertools.pairwise(sorted(bars)))
