"""Parts of a dataset that several jobs prepare in parallel, and merging them."""

from __future__ import annotations

import os
import re
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from headmax import durable, fields
from headmax.data.documents import Input
from headmax.data.encoder import SPLITS
from headmax.data.folder import CONTENTS, DATA, PART, SHARD_FILE
from headmax.data.shards import INDEX, PROGRESS, Index, Shard
from headmax.data.tokenizer import FILES

MADE_FROM: dict[str, Any] = {PART: list[int], CONTENTS: list[Any], "valid_fraction": float | None, "valid inputs": list[Any]}
"""What a merge reads of how a part was made."""
MOST_PARTS = 1_000_000


class Part(NamedTuple):
    """One of `parts`, counted from 1."""

    number: int
    parts: int

    @classmethod
    def of(cls, text: str) -> Part:
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"part must be number/parts, such as 1/8 to 8/8, got {text!r}")
        return cls(int(match[1]), int(match[2]))

    def share(self, inputs: Sequence[Input]) -> list[Input]:
        """This part's inputs: at least one, contiguous, with about an even share of the bytes."""
        if unsized := [source.where for source in inputs if source.size is None]:
            raise ValueError(f"part: the size of {unsized[0]} is unknown; give files, which can be divided into parts")
        if len(inputs) < self.parts:
            raise ValueError(f"part: {len(inputs)} files make at most {len(inputs)} parts, got {self.parts}; use fewer parts")
        ends = list(accumulate(source.size or 0 for source in inputs))

        def cut(n: int) -> int:
            """Index of the first input of part n + 1, leaving at least one input for each other part."""
            return min(max(bisect_left(ends, ends[-1] * n / self.parts), n), len(inputs) - self.parts + n)

        return list(inputs[cut(self.number - 1) : cut(self.number) if self.number < self.parts else None])


def merge(folders: Sequence[Path], out: Path) -> Index:
    """Merges all parts into `out`, with hard links to their files, or copies on another file system.

    The result is what one process would have prepared, except for the sizes of shards. A complete `out` of the same parts is kept as it is.
    """
    if not folders or len(set(folders)) < len(folders):
        raise ValueError(f"merge takes the folder of each part once, got {', '.join(map(str, folders)) or 'none'}")
    parts = _sorted({folder: Index.read(folder) for folder in folders})
    index = _concatenate(list(parts.values()))
    durable.claim(out, DATA)
    with durable.sole_user(out):
        if (out / INDEX).exists():
            if Index.read(out) != index:
                raise ValueError(f"{out}: contains other data than these parts; choose another folder")
            (out / PROGRESS).unlink(missing_ok=True)  # of a process that was killed right before that
            return index
        durable.write(out / PROGRESS, replace(index, splits=dict.fromkeys(SPLITS, ())).dump())
        for file in out.iterdir():
            if SHARD_FILE.fullmatch(file.name):
                file.unlink()
        for split in SPLITS:
            sources = [folder / shard.name for folder, part in parts.items() for shard in part.splits[split]]
            for source, shard in zip(sources, index.splits[split], strict=True):
                for kind in ("tokens", "documents"):
                    _link(source.with_name(f"{source.name}.{kind}"), out / f"{shard.name}.{kind}")
        for name in FILES:
            durable.write(out / name, (next(iter(parts)) / name).read_bytes())
        durable.sync_folder(out)
        durable.write(out / INDEX, index.dump())
        (out / PROGRESS).unlink()
    return index


def _sorted(given: dict[Path, Index]) -> dict[Path, Index]:
    """All parts by number; ValueError names one that is missing, duplicate or of another dataset."""
    numbers: dict[int, Path] = {}
    for folder, index in given.items():
        if PART not in index.made_from:
            raise ValueError(f"{folder}: not a part; make parts with `headmax data prepare --part`")
        number, parts = _part(folder, index)
        if number in numbers:
            raise ValueError(f"{folder}: part {number} of {parts} again, after {numbers[number]}; give each part once")
        numbers[number] = folder
        if _common(index) != _common(next(iter(given.values()))):
            raise ValueError(f"{folder}: inputs, tokenizer or options differ from {next(iter(given))}")
    if missing := sorted({*range(1, parts + 1)} - {*numbers}):
        raise ValueError(f"missing parts of {parts}: {', '.join(map(str, missing))}")
    return {numbers[number]: given[numbers[number]] for number in sorted(numbers)}


def _part(folder: Path, index: Index) -> Part:
    """Which part the folder says it is; ValueError if its index lacks what a merge reads."""
    try:
        fields.check(index.made_from, MADE_FROM, set(MADE_FROM), allow_unknown=True)
        part = Part(*index.made_from[PART]) if len(index.made_from[PART]) == 2 else Part(0, 0)
        if not 1 <= part.number <= part.parts <= MOST_PARTS:
            raise ValueError(f"{PART} must be a number and how many parts there are, got {index.made_from[PART]}")
    except ValueError as error:
        raise ValueError(f"{folder / INDEX}: not the index of a part: {error}") from error
    return part


def _common(index: Index) -> Index:
    """The index without what differs between parts."""
    settings = {name: x for name, x in index.made_from.items() if name not in (PART, CONTENTS)}
    settings["parts"] = index.made_from[PART][1]
    return replace(index, splits={}, made_from=settings)


def _concatenate(parts: Sequence[Index]) -> Index:
    splits: dict[str, tuple[Shard, ...]] = {}
    for split in SPLITS:
        shards = [shard for part in parts for shard in part.splits[split]]
        splits[split] = tuple(replace(shard, name=f"{split}-{n:05}") for n, shard in enumerate(shards))
    made_from = {name: x for name, x in parts[0].made_from.items() if name != PART}
    made_from[CONTENTS] = [content for part in parts for content in part.made_from[CONTENTS]]
    index = replace(parts[0], splits=splits, made_from=made_from)
    required = ["train"]
    if made_from["valid_fraction"] or made_from["valid inputs"]:
        required.append("valid")
    if empty := [split for split in required if not index.tokens(split)]:
        raise ValueError(f"these parts have no documents in split {empty[0]!r}")
    return index


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        with source.open("rb") as file, durable.replacing(target) as copy:
            shutil.copyfileobj(file, copy)
