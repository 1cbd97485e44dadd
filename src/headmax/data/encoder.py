"""Encodes text in a separate process: `python encoder.py tokenizer.json document_token dtype socket` receives blocks and sends arrays.

As a script it imports nothing from headmax, so that it starts fast and stays small. It exits with its parent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np
from tokenizers import Tokenizer

Block = Sequence[tuple[str, bool, int]]
"""Texts, each with whether it begins a document and the split it belongs to."""
SPLITS = ("train", "valid")
PART = 8192
"""Characters to encode at a time. Models that do not split words first, such as sentencepiece's, slow down with length."""
LONGEST = 2**18
"""Characters to encode at a time if there is no line end to cut at."""
BATCH = 64
"""Parts to encode in one call."""
LINE_END = re.compile(r"(?<=\S)\n")
PROBES = ("a\nb", "A.\n\nB", "1\n2", "é,\n\n\n漢", "(x)\n\t{y}", "the end\n  And then", "x = 1;\n    y")


class Encoder:
    """Encodes documents part by part, with the same ids as in one call."""

    def __init__(self, tokenizer: Tokenizer, document_token: int, dtype: str) -> None:
        tokenizer.encode_special_tokens = True  # encode "<s>" in a text as three characters, not as the control token
        self.tokenizer, self.document_token, self.dtype = tokenizer, document_token, np.dtype(dtype)
        self.prefix = self._find_prefix()

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _find_prefix(self) -> int | None:
        """Number of tokens (a space, in sentencepiece's models) added to every text; None if cutting at line ends changes the ids."""
        for prefix in (0, 1):
            if all(self._ids(left) + self._ids("\n" + right)[prefix:] == self._ids(f"{left}\n{right}") for left, right in _halves()):
                return prefix
        return None

    def parts(self, text: str) -> Iterator[str]:
        """`text` in parts; each after the first begins with the newline at which it was cut."""
        start, size = 0, LONGEST if self.prefix is None else PART
        while len(text) - start > size:
            line_end = LINE_END.search(text, start + size, start + LONGEST)
            if line_end is None and len(text) - start <= LONGEST:
                break
            end = line_end.start() if line_end else start + LONGEST
            yield text[start:end]
            start = end
        yield text[start:]

    def encode(self, block: Block) -> list[tuple[np.ndarray, np.ndarray]]:
        """(tokens, offsets at which documents begin) for each split."""
        tokens: list[list[np.ndarray]] = [[] for _ in SPLITS]
        starts: list[list[int]] = [[] for _ in SPLITS]
        count = [0 for _ in SPLITS]
        parts = (
            (part, starts_document and n == 0, split) for text, starts_document, split in block for n, part in enumerate(self.parts(text))
        )
        while batch := list(itertools.islice(parts, BATCH)):
            encoded = self.tokenizer.encode_batch_fast([part for part, _, _ in batch], add_special_tokens=False)
            for (part, begins, split), encoding in zip(batch, encoded, strict=True):
                ids = encoding.ids
                if begins:
                    starts[split].append(count[split])
                    ids.insert(0, self.document_token)
                elif self.prefix and part.startswith("\n"):
                    del ids[: self.prefix]
                tokens[split].append(np.array(ids, dtype=self.dtype))
                count[split] += len(ids)
        return [
            (np.concatenate([np.empty(0, self.dtype), *tokens[split]]), np.array(starts[split], dtype=np.int64))
            for split in range(len(SPLITS))
        ]


def _halves() -> Iterable[tuple[str, str]]:
    return (tuple(probe.split("\n", 1)) for probe in PROBES)  # type: ignore[misc]


def main(path: str, document_token: str, dtype: str, socket: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the socket
    os.environ["TOKENIZERS_PARALLELISM"] = "0"
    encoder = Encoder(Tokenizer.from_file(path), int(document_token), dtype)
    parent = Connection(int(socket))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            parent.send(encoder.encode(parent.recv()))


if __name__ == "__main__":
    main(*sys.argv[1:])
