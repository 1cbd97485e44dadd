"""Documents out of files and hub datasets, in order, from the first on or from where an earlier reading stopped."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import lzma
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from headmax import durable
from headmax.data.encoder import LINE_END

KINDS = (".txt", ".jsonl", ".parquet")
PACKED = (".gz", ".xz", ".zst")
HELD = 2**20
"""Characters of a document in a .txt that are held at a time; a longer one comes in parts."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.\[\]:%-]+)?")


class Text(NamedTuple):
    """A document, or a part of one that is too long to be held."""

    text: str
    starts: bool
    """Whether it is its document's beginning."""
    state: Any
    """Handed to `read`, it goes on after this text; JSON."""
    position: int
    """Bytes of the input read so far."""


class Input(Protocol):
    """One file or dataset."""

    @property
    def where(self) -> str:
        """The path or the dataset, for messages."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """What tells it from another: a name, and what must not change."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes, where known."""
        ...

    def read(self, state: Any = None) -> Iterator[Text]:
        """Its texts, from the beginning or from after the one that `state` came with."""
        ...

    def content(self) -> dict[str, Any] | None:
        """What was read so far, as {"bytes": how many, "blake2b": their hash}, where that can be read again."""
        ...

    def holds(self, content: dict[str, Any], read: Callable[[int], None]) -> bool:
        """Whether it still begins with what `content` was taken of; `read` hears of every part's bytes."""
        ...


@dataclass(frozen=True)
class Options:
    """How documents are found in inputs."""

    text_key: str = "text"
    """The field of a JSON line, or the column of a table, that holds the text."""
    separator: str = "<|doc|>"
    """The line between two documents of a .txt."""


class Content:
    """The bytes of a file from its beginning on, as many as were read."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.bytes, self.hash = 0, hashlib.blake2b(digest_size=32)

    def add(self, part: bytes | memoryview) -> None:
        self.bytes += len(part)
        self.hash.update(part)

    def take(self, file: BinaryIO, most: int, read: Callable[[int], None] = lambda count: None) -> None:
        while self.bytes < most and (part := file.read(min(2**20, most - self.bytes))):
            self.add(part)
            read(len(part))

    def describe(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "blake2b": self.hash.hexdigest()}


class HashedFile(io.RawIOBase):
    """A file whose content is hashed as it is read."""

    def __init__(self, raw: BinaryIO, content: Content) -> None:
        self.raw, self.content = raw, content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.raw.readinto(buffer)  # type: ignore[attr-defined]
        self.content.add(memoryview(buffer)[:count])
        return count


@dataclass(frozen=True)
class FileInput:
    """A .txt, .jsonl or .parquet, plain or compressed."""

    path: Path
    name: str
    options: Options
    read_so_far: Content = field(default_factory=lambda: Content(), compare=False)

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.size}

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def content(self) -> dict[str, Any]:
        return self.read_so_far.describe()

    def holds(self, content: dict[str, Any], read: Callable[[int], None]) -> bool:
        found = Content()
        with _opened(self.path) as file:
            found.take(file, content["bytes"], read)
        return found.describe() == content

    def read(self, state: Any = None) -> Iterator[Text]:
        taken = 0
        self.read_so_far.clear()
        texts = {".txt": self._paragraphs, ".jsonl": self._json_lines, ".parquet": self._rows}[_kind(self.path)]
        for text, starts, position in texts():
            if text.strip():
                taken += 1
                if taken > (state or 0):
                    yield Text(text, starts, taken, position)

    def _paragraphs(self) -> Iterator[tuple[str, bool, int]]:
        """Lines gathered up to a separator or the end of the file, or after HELD characters up to the end of a line."""
        held: list[str] = []
        size, starts, fresh = 0, True, True
        for _, line, position in self._lines(HELD):
            if not line or (fresh and line.rstrip("\r\n") == self.options.separator):
                text = "".join(held).rstrip("\n")
                yield text.lstrip("\n") if starts else text, starts, position
                held, size, starts = [], 0, True
                continue
            fresh = line.endswith("\n")
            held.append(line[:-2] + "\n" if line.endswith("\r\n") else line)
            size += len(line)
            if size >= HELD:
                text = "".join(held).lstrip("\n") if starts else "".join(held)
                ends = [match.start() for match in LINE_END.finditer(text, len(text) // 2)]
                cut = ends[-1] if ends else len(text)
                yield text[:cut], starts, position
                held, size, starts = [text[cut:]], len(text) - cut, starts and not text[:cut].strip()

    def _lines(self, longest: int = -1) -> Iterator[tuple[int, str, int]]:
        """(number, line, bytes of the file read so far); a line over `longest` bytes comes in pieces."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        number, line = 1, b"start"
        with _opened(self.path) as raw:
            file = io.BufferedReader(_unpacked(self.path, HashedFile(raw, self.read_so_far)), 2**20)
            while line:
                with _translated(self.path, f"line {number}: cannot be read"):
                    line = file.readline(longest)
                try:
                    text = decoder.decode(line, final=not line)
                except UnicodeDecodeError as error:
                    raise ValueError(f"{self.path}:{number}: not UTF-8: byte 0x{error.object[error.start]:02x}: {error.reason}") from error
                yield number, text, self.read_so_far.bytes
                number += line.endswith(b"\n")

    def _json_lines(self) -> Iterator[tuple[str, bool, int]]:
        for number, line, position in self._lines():
            if not line.strip():
                continue
            try:
                document = durable.parse_json(line)
            except ValueError as error:
                raise ValueError(f"{self.path}:{number}: not JSON: {error}") from error
            if not isinstance(document, dict):
                raise ValueError(f"{self.path}:{number}: not a JSON object but {type(document).__name__}")
            if self.options.text_key not in document:
                raise ValueError(f"{self.path}:{number}: no field {self.options.text_key!r}; it has {', '.join(map(repr, document))}")
            yield _checked(document[self.options.text_key], f"{self.path}:{number}"), True, position

    def _rows(self) -> Iterator[tuple[str, bool, int]]:
        with tempfile.TemporaryFile() as unpacked:
            source: Any = self.path
            with _opened(self.path) as file:  # a table is read in no order
                self.read_so_far.take(file, self.size)
            if self.path.suffix in PACKED:  # a table is read from its end
                with _translated(self.path, "cannot be decompressed"), self.path.open("rb") as raw:
                    shutil.copyfileobj(_unpacked(self.path, raw), unpacked)
                source = unpacked
            with _translated(self.path, "not a Parquet file"):
                table = pq.ParquetFile(source, buffer_size=2**20, pre_buffer=False)
            if self.options.text_key not in table.schema_arrow.names:
                raise ValueError(f"{self.path}: no column {self.options.text_key!r}; it has {', '.join(table.schema_arrow.names)}")
            row, rows, size = 0, table.metadata.num_rows, self.size
            batches = table.iter_batches(64, columns=[self.options.text_key])
            while True:
                with _translated(self.path, f"cannot be read after row {row}"):
                    batch = next(batches, None)
                if batch is None:
                    return
                with _translated(self.path, f"not UTF-8 after row {row}"):
                    texts = batch.column(0).to_pylist()
                for text in texts:
                    row += 1
                    yield _checked(text, f"{self.path}: row {row}"), True, size * row // rows


