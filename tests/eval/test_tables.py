"""The paper's figures beside ours."""

from pathlib import Path
from typing import Any

import pytest

from headmax import records
from headmax.eval.names import TASKS
from headmax.eval.tables import PAPER, render


def test_the_paper_s_figures_agree_with_its_averages() -> None:
    for table in PAPER["tables"]:
        assert set(table["values"]) == set(PAPER["models"])
        for row, values in table["values"].items():
            assert len(values) == len(table["columns"])
            scores = [value for value, column in zip(values, table["columns"], strict=True) if column["better"] == "higher"]
            if table["average"]:
                assert sum(scores) / len(scores) == pytest.approx(table["averages"][row], abs=0.00501)
        assert {column["task"] for column in table["columns"]} <= set(TASKS)


def record(path: Path, model: str, task: str, metric: str, value: float, stderr: float | None, **extra: object) -> None:
    about = {"model": model, "stderr": stderr, "n": 9, "limit": None, "data": "hub"} | extra
    unit = "perplexity" if metric.endswith("perplexity") else "fraction"
    records.append(path, [records.Recorder("eval", "cpu")(task, "headmax", metric, value, unit, **about)])


def cells(text: str, start: int) -> list[str]:
    return [cell.strip() for cell in text.splitlines()[start].split("|")[1:-1]]


def test_ours_stand_beside_the_paper_s(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for model, shift in (("gla-25m", 0.0), ("softmax-gla-25m", 0.04)):
        for task in ("lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge"):
            record(path, model, task, "acc", 0.26 + shift, 0.01)
    record(path, "gla-25m", "wikitext", "word_perplexity", 50.0, None)
    record(path, "softmax-gla-25m", "wikitext", "word_perplexity", 47.5, None)
    record(path, "gla-25m", "squad_completion", "contains", 0.1, 0.01, data="squad_subset.jsonl")
    record(path, "gla-25m", "fda", "contains", 0.0, 0.0, limit=9)
    text = render((path,), "25m", "markdown")
    lines = text.splitlines()
    rows = {
        cell[0]: n
        for n, line in enumerate(lines)
        if (cell := cells(text, n) if line.startswith("|") else [""])[0] in PAPER["models"].values()
    }
    first = lines.index(next(line for line in lines if line.startswith("| GLA | paper")))
    assert cells(text, first + 1)[1:4] == ["ours, 25m", "50.00", ""]
    assert cells(text, first + 1)[6] == "26.00 ± 1.00 †"  # HellaSwag: chance is 25
    assert cells(text, first + 1)[5] == "26.00 ± 1.00 †"  # PIQA: chance is 50
    assert cells(text, first + 1)[-1] == "26.00"
    assert cells(text, first + 3)[1:3] == ["paper Δ", "−2.61"]
    assert cells(text, first + 4)[6] == "30.00 ± 1.00"
    assert cells(text, first + 5)[1:] == ["ours Δ", "−2.50", "", *["+4.00"] * 7]
    assert rows["Softmax GLA"]
    assert "| chance |  |  |  | 0.00 | 50.00 | 25.00 | 50.00 | 25.00 | 25.00 | 29.17 |" in text
    assert "10.00 ± 1.00 ‡" in text
    assert "‡ a subset of SQuAD, not the paper's selection." in text
    assert "0.00 ± 0.00 † ‡" in text
    assert "‡ the first 9 documents of a task only." in text
    other = render((path,), "340m", "markdown")
    assert "26.00" not in other  # what was not run at that scale is empty


def test_seeds_are_averaged_and_paired_and_controls_shown(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    perplexities = {"gla-25m": (50.0, 54.0), "softmax-gla-25m": (47.0, 52.0), "uniform-gla-25m": (48.0, 51.0)}
    for model, values in perplexities.items():
        for seed, value in enumerate(values):
            record(path, model, "wikitext", "word_perplexity", value, None, run={"seed": seed})
            record(path, model, "swde", "contains", 0.01 * seed, 0.02, run={"seed": seed})
    text = render((path,), "25m", "markdown", {"uniform": "Uniform", "sigmoid": "Sigmoid"})
    first = next(n for n, line in enumerate(text.splitlines()) if line.startswith("| GLA | paper"))
    assert cells(text, first + 1)[2] == "52.00 ± 2.83"
    assert cells(text, first + 4)[2] == "49.50 ± 3.54"
    assert cells(text, first + 5)[1:3] == ["ours Δ", "−2.50 ± 0.71"], "seed by seed"
    assert cells(text, first + 6)[:3] == ["Uniform GLA", "ours, 25m", "49.50 ± 2.12"]
    assert cells(text, first + 7)[2] == "−2.50 ± 0.71"
    assert "0.50 ± 0.71 †" in text
    assert "± standard deviation over seeds, or one standard error for a single seed." in text
    assert "Sigmoid" not in text


def test_latex_and_the_command(headmax: Any, tmp_path: Path) -> None:
    empty = tmp_path / "r.jsonl"
    empty.touch()
    text = render((empty,), "nothing", "latex")
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 3
    assert r"Softmax GDN & paper & 100.0" in text
    assert not set(text) & set("†‡Δ±↑↓−")
    widths = {line.count("&") for line in text.splitlines() if line.endswith(r"\\")}
    assert widths == {10, 5, 13}
    assert headmax("eval", "tables", empty, "--out", tmp_path / "t.md")[0] == 0
    assert "| Transformer++ | paper | 24.59 | 31.26 |" in (tmp_path / "t.md").read_text()
    code, _, errors = headmax("eval", "tables", tmp_path / "none.jsonl")
    assert code == 2
    assert "none.jsonl: no such file" in errors
