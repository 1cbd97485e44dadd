"""The paper's tables, figures and theory, and this repository's, from records; and the runs that make the records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

Part = Literal["rates", "language", "placement", "after", "heads", "scaling", "gate-rates", "recall-rates", "recall", "recall-gate-rates"]


PAGES = (Path("README.md"), Path("docs/training.md"), Path("docs/performance.md"), Path("docs/choosing-gates.md"))
"""Those with generated sections."""


def readme(paths: tuple[Path, ...] = PAGES) -> None:
    """Render the generated sections of the README and the docs.

    Args:
        paths: the files whose generated sections are rewritten.
    """
    from headmax.reproduce.readme import update

    update(paths)


def tables(
    records: tuple[Path, ...] = (),
    scale: str = "340m",
    form: Literal["markdown", "latex"] = "markdown",
    out: Path | None = None,
) -> None:
    """Render the paper's three tables beside our own results.

    Args:
        records: files with records of `headmax eval`; the repository's own unless given.
        scale: which models are ours: those whose recipe or name ends with it.
        form: Markdown or LaTeX.
        out: write to this file instead of standard output.
    """
    from headmax import durable
    from headmax.eval.tables import RECORDS, render

    text = render(records or (RECORDS,), scale, form)
    if out is None:
        print(text, end="")
    else:
        durable.write(out, text)


def theory(out: Path = Path("runs/theory")) -> None:
    """Run the paper's proposition and theorems as experiments.

    Args:
        out: where they go.
    """
    from headmax.analysis.theory_figures import reproduce

    for record in reproduce(out):
        settings = ", ".join(f"{name} {value:g}" for name, value in record.extra.items())
        print(f"{record.case:44} {record.metric:36} {record.value:10.3g} {record.unit:6} {settings}".rstrip())
    print(f"headmax: wrote {out}")


def figures(out: Path = Path("runs/figures"), results: Path | None = None) -> None:
    """Draw the paper's figures from records.

    Args:
        out: where they go.
        results: a folder with records (.jsonl); those of the repository unless given.
    """
    from headmax import records
    from headmax.analysis import figures

    for line in figures.reproduce(out, results or records.RESULTS):
        print(line)


def prepare(data: Path, /, eval_data: Path, haystack: Path) -> None:
    """Prepare requests and needles for machines without lm-eval.

    Args:
        data: the folder that `headmax data prepare` wrote.
        eval_data: the folder with the tasks' files.
        haystack: the text that needles are hidden in.
    """
    from rich.console import Console

    from headmax.reproduce.prepare import prepare

    with Console(stderr=True).status("requests") as status:
        prepare(data, eval_data, haystack, status.update)
    for name in ("requests.jsonl", "needles.npz"):
        print(f"headmax: wrote {data / name}: {(data / name).stat().st_size / 2**20:.1f} MiB")


def run(
    parts: tuple[Part, ...],
    /,
    out: Path,
    data: Path | None = None,
    budget_seconds: float = float("inf"),
    share: str = "0/1",
    device: str | None = None,
) -> None:
    """Train and examine the models of some parts of the reproduction.

    Args:
        parts: rates and recall-rates choose the learning rates that the others need.
        out: the folder for records.jsonl and scores.jsonl.gz; called again, it goes on there.
        data: the folder that `headmax reproduce prepare` completed; recall needs none.
        budget_seconds: no run begins that would not end within so many seconds.
        share: take the models i, i + n, i + 2n, ... with all their seeds, as i/n; for several processes on one GPU.
        device: cpu or cuda; cuda where there is one.
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


def collect(outs: tuple[Path, ...], /, data: Path, eval_data: Path, haystack: Path) -> None:
    """Add what runs brought home to the repository's records.

    Args:
        outs: folders that `headmax reproduce run` wrote.
        data: the folder that `headmax reproduce prepare` completed.
        eval_data: the folder with the tasks' files.
        haystack: the text that needles are hidden in.
    """
    from headmax.reproduce.collect import collect

    print(f"headmax: {collect(list(outs), data, eval_data, haystack, print)} new records")


def report(page: Path = Path("docs/reproduction.md"), results: Path | None = None) -> None:
    """Write the page of the reproduction from records.

    Args:
        page: the file to write; pictures go beside it, into images/reproduction.
        results: a folder with records (.jsonl); those of the repository unless given.
    """
    from headmax import records
    from headmax.reproduce.report import write

    write(page, results or records.RESULTS)
    print(f"headmax: wrote {page}")
