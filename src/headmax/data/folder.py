"""Writing a prepared folder: shards complete one by one, what is complete is noted, and the index comes last."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headmax import durable
from headmax.data.documents import Input
from headmax.data.encoder import SPLITS
from headmax.data.shards import INDEX, PROGRESS, STARTS, Index, Shard
from headmax.data.tokenizer import FILES

logger = logging.getLogger("headmax")

CONTENTS = "contents"
"""In `Index.made_from`: how much of each input was read, and its hash; inputs to validate on come first."""
PART = "part"
"""In `Index.made_from`, of a folder that is one of several parts: its number and how many there are."""
REPORTED = 2**26
"""Bytes between two reports of comparing inputs."""
DATA = durable.Owner(
    "data of headmax data prepare",
    lambda folder: any((folder / name).is_file() for name in (INDEX, PROGRESS, PROGRESS + durable.UNFINISHED)),
)
SHARD_FILE = re.compile(rf"({'|'.join(SPLITS)})-\d+\.(tokens|documents)(\.tmp)?")


class ShardWriter:
    """Writes one shard under names that only `finish` makes its own."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.folder, self.name = folder, name
        self.dtypes = {"tokens": dtype, "documents": STARTS}
        self.files = {part: (folder / f"{name}.{part}.tmp").open("wb") for part in self.dtypes}
        self.sums = {part: hashlib.sha256() for part in self.dtypes}
        self.counts = dict.fromkeys(self.dtypes, 0)

    def add(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """More tokens, and where in these documents begin."""
        for part, array in (("documents", starts + self.counts["tokens"]), ("tokens", tokens)):
            content = array.astype(self.dtypes[part], copy=False).tobytes()
            self.files[part].write(content)
            self.sums[part].update(content)
            self.counts[part] += len(array)

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def finish(self) -> Shard:
        for part, file in self.files.items():
            durable.sync(file)
            file.close()
            os.replace(file.name, self.folder / f"{self.name}.{part}")
        return Shard(self.name, self.counts["tokens"], self.counts["documents"], *(s.hexdigest() for s in self.sums.values()))


class FolderWriter:
    """A folder on its way to `index`, which has no shards yet: a new one, or one that was left half-written."""

    def __init__(self, out: Path, index: Index, files: dict[str, bytes]) -> None:
        self.out, self.dtype = out, np.dtype(index.dtype)
        self.writers: dict[str, ShardWriter] = {}
        self.index = index
        if (out / PROGRESS).exists():
            earlier = Index.parse(out / PROGRESS)
            if any(earlier.splits.values()):
                refuse_other(out, earlier, index)
                earlier.check_sizes(out)
                self.index = earlier
        complete = {name for name, _, _ in self.index.files()}
        with _writing(out):
            durable.write(out / PROGRESS, self.index.dump())
            for file in out.iterdir():
                if SHARD_FILE.fullmatch(file.name) and file.name not in complete:
                    file.unlink()
            for name, content in files.items():
                durable.write(out / name, content)

    def add(self, split: str, tokens: np.ndarray, starts: np.ndarray) -> None:
        """More tokens of a split, and where in these documents begin."""
        if len(tokens):
            with _writing(self.out):
                if split not in self.writers:
                    self.writers[split] = ShardWriter(self.out, f"{split}-{len(self.index.splits[split]):05}", self.dtype)
                self.writers[split].add(tokens, starts)

    @property
    def pending(self) -> int:
        """Tokens of shards that are not complete."""
        return sum(writer.counts["tokens"] for writer in self.writers.values())

    def commit(self, cursor: Any, contents: Sequence[dict[str, Any] | None]) -> None:
        """Completes the shards begun; all inputs before `cursor` are in them or in earlier ones, and `contents` says what was in those."""
        with _writing(self.out):
            made = {split: writer.finish() for split, writer in self.writers.items()}
            durable.sync_folder(self.out)
            self.writers.clear()
            splits = {split: (*shards, made[split]) if split in made else shards for split, shards in self.index.splits.items()}
            self.index = replace(self.index, splits=splits, cursor=cursor, made_from=self.index.made_from | {CONTENTS: list(contents)})
            durable.write(self.out / PROGRESS, self.index.dump())

    def discard(self) -> None:
        """Leaves an empty folder, where nothing that was begun can ever be complete."""
        self.close()
        for file in self.out.iterdir():
            if SHARD_FILE.fullmatch(file.name) or file.name in (PROGRESS, *FILES):
                file.unlink()

    def close(self) -> None:
        """Leaves shards that are not complete; the next time they are begun anew."""
        for writer in self.writers.values():
            writer.close()

    def finish(self) -> Index:
        """Writes the index: the folder is complete."""
        with _writing(self.out):
            self.index = replace(self.index, cursor=None)
            durable.write(self.out / INDEX, self.index.dump())
            (self.out / PROGRESS).unlink()
            return self.index


def refuse_other(out: Path, there: Index, wanted: Index) -> None:
    """Raises where a folder was made from something else."""
    other = [name for name in ("tokenizer_sha256", "document_token") if getattr(there, name) != getattr(wanted, name)]
    other += [name for name in {**wanted.made_from, PART: None} if there.made_from.get(name) != wanted.made_from.get(name)]
    if other:
        changed = ", ".join(name.removesuffix("_sha256").replace("_", " ") for name in other)
        raise ValueError(f"{out}: made with another {changed}; give the same again, or choose another folder")


def refuse_changed(out: Path, there: Index, inputs: Sequence[Input], report: Callable[[int, int], None]) -> None:
    """Reads again what a folder was made from and raises where it is not the same; `report` hears of bytes read and to read."""
    contents = there.made_from.get(CONTENTS)
    if contents is None:
        logger.warning("%s: made before inputs were hashed: only their names and sizes are compared", out)
        return
    done, total = 0, sum(content["bytes"] for content in contents if content)

    def read(count: int) -> None:
        nonlocal done
        done += count
        if done // REPORTED > (done - count) // REPORTED:
            report(done, total)

    for source, content in zip(inputs, contents, strict=False):
        if content and not source.holds(content, read):
            raise ValueError(f"{source.where}: not the text that {out} was made from; restore it, or choose another folder")


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{out}: cannot be written to: {error.strerror}; complete shards stay, run again to go on") from error
