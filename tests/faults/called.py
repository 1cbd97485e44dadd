"""`headmax` in processes of their own that need no second to start: forked from one that has imported everything.

A process can be told to die at its n-th change of a file, to hesitate before each, or to have no room on the disk.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from headmax_cli import main
from headmax_cli.commands import COMMANDS

for _command in COMMANDS.values():
    importlib.import_module(_command.target.split(":")[0])
for _name in (
    "headmax.analysis.curves",
    "headmax.analysis.report",
    "headmax.data.prepare",
    "headmax.eval.terminal",
    "headmax.generate",
    "tests.faults.called",
):
    importlib.import_module(_name)

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.called"])

LOCK = threading.Lock()
"""Held while multiprocessing reads how a child ended: starting another in a second thread does so for all."""
LIMIT = 90.0
"""Seconds after which a command hangs."""
MEMORY = 16 * 2**30
"""Bytes of address space."""
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


@dataclass(frozen=True)
class Disturbance:
    """What happens to a process, beside what it was asked for."""

    dies_at: int = 0
    """Kills itself right before this change of a file, the first being 1."""
    hesitates: float = 0.0
    """Most seconds before each change of a file."""
    room: int | None = None
    """Bytes that a file can have."""
    seed: int = 0

    def apply(self) -> None:
        if self.room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.room, self.room))
        draw, changes = random.Random(self.seed), 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal changes
            if event not in CHANGES and not (
                event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and "/dev/" not in str(arguments[0])
            ):
                return
            changes += 1
            if changes == self.dies_at:
                os.kill(os.getpid(), 9)
            time.sleep(draw.uniform(0, self.hesitates))

        if self.dies_at or self.hesitates:
            sys.addaudithook(watch)


@dataclass(frozen=True)
class Called:
    words: tuple[str, ...]
    code: int | None
    """Negative for a signal; None where it did not end in time."""
    out: str
    errors: str
    seconds: float

    @property
    def refused(self) -> bool:
        """One clear line at the end; 1 is the status of a training run that a fault ends."""
        said = [line for line in self.errors.splitlines() if line.startswith("headmax: ")]
        last = self.errors.rstrip().splitlines()[-1:]
        return self.code in (1, 2) and not self.broke and said[-1:] == last and len(said[-1]) > 15

    @property
    def broke(self) -> bool:
        """An error of headmax's own, a traceback or a crash."""
        return self.code not in (None, 0, 1, 2, -9) or "Traceback" in self.errors or "internal error" in self.errors


def _child(
    words: Sequence[str],
    folder: str,
    stdin: bytes,
    environment: Mapping[str, str],
    disturbance: Disturbance,
    out: Connection,
    errors: Connection,
) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    os.chdir(folder)
    read, write = os.pipe()
    os.write(write, stdin)
    os.close(write)
    os.dup2(read, 0)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "COLUMNS": "110", **environment}
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    disturbance.apply()
    main(list(words))


class Process:
    """`headmax` under way in a folder."""

    def __init__(
        self,
        folder: Path,
        *words: object,
        stdin: bytes = b"",
        environment: Mapping[str, str] = MappingProxyType({}),
        disturbance: Disturbance = Disturbance(),  # noqa: B008
    ) -> None:
        self.words, self.began = tuple(map(str, words)), time.monotonic()
        self.pipes, theirs = zip(*(CONTEXT.Pipe(duplex=False) for _ in range(2)), strict=True)
        self.process = CONTEXT.Process(target=_child, args=(self.words, str(folder), stdin, dict(environment), disturbance, *theirs))
        with LOCK:
            self.process.start()
        for pipe in theirs:
            pipe.close()

    def end(self, within: float = LIMIT) -> Called:
        """Waits, and kills it after that long."""
        late = not wait([self.process.sentinel], within)
        if late:
            self.process.kill()
            wait([self.process.sentinel])
        with LOCK:
            self.process.join()
            code = None if late else self.process.exitcode
        return Called(self.words, code, *(self._read(pipe) for pipe in self.pipes), time.monotonic() - self.began)

    def kill(self, after: float) -> Called:
        """As `end`, but that it was killed is not held against it."""
        done = self.end(after)
        return replace(done, code=-9) if done.code is None else done

    @staticmethod
    def _read(pipe: Connection) -> str:
        os.set_blocking(pipe.fileno(), False)
        content = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(pipe.fileno(), 1 << 16):
                content += piece
        pipe.close()
        return content.decode(errors="replace")


def headmax(folder: Path, *words: object, **options: Any) -> Called:
    return Process(folder, *words, **options).end()
