"""The study of the paper's claims at small scale, and its theory as experiments: the runs that make records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, get_args

from headmax.cli.options import Device, Folder, Number, OutFile, OutFolder, Seconds, Size, metavar

Part = Literal["rates", "language", "placement", "after", "heads", "scaling", "gate-rates", "recall-rates", "recall", "recall-gate-rates"]


def prepare(data: OutFolder, /, eval_data: OutFolder, haystack: OutFile) -> None:
    """Prepare requests and needles for machines without lm-eval.

    Args:
        data: folder that `headmax data prepare` wrote.
        eval_data: folder with the tasks' files.
        haystack: text to hide needles in.
    """
    from rich.console import Console

    from lab.study.prepare import prepare

    with Console(stderr=True).status("requests") as status:
        prepare(data, eval_data, haystack, status.update)
    for name in ("requests.jsonl", "needles.npz"):
        print(f"lab: wrote {data / name}: {(data / name).stat().st_size / 2**20:.1f} MiB")


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
        data: folder that `python -m lab prepare` completed; recall needs none.
        budget_seconds: start no run that would end later than this.
        share: take only the models i, i + n, i + 2n, ... with all their seeds, for several processes on one GPU.
        device: where to run; auto takes a GPU if there is one.
    """
    from lab.study.run import execute

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
    print(f"lab: {out}: " + (f"{left} runs are left; the same command goes on with them" if left else "all runs are recorded"))


def collect(
    outs: Annotated[tuple[Path, ...], metavar("FOLDER [FOLDER ...]")], /, data: OutFolder, eval_data: OutFolder, haystack: OutFile
) -> None:
    """Add the results of finished runs to the repository's records.

    Args:
        outs: folders that `python -m lab run` wrote.
        data: folder that `python -m lab prepare` completed.
        eval_data: folder with the tasks' files.
        haystack: text to hide needles in.
    """
    from lab.study.collect import collect

    print(f"lab: {collect(list(outs), data, eval_data, haystack, print)} new records")


def data(
    inputs: Annotated[tuple[str, ...], metavar("INPUT [INPUT ...]")],
    /,
    valid: Annotated[tuple[str, ...], metavar("INPUT [INPUT ...]")],
    squad: OutFile,
    haystack: OutFile,
    out: OutFolder,
    tokenizer: Annotated[str, metavar("TOKENIZER")] = "mistral",
    piece_size: Size = 56 * 2**20,
) -> None:
    """Prepare the study's texts, needles and questions, in pieces; rerun to resume.

    Args:
        inputs: texts to train on, as `headmax data prepare` takes them.
        valid: texts to validate on.
        squad: JSON lines of context, question and answers.
        haystack: text to hide needles in, not trained on.
        out: folder for corpus/ and pieces/1, 2, ...; a machine that has all pieces needs no corpus/.
        tokenizer: `mistral`, a tokenizer.json, or a folder with one.
        piece_size: largest piece.
    """
    from headmax.data.prepare import PrepareConfig
    from lab.study import corpus

    config = PrepareConfig(inputs, valid, tokenizer=tokenizer, shard_tokens=corpus.SHARD_TOKENS)
    corpus.build(config, squad, haystack, out, print)
    corpus.pack(out, piece_size, print)


def study_run(
    out: OutFolder,
    data: Folder = None,
    records: OutFile = Path("lab/results/study.jsonl"),
    minutes: Annotated[float, metavar("MINUTES")] = float("inf"),
    part: Literal["language", "recall"] = "language",
    most: Number = None,
    split: bool = False,
    share: Annotated[str, metavar("I/N")] = "0/1",
    device: Device = "auto",
) -> None:
    """Train, score and record what comes next in the plan; rerun to resume.

    Args:
        out: folder for trainings that were stopped; the same command goes on with them.
        data: folder that `python -m lab study data` wrote, or its pieces; recall needs none.
        records: file of records: what is in it is skipped, what is measured is appended.
        minutes: start nothing that would take longer.
        part: language models, or associative recall (MQAR).
        most: record at most this many.
        split: start a training that will not end in time too, to be gone on with.
        share: take the i-th of n parts, for n processes on one GPU; those of recall are small.
        device: where to run; auto takes a GPU if there is one.
    """
    from lab.study.session import Options, Session

    match = re.fullmatch(r"(\d+)/([1-9]\d*)", share)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"--share must be i/n with i below n, such as 0/4, got {share}")
    options = Options(split, (int(match[1]), int(match[2])))
    session = Session(data, out, records, device, 60 * minutes, options=options, say=lambda text: print(text, flush=True))
    number = session.run(part, most)
    print(f"lab: {records}: {number} new records")


def theory(out: OutFolder = Path("runs/theory")) -> None:
    """Run the paper's proposition and theorems as experiments.

    Args:
        out: folder for the figures.
    """
    from lab.theory.figures import reproduce

    for record in reproduce(out):
        settings = ", ".join(f"{name} {value:g}" for name, value in record.extra.items())
        print(f"{record.case:44} {record.metric:36} {record.value:10.3g} {record.unit:6} {settings}".rstrip())
    print(f"lab: wrote {out}")
