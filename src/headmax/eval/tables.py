"""The paper's three tables, its figures beside ours. A cell that was not run is empty."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from headmax import records
from headmax.records import Record
from headmax.tables import Table

PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text())
ERRORS = 1.96
"""Standard errors within which a score counts as chance."""
LEGEND = f"† within {ERRORS} standard errors of chance, or below. Δ: difference to the backbone without gates, from the same seed."
ONE, SEVERAL = "± one standard error.", "± standard deviation over seeds, or one standard error where there is one seed."
SUBSETS = {"squad_subset.jsonl": "a subset of SQuAD, not the paper's selection"}
LARGE = 1e4
"""From where on a number is shown by its order."""
Cells = Sequence[float | None]
Found = dict[int | None, Record]
"""Records of models that differ in the seed of their training alone."""


def render(files: Sequence[Path], scale: str, form: Literal["markdown", "latex"], controls: Mapping[str, str] | None = None) -> str:
    """All three tables."""
    return "\n".join(grid.markdown() if form == "markdown" else grid.latex() for grid in grids(files, scale, controls or {}))


def grids(files: Sequence[Path], scale: str, controls: Mapping[str, str]) -> list[Table]:
    """The three tables; of several records for one model and cell the last counts.

    `controls`: titles of further models with gates, by what stands before the backbone in a model's name.
    """
    ours: dict[tuple[str, str, str], Found] = defaultdict(dict)
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        for r in records.read(file):
            if r.suite == "eval":
                ours[r.extra["model"], r.case, r.metric][r.extra.get("run", {}).get("seed")] = r
    return [_grid(table, ours, scale, controls) for table in PAPER["tables"]]


def _grid(table: dict[str, Any], ours: Mapping[tuple[str, str, str], Found], scale: str, controls: Mapping[str, str]) -> Table:
    columns, digits = table["columns"], table["digits"]
    arrows = {"lower": "↓", "higher": "↑"}
    header = ["Model", "", *(f"{column['title']} {arrows[column['better']]}" for column in columns)] + ["Avg. ↑"] * table["average"]
    chance: list[float | None] = [column["chance"] for column in columns]
    grid = Table(header, align="ll" + "r" * (len(header) - 2), title=table["title"])
    grid.rows.append(["chance", "", *_plain(chance + [_average(table, chance)] * table["average"], digits)])
    notes: dict[str, None] = {}

    def add(title: str, model: str, backbone: str) -> None:
        """What we found, and by how much it differs from the backbone."""
        found, base = ([ours.get((f"{name}-{scale}", c["task"], c["metric"]), {}) for c in columns] for name in (model, backbone))
        cells = [_ours(one, column, digits, notes) for one, column in zip(found, columns, strict=True)]
        grid.rows.append([title, f"ours, {scale}", *cells, *([spread(_averages(table, found), digits)] * table["average"])])
        if model != backbone:
            values, others = ([*map(_values, part), *[_averages(table, part)] * table["average"]] for part in (found, base))
            pairs = zip(values, others, strict=True)
            grid.rows.append(["", "ours Δ", *(spread({s: a[s] - b[s] for s in a if s in b}, digits, "+") for a, b in pairs)])

    for row, title in PAPER["models"].items():
        backbone = row.removeprefix("softmax-")
        paper, base = ([*table["values"][name], *([table["averages"][name]] if table["average"] else [])] for name in (row, backbone))
        grid.rows.append([title, "paper", *_plain(paper, digits)])
        if row != backbone:
            grid.rows.append(["", "paper Δ", *(_signed(a - b, digits) for a, b in zip(paper, base, strict=True))])
        add("", row, backbone)
        for control, words in controls.items():
            if row != backbone and any(model == f"{control}-{backbone}-{scale}" for model, _, _ in ours):
                add(f"{words} {PAPER['models'][backbone]}", f"{control}-{backbone}", backbone)
    several = any(len(found) > 1 for (model, _, _), found in ours.items() if model.endswith(f"-{scale}"))
    grid.notes = [LEGEND, SEVERAL if several else ONE, *(f"‡ {note}." for note in notes)]
    return grid


def _values(found: Found) -> dict[int | None, float]:
    return {seed: record.value * (100 if record.unit == "fraction" else 1) for seed, record in found.items()}


def _average(table: dict[str, Any], cells: Cells) -> float | None:
    """Of the accuracies, if all are there."""
    values = [cell for cell, column in zip(cells, table["columns"], strict=True) if column["better"] == "higher"]
    return None if None in values else mean(values)  # type: ignore[type-var]


def _averages(table: dict[str, Any], found: Sequence[Found]) -> dict[int | None, float]:
    """By seed, where all accuracies are there."""
    values = [_values(one) for one in found]
    made = {seed: _average(table, [one.get(seed) for one in values]) for one in values for seed in one}
    return {seed: value for seed, value in made.items() if value is not None}


def _plain(cells: Cells, digits: int) -> list[str]:
    return ["" if cell is None else f"{cell:.{digits}f}" for cell in cells]


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def spread(values: Mapping[int | None, float], digits: int, sign: Literal["", "+"] = "") -> str:
    """The mean over seeds, with its spread if there are several."""
    if not values:
        return ""
    text = f"{_number(mean(values.values()), digits, sign)}".replace("-", "−")
    return text + (f" ± {_number(stdev(values.values()), digits)}" if len(values) > 1 else "")


def _number(value: float, digits: int, sign: Literal["", "+"] = "") -> str:
    return f"{value:{sign}.{digits}f}" if abs(value) < LARGE else f"{value:{sign}.2e}"


def _ours(found: Found, column: dict[str, Any], digits: int, notes: dict[str, None]) -> str:
    if not found:
        return ""
    values, last = _values(found), list(found.values())[-1]
    factor = 100 if last.unit == "fraction" else 1
    text, errors = spread(values, digits), [r.extra["stderr"] * factor for r in found.values() if r.extra["stderr"] is not None]
    if errors:
        text += f" ± {_number(errors[0], digits)}" * (len(values) == 1)
        if column["chance"] is not None and mean(values.values()) - column["chance"] <= ERRORS * mean(errors):
            text += " †"
    said = [f"the first {last.extra['n']} documents of a task only"] * (last.extra["limit"] is not None)
    said += [SUBSETS[source] for source in [last.extra.get("data")] if source in SUBSETS]
    notes |= dict.fromkeys(said)
    return text + " ‡" * bool(said)
