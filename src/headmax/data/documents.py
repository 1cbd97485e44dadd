"""Documents of files and hub datasets, in order, from the beginning or from a saved state."""

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
COMPRESSED = (".gz", ".xz", ".zst")
MAX_TEXT = 2**20
"""Characters of a document in a .txt to yield at a time; a longer document comes in parts."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.\[\]:%-]+)?")


class Text(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    starts: bool
    """Whether it begins a document."""
    state: Any
    """`read` continues after this text if given it; JSON."""
    position: int
    """Bytes of the input read so far."""


class Input(Protocol):
    """One file or dataset."""

    @property
    def where(self) -> str:
        """The path or dataset name, for messages."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """Its name, and what must not change between runs."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes, if known."""
        ...

    def read(self, state: Any = None) -> Iterator[Text]:
        """Its texts, from the beginning or after the text with this `state`."""
        ...

    def content(self) -> dict[str, Any] | None:
        """{"bytes": number read so far, "blake2b": their hash}; None if they cannot be read again."""
        ...

    def matches(self, content: dict[str, Any], on_read: Callable[[int], None]) -> bool:
        """Whether its first bytes still match `content`; `on_read` is called with the size of each block read."""
        ...


@dataclass(frozen=True)
class Options:
    """How documents are found in inputs."""

    text_key: str = "text"
    """The field of a JSON line, or the column of a table, that holds the text."""
    separator: str = "<|doc|>"
    """The line that separates documents of a .txt."""


class ContentHash:
    """Number and hash of the bytes read from the beginning of a file."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.bytes, self.hash = 0, hashlib.blake2b(digest_size=32)

    def add(self, part: bytes | memoryview) -> None:
        self.bytes += len(part)
        self.hash.update(part)

    def read(self, file: BinaryIO, limit: int, on_read: Callable[[int], None] = lambda count: None) -> None:
        while self.bytes < limit and (part := file.read(min(2**20, limit - self.bytes))):
            self.add(part)
            on_read(len(part))

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "blake2b": self.hash.hexdigest()}


class HashedFile(io.RawIOBase):
    """A file whose content is hashed as it is read."""

    def __init__(self, raw: BinaryIO, content: ContentHash) -> None:
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
    content_hash: ContentHash = field(default_factory=ContentHash, compare=False)

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
        return self.content_hash.to_json()

    def matches(self, content: dict[str, Any], on_read: Callable[[int], None]) -> bool:
        actual = ContentHash()
        with _opened(self.path) as file:
            actual.read(file, content["bytes"], on_read)
        return actual.to_json() == content

    def read(self, state: Any = None) -> Iterator[Text]:
        number = 0
        self.content_hash.clear()
        texts = {".txt": self._paragraphs, ".jsonl": self._json_lines, ".parquet": self._rows}[_kind(self.path)]
        for text, starts, position in texts():
            if text.strip():
                number += 1
                if number > (state or 0):
                    yield Text(text, starts, number, position)

    def _paragraphs(self) -> Iterator[tuple[str, bool, int]]:
        """Documents up to a separator or the end of the file, split at line ends after MAX_TEXT characters."""
        lines: list[str] = []
        size, starts, line_start = 0, True, True
        for _, line, position in self._lines(MAX_TEXT):
            if not line or (line_start and line.rstrip("\r\n") == self.options.separator):
                text = "".join(lines).rstrip("\n")
                yield text.lstrip("\n") if starts else text, starts, position
                lines, size, starts = [], 0, True
                continue
            line_start = line.endswith("\n")
            lines.append(line[:-2] + "\n" if line.endswith("\r\n") else line)
            size += len(line)
            if size >= MAX_TEXT:
                text = "".join(lines).lstrip("\n") if starts else "".join(lines)
                ends = [match.start() for match in LINE_END.finditer(text, len(text) // 2)]
                cut = ends[-1] if ends else len(text)
                yield text[:cut], starts, position
                lines, size, starts = [text[cut:]], len(text) - cut, starts and not text[:cut].strip()

    def _lines(self, longest: int = -1) -> Iterator[tuple[int, str, int]]:
        """(number, line, bytes of the file read so far); a line over `longest` bytes comes in pieces."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        number, line = 1, b"start"
        with _opened(self.path) as raw:
            file = io.BufferedReader(_unpacked(self.path, HashedFile(raw, self.content_hash)), 2**20)
            while line:
                with _translated(self.path, f"line {number}: cannot be read"):
                    line = file.readline(longest)
                try:
                    text = decoder.decode(line, final=not line)
                except UnicodeDecodeError as error:
                    raise ValueError(f"{self.path}:{number}: not UTF-8: byte 0x{error.object[error.start]:02x}: {error.reason}") from error
                yield number, text, self.content_hash.bytes
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
            with _opened(self.path) as file:  # hashed beforehand, as Parquet is not read sequentially
                self.content_hash.read(file, self.size)
            if self.path.suffix in COMPRESSED:  # Parquet is read from its end
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

    def matches(self, content: dict[str, Any], on_read: Callable[[int], None]) -> bool:
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
            with _translated(self.where, f"cannot be read after {number} more documents (rerun to resume)"):
                document = next(documents, None)
            if document is None:
                return
            number += 1
            if (text := _checked(document[key], f"{self.where}: document {number}")).strip():
                yield Text(text, True, dataset.state_dict(), 0)


