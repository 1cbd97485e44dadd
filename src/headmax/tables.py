"""Tables rendered as Markdown, as LaTeX or on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.table

RULES = {"l": "---", "r": "---:"}
LATEX = {"†": r"$^\dagger$", "‡": r"$^\ddagger$", "Δ": r"$\Delta$", "±": r"$\pm$", "↓": r"$\downarrow$", "↑": r"$\uparrow$"}
LATEX |= {"−": "$-$", "%": r"\%", "_": r"\_", "&": r"\&"}


@dataclass
class Table:
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    align: str = ""
    """l or r for each column; all l unless given."""
    title: str = ""
    notes: list[str] = field(default_factory=list)
    bold: Collection[int] = ()
    """Indices of rows to highlight on a terminal."""

    def __post_init__(self) -> None:
        self.align = self.align or "l" * len(self.header)
        if len(self.align) != len(self.header):
            raise ValueError(f"align must have a letter for each of {len(self.header)} columns, got {self.align!r}")

    def markdown(self) -> str:
        """With the title, if any, as a heading, and the notes below."""
        lines = [f"| {' | '.join(row)} |" for row in (self.header, [RULES[side] for side in self.align], *self.rows)]
        if self.title:
            lines = [f"### {self.title}", "", *lines, "", *(f"{note}  " for note in self.notes), ""]
        return "\n".join(lines)

    def latex(self) -> str:
        """A floating table with booktabs rules, and the notes in the caption."""
        caption = _escape(" ".join([self.title + ".", *self.notes]))
        return "\n".join(
            [
                r"\begin{table}[t]",
                r"\centering",
                rf"\caption{{{caption}}}",
                rf"\begin{{tabular}}{{{self.align}}}",
                r"\toprule",
                " & ".join(map(_escape, self.header)) + r" \\",
                r"\midrule",
                *(" & ".join(map(_escape, row)) + r" \\" for row in self.rows),
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def terminal(self) -> rich.table.Table:
        """For a rich console."""
        import rich.table

        table = rich.table.Table(title=self.title or None, title_justify="left", box=None)
        for name, side in zip(self.header, self.align, strict=True):
            table.add_column(name, justify="right" if side == "r" else "left")
        for number, row in enumerate(self.rows):
            table.add_row(*row, style="bold" if number in self.bold else None)
        return table


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table without title and notes."""
    return Table(header, list(rows)).markdown()


def _escape(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
