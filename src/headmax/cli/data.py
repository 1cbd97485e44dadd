"""Token shards to train on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headmax.cli.options import Count, Name, Number, OptionalCount, OutFolder, metavar

if TYPE_CHECKING:
    from headmax.data.shards import Index


def prepare(
    inputs: Annotated[tuple[str, ...], metavar("INPUT [INPUT ...]")],
    /,
    out: OutFolder,
    valid: Annotated[tuple[str, ...], metavar("INPUT [INPUT ...]")] = (),
    valid_fraction: float = 0.0,
    tokenizer: Annotated[str, metavar("TOKENIZER")] = "mistral",
    document_token: Name = None,
    text_key: Annotated[str, metavar("KEY")] = "text",
    separator: Annotated[str, metavar("LINE")] = "<|doc|>",
    max_tokens: OptionalCount = None,
    shard_tokens: Count = 100_000_000,
    part: Annotated[str | None, metavar("N/PARTS")] = None,
    workers: Number = None,
) -> None:
    """Turn text into token shards to train on; rerun to resume.

    Args:
        inputs: .txt, .jsonl or .parquet files, also .gz, .xz or .zst; folders of them; hf:owner/name[:configuration][@split].
        out: folder to write.
        valid: inputs for validation, as above.
        valid_fraction: share of documents held out for validation, as an alternative to --valid.
        tokenizer: `mistral`, a tokenizer.json, or a folder with one.
        document_token: token that starts every document; the tokenizer's start-of-text token unless given.
        text_key: field of a JSON line, or column of a table, that holds the text.
        separator: line between two documents of a .txt file.
        max_tokens: stop at this many training tokens, such as 15B.
        shard_tokens: tokens per shard.
        part: prepare one of several parts, such as 3/8, for parallel jobs; `headmax data merge` joins them.
        workers: encoding processes; one per core unless given.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from headmax.data.documents import Options
    from headmax.data.prepare import Done, PrepareConfig, prepare

    config = PrepareConfig(
        inputs,
        valid,
        valid_fraction,
        tokenizer,
        document_token,
        Options(text_key, separator),
        max_tokens=max_tokens,
        shard_tokens=shard_tokens,
        part=part,
    )
    tokens = TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f}/s")
    columns = (BarColumn(), DownloadColumn(), tokens, TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None, tokens=0, rate=0.0)

        def report(done: Done) -> None:
            rate = (done.tokens - done.earlier) / max(progress.tasks[0].elapsed or 0.0, 1e-3)
            progress.update(bar, completed=done.bytes, total=done.total_bytes, tokens=done.tokens, rate=rate)

        index = prepare(config, out, workers=workers, report=report)
    _tell(out, index)


def _tell(out: Path, index: Index) -> None:
    for split, shards in index.splits.items():
        if shards:
            counts = ((index.tokens(split), "token"), (index.documents(split), "document"), (len(shards), "shard"))
            print(f"headmax: {out}: {split}", ", ".join(f"{n:,} {name}{'' if n == 1 else 's'}" for n, name in counts))


def merge(parts: Annotated[tuple[Path, ...], metavar("PART [PART ...]")], /, out: OutFolder) -> None:
    """Merge the parts of `headmax data prepare --part`.

    Args:
        parts: folders of all parts, in any order; they may be deleted afterwards.
        out: folder to write, with hard links to the files of the parts.
    """
    from headmax.data.parts import merge

    _tell(out, merge(parts, out))


def check(folder: Annotated[Path, metavar("FOLDER")], /) -> None:
    """Compare every file of a prepared folder with its checksum.

    Args:
        folder: folder that `headmax data prepare` wrote.
    """
    from headmax.data.shards import verify

    index = verify(folder)
    print(f"headmax: {folder}: intact, {index.tokens('train'):,} training tokens, {index.tokens('valid'):,} validation tokens")
