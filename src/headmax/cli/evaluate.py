"""`headmax eval`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from headmax.cli.options import (
    Checkpoint,
    Device,
    File,
    Folder,
    Name,
    Number,
    OptionalCheckpoint,
    OptionalCount,
    Words,
    find_device,
    metavar,
)


def evaluate(
    checkpoint: Checkpoint,
    /,
    tasks: Words = ("commonsense", "retrieval", "niah", "mqar"),
    data_dir: Folder = None,
    haystack: Annotated[str | None, metavar("FILE")] = None,
    limit: Number = None,
    out: File = None,
    device: Device = "auto",
    dtype: Annotated[Literal["float32", "bfloat16", "float16", "float64"] | None, metavar("{float32,bfloat16,float16,float64}")] = None,
    max_length: Number = None,
    stage: Literal["all", "requests", "score", "metrics"] = "all",
    work: Folder = None,
    tokenizer: OptionalCheckpoint = None,
    name: Name = None,
    batch_tokens: OptionalCount = None,
    seed: int = 42,
) -> None:
    """Run the paper's benchmarks on a model; rerun to resume.

    Args:
        checkpoint: a model folder, a run of `headmax train`, or a model on the Hugging Face hub.
        tasks: tasks, or the groups commonsense, retrieval, niah and mqar.
        data_dir: folder with the tasks' files; downloaded from the Hugging Face hub unless given.
        haystack: text to hide needles in: a file, or `generated`; RULER's essays from the hub unless given.
        limit: evaluate only the first N documents of each task.
        out: append the records to this file; records.jsonl in the work folder unless given.
        device: where to run; auto takes a GPU if there is one.
        dtype: precision of the weights; bfloat16 on a GPU and float32 on a CPU unless given.
        max_length: longest input in tokens; longer ones are cut and counted in the records. No limit unless given; 4096 for retrieval.
        stage: run one stage only; `score` needs nothing but torch, transformers and the work folder.
        work: folder for requests.jsonl and scores.jsonl; runs/eval/MODEL unless given.
        tokenizer: checkpoint or folder with the tokenizer, if the model has none.
        name: the model's name in records; the recipe's or the folder's unless given.
        batch_tokens: tokens per forward pass; 65,536 on a GPU and 16,384 on a CPU unless given.
        seed: random seed for needles and recall sequences.
    """
    from headmax.eval import terminal
    from headmax.eval.run import Settings

    settings = Settings(data_dir, limit, max_length, seed, haystack)
    default = Path("runs/eval") / Path(checkpoint).resolve().name
    place = terminal.Place(checkpoint, tokenizer or checkpoint, work or default, name)
    failures = terminal.run(place, ",".join(tasks), settings, stage, out, find_device(device), dtype, batch_tokens)
    for line in failures:
        print(f"headmax: {line}", file=sys.stderr)
    if failures:
        sys.exit(2)


def tables(
    records: Annotated[tuple[Path, ...], metavar("FILE [FILE ...]")],
    /,
    scale: Annotated[str, metavar("NAME")] = "340m",
    form: Literal["markdown", "latex"] = "markdown",
    out: File = None,
) -> None:
    """Render the paper's three tables with your results next to the paper's.

    Args:
        records: files with records of `headmax eval`.
        scale: show models whose names end in this, such as 340m.
        form: output format.
        out: write to this file instead of standard output.
    """
    from headmax import durable
    from headmax.eval.tables import render

    if not records:
        raise ValueError("name at least one file with records of `headmax eval`")
    text = render(records, scale, form)
    if out is None:
        print(text, end="")
    else:
        durable.refuse_inputs(out, *records)
        durable.write(out, text)
