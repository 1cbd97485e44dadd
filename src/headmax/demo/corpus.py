"""The demo's text, available on every machine: the source of Python's standard library, one document per file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headmax import durable

SKIPPED = {"__pycache__", "_bundled", "dist-packages", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
"""Folders of tests, installed packages and generated pages, which are not the library's code."""
MACHINE_SPECIFIC = "_sysconfigdata"
"""Files whose names start like this describe one machine."""
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Document:
    name: str
    """The file's path relative to the library's folder, with slashes."""
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, both sorted by name."""

    version: str
    """The Python version, such as "Python 3.11.7"."""
    train: tuple[Document, ...]
    valid: tuple[Document, ...]

    @cached_property
    def sha256(self) -> str:
        """Checksum of all names and texts."""
        return hashlib.sha256(to_json_lines((*self.train, *self.valid))).hexdigest()

    def write(self, folder: Path) -> None:
        """Writes train.jsonl and valid.jsonl, one document per line, as `headmax data prepare` reads them."""
        durable.write(folder / "train.jsonl", to_json_lines(self.train))
        durable.write(folder / "valid.jsonl", to_json_lines(self.valid))


def standard_library() -> Corpus:
    """The source of the running Python's standard library."""
    return read(Path(sysconfig.get_paths()["stdlib"]), f"Python {platform.python_version()}")


def read(folder: Path, version: str) -> Corpus:
    """All Python source below a folder, split into training and held-out files."""
    documents = tuple(read_documents(folder))
    train, valid = (tuple(d for d in documents if is_held_out(d.name) is wanted) for wanted in (False, True))
    if not train or not valid:
        problem = f"{len(documents)} files of Python source, too few for the demo"
        raise ValueError(f"{folder}: {problem}; use a Python whose standard library is installed as source")
    return Corpus(version, train, valid)


def read_documents(root: Path) -> Iterator[Document]:
    """The files below `root` with text in UTF-8, sorted by name."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    for name in sorted(names):
        if name.startswith(MACHINE_SPECIFIC):
            continue
        try:
            text = (root / name).read_bytes().decode()
        except (OSError, UnicodeDecodeError):  # dangling links, other encodings
            continue
        if text.strip():
            yield Document(name, text)


def is_held_out(name: str) -> bool:
    """Depends on the file's name alone, so that a file's split is the same in every installation."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % HELD_OUT_ONE_IN == 0


def count_bytes(documents: Iterable[Document]) -> int:
    """Size of the texts in UTF-8."""
    return sum(len(document.text.encode()) for document in documents)


def to_json_lines(documents: Iterable[Document]) -> bytes:
    return "".join(json.dumps({"name": document.name, "text": document.text}) + "\n" for document in documents).encode()
