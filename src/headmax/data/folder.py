"""Writes a prepared folder: shard by shard, with a progress file, and the index last."""

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
"""Key in `Index.made_from`: bytes read of each input and their hash; validation inputs come first."""
PART = "part"
"""Key in `Index.made_from` of a part: its number and the number of parts."""
REPORT_EVERY = 2**26
"""Bytes between progress reports when comparing inputs."""
DATA = durable.Owner(
    "data of headmax data prepare",
    lambda folder: any((folder / name).is_file() for name in (INDEX, PROGRESS, PROGRESS + durable.UNFINISHED)),
)
SHARD_FILE = re.compile(rf"({'|'.join(SPLITS)})-\d+\.(tokens|documents)(\.tmp)?")


class ShardWriter:
    """Writes one shard under temporary names until `finish`."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.folder, self.name = folder, name
        self.dtypes = {"tokens": dtype, "documents": STARTS}
        self.files = {part: (folder / f"{name}.{part}.tmp").open("wb") for part in self.dtypes}
        self.sums = {part: hashlib.sha256() for part in self.dtypes}
        self.counts = dict.fromkeys(self.dtypes, 0)

    def add(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Appends tokens, and the offsets in them at which documents begin."""
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
    """Writes a folder from `index`, which has no shards yet, or resumes an incomplete one."""

    def __init__(self, out: Path, index: Index, files: dict[str, bytes]) -> None:
        self.out, self.dtype = out, np.dtype(index.dtype)
        self.writers: dict[str, ShardWriter] = {}
        self.index = index
        if (out / PROGRESS).exists():
            existing = Index.parse(out / PROGRESS)
            if any(existing.splits.values()):
                refuse_other(out, existing, index)
                existing.check_sizes(out)
                self.index = existing
        complete = {name for name, _, _ in self.index.files()}
        with _writing(out):
            durable.write(out / PROGRESS, self.index.dump())
            for file in out.iterdir():
                if SHARD_FILE.fullmatch(file.name) and file.name not in complete:
                    file.unlink()
            for name, content in files.items():
                durable.write(out / name, content)

    def add(self, split: str, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Appends tokens of a split, and the offsets in them at which documents begin."""
        if len(tokens):
            with _writing(self.out):
                if split not in self.writers:
                    self.writers[split] = ShardWriter(self.out, f"{split}-{len(self.index.splits[split]):05}", self.dtype)
                self.writers[split].add(tokens, starts)

    @property
    def pending(self) -> int:
        """Tokens in incomplete shards."""
        return sum(writer.counts["tokens"] for writer in self.writers.values())

    def commit(self, cursor: Any, contents: Sequence[dict[str, Any] | None]) -> None:
        """Completes the current shards. Complete shards then have all inputs before `cursor`, with these `contents`."""
        with _writing(self.out):
            finished = {split: writer.finish() for split, writer in self.writers.items()}
            durable.sync_folder(self.out)
            self.writers.clear()
            splits = {split: (*shards, finished[split]) if split in finished else shards for split, shards in self.index.splits.items()}
            self.index = replace(self.index, splits=splits, cursor=cursor, made_from=self.index.made_from | {CONTENTS: list(contents)})
            durable.write(self.out / PROGRESS, self.index.dump())

    def discard(self) -> None:
        """Removes everything written, if the folder can never be complete."""
        self.close()
        for file in self.out.iterdir():
            if SHARD_FILE.fullmatch(file.name) or file.name in (PROGRESS, *FILES):
                file.unlink()

    def close(self) -> None:
        """Abandons incomplete shards; the next run writes them again."""
        for writer in self.writers.values():
            writer.close()

    def finish(self) -> Index:
        """Writes the index: the folder is complete."""
        with _writing(self.out):
            self.index = replace(self.index, cursor=None)
            durable.write(self.out / INDEX, self.index.dump())
            (self.out / PROGRESS).unlink()
            return self.index


def refuse_other(out: Path, existing: Index, wanted: Index) -> None:
    """ValueError if a folder was made with other inputs or settings."""
    changed = [name for name in ("tokenizer_sha256", "document_token") if getattr(existing, name) != getattr(wanted, name)]
    changed += [name for name in {**wanted.made_from, PART: None} if existing.made_from.get(name) != wanted.made_from.get(name)]
    if changed:
        names = ", ".join(name.removesuffix("_sha256").replace("_", " ") for name in changed)
        raise ValueError(f"{out}: made with another {names}; restore it, or choose another folder")


def refuse_changed(out: Path, existing: Index, inputs: Sequence[Input], report: Callable[[int, int], None]) -> None:
    """Reads the inputs again; ValueError if one has changed. `report` is called with (bytes read, total)."""
    contents = existing.made_from.get(CONTENTS)
    if contents is None:
        logger.warning("%s: prepared before inputs were hashed: only names and sizes are compared", out)
        return
    done, total = 0, sum(content["bytes"] for content in contents if content)

    def read(count: int) -> None:
        nonlocal done
        done += count
        if done // REPORT_EVERY > (done - count) // REPORT_EVERY:
            report(done, total)

    for source, content in zip(inputs, contents, strict=False):
        if content and not source.matches(content, read):
            raise ValueError(f"{source.where}: changed since {out} was made from it; restore it, or choose another folder")


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{out}: cannot be written to: {error.strerror}; complete shards are kept, rerun to resume") from error
