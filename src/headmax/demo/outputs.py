"""A demo's output folder and records."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from headmax import durable, records
from headmax.analysis.style import require_matplotlib

THREADS = 2


@contextlib.contextmanager
def demo_folder(command: str, out: Path, record: Path | None) -> Iterator[None]:
    """Claims `out` for one process of `command`, and runs the block on `THREADS` threads.

    ValueError, before anything is computed or written, if `out` contains other files or `record` is not a file of records.
    """
    require_matplotlib()
    marker = out / f"{command.replace(' ', '-')}.txt"
    if record is not None:
        records.check(record)
    durable.claim(out, durable.Owner(f"an earlier demo (`{command}`)", lambda _: _was_written(marker)))
    with durable.sole_user(out), _threads(THREADS), _warnings_only():
        durable.write(marker, f"`{command}` writes to this folder and replaces what it wrote earlier.\n")
        yield


def _was_written(path: Path) -> bool:
    """Completely, or partially by a killed process."""
    return path.is_file() or path.with_name(path.name + durable.UNFINISHED).is_file()


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """Sets torch's number of threads, which determines the order of sums and so the last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _warnings_only() -> Iterator[None]:
    """Hides the trainer's messages, which would interfere with the progress display."""
    logger = logging.getLogger("headmax")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def write_records(measured: Iterable[records.Record], out: Path, record: Path | None) -> None:
    """Replaces out/records.jsonl, and appends to `record` if there is one."""
    measured = list(measured)
    records.write(out / "records.jsonl", measured)
    if record is not None:
        records.append(record, measured)
