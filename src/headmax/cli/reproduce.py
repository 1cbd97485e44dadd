"""The paper's tables, figures and theory, and this repository's, from records."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def readme(path: Path = Path("README.md")) -> None:
    """Render the README's figures anew from the committed records.

    Args:
        path: the file whose generated sections are rewritten.
    """
    from headmax.bench.readme import update

    update(path)


def tables(
    records: tuple[Path, ...] = (),
    scale: str = "340m",
    form: Literal["markdown", "latex"] = "markdown",
    out: Path | None = None,
) -> None:
    """Render the paper's three tables: its figures, ours beside them where there are records, deltas to the backbone, chance.

    Args:
        records: files with records of `headmax eval`; the repository's own unless given.
        scale: which models are ours: those whose recipe or name ends with it.
        form: Markdown or LaTeX.
        out: write to this file instead of standard output.
    """
    from headmax.eval.tables import RECORDS, render

    text = render(records or (RECORDS,), scale, form)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)


def theory(out: Path = Path("runs/theory")) -> None:
    """Run the paper's proposition and theorems, and the norm's effect on the read gate, as experiments: pictures and records.

    Args:
        out: where they go.
    """
    from headmax.analysis.theory_figures import reproduce

    for record in reproduce(out):
        settings = ", ".join(f"{name} {value:g}" for name, value in record.extra.items())
        print(f"{record.case:44} {record.metric:36} {record.value:10.3g} {record.unit:6} {settings}".rstrip())
    print(f"headmax: wrote {out}")


def figures(out: Path = Path("runs/figures"), results: Path | None = None) -> None:
    """Draw the paper's figures from records; one whose records are missing is named instead.

    Args:
        out: where they go.
        results: a folder with records (.jsonl); those of the repository unless given.
    """
    from headmax import records
    from headmax.analysis import figures

    for line in figures.reproduce(out, results or records.RESULTS):
        print(line)
