"""Measures in a separate process with a time limit, so that a peer that autotunes for minutes, or crashes, does no harm."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headmax.records import Record


def _work(
    measure: Callable[..., Iterable[Record]], arguments: tuple[Any, ...], path: str, environment: Mapping[str, str], threads: int
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(threads)
    with open(path, "a") as file:
        for record in measure(*arguments):
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()


def isolated(
    measure: Callable[..., Iterable[Record]],
    *arguments: Any,
    limit: float,
    say: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> list[Record]:
    """All records that `measure(*arguments)` yields within `limit` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "records.jsonl")
        path.touch()
        work = (measure, arguments, str(path), environment or {}, torch.get_num_threads())
        process = multiprocessing.get_context("spawn").Process(target=_work, args=work)
        process.start()
        process.join(limit)
        if process.is_alive():
            say(f"{arguments}: stopped after {limit:.0f} s")
            process.kill()
            process.join()
        elif process.exitcode:
            say(f"{arguments}: failed; see the error above")
        return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
