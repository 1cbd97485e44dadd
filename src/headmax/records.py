"""Every measured number is one record, one JSON line, the same shape everywhere."""

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
"""Of the checkout, where this is one."""


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
        """For a terminal: the case in at least `width` characters, the number and what is known beside it."""
        text, extra = f"{self.case:{width}} {self.impl:8} {self.metric:36} {self.value:12.5g} {self.unit}", self.extra
        if "roofline" in extra:
            text += f"   {extra['TFLOP/s']:.0f} TFLOP/s, {extra['GB/s']:.0f} GB/s, {extra['roofline']:.0%} of the roofline"
        if "of the bandwidth" in extra:
            text += f"   {extra['of the bandwidth']:.0%} of the bandwidth"
        if extra.get("interval") is not None:
            text += "   95% interval {:.4f} to {:.4f}".format(*extra["interval"])
        return text


class Recorder:
    """Makes the records of one run on one device, at one commit, on one day."""

    def __init__(self, suite: str, device: torch.device | str) -> None:
        self.suite = suite
        self.device = describe_device(torch.device(device))
        self.commit = current_commit()
        self.date = datetime.datetime.now(datetime.UTC).date().isoformat()

    def __call__(self, case: str, impl: str, metric: str, value: float, unit: str, seed: int | None = None, **extra: Any) -> Record:
        return Record(self.suite, case, impl, metric, value, unit, self.device, self.commit, self.date, seed, extra)


def describe_device(device: torch.device) -> str:
    """The GPU's name, or the processor's with the number of threads in use."""
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
    """The commit of the working tree, with + if it was changed since; the version where this is no checkout of headmax."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() == ROOT:
            return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "src", "lab/*.py"))
    except (OSError, subprocess.CalledProcessError):
        pass
    from headmax import __version__

    return f"headmax {__version__}"


def append(path: Path, records: Iterable[Record]) -> None:
    """All or none of them, behind those that are there; several processes may share a file."""
    check(path)
    durable.append(path, _lines(records))


def write(path: Path, records: Iterable[Record]) -> None:
    """In place of what the file held."""
    durable.write(path, _lines(records))


def _lines(records: Iterable[Record]) -> bytes:
    return "".join(json.dumps(asdict(record)) + "\n" for record in records).encode()


def check(path: Path) -> None:
    """Raises where records cannot be appended to `path`: it begins with something else."""
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
        raise ValueError(f"{path}: no file of records; choose another one to append to") from error


def read(path: Path) -> Iterator[Record]:
    """The records of a file; none if there is no such file."""
    if path.exists():
        for number, line in enumerate(durable.read_text(path).splitlines(), 1):
            try:
                yield fields.build(Record, durable.parse_json(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not a record: {error}") from error
