"""Text → token shards: several processes, whole after any interruption, and the same result in however many goes."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headmax import durable
from headmax.data import encoder
from headmax.data.documents import HELD, Input, Options, find
from headmax.data.encoder import SPLITS
from headmax.data.folder import CONTENTS, DATA, PART, FolderWriter, refuse_changed, refuse_other
from headmax.data.parts import Part
from headmax.data.shards import FORMAT, INDEX, PROGRESS, Index
from headmax.data.tokenizer import FILES, load

BLOCK = 2**20
"""Characters that one process encodes at a time."""
TRAIN, VALID = range(len(SPLITS))


@dataclass(frozen=True)
class PrepareConfig:
    """All that decides what is in a prepared folder."""

    inputs: tuple[str, ...]
    """Files, folders or datasets of the hub to train on."""
    valid: tuple[str, ...] = ()
    """The same to validate on."""
    valid_fraction: float = 0.0
    """Instead: the share of documents that are held out, chosen by their text, so that copies of one stay together."""
    tokenizer: str = "mistral"
    """"mistral", a tokenizer.json, or a folder with one."""
    document_token: str | None = None
    """The token before every document, where it is not the one that the tokenizer puts before a text."""
    options: Options = field(default_factory=Options)
    max_tokens: int | None = None
    """Stop when there are so many to train on."""
    shard_tokens: int = 100_000_000
    """A shard is complete when it has as many."""
    part: str | None = None
    """"3/8" makes the third of eight folders that `headmax data merge` puts together."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("inputs: name at least one file, folder or dataset of the hub")
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(f"valid_fraction must be at least 0 and below 1, got {self.valid_fraction}")
        if self.valid and self.valid_fraction:
            raise ValueError("valid and valid_fraction exclude each other: validate on other inputs, or on a share of these")
        if not self.options.separator.strip() or not self.options.text_key:
            raise ValueError("separator and text_key must not be empty")
        if self.part is not None:
            Part.of(self.part)
            if self.max_tokens is not None:
                raise ValueError("max_tokens and part exclude each other: where a number of tokens ends, no part knows by itself")
        for name, number in (("shard_tokens", self.shard_tokens), ("max_tokens", self.max_tokens)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")


class Cursor(NamedTuple):
    """A place in the inputs; JSON."""

    number: int = 0
    """Of the input."""
    state: Any = None
    """What its `read` goes on from."""
    split: int = TRAIN
    """Of the document that may go on here."""


class Block(NamedTuple):
    texts: encoder.Block
    cursor: Cursor
    """Where the next block begins."""
    position: int
    """Bytes of all inputs read so far."""
    contents: Sequence[dict[str, Any] | None]
    """Of each input, as far as it was read."""


class Done(NamedTuple):
    """How far it is."""

    bytes: int
    total_bytes: int | None
    tokens: int
    documents: int
    earlier: int
    """Tokens that were there before it went on."""


class Encoders:
    """Encoding processes, each served by a thread."""

    def __init__(self, workers: int, tokenizer: Path, document_token: int, dtype: np.dtype) -> None:
        self.arguments = [str(tokenizer), str(document_token), dtype.name]
        self.started: list[tuple[Connection, subprocess.Popen]] = []
        self.mine = threading.local()
        self.threads = ThreadPoolExecutor(workers, initializer=self._start)

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", encoder.__file__, *self.arguments, str(theirs.fileno())]
            self.mine.connection, self.mine.process = ours, subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.started.append((ours, self.mine.process))

    def _encode(self, texts: encoder.Block) -> list[tuple[np.ndarray, np.ndarray]]:
        try:
            self.mine.connection.send(texts)
            return self.mine.connection.recv()
        except (EOFError, ConnectionError) as error:
            code = self.mine.process.wait()
            raise ValueError(f"an encoding process ended with code {code} (out of memory?); run again to go on") from error

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        for connection, process in self.started:
            connection.close()
            process.wait()

    def results(self, blocks: Iterator[Block], ahead: int) -> Iterator[tuple[Block, list[tuple[np.ndarray, np.ndarray]]]]:
        """Every block with its tokens, in order; so many are read ahead."""
        waiting: deque[tuple[Block, Future]] = deque()
        for block in blocks:
            waiting.append((block, self.threads.submit(self._encode, block.texts)))
            if len(waiting) > ahead:
                block, future = waiting.popleft()
                yield block, future.result()
        for block, future in waiting:
            yield block, future.result()


def read_blocks(
    inputs: Sequence[tuple[Input, int]], cursor: Cursor, valid_fraction: float, contents: Sequence[dict[str, Any] | None]
) -> Iterator[Block]:
    """The texts of all inputs from `cursor` on. A document's split is its input's, or drawn by its text.

    `contents` are those of the inputs before `cursor`.
    """
    read = [*contents[: cursor.number], *[None] * (cursor.number - len(contents))]
    texts: list[tuple[str, bool, int]] = []
    size, split = 0, cursor.split
    before = sum(source.size or 0 for source, _ in inputs[: cursor.number])
    for number, (source, input_split) in enumerate(inputs[cursor.number :], cursor.number):
        for text, starts, state, position in source.read(cursor.state if number == cursor.number else None):
            if starts:
                split = VALID if valid_fraction and _draw(text) < valid_fraction else input_split
            texts.append((text, starts, split))
            size += len(text)
            if size >= BLOCK:
                yield Block(texts, Cursor(number, state, split), before + position, [*read, source.content()])
                texts, size = [], 0
        before += source.size or 0
        read.append(source.content())
    yield Block(texts, Cursor(len(inputs)), before, read)


def _draw(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text[:HELD].encode(), digest_size=8).digest(), "big") / 2**64