def find(names: Sequence[str], options: Options) -> list[Input]:
    """The inputs of `names`: files, files of a folder sorted by name, or datasets of the hub."""
    inputs: list[Input] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if _kind(file) in KINDS and not file.is_dir())
            if strange := [file for file in files if not file.is_file()]:
                raise ValueError(f"{strange[0]}: not a regular file, or a link that leads to none: mend it or take it out of the folder")
            if not files:
                raise ValueError(f"{name}: no {', '.join(KINDS)} in this folder, nor any compressed as {', '.join(COMPRESSED)}")
            inputs += [FileInput(file, file.relative_to(path).as_posix(), options) for file in files]
        elif path.is_file():
            if _kind(path) not in KINDS:
                raise ValueError(f"{name}: must end in one of {', '.join(KINDS)}, optionally compressed as {', '.join(COMPRESSED)}")
            inputs.append(FileInput(path, path.name, options))
        elif name.startswith("hf:") and not HUB_NAME.fullmatch(name.removeprefix("hf:")):
            raise ValueError(f"{name}: not a dataset of the hub; give hf:owner/name[:configuration][@split]")
        elif name.startswith("hf:") or (HUB_NAME.fullmatch(name) and _kind(path) not in KINDS):
            inputs.append(HubInput(name.removeprefix("hf:"), options))
        else:
            raise FileNotFoundError(f"{name}: no such file or folder (a dataset of the hub is hf:owner/name)")
    refuse_twice(inputs)
    return inputs


def refuse_twice(inputs: Sequence[Input]) -> None:
    """ValueError if one file is there under two names: documents to validate on would be among those to train on."""
    known: dict[tuple[int, int], FileInput] = {}
    for source in inputs:
        if isinstance(source, FileInput):
            status = source.path.stat()
            if (first := known.setdefault((status.st_dev, status.st_ino), source)) is not source:
                raise ValueError(f"{source.path}: the same file as {first.path}; give it once")


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def _checked(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where}: the text must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: not Unicode: half a surrogate pair at character {error.start}") from error
    return text


class _translated:
    """Turns a library's errors into a ValueError of one line that names the file."""

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
    # pyarrow's, since the package zstandard does not notice truncated files
    return pa.CompressedInputStream(raw, "zstd") if path.suffix == ".zst" else raw


def _opened(path: Path) -> BinaryIO:
    with _translated(path, "cannot be opened"):
        return path.open("rb")
