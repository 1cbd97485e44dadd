"""Measurements as records: one JSON line each, with the same fields everywhere."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from headmax import durable, fields

ROOT = Path(__file__).resolve().parents[2]
"""Of the checkout, if headmax runs from one."""


@dataclass(frozen=True)
class Record:
    suite: str
    case: str
    impl: str
    metric: str
    value: float
    unit: str
    device: str
    commit: str
    date: str
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def line(self, width: int = 28) -> str:
        """The record as a line for a terminal, with the case padded to `width`."""
        text, extra = f"{self.case:{width}} {self.impl:8} {self.metric:36} {self.value:12.5g} {self.unit}", self.extra
        if "roofline" in extra:
            text += f"   {extra['TFLOP/s']:.0f} TFLOP/s, {extra['GB/s']:.0f} GB/s, {extra['roofline']:.0%} of the roofline"
        if "of the bandwidth" in extra:
            text += f"   {extra['of the bandwidth']:.0%} of the bandwidth"
        if extra.get("interval") is not None:
            text += "   95% interval {:.4f} to {:.4f}".format(*extra["interval"])
        return text


class Recorder:
    """Creates records with the same suite, device, commit and date."""

    def __init__(self, suite: str, device: torch.device | str) -> None:
        self.suite = suite
        self.device = describe_device(torch.device(device))
        self.commit = current_commit()
        self.date = datetime.datetime.now(datetime.UTC).date().isoformat()

    def __call__(self, case: str, impl: str, metric: str, value: float, unit: str, seed: int | None = None, **extra: Any) -> Record:
        return Record(self.suite, case, impl, metric, value, unit, self.device, self.commit, self.date, seed, extra)


def describe_device(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {torch.get_num_threads()} threads"


def current_commit() -> str:
    """The commit of the checkout, with + if it has changes; headmax's version outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() == ROOT:
            changes = git("status", "--porcelain", "--", "src", "lab/*.py")
            return git("rev-parse", "--short=12", "HEAD") + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        pass
    from headmax import __version__

    return f"headmax {__version__}"


def append(path: Path, records: Iterable[Record]) -> None:
    """Appends all records or none; several processes may share a file."""
    check(path)
    durable.append(path, _lines(records))


def write(path: Path, records: Iterable[Record]) -> None:
    """Replaces the file."""
    durable.write(path, _lines(records))


def _lines(records: Iterable[Record]) -> bytes:
    return "".join(json.dumps(asdict(record)) + "\n" for record in records).encode()


def check(path: Path) -> None:
    """ValueError if records cannot be appended to `path`, such as to a file of something else."""
    with durable.writing(path):
        durable.refuse_inputs(path)
        if not path.exists():
            return
        with path.open("rb") as file:
            first = file.readline()
    try:
        if first:
            fields.build(Record, durable.parse_json(first))
    except ValueError as error:
        raise ValueError(f"{path}: not a file of records; choose another file to append to") from error


def read(path: Path) -> Iterator[Record]:
    """The records of a file; none if it does not exist."""
    if path.exists():
        for number, line in enumerate(durable.read_text(path).splitlines(), 1):
            try:
                yield fields.build(Record, durable.parse_json(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not a record: {error}") from error