@dataclass(frozen=True)
class HubInput:
    """A dataset of the Hugging Face hub, streamed."""

    name: str
    """ "owner/name", "owner/name:configuration", "owner/name@split", or all of it."""
    options: Options
    size: None = None

    @property
    def where(self) -> str:
        return f"hf:{self.name}"

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.where}

    def content(self) -> None:
        return None

    def holds(self, content: dict[str, Any], read: Callable[[int], None]) -> bool:
        return True

    def read(self, state: Any = None) -> Iterator[Text]:
        import datasets

        name, _, split = self.name.partition("@")
        name, _, configuration = name.partition(":")
        key = self.options.text_key
        with _translated(self.where, "cannot be streamed from the Hugging Face hub"):
            dataset = datasets.load_dataset(name, configuration or None, split=split or "train", streaming=True)
            columns = dataset.column_names or list(next(iter(dataset)))
        if key not in columns:
            raise ValueError(f"{self.where}: no field {key!r}; it has {', '.join(columns)}")
        dataset = dataset.select_columns([key])
        if state is not None:
            dataset.load_state_dict(state)
        documents, number = iter(dataset), 0
        while True:
            with _translated(self.where, f"cannot be read after {number} more documents (run again to go on)"):
                document = next(documents, None)
            if document is None:
                return
            number += 1
            if (text := _checked(document[key], f"{self.where}: document {number}")).strip():
                yield Text(text, True, dataset.state_dict(), 0)


def find(names: Sequence[str], options: Options) -> list[Input]:
    """All inputs that `names` stand for: files, the files of a folder in the order of their names, or datasets of the hub."""
    found: list[Input] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in KINDS)
            if not files:
                raise ValueError(f"{name}: no {', '.join(KINDS)} in this folder, nor any of them with {', '.join(PACKED)}")
            found += [FileInput(file, file.relative_to(path).as_posix(), options) for file in files]
        elif path.is_file():
            if _kind(path) not in KINDS:
                raise ValueError(f"{name}: neither {', '.join(KINDS)} nor one of them with {', '.join(PACKED)}")
            found.append(FileInput(path, path.name, options))
        elif name.startswith("hf:") and not HUB_NAME.fullmatch(name.removeprefix("hf:")):
            raise ValueError(f"{name}: a dataset of the hub is hf:owner/name[:configuration][@split]")
        elif name.startswith("hf:") or (HUB_NAME.fullmatch(name) and _kind(path) not in KINDS):
            found.append(HubInput(name.removeprefix("hf:"), options))
        else:
            raise FileNotFoundError(f"{name}: no such file or folder (a dataset of the hub is hf:owner/name)")
    return found


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix


def _checked(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where}: the text is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: not Unicode: half a surrogate pair at character {error.start}") from error
    return text


class _translated:
    """Turns what a library raises into one line that names the file."""

    def __init__(self, where: object, what: str) -> None:
        self.where, self.what = where, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | EOFError | ValueError | zlib.error | lzma.LZMAError | pa.ArrowException):
            raise ValueError(f"{self.where}: {self.what}: {str(error).splitlines()[0] if str(error) else kind}") from error


def _unpacked(path: Path, raw: Any) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix == ".xz":
        return lzma.LZMAFile(raw)
    # pyarrow's, since the package zstandard takes a file that was cut short for a whole one
    return pa.CompressedInputStream(raw, "zstd") if path.suffix == ".zst" else raw


def _opened(path: Path) -> BinaryIO:
    with _translated(path, "cannot be opened"):
        return path.open("rb")
