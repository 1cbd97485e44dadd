"""Token shards to train on."""

from __future__ import annotations

from pathlib import Path

from headmax.cli.arguments import count


def prepare(
    inputs: tuple[str, ...],
    /,
    out: Path,
    valid: tuple[str, ...] = (),
    valid_fraction: float = 0.0,
    tokenizer: str = "mistral",
    document_token: str | None = None,
    text_key: str = "text",
    separator: str = "<|doc|>",
    max_tokens: str | None = None,
    shard_tokens: str = "100M",
    workers: int | None = None,
) -> None:
    """Turn text into token shards to train on. Run again after an interruption, it goes on after the last complete shard.

    Args:
        inputs: .txt, .jsonl, .parquet, each also .gz, .xz, .zst; folders of them; hub datasets as hf:owner/name[:configuration][@split].
        out: the folder to write.
        valid: inputs to validate on.
        valid_fraction: or the share of documents to hold out for that.
        tokenizer: mistral, a tokenizer.json, or a folder with one.
        document_token: the token before every document; what the tokenizer puts before a text unless given.
        text_key: the field of a JSON line, or the column of a table, that holds the text.
        separator: the line between two documents of a .txt.
        max_tokens: stop at so many to train on, such as 15B.
        shard_tokens: tokens per shard.
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
        max_tokens=None if max_tokens is None else count("max-tokens", max_tokens),
        shard_tokens=count("shard-tokens", shard_tokens),
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
    for split, shards in index.splits.items():
        if shards:
            print(f"headmax: {out}: {split} {index.tokens(split):,} tokens, {index.documents(split):,} documents, {len(shards)} shards")


def check(folder: Path, /) -> None:
    """Read a prepared folder through and compare every file with its checksum.

    Args:
        folder: what `headmax data prepare` wrote.
    """
    from headmax.data.shards import verify

    index = verify(folder)
    print(f"headmax: {folder}: whole, {index.tokens('train'):,} tokens to train on, {index.tokens('valid'):,} to validate on")
