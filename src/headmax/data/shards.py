"""A prepared folder: token shards, document offsets, the tokenizer, and an index, which is written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headmax import durable, fields
from headmax.data.encoder import SPLITS

FORMAT = 1
"""Version of the folder's layout and of tokenisation; folders of another version are refused."""
INDEX, PROGRESS = "index.json", "progress.json"
STARTS = np.dtype("<i8")
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class Shard:
    """<name>.tokens, the token ids, and <name>.documents, the int64 offsets at which documents begin."""

    name: str
    tokens: int
    documents: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Index:
    """index.json. It does not depend on when or where the folder was prepared, or on interruptions."""

    format: int
    headmax: str
    """The version that prepared it."""
    dtype: str
    vocab_size: int
    document_token: int
    """The token before every document."""
    tokenizer_sha256: str
    """Of tokenizer.json in the same folder."""
    made_from: dict[str, Any]
    """Inputs and options."""
    splits: dict[str, tuple[Shard, ...]]
    cursor: Any = None
    """In progress.json: the position in the inputs at which the next shards begin."""

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of a complete folder; checks that its files exist with the right sizes."""
        path = folder / INDEX
        if not path.exists():
            if (folder / PROGRESS).exists():
                raise ValueError(f"{folder}: incomplete; rerun the same `headmax data prepare` to finish it")
            raise ValueError(f"{folder}: no prepared data ({INDEX} is missing); make it with `headmax data prepare`")
        index = cls.parse(path)
        index.check_sizes(folder)
        return index

    @classmethod
    def parse(cls, path: Path) -> Index:
        """The index in a file, without looking at other files."""
        content = durable.read_json(path, "an index of prepared data")
        if (version := content.get("format", FORMAT)) != FORMAT:
            raise ValueError(f"{path.parent}: prepared in format {version}, but this headmax reads {FORMAT}; prepare it again")
        try:
            splits: Any = content.get("splits")
            fields.check(splits, dict.fromkeys(SPLITS, list), set(SPLITS))
            shards = {split: tuple(fields.build(Shard, shard) for shard in splits[split]) for split in SPLITS}
            index = replace(fields.build(cls, content | {"splits": {}}), splits=shards)
            index.check(path)
        except ValueError as error:
            raise ValueError(f"{path}: not an index of prepared data: {error}") from error
        return index

    def check(self, path: Path) -> None:
        """ValueError for a field that `headmax data prepare` cannot have written; `path` is the file it was read from."""
        valid = {
            "dtype": self.dtype in DTYPES,
            "vocab_size": 0 < self.vocab_size <= 2**32,
            "document_token": 0 <= self.document_token < self.vocab_size,
            "cursor": self.cursor is None or (fields.is_of(self.cursor, list) and _is_cursor(*self.cursor)),
        }
        for name, is_valid in valid.items():
            if not is_valid:
                raise ValueError(f"{name} cannot be {getattr(self, name)!r:.80}")
        fields.check(self.made_from, {"contents": list[dict | None]}, set(), allow_unknown=True)
        for content in filter(None, self.made_from.get("contents", [])):
            fields.check(content, {"bytes": int, "blake2b": str}, {"bytes", "blake2b"})
        for shard in (shard for shards in self.splits.values() for shard in shards):
            durable.file_name(shard.name, path)
            if shard.tokens < 0 or shard.documents < 0:
                raise ValueError(f"tokens and documents must not be negative in {shard}")

    def dump(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    def files(self) -> Iterator[tuple[str, int, str]]:
        """(name, bytes, sha256) of every shard's files."""
        for shards in self.splits.values():
            for shard in shards:
                yield f"{shard.name}.tokens", shard.tokens * np.dtype(self.dtype).itemsize, shard.tokens_sha256
                yield f"{shard.name}.documents", shard.documents * STARTS.itemsize, shard.documents_sha256

    def check_sizes(self, folder: Path) -> None:
        for file, size, _ in self.files():
            actual = (folder / file).stat().st_size if (folder / file).is_file() else None
            if actual != size:
                raise ValueError(f"{folder / file}: {'missing' if actual is None else f'{actual} bytes'}, the index says {size} bytes")

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.splits[split])

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.splits[split])


def _is_cursor(number: Any = None, state: Any = None, split: Any = None, *rest: Any) -> bool:
    """Whether these are the fields of a `headmax.data.prepare.Cursor`."""
    return not rest and fields.is_of(number, int) and number >= 0 and fields.is_of(state, int | dict | None) and split in range(len(SPLITS))


def verify(folder: Path) -> Index:
    """The index of a folder, after comparing every file with its checksum."""
    index = Index.read(folder)
    for name, checksum in [("tokenizer.json", index.tokenizer_sha256), *((name, checksum) for name, _, checksum in index.files())]:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; prepare the folder again")
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                raise ValueError(f"{folder / name}: changed since it was prepared (its checksum differs); prepare the folder again")
    for shard in (shard for shards in index.splits.values() for shard in shards):
        refuse_outside(
            folder / f"{shard.name}.tokens", mapped(folder / f"{shard.name}.tokens", index.dtype, shard.tokens), index.vocab_size
        )
        starts = mapped(folder / f"{shard.name}.documents", STARTS, shard.documents)
        if len(starts) and (starts[0] < 0 or starts[-1] >= shard.tokens or (np.diff(starts) <= 0).any()):
            raise ValueError(
                f"{folder / f'{shard.name}.documents'}: not increasing offsets below {shard.tokens} tokens; prepare the folder again"
            )
    return index


def mapped(path: Path, dtype: np.dtype | str, count: int) -> np.ndarray:
    """A memory-mapped array of a file."""
    return np.memmap(path, dtype, "r", shape=(count,)).view(np.ndarray) if count else np.empty(0, dtype)


def refuse_outside(where: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """ValueError for a token outside the vocabulary."""
    if tokens.size and (largest := int(tokens.max())) >= vocab_size:
        raise ValueError(f"{where}: token {largest} is outside the vocabulary of {vocab_size}; prepare the folder again")
