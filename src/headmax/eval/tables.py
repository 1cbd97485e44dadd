"""The paper's three tables, with its results and ours. Cells without a result are empty."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from headmax import records
from headmax.records import Record
from headmax.tables import Table

PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text())
Z = 1.96
"""Standard errors within which a score counts as chance."""
LEGEND = f"† within {Z} standard errors of chance, or below. Δ: difference to the backbone without gates, with the same seed."
ONE_SEED, SEVERAL_SEEDS = "± one standard error.", "± standard deviation over seeds, or one standard error for a single seed."
SUBSETS = {"squad_subset.jsonl": "a subset of SQuAD, not the paper's selection"}
LARGE = 1e4
"""Numbers from here on are shown in scientific notation."""
Cells = Sequence[float | None]
BySeed = dict[int | None, Record]
"""Records of models that differ only in their training seed."""


def render(files: Sequence[Path], scale: str, form: Literal["markdown", "latex"], controls: Mapping[str, str] | None = None) -> str:
    """The three tables as text."""
    return "\n".join(grid.markdown() if form == "markdown" else grid.latex() for grid in grids(files, scale, controls or {}))


def grids(files: Sequence[Path], scale: str, controls: Mapping[str, str]) -> list[Table]:
    """The three tables; if a cell has several records with one seed, the last counts.

    `controls`: titles of further models with gates, by the prefix of the backbone in the model's name.
    """
    ours: dict[tuple[str, str, str], BySeed] = defaultdict(dict)
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        for r in records.read(file):
            if r.suite == "eval":
                ours[r.extra["model"], r.case, r.metric][r.extra.get("run", {}).get("seed")] = r
    return [_grid(table, ours, scale, controls) for table in PAPER["tables"]]


def _grid(table: dict[str, Any], ours: Mapping[tuple[str, str, str], BySeed], scale: str, controls: Mapping[str, str]) -> Table:
    columns, digits = table["columns"], table["digits"]
    arrows = {"lower": "↓", "higher": "↑"}
    header = ["Model", "", *(f"{column['title']} {arrows[column['better']]}" for column in columns)]
    chance: list[float | None] = [column["chance"] for column in columns]
    if table["average"]:
        header.append("Avg. ↑")
        chance.append(_average(table, chance))
    grid = Table(header, align="ll" + "r" * (len(header) - 2), title=table["title"])
    grid.rows.append(["chance", "", *_plain(chance, digits)])
    notes: dict[str, None] = {}

    def cells(model: str) -> list[BySeed]:
        return [ours.get((f"{model}-{scale}", column["task"], column["metric"]), {}) for column in columns]

    for model, title in PAPER["models"].items():
        backbone = model.removeprefix("softmax-")
        base = None if model == backbone else backbone
        grid.rows += _paper_rows(table, model, title, base)
        for name, label in ({model: ""} | (_controls(ours, scale, controls, backbone) if base else {})).items():
            grid.rows += _our_rows(table, label, scale, cells(name), cells(base) if base else None, notes)
    several = any(len(records) > 1 for (model, _, _), records in ours.items() if model.endswith(f"-{scale}"))
    grid.notes = [LEGEND, SEVERAL_SEEDS if several else ONE_SEED, *(f"‡ {note}." for note in notes)]
    return grid


def _controls(ours: Mapping[tuple[str, str, str], BySeed], scale: str, controls: Mapping[str, str], backbone: str) -> dict[str, str]:
    """The controls of a backbone that have results, and their titles."""
    measured = {model for model, _, _ in ours}
    titles = {f"{control}-{backbone}": f"{label} {PAPER['models'][backbone]}" for control, label in controls.items()}
    return {model: title for model, title in titles.items() if f"{model}-{scale}" in measured}


def _paper_rows(table: dict[str, Any], model: str, title: str, base: str | None) -> Iterator[list[str]]:
    """The paper's results, and their differences to those of `base`."""
    digits = table["digits"]

    def cells(name: str) -> list[float]:
        return [*table["values"][name], *([table["averages"][name]] if table["average"] else [])]

    yield [title, "paper", *_plain(cells(model), digits)]
    if base is not None:
        yield ["", "paper Δ", *(_signed(a - b, digits) for a, b in zip(cells(model), cells(base), strict=True))]


