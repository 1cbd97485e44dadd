"""Checkpoints: written atomically in the background, and verified before use.

RUN/checkpoints/step-00000500/ holds torch.distributed.checkpoint's files, `train.json` (the run's progress and settings)
and `manifest.json` (size and SHA-256 of every file). It is written under a temporary name and renamed once all of it,
manifest last, is on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from headmax import durable, fields
from headmax.train.config import CheckpointConfig
from headmax.train.faults import TrainingError
from headmax.train.parallel import World
from headmax.train.restricted import Planner, Reader

logger = logging.getLogger("headmax")

MANIFEST, PROGRESS, UNFINISHED, BROKEN = "manifest.json", "train.json", ".tmp", ".broken"
PROGRESS_FIELDS: dict[str, Any] = {"step": int, "skipped": int, "settings": dict[str, dict[str, Any]]}
"""What a run resumes from, in `PROGRESS`."""


@contextlib.contextmanager
def ignore_single_process_warning() -> Iterator[None]:
    """Suppresses torch.distributed.checkpoint's warning about a single process, which its writer thread may also raise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, config: CheckpointConfig, world: World) -> None:
        self.folder, self.config, self.world = folder, config, world
        # A separate group: messages of the background thread must not mix with those of training.
        self.group = dist.new_group(backend="gloo") if world.size > 1 else None
        self.background = ThreadPoolExecutor(1, "headmax-checkpoint")
        self.pending: Future[None] | None = None
        if world.main:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(leftover)

    def save(self, step: int, state: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Copies `state` at once and writes it in the background, after waiting for the previous checkpoint."""
        self.wait()
        target = self.folder / f"step-{step:08}"
        unfinished = target.with_name(target.name + UNFINISHED)
        written = dcp.async_save(
            dict(state),
            storage_writer=dcp.FileSystemWriter(unfinished),
            process_group=self.group,
            no_dist=self.world.size == 1,
        )
        assert isinstance(written, Future)
        self.pending = self.background.submit(self._finalize, written, unfinished, target, progress)

    def _finalize(self, written: Future[Any], unfinished: Path, target: Path, progress: Mapping[str, Any]) -> None:
        """Once every rank has written (the first rank learns that last): writes the manifest, renames, deletes old checkpoints."""
        written.result()
        if self.world.main:
            durable.write(unfinished / PROGRESS, json.dumps(progress, indent=2))
            durable.write(unfinished / MANIFEST, json.dumps({"files": fingerprints(unfinished)}, indent=2))
            unfinished.rename(target)
            durable.sync_folder(self.folder)
            self._prune()

    def _prune(self) -> None:
        every = self.config.milestone_every
        for folder in list_checkpoints(self.folder)[: -self.config.keep_last]:
            if not (every and step_of(folder) % every == 0):
                renamed = folder.rename(folder.with_name(folder.name + UNFINISHED))  # half deleted, it must not look complete
                shutil.rmtree(renamed)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete; TrainingError if it could not be written."""
        if self.pending is not None:
            try:
                self.pending.result()
            except (OSError, CheckpointException) as error:
                complete = list_checkpoints(self.folder)
                latest = f"the last complete one is {complete[-1].name}" if complete else "no checkpoint is complete yet"
                free = shutil.disk_usage(self.folder).free / 2**20
                cause = f"{root_cause(error)} ({free:,.0f} MiB free)"
                raise TrainingError(f"cannot write a checkpoint to {self.folder}: {cause}; {latest}") from error
            finally:
                self.pending = None

    def close(self) -> None:
        """Waits for the last checkpoint, then for the first rank, which finishes it."""
        self.wait()
        self.world.broadcast(None)

    def newest(self) -> Path | None:
        """The newest intact checkpoint. Damaged newer ones are renamed, as the run will write these steps again."""
        intact = None
        if self.world.main:
            intact, damaged = newest(self.folder)
            for folder in damaged:
                renamed = folder.with_name(folder.name + BROKEN)
                shutil.rmtree(renamed, ignore_errors=True)
                folder.rename(renamed)
        return self.world.broadcast(intact)


def load(folder: Path, state: dict[str, Any], single_process: bool, group: dist.ProcessGroup | None = None) -> None:
    """Fills `state`, whose tensors may be sharded differently than when they were saved."""
    reader = Reader(folder)
    reader.read_metadata()  # raises its own error, which dcp.load would wrap
    try:
        with ignore_single_process_warning():
            dcp.load(state, storage_reader=reader, planner=Planner(), process_group=group, no_dist=single_process)
    except CheckpointException as error:
        raise ValueError(f"{folder}: cannot be read: {root_cause(error).splitlines()[0]}") from error


def newest(folder: Path) -> tuple[Path | None, list[Path]]:
    """The newest intact checkpoint, and the damaged ones after it, with a warning about each."""
    damaged: list[Path] = []
    for path in reversed(list_checkpoints(folder)):
        if (reason := problem(path)) is None:
            return path, damaged
        logger.warning("%s is skipped: %s", path, reason)
        damaged.append(path)
    return None, damaged


def list_checkpoints(folder: Path) -> list[Path]:
    """The completely written checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit())


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def state_keys(folder: Path) -> set[str]:
    """Names of a checkpoint's entries."""
    return set(Reader(folder).read_metadata().state_dict_metadata)


def tensor_shapes(folder: Path, part: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors `part.NAME`, by NAME."""
    metadata, prefix = Reader(folder).read_metadata().state_dict_metadata, f"{part}."
    return {name.removeprefix(prefix): tuple(x.size) for name, x in metadata.items() if name.startswith(prefix) and hasattr(x, "size")}


def read_progress(folder: Path) -> dict[str, Any]:
    """A checkpoint's step, number of skipped steps and settings."""
    progress = durable.read_json(folder / PROGRESS)
    try:
        fields.check(progress, PROGRESS_FIELDS, set(PROGRESS_FIELDS), allow_unknown=True)
        if progress["step"] != step_of(folder) or progress["skipped"] < 0 or set(progress["settings"]) != {"model", "train", "data"}:
            raise ValueError("step, skipped or settings do not belong to this checkpoint")
    except ValueError as error:
        raise ValueError(f"{folder / PROGRESS}: not the progress of a run: {error}") from error
    return progress


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file, by name, as the manifest lists them."""
    files = {}
    for path in sorted(path for path in folder.iterdir() if path.name != MANIFEST):
        with path.open("rb") as file:
            files[path.name] = {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return files


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        expected = durable.read_json(folder / MANIFEST)["files"]
        if PROGRESS not in expected:
            return f"{MANIFEST} does not list {PROGRESS}"
        for name, file in expected.items():
            if (size := (folder / durable.file_name(name, MANIFEST)).stat().st_size) != file["size"]:
                return f"{name} has {size} bytes, the manifest says {file['size']}"
        actual = fingerprints(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return next((f"{name} does not match its checksum" for name, file in expected.items() if actual.get(name) != file), None)


def root_cause(error: BaseException) -> str:
    """The message of the original error: torch.distributed.checkpoint wraps errors of ranks, torch.save those of the system."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return str(cause or error) or type(error).__name__
