"""Text → token shards: parallel, resumable after any interruption, with the same result."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from headmax import durable
from headmax.data import encoder
from headmax.data.documents import MAX_TEXT, Input, Options, find
from headmax.data.encoder import SPLITS
from headmax.data.folder import CONTENTS, DATA, PART, FolderWriter, refuse_changed, refuse_other
from headmax.data.parts import Part
from headmax.data.shards import FORMAT, INDEX, PROGRESS, Index
from headmax.data.tokenizer import FILES, load

BLOCK = 2**20
"""Characters that a process encodes at a time."""
TRAIN, VALID = range(len(SPLITS))


@dataclass(frozen=True)
class PrepareConfig:
    """Everything that determines the contents of a prepared folder."""

    inputs: tuple[str, ...]
    """Training data: files, folders or datasets of the hub."""
    valid: tuple[str, ...] = ()
    """Validation data, likewise."""
    valid_fraction: float = 0.0
    """Alternatively, the share of documents to hold out, chosen by a hash of the text, so that duplicates stay together."""
    tokenizer: str = "mistral"
    """"mistral", a tokenizer.json, or a folder with one."""
    document_token: str | None = None
    """The token that begins every document; unless given, the one that the tokenizer puts before a text."""
    options: Options = field(default_factory=Options)
    max_tokens: int | None = None
    """Stop at this many training tokens."""
    shard_tokens: int = 100_000_000
    """Tokens per shard."""
    part: str | None = None
    """"3/8" prepares the third of eight parts, for `headmax data merge`."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("inputs: name at least one file, folder or dataset of the hub")
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(f"valid_fraction must be at least 0 and below 1, got {self.valid_fraction}")
        if self.valid and self.valid_fraction:
            raise ValueError("valid and valid_fraction exclude each other: give one of them")
        if not self.options.separator.strip() or not self.options.text_key:
            raise ValueError("separator and text_key must not be empty")
        if self.part is not None:
            Part.of(self.part)
            if self.max_tokens is not None:
                raise ValueError("max_tokens and part exclude each other: a part does not know how many tokens the others have")
        for name, number in (("shard_tokens", self.shard_tokens), ("max_tokens", self.max_tokens)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")


class Cursor(NamedTuple):
    """A position in the inputs; JSON."""

    number: int = 0
    """Of the input."""
    state: Any = None
    """Argument for its `read` to continue."""
    split: int = TRAIN
    """Of the current document, which may continue here."""


class Block(NamedTuple):
    texts: encoder.Block
    cursor: Cursor
    """Start of the next block."""
    position: int
    """Bytes of all inputs read so far."""
    contents: Sequence[dict[str, Any] | None]
    """`Input.content` of each input so far."""


class Done(NamedTuple):
    """Progress."""

    bytes: int
    total_bytes: int | None
    tokens: int
    documents: int
    earlier: int
    """Tokens that existed before this run."""


class Encoders:
    """Encoding processes, each with a thread of this process."""

    def __init__(self, workers: int, tokenizer: Path, document_token: int, dtype: np.dtype) -> None:
        self.arguments = [str(tokenizer), str(document_token), dtype.name]
        self.started: list[tuple[Connection, subprocess.Popen]] = []
        self.local = threading.local()
        self.threads = ThreadPoolExecutor(workers, initializer=self._start)

    def _start(self) -> None:
        connection, remote = Pipe()
        with remote:
            command = [sys.executable, "-P", encoder.__file__, *self.arguments, str(remote.fileno())]
            self.local.connection, self.local.process = connection, subprocess.Popen(command, pass_fds=[remote.fileno()])
        self.started.append((connection, self.local.process))

    def _encode(self, texts: encoder.Block) -> list[tuple[np.ndarray, np.ndarray]]:
        try:
            self.local.connection.send(texts)
            return self.local.connection.recv()
        except (EOFError, ConnectionError) as error:
            code = self.local.process.wait()
            raise ValueError(f"an encoding process exited with code {code} (out of memory?); rerun to resume") from error

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        for connection, process in self.started:
            connection.close()
            process.wait()

    def results(self, blocks: Iterator[Block], ahead: int) -> Iterator[tuple[Block, list[tuple[np.ndarray, np.ndarray]]]]:
        """Every block with its tokens, in order; up to `ahead` blocks are encoded in advance."""
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
    """Texts of all inputs from `cursor` on. A document's split is that of its input, or chosen by a hash of its text.

    `contents` belong to the inputs before `cursor`.
    """
    read = [*contents[: cursor.number], *[None] * (cursor.number - len(contents))]
    texts: list[tuple[str, bool, int]] = []
    size, split = 0, cursor.split
    before = sum(source.size or 0 for source, _ in inputs[: cursor.number])
    for number, (source, input_split) in enumerate(inputs[cursor.number :], cursor.number):
        for text, starts, state, position in source.read(cursor.state if number == cursor.number else None):
            if starts:
                split = VALID if valid_fraction and _uniform_hash(text) < valid_fraction else input_split
            texts.append((text, starts, split))
            size += len(text)
            if size >= BLOCK:
                yield Block(texts, Cursor(number, state, split), before + position, [*read, source.content()])
                texts, size = [], 0
        before += source.size or 0
        read.append(source.content())
    yield Block(texts, Cursor(len(inputs)), before, read)


def _uniform_hash(text: str) -> float:
    """In [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text[:MAX_TEXT].encode(), digest_size=8).digest(), "big") / 2**64


def prepare(config: PrepareConfig, out: Path, *, workers: int | None = None, report: Callable[[Done], None] = lambda done: None) -> Index:
    """Prepares `out`, or resumes after its last complete shard. A complete `out` with the same configuration is kept as it is."""
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    elif workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    inputs = [(source, split) for split, names in ((VALID, config.valid), (TRAIN, config.inputs)) for source in find(names, config.options)]
    durable.claim(out, DATA)
    index, files = _begin(config, inputs)
    if config.part is not None:
        inputs = _share(inputs, Part.of(config.part))

    def check_inputs(existing: Index) -> None:
        tokens, documents = sum(map(existing.tokens, SPLITS)), sum(map(existing.documents, SPLITS))
        refuse_changed(
            out, existing, [source for source, _ in inputs], lambda done, total: report(Done(done, total, tokens, documents, tokens))
        )

    with durable.sole_user(out):
        if (out / INDEX).exists():
            complete = Index.read(out)
            refuse_other(out, complete, index)
            check_inputs(complete)
            (out / PROGRESS).unlink(missing_ok=True)
            return complete
        with contextlib.closing(FolderWriter(out, index, files)) as folder:
            if folder.index is not index:
                check_inputs(folder.index)
            return _write(config, inputs, folder, workers, report)


def _share(inputs: Sequence[tuple[Input, int]], part: Part) -> list[tuple[Input, int]]:
    """Inputs of a part; the first gets all validation inputs."""
    valid = [pair for pair in inputs if pair[1] == VALID]
    train = part.share([source for source, split in inputs if split == TRAIN])
    return [*(valid if part.number == 1 else []), *((source, TRAIN) for source in train)]


def _begin(config: PrepareConfig, inputs: Sequence[tuple[Input, int]]) -> tuple[Index, dict[str, bytes]]:
    """The index without shards, and the tokenizer's files."""
    import headmax

    by_split = {name: [x for x, split in inputs if split == wanted] for name, wanted in (("inputs", TRAIN), ("valid inputs", VALID))}
    paths = [{os.path.realpath(source.where) for source in sources} for sources in by_split.values()]
    for path in set.intersection(*paths):
        raise ValueError(f"{path}: given for training and for validation; choose one")
    identities = {name: [source.identity for source in sources] for name, sources in by_split.items()}
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
    cursor, max_tokens = Cursor(*(index.cursor or ())), config.max_tokens or math.inf
    if cursor.number > len(inputs) or (index.cursor is None and any(index.splits.values())):
        raise ValueError(f"{folder.out / PROGRESS}: cursor {index.cursor} is not a position in these inputs; choose another folder")
    contents: Sequence[dict[str, Any] | None] = index.made_from.get(CONTENTS, [])
    with contextlib.closing(Encoders(workers, folder.out / FILES[0], index.document_token, folder.dtype)) as encoders:
        blocks = read_blocks(inputs, cursor, config.valid_fraction, contents) if tokens["train"] < max_tokens else iter(())
        for block, encoded in encoders.results(blocks, ahead=2 * workers):
            cursor, contents = block.cursor, block.contents
            for split, (ids, starts) in zip(SPLITS, encoded, strict=True):
                folder.add(split, ids, starts)
                tokens[split] += len(ids)
                documents += len(starts)
            report(Done(block.position, total, sum(tokens.values()), documents, earlier))
            if folder.pending >= config.shard_tokens:
                folder.commit(cursor, contents)
            if tokens["train"] >= max_tokens:
                break
    if (empty := _empty_split(config, tokens)) is not None:
        folder.discard()
        raise ValueError(_no_documents(config, empty, documents))
    folder.commit(cursor, contents)
    return folder.finish()


def _empty_split(config: PrepareConfig, tokens: Mapping[str, int]) -> Literal["training", "validation"] | None:
    """What there are no tokens for, though there should be. One part of several may lack either."""
    if config.part is not None:
        return None
    if not tokens["train"]:
        return "training"
    return "validation" if not tokens["valid"] and (config.valid or config.valid_fraction) else None


def _no_documents(config: PrepareConfig, use: Literal["training", "validation"], documents: int) -> str:
    """Why there are no documents for a split, and what to do."""
    message = f"no documents for {use} in {' '.join(config.inputs + config.valid)}"
    if not config.valid_fraction:
        return f"{message}: they hold no text"
    change = "larger" if use == "validation" else "smaller"
    share = f"a valid_fraction of {config.valid_fraction:g} leaves none of {documents} documents"
    return f"{message}: {share}; give a {change} one, or separate inputs for validation (--valid)"