def _our_rows(
    table: dict[str, Any], title: str, scale: str, cells: Sequence[BySeed], base: Sequence[BySeed] | None, notes: dict[str, None]
) -> Iterator[list[str]]:
    """Our results, and their differences to those of `base` with the same seed; adds to `notes`."""
    digits = table["digits"]

    def values(cells: Sequence[BySeed]) -> list[dict[int | None, float]]:
        return [*map(_values, cells), *([_averages(table, cells)] if table["average"] else [])]

    row = [_ours(cell, column, digits, notes) for cell, column in zip(cells, table["columns"], strict=True)]
    averages = [spread(values(cells)[-1], digits)] if table["average"] else []
    yield [title, f"ours, {scale}", *row, *averages]
    if base is not None:
        pairs = zip(values(cells), values(base), strict=True)
        yield ["", "ours Δ", *(spread({s: a[s] - b[s] for s in a if s in b}, digits, "+") for a, b in pairs)]


def _values(cell: BySeed) -> dict[int | None, float]:
    return {seed: record.value * (100 if record.unit == "fraction" else 1) for seed, record in cell.items()}


def _average(table: dict[str, Any], cells: Cells) -> float | None:
    """The mean of the accuracies, if there are all."""
    values = [cell for cell, column in zip(cells, table["columns"], strict=True) if column["better"] == "higher"]
    return None if None in values else mean(values)  # type: ignore[type-var]


def _averages(table: dict[str, Any], cells: Sequence[BySeed]) -> dict[int | None, float]:
    """`_average` by seed, for seeds with all accuracies."""
    values = [_values(cell) for cell in cells]
    averages = {seed: _average(table, [cell.get(seed) for cell in values]) for cell in values for seed in cell}
    return {seed: value for seed, value in averages.items() if value is not None}


def _plain(cells: Cells, digits: int) -> list[str]:
    return ["" if cell is None else f"{cell:.{digits}f}" for cell in cells]


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def spread(values: Mapping[int | None, float], digits: int, sign: Literal["", "+"] = "") -> str:
    """The mean over seeds, with the standard deviation if there are several."""
    if not values:
        return ""
    text = f"{_number(mean(values.values()), digits, sign)}".replace("-", "−")
    return text + (f" ± {_number(stdev(values.values()), digits)}" if len(values) > 1 else "")


def _number(value: float, digits: int, sign: Literal["", "+"] = "") -> str:
    return f"{value:{sign}.{digits}f}" if abs(value) < LARGE else f"{value:{sign}.2e}"


def _ours(cell: BySeed, column: dict[str, Any], digits: int, notes: dict[str, None]) -> str:
    """The text of a cell; adds to `notes`."""
    if not cell:
        return ""
    values, last = _values(cell), list(cell.values())[-1]
    factor = 100 if last.unit == "fraction" else 1
    text, errors = spread(values, digits), [r.extra["stderr"] * factor for r in cell.values() if r.extra["stderr"] is not None]
    if errors:
        if len(values) == 1:
            text += f" ± {_number(errors[0], digits)}"
        if column["chance"] is not None and mean(values.values()) - column["chance"] <= Z * mean(errors):
            text += " †"
    own_notes = [SUBSETS[source] for source in [last.extra.get("data")] if source in SUBSETS]
    if last.extra["limit"] is not None:
        own_notes.insert(0, f"the first {last.extra['n']} documents of a task only")
    notes |= dict.fromkeys(own_notes)
    return f"{text} ‡" if own_notes else text
