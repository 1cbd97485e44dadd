"""`headmax inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headmax.cli.options import TEXT, Checkpoint, Device, File, OptionalCheckpoint, OutFile, at_least, find_device, metavar


def inspect(
    checkpoint: Checkpoint,
    /,
    prompt: Annotated[str | None, TEXT, metavar("TEXT", "--text")] = None,
    file: File = None,
    out: OutFile = Path("report.html"),
    compare: OptionalCheckpoint = None,
    tokenizer: OptionalCheckpoint = None,
    max_tokens: int = 10_000,
    device: Device = "auto",
) -> None:
    """Show which head wins each token of a text, as one HTML file.

    Args:
        checkpoint: a model folder, a run of `headmax train`, or a model on the Hugging Face hub.
        prompt: text to inspect.
        file: file with the text to inspect.
        out: HTML file to write; it opens in any browser and needs no network.
        compare: another model with the same tokenizer, shown alongside.
        tokenizer: checkpoint or folder with the tokenizer, if the model has none.
        max_tokens: cut longer texts at this many tokens.
        device: where to run; auto takes a GPU if there is one.
    """
    from rich.console import Console

    from headmax import durable
    from headmax.analysis import gates, report

    if (prompt is None) == (file is None):
        raise ValueError("give the text with --prompt or --file, one of the two")
    at_least(1, max_tokens=max_tokens)
    place = find_device(device)
    report.check_place(out, file)
    text = durable.read_text(file, pipe=True) if file is not None else prompt or ""
    models = [checkpoint] if compare is None else [checkpoint, compare]
    names = [Path(model).resolve().name for model in models]
    if len(set(names)) < len(names):
        names = models
    traces = []
    for model, name in zip(models, names, strict=True):
        with Console(stderr=True).status(f"reading with {name}"):
            traces.append(gates.of_checkpoint(model, text, name=name, tokenizer=tokenizer, most=max_tokens, device=place))
    report.write(out, traces)
    tokens = len(traces[0].tokens)
    cut = f", cut at --max-tokens {max_tokens:,}" if tokens == max_tokens else ""
    print(f"headmax: wrote {out}: {tokens:,} tokens{cut}, {out.stat().st_size / 2**10:,.0f} KiB")
