"""A folder of several parts that jobs prepare side by side, and the parts put together."""

from __future__ import annotations

import os
import re
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from headmax import durable
from headmax.data.documents import Input
from headmax.data.encoder import SPLITS
from headmax.data.folder import CONTENTS, DATA, PART, SHARD_FILE
from headmax.data.shards import INDEX, PROGRESS, Index, Shard
from headmax.data.tokenizer import FILES


class Part(NamedTuple):
    """One of `parts`, counted from 1."""

    number: int
    parts: int

    @classmethod
    def of(cls, text: str) -> Part:
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"part must be number/parts, such as 1/8 to 8/8, got {text!r}")
        return cls(int(found[1]), int(found[2]))

    def share(self, inputs: Sequence[Input]) -> list[Input]:
        """This part's of the inputs: some that follow one another, of about its share of their bytes, at least one."""
        if unsized := [source.where for source in inputs if source.size is None]:
            raise ValueError(f"part: {unsized[0]} has no size to share out; parts are made of files")
        if len(inputs) < self.parts:
            raise ValueError(f"part: {len(inputs)} files make at most {len(inputs)} parts, got {self.parts}")
        ends = list(accumulate(source.size or 0 for source in inputs))

        def cut(n: int) -> int:
            """The first input of part n + 1, and enough others left for the parts on either side."""
            return min(max(bisect_left(ends, ends[-1] * n / self.parts), n), len(inputs) - self.parts + n)

        return list(inputs[cut(self.number - 1) : cut(self.number) if self.number < self.parts else None])


def merge(folders: Sequence[Path], out: Path) -> Index:
    """Makes `out` of all parts, with links to their files, or copies on another file system: what one process would have prepared, but for
    where shards end. A complete one of the same parts is left as it is.
    """
    if not folders or len(set(folders)) < len(folders):
        raise ValueError(f"merge takes the folder of each part once, got {', '.join(map(str, folders)) or 'none'}")
    parts = _sorted({folder: Index.read(folder) for folder in folders})
    index = _joined(list(parts.values()))
    durable.claim(out, DATA)
    with durable.sole_user(out):
        if (out / INDEX).exists():
            if Index.read(out) != index:
                raise ValueError(f"{out}: holds other data than these parts; choose another folder")
            return index
        durable.write(out / PROGRESS, replace(index, splits=dict.fromkeys(SPLITS, ())).dump())
        for file in out.iterdir():
            if SHARD_FILE.fullmatch(file.name):
                file.unlink()
        for split in SPLITS:
            theirs = [folder / shard.name for folder, part in parts.items() for shard in part.splits[split]]
            for source, shard in zip(theirs, index.splits[split], strict=True):
                for kind in ("tokens", "documents"):
                    _link(source.with_name(f"{source.name}.{kind}"), out / f"{shard.name}.{kind}")
        for name in FILES:
            durable.write(out / name, (next(iter(parts)) / name).read_bytes())
        durable.sync_folder(out)
        durable.write(out / INDEX, index.dump())
        (out / PROGRESS).unlink()
    return index


def _sorted(given: dict[Path, Index]) -> dict[Path, Index]:
    """All parts in their order, each once; ValueError says which is missing or another."""
    numbers: dict[int, Path] = {}
    for folder, index in given.items():
        if PART not in index.made_from:
            raise ValueError(f"{folder}: not a part; `headmax data prepare --part` makes them")
        number, parts = index.made_from[PART]
        if number in numbers:
            raise ValueError(f"{folder}: part {number} of {parts}, as {numbers[number]} is")
        numbers[number] = folder
        if _common(index) != _common(next(iter(given.values()))):
            raise ValueError(f"{folder}: made from other inputs, by another tokenizer or with other options than {next(iter(given))}")
    if missing := sorted({*range(1, parts + 1)} - {*numbers}):
        raise ValueError(f"part {missing[0]} of {parts} is missing, one of {len(missing)}")
    return {numbers[number]: given[numbers[number]] for number in sorted(numbers)}


def _common(index: Index) -> Index:
    """What is the same in all parts."""
    settings = {name: x for name, x in index.made_from.items() if name not in (PART, CONTENTS)}
    settings["parts"] = index.made_from[PART][1]
    return replace(index, splits={}, made_from=settings)


def _joined(parts: Sequence[Index]) -> Index:
    splits: dict[str, tuple[Shard, ...]] = {}
    for split in SPLITS:
        shards = [shard for part in parts for shard in part.splits[split]]
        splits[split] = tuple(replace(shard, name=f"{split}-{n:05}") for n, shard in enumerate(shards))
    made_from = {name: x for name, x in parts[0].made_from.items() if name != PART}
    made_from[CONTENTS] = [content for part in parts for content in part.made_from[CONTENTS]]
    index = replace(parts[0], splits=splits, made_from=made_from)
    wanted = ["train", *(["valid"] if made_from["valid_fraction"] or made_from["valid inputs"] else [])]
    if empty := [split for split in wanted if not index.tokens(split)]:
        raise ValueError(f"no documents to {'train' if empty[0] == 'train' else 'validate'} on in these parts")
    return index


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        with source.open("rb") as file, durable.replacing(target) as copy:
            shutil.copyfileobj(file, copy)