def prepare(config: PrepareConfig, out: Path, *, workers: int | None = None, report: Callable[[Done], None] = lambda done: None) -> Index:
    """Makes `out`, or goes on with it after its last complete shard. A complete one of the same configuration is left as it is."""
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    elif workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    inputs = [(source, split) for split, names in ((VALID, config.valid), (TRAIN, config.inputs)) for source in find(names, config.options)]
    durable.claim(out, DATA)
    index, files = _begin(config, inputs)
    if config.part is not None:
        inputs = _share(inputs, Part.of(config.part))

    def compare(there: Index) -> None:
        known = sum(map(there.tokens, SPLITS)), sum(map(there.documents, SPLITS))
        refuse_changed(out, there, [source for source, _ in inputs], lambda done, total: report(Done(done, total, *known, known[0])))

    with durable.sole_user(out):
        if (out / INDEX).exists():
            complete = Index.read(out)
            refuse_other(out, complete, index)
            compare(complete)
            (out / PROGRESS).unlink(missing_ok=True)
            return complete
        with contextlib.closing(FolderWriter(out, index, files)) as folder:
            if folder.index is not index:
                compare(folder.index)
            return _write(config, inputs, folder, workers, report)


def _share(inputs: Sequence[tuple[Input, int]], part: Part) -> list[tuple[Input, int]]:
    """What a part is made of; all that is there to validate on goes to the first."""
    valid = [pair for pair in inputs if pair[1] == VALID]
    train = part.share([source for source, split in inputs if split == TRAIN])
    return [*(valid if part.number == 1 else []), *((source, TRAIN) for source in train)]


def _begin(config: PrepareConfig, inputs: Sequence[tuple[Input, int]]) -> tuple[Index, dict[str, bytes]]:
    """The index before the first shard, and the tokenizer's files."""
    import headmax

    sources = {name: [source for source, its in inputs if its == split] for name, split in (("inputs", TRAIN), ("valid inputs", VALID))}
    places = [{os.path.realpath(source.where) for source in of} for of in sources.values()]
    for twice in set.intersection(*places):
        raise ValueError(f"{twice}: among what to train on and what to validate on")
    identities = {name: [source.identity for source in of] for name, of in sources.items()}
    loaded = load(config.tokenizer)
    files = loaded.files()
    part = {} if config.part is None else {PART: list(Part.of(config.part))}
    limits = ("valid_fraction", "max_tokens", "shard_tokens")
    index = Index(
        format=FORMAT,
        headmax=headmax.__version__,
        dtype="uint16" if loaded.vocab_size <= 2**16 else "uint32",
        vocab_size=loaded.vocab_size,
        document_token=loaded.document_token(config.document_token),
        tokenizer_sha256=hashlib.sha256(files[FILES[0]]).hexdigest(),
        made_from=identities | asdict(config.options) | {name: getattr(config, name) for name in limits} | part,
        splits=dict.fromkeys(SPLITS, ()),
    )
    return index, files


def _write(
    config: PrepareConfig, inputs: Sequence[tuple[Input, int]], folder: FolderWriter, workers: int, report: Callable[[Done], None]
) -> Index:
    index, sizes = folder.index, [source.size for source, _ in inputs]
    total = None if None in sizes else sum(filter(None, sizes))
    tokens = {split: index.tokens(split) for split in SPLITS}
    documents, earlier = sum(map(index.documents, SPLITS)), sum(tokens.values())
    cursor, most = Cursor(*(index.cursor or ())), config.max_tokens or math.inf
    if cursor.number > len(inputs) or (index.cursor is None and any(index.splits.values())):
        raise ValueError(f"{folder.out / PROGRESS}: its cursor {index.cursor} is no place in these inputs; choose another folder")
    contents: Sequence[dict[str, Any] | None] = index.made_from.get(CONTENTS, [])
    with contextlib.closing(Encoders(workers, folder.out / FILES[0], index.document_token, folder.dtype)) as encoders:
        blocks = read_blocks(inputs, cursor, config.valid_fraction, contents) if tokens["train"] < most else iter(())
        for block, encoded in encoders.results(blocks, ahead=2 * workers):
            cursor, contents = block.cursor, block.contents
            for split, (ids, starts) in zip(SPLITS, encoded, strict=True):
                folder.add(split, ids, starts)
                tokens[split] += len(ids)
                documents += len(starts)
            report(Done(block.position, total, sum(tokens.values()), documents, earlier))
            if folder.pending >= config.shard_tokens:
                folder.commit(cursor, contents)
            if tokens["train"] >= most:
                break
    if config.part is None and (not tokens["train"] or (not tokens["valid"] and (config.valid or config.valid_fraction))):
        folder.discard()
        raise ValueError(_nothing(config, "train" if not tokens["train"] else "validate", documents))
    folder.commit(cursor, contents)
    return folder.finish()


def _nothing(config: PrepareConfig, to: str, documents: int) -> str:
    """Why there are no documents to train or to validate on, and what to do."""
    said = f"no documents to {to} on in {' '.join(config.inputs + config.valid)}"
    if not config.valid_fraction:
        return f"{said}: no text there; give other inputs"
    way = "larger" if to == "validate" else "smaller"
    return f"{said}: valid_fraction {config.valid_fraction:g} of {documents} leaves none; give a {way} one, or inputs with valid"
