"""The pages of this repository, from its records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headmax.cli.options import Folder, OutFile, OutFolder, metavar

PAGES = (
    Path("README.md"),
    *(Path("docs", f"{page}.md") for page in ("training", "performance", "performance-details", "choosing-gates")),
)
"""Those with generated sections."""


def readme(paths: Annotated[tuple[Path, ...], metavar("FILE [FILE ...]")] = PAGES) -> None:
    """Render the generated sections of the README and the docs.

    Args:
        paths: files with generated sections to render.
    """
    from lab.pages.readme import update

    update(paths)


def report(page: OutFile = Path("docs/reproduction.md"), results: Folder = None) -> None:
    """Write the page of the reproduction from records.

    Args:
        page: file to write; its appendix goes next to it, pictures into images.
        results: folder with records (.jsonl); the repository's own unless given.
    """
    from lab import RESULTS
    from lab.pages.report import write

    write(page, results or RESULTS)
    print(f"lab: wrote {page}")


def findings(page: OutFile = Path("docs/findings.md"), records: OutFile = Path("lab/results/study.jsonl")) -> None:
    """Write the page of the study's findings from records.

    Args:
        page: file to write; its tables go next to it, pictures into images/findings.
        records: file of records that `python -m lab study run` wrote.
    """
    from lab.pages.findings import write

    write(page, records)
    print(f"lab: wrote {page}")


def notebook(path: OutFile = Path("docs/quickstart.ipynb")) -> None:
    """Run the notebook of the quickstart and keep its outputs.

    Args:
        path: the notebook, which is written over.
    """
    from headmax import durable
    from lab.pages.notebook import execute

    durable.write(path, execute(path))
    print(f"lab: wrote {path}")


def package() -> None:
    """Write the records that the package needs into it."""
    from lab.package import write

    for path in write():
        print(f"lab: wrote {path}")


def figures(out: OutFolder = Path("runs/figures"), results: Folder = None) -> None:
    """Draw the paper's figures from records.

    Args:
        out: folder for the figures.
        results: folder with records (.jsonl); the repository's own unless given.
    """
    from lab import RESULTS
    from lab.pages import figures

    for line in figures.reproduce(out, results or RESULTS):
        print(line)
