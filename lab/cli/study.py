"""The study of lab/study/plan.md, and the paper's theory as experiments: the runs that make records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from headmax.cli.options import Device, Folder, Number, OutFile, OutFolder, Size, metavar


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
