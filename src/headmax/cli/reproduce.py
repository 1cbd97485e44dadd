"""The paper's tables, figures and theory, and this repository's, from records; and the runs that make the records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, get_args

from headmax.cli.options import Device, File, Folder, OutFile, OutFolder, Seconds, metavar

Part = Literal["rates", "language", "placement", "after", "heads", "scaling", "gate-rates", "recall-rates", "recall", "recall-gate-rates"]


PAGES = (Path("README.md"), Path("docs/training.md"), Path("docs/performance.md"), Path("docs/choosing-gates.md"))
"""Those with generated sections."""


def readme(paths: Annotated[tuple[Path, ...], metavar("FILE [FILE ...]")] = PAGES) -> None:
    """Render the generated sections of the README and the docs.

    Args:
        paths: files with generated sections to render.
    """
    from headmax.reproduce.readme import update

    update(paths)


def tables(
    records: Annotated[tuple[Path, ...], metavar("FILE [FILE ...]")] = (),
    scale: Annotated[str, metavar("NAME")] = "340m",
    form: Literal["markdown", "latex"] = "markdown",
    out: File = None,
) -> None:
    """Render the paper's three tables with our own results.

    Args:
        records: files with records of `headmax eval`; the repository's own unless given.
        scale: take our models of this scale, by the end of their names.
        form: output format.
        out: write to this file instead of standard output.
    """
    from headmax import durable
    from headmax.eval.tables import RECORDS, render

    text = render(records or (RECORDS,), scale, form)
    if out is None:
        print(text, end="")
    else:
        durable.write(out, text)


def theory(out: OutFolder = Path("runs/theory")) -> None:
    """Run the paper's proposition and theorems as experiments.

    Args:
        out: folder for the figures.
    """
    from headmax.analysis.theory_figures import reproduce

    for record in reproduce(out):
        settings = ", ".join(f"{name} {value:g}" for name, value in record.extra.items())
        print(f"{record.case:44} {record.metric:36} {record.value:10.3g} {record.unit:6} {settings}".rstrip())
    print(f"headmax: wrote {out}")


def figures(out: OutFolder = Path("runs/figures"), results: Folder = None) -> None:
    """Draw the paper's figures from records.

    Args:
        out: folder for the figures.
        results: folder with records (.jsonl); the repository's own unless given.
    """
    from headmax import records
    from headmax.analysis import figures

    for line in figures.reproduce(out, results or records.RESULTS):
        print(line)


def prepare(data: OutFolder, /, eval_data: OutFolder, haystack: OutFile) -> None:
    """Prepare requests and needles for machines without lm-eval.

    Args:
        data: folder that `headmax data prepare` wrote.
        eval_data: folder with the tasks' files.
        haystack: text to hide needles in.
    """
    from rich.console import Console

    from headmax.reproduce.prepare import prepare

    with Console(stderr=True).status("requests") as status:
        prepare(data, eval_data, haystack, status.update)
    for name in ("requests.jsonl", "needles.npz"):
        print(f"headmax: wrote {data / name}: {(data / name).stat().st_size / 2**20:.1f} MiB")


def run(
    parts: Annotated[tuple[Part, ...], metavar("PART [PART ...]")],
    /,
    out: OutFolder,
    data: Folder = None,
    budget_seconds: Seconds = float("inf"),
    share: Annotated[str, metavar("I/N")] = "0/1",
    device: Device = "auto",
) -> None:
    """Train and evaluate the models of some parts of the reproduction.

    Args:
        parts: rates, language, placement, after, heads, scaling, gate-rates, recall-rates, recall or recall-gate-rates;
            rates and recall-rates come first, since they choose learning rates.
        out: folder for records.jsonl and scores.jsonl.gz; rerun to resume.
        data: folder that `headmax reproduce prepare` completed; recall needs none.
        budget_seconds: start no run that would end later than this.
        share: take only the models i, i + n, i + 2n, ... with all their seeds, for several processes on one GPU.
        device: where to run; auto takes a GPU if there is one.
    """
    from headmax.reproduce.run import execute

    if not parts:
        raise ValueError(f"name at least one part: {', '.join(get_args(Part))}")
    match = re.fullmatch(r"(\d+)/([1-9]\d*)", share)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"--share must be i/n with i below n, such as 0/4, got {share}")
    left = execute(
        parts,
        data=data,
        out=out,
        budget=budget_seconds,
        share=(int(match[1]), int(match[2])),
        device=device,
        say=lambda text: print(text, flush=True),
    )
    print(f"headmax: {out}: " + (f"{left} runs are left; the same command goes on with them" if left else "all runs are recorded"))


def collect(
    outs: Annotated[tuple[Path, ...], metavar("FOLDER [FOLDER ...]")], /, data: OutFolder, eval_data: OutFolder, haystack: OutFile
) -> None:
    """Add the results of finished runs to the repository's records.

    Args:
        outs: folders that `headmax reproduce run` wrote.
        data: folder that `headmax reproduce prepare` completed.
        eval_data: folder with the tasks' files.
        haystack: text to hide needles in.
    """
    from headmax.reproduce.collect import collect

    print(f"headmax: {collect(list(outs), data, eval_data, haystack, print)} new records")


def report(page: OutFile = Path("docs/reproduction.md"), results: Folder = None) -> None:
    """Write the page of the reproduction from records.

    Args:
        page: file to write; pictures go into images/reproduction next to it.
        results: folder with records (.jsonl); the repository's own unless given.
    """
    from headmax import records
    from headmax.reproduce.report import write

    write(page, results or records.RESULTS)
    print(f"headmax: wrote {page}")
