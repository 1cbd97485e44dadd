"""The paper's three tables, its figures beside ours. A cell that was not run is empty."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headmax import records
from headmax.records import Record

PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text())
RECORDS = records.RESULTS / "eval.jsonl"
ERRORS = 1.96
"""Standard errors within which a score counts as chance."""
LEGEND = f"† within {ERRORS} standard errors of chance. Δ: difference to the backbone without the softmax over heads. ± one standard error."
SUBSETS = {"squad_subset.jsonl": "a subset of SQuAD, not the paper's selection"}
Cells = Sequence[float | None]


@dataclass
class Grid:
    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        rule = ["---", "---", *["---:"] * (len(self.header) - 2)]
        lines = [f"| {' | '.join(row)} |" for row in (self.header, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"{note}  " for note in self.notes), ""])

    def latex(self) -> str:
        marks = {"†": r"$^\dagger$", "‡": r"$^\ddagger$", "Δ": r"$\Delta$", "±": r"$\pm$", "↓": r"$\downarrow$", "↑": r"$\uparrow$"}
        marks |= {"−": "$-$", "%": r"\%", "_": r"\_"}

        def escape(text: str) -> str:
            return "".join(marks.get(letter, letter) for letter in text)

        body = [" & ".join(map(escape, row)) + r" \\" for row in self.rows]
        return "\n".join(
            [
                r"\begin{table}[t]",
                r"\centering",
                rf"\caption{{{escape(' '.join([self.title + '.', *self.notes]))}}}",
                rf"\begin{{tabular}}{{ll{'r' * (len(self.header) - 2)}}}",
                r"\toprule",
                " & ".join(map(escape, self.header)) + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def render(files: Sequence[Path], scale: str, form: Literal["markdown", "latex"]) -> str:
    """All three tables; of several records for one cell the last counts."""
    ours: dict[tuple[str, str, str], Record] = {}
    for file in files:
        if file != RECORDS and not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        ours |= {(r.extra["model"], r.case, r.metric): r for r in records.read(file) if r.suite == "eval"}
    grids = [_grid(table, ours, scale) for table in PAPER["tables"]]
    return "\n".join(grid.markdown() if form == "markdown" else grid.latex() for grid in grids)


def _grid(table: dict[str, Any], ours: dict[tuple[str, str, str], Record], scale: str) -> Grid:
    columns, digits = table["columns"], table["digits"]
    arrows = {"lower": "↓", "higher": "↑"}
    header = ["Model", "", *(f"{column['title']} {arrows[column['better']]}" for column in columns)] + ["Avg. ↑"] * table["average"]
    chance: list[float | None] = [column["chance"] for column in columns]
    grid = Grid(table["title"], header)
    grid.rows.append(["chance", "", *_plain(chance + [_average(table, chance)] * table["average"], digits)])
    notes: dict[str, None] = {}
    measured: dict[str, list[float | None]] = {}
    for row, title in PAPER["models"].items():
        backbone = row.removeprefix("softmax-")
        paper = [*table["values"][row], *([table["averages"][row]] if table["average"] else [])]
        found = [ours.get((f"{row}-{scale}", column["task"], column["metric"])) for column in columns]
        cells = [_value(record) for record in found]
        measured[row] = cells + [_average(table, cells)] * table["average"]
        shown = [_ours(record, column, digits, notes) for record, column in zip(found, columns, strict=True)]
        shown += _plain(measured[row][len(columns) :], digits)
        grid.rows.append([title, "paper", *_plain(paper, digits)])
        if row != backbone:
            base = [*table["values"][backbone], *([table["averages"][backbone]] if table["average"] else [])]
            grid.rows.append(["", "paper Δ", *_difference(paper, base, digits)])
        grid.rows.append(["", f"ours, {scale}", *shown])
        if row != backbone:
            grid.rows.append(["", "ours Δ", *_difference(measured[row], measured[backbone], digits)])
    grid.notes = [LEGEND, *(f"‡ {note}." for note in notes)]
    return grid


def _value(record: Record | None) -> float | None:
    return None if record is None else record.value * (100 if record.unit == "fraction" else 1)


def _average(table: dict[str, Any], cells: Cells) -> float | None:
    """Of the accuracies, if all are there."""
    values = [cell for cell, column in zip(cells, table["columns"], strict=True) if column["better"] == "higher"]
    return None if None in values else sum(values) / len(values)  # type: ignore[arg-type]


def _plain(cells: Cells, digits: int) -> list[str]:
    return ["" if cell is None else f"{cell:.{digits}f}" for cell in cells]


def _difference(cells: Cells, base: Cells, digits: int) -> list[str]:
    pairs = zip(cells, base, strict=True)
    return ["" if a is None or b is None else f"{a - b:+.{digits}f}".replace("-", "−") for a, b in pairs]


def _ours(record: Record | None, column: dict[str, Any], digits: int, notes: dict[str, None]) -> str:
    value = _value(record)
    if record is None or value is None:
        return ""
    text, error = f"{value:.{digits}f}", record.extra["stderr"]
    if error is not None:
        error *= 100 if record.unit == "fraction" else 1
        text += f" ± {error:.{digits}f}"
        if column["chance"] is not None and abs(value - column["chance"]) <= ERRORS * error:
            text += " †"
    said = []
    if record.extra["limit"] is not None:
        said.append(f"the first {record.extra['n']} documents of a task only")
    if (source := record.extra.get("data")) in SUBSETS:
        said.append(SUBSETS[source])
    notes |= dict.fromkeys(said)
    return text + " ‡" * bool(said)
