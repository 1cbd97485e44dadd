"""Checkpoints: written in the background, complete or not there at all, and verified before they are used.

RUN/checkpoints/step-00000500/ holds torch.distributed.checkpoint's files, `train.json` (where the run stands and its
settings) and `manifest.json` (size and SHA-256 of every file). It is written under another name, and renamed when all of
it, manifest last, is on disk.
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
POSITION: dict[str, Any] = {"step": int, "skipped": int, "settings": dict[str, dict[str, Any]]}
"""What a run goes on from, in `PROGRESS`."""


@contextlib.contextmanager
def one_process_is_meant() -> Iterator[None]:
    """Without the warning of torch.distributed.checkpoint that there is no other process. It may come from the thread that writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, config: CheckpointConfig, world: World) -> None:
        self.folder, self.config, self.world = folder, config, world
        # A group of its own: the background's messages must not meet the training's.
        self.group = dist.new_group(backend="gloo") if world.size > 1 else None
        self.sealer = ThreadPoolExecutor(1, "headmax-checkpoint")
        self.writing: Future[None] | None = None
        if world.main:
            folder.mkdir(parents=True, exist_ok=True)
            for rest in folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(rest)

    def save(self, step: int, state: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Copies `state` now and writes it in the background; waits first for the checkpoint before this one."""
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
        self.writing = self.sealer.submit(self._seal, written, unfinished, target, progress)

    def _seal(self, written: Future[Any], unfinished: Path, target: Path, progress: Mapping[str, Any]) -> None:
        """Once every rank has written (which the first one hears last): manifest, rename, and away with what is too old."""
        written.result()
        if self.world.main:
            durable.write(unfinished / PROGRESS, json.dumps(progress, indent=2))
            durable.write(unfinished / MANIFEST, json.dumps({"files": fingerprints(unfinished)}, indent=2))
            unfinished.rename(target)
            durable.sync_folder(self.folder)
            self._prune()

    def _prune(self) -> None:
        every = self.config.milestone_every
        for folder in finished(self.folder)[: -self.config.keep_last]:
            if not (every and step_of(folder) % every == 0):
                doomed = folder.rename(folder.with_name(folder.name + UNFINISHED))  # what is half deleted must not look whole
                shutil.rmtree(doomed)

    def wait(self) -> None:
        """Until the last checkpoint is complete; TrainingError if it could not be written."""
        if self.writing is not None:
            try:
                self.writing.result()
            except (OSError, CheckpointException) as error:
                there = finished(self.folder)
                kept = f"the last complete one is {there[-1].name}" if there else "there is none yet"
                free = shutil.disk_usage(self.folder).free / 2**20
                why = f"{reason(error)} ({free:,.0f} MiB are free there)"
                raise TrainingError(f"cannot write a checkpoint to {self.folder}: {why}; {kept}") from error
            finally:
                self.writing = None

    def close(self) -> None:
        """Lets the one under way end, and all ranks leave together: the first is the last to be done."""
        self.wait()
        self.world.share(None)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole. Those after it are renamed, as the run will come by there again."""
        found = None
        if self.world.main:
            found, broken = newest(self.folder)
            for folder in broken:
                aside = folder.with_name(folder.name + BROKEN)
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
        return self.world.share(found)


def load(folder: Path, state: dict[str, Any], alone: bool, group: dist.ProcessGroup | None = None) -> None:
    """Fills `state`, whose tensors may be spread over ranks in another way than they were."""
    reader = Reader(folder)
    reader.read_metadata()  # what is wrong with it is then said by itself; dcp.load would wrap it
    try:
        with one_process_is_meant():
            dcp.load(state, storage_reader=reader, planner=Planner(), process_group=group, no_dist=alone)
    except CheckpointException as error:
        raise ValueError(f"{folder}: cannot be read: {reason(error).splitlines()[0]}") from error


def newest(folder: Path) -> tuple[Path | None, list[Path]]:
    """The newest checkpoint that is whole, and newer ones that are not, each of which is warned of."""
    broken: list[Path] = []
    for path in reversed(finished(folder)):
        if (wrong := problem(path)) is None:
            return path, broken
        logger.warning("%s is skipped: %s", path, wrong)
        broken.append(path)
    return None, broken


def finished(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit())


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def keys(folder: Path) -> set[str]:
    """What a checkpoint holds, by name."""
    return set(Reader(folder).read_metadata().state_dict_metadata)


def shapes(folder: Path, part: str) -> dict[str, tuple[int, ...]]:
    """Of a checkpoint's tensors whose names begin with `part` and a dot, by the rest of the name."""
    held = Reader(folder).read_metadata().state_dict_metadata
    return {name.removeprefix(f"{part}."): tuple(x.size) for name, x in held.items() if name.startswith(f"{part}.") and hasattr(x, "size")}


def progress_of(folder: Path) -> dict[str, Any]:
    """Where the run stood, and its settings."""
    progress = durable.read_json(folder / PROGRESS)
    try:
        fields.check(progress, POSITION, set(POSITION), others=True)
        if (progress["step"], progress["skipped"] >= 0, set(progress["settings"])) != (step_of(folder), True, {"model", "train", "data"}):
            raise ValueError("its step or its settings are not this checkpoint's")
    except ValueError as error:
        raise ValueError(f"{folder / PROGRESS}: not the position of a run: {error}") from error
    return progress


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    made = {}
    for path in sorted(path for path in folder.iterdir() if path.name != MANIFEST):
        with path.open("rb") as file:
            made[path.name] = {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return made


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        expected = durable.read_json(folder / MANIFEST)["files"]
        if PROGRESS not in expected:
            return f"{MANIFEST} does not name {PROGRESS}"
        for name, file in expected.items():
            if (size := (folder / durable.file_name(name, MANIFEST)).stat().st_size) != file["size"]:
                return f"{name} has {size} bytes, the manifest says {file['size']}"
        found = fingerprints(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return next((f"{name} does not match its checksum" for name, file in expected.items() if found.get(name) != file), None)


def reason(error: BaseException) -> str:
    """The first cause: torch.distributed.checkpoint wraps what each rank raised, and torch.save what the system said."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return str(cause or error) or type(error).__name__
