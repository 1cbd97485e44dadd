"""The demo's text, which every machine has: the source of Python's standard library, a file a document."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headmax import durable

SKIPPED = {"__pycache__", "_bundled", "dist-packages", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
"""Folders with what is not the library's own code: tests, installed packages, generated pages."""
GENERATED = "_sysconfigdata"
"""How the names of files begin that tell of one machine."""
HELD_OUT = 20
"""One file in so many is held out."""


@dataclass(frozen=True)
class Document:
    name: str
    """The file's path in its folder, with slashes."""
    text: str


@dataclass(frozen=True)
class Corpus:
    """The documents to train on and to validate on, both in the order of their names."""

    version: str
    """Of the Python it is the library of."""
    train: tuple[Document, ...]
    valid: tuple[Document, ...]

    @property
    def sha256(self) -> str:
        """Of all names and texts."""
        return hashlib.sha256(_lines((*self.train, *self.valid))).hexdigest()

    def write(self, folder: Path) -> tuple[Path, Path]:
        """One JSON line a document: train.jsonl and valid.jsonl, as `headmax data prepare` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = folder / "train.jsonl", folder / "valid.jsonl"
        for path, documents in zip(paths, (self.train, self.valid), strict=True):
            durable.write(path, _lines(documents))
        return paths


def size(documents: tuple[Document, ...]) -> int:
    """Bytes of their texts, in UTF-8."""
    return sum(len(document.text.encode()) for document in documents)


def standard_library() -> Corpus:
    """The source of the running Python's standard library."""
    return read(Path(sysconfig.get_paths()["stdlib"]), f"Python {platform.python_version()}")


def read(folder: Path, version: str) -> Corpus:
    """All Python source below a folder, whole files held out by their names, whatever else is there."""
    documents = tuple(_documents(folder))
    train, valid = (tuple(d for d in documents if held_out(d.name) is wanted) for wanted in (False, True))
    if not train or not valid:
        raise ValueError(f"{folder}: {len(documents)} files of Python source, too few for the demo; use a Python that has its source")
    return Corpus(version, train, valid)


def held_out(name: str) -> bool:
    """Whether the file of this name is for validation."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % HELD_OUT == 0


def _documents(root: Path) -> Iterator[Document]:
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    for name in sorted(names):
        if not name.startswith(GENERATED):
            try:
                text = (root / name).read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip():
                yield Document(name, text)


def _lines(documents: tuple[Document, ...]) -> bytes:
    return "".join(json.dumps({"name": document.name, "text": document.text}) + "\n" for document in documents).encode()
