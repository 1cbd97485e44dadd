"""Text to token ids, in a process of its own: `python encoder.py tokenizer.json document_token dtype socket`, blocks in, arrays out.

Run as a script it imports nothing of headmax, so that a process starts at once and stays small. It ends when its parent does.
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
"""Characters encoded at a time. Without words to split at, as in sentencepiece's models, longer ones cost more per character."""
LONGEST = 2**18
"""Characters without a line's end that are still encoded in one."""
BATCH = 64
"""Parts whose encodings are held at a time."""
LINE_END = re.compile(r"(?<=\S)\n")
PROBES = ("a\nb", "A.\n\nB", "1\n2", "é,\n\n\n漢", "(x)\n\t{y}", "the end\n  And then", "x = 1;\n    y")


class Encoder:
    """Encodes documents part by part, to the very ids that they have as a whole."""

    def __init__(self, tokenizer: Tokenizer, document_token: int, dtype: str) -> None:
        tokenizer.encode_special_tokens = True  # "<s>" in a text is three characters, not the beginning of a document
        self.tokenizer, self.document_token, self.dtype = tokenizer, document_token, np.dtype(dtype)
        self.prefix = self._find_prefix()

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _find_prefix(self) -> int | None:
        """How many tokens (a space, for sentencepiece's models) begin every text, where one may be cut at a line's end; else None."""
        for prefix in (0, 1):
            if all(self._ids(left) + self._ids("\n" + right)[prefix:] == self._ids(f"{left}\n{right}") for left, right in _halves()):
                return prefix
        return None

    def parts(self, text: str) -> Iterator[str]:
        """`text` in parts, each but the first beginning with the newline it was cut at."""
        start, size = 0, LONGEST if self.prefix is None else PART
        while len(text) - start > size:
            found = LINE_END.search(text, start + size, start + LONGEST)
            if found is None and len(text) - start <= LONGEST:
                break
            end = found.start() if found else start + LONGEST
            yield text[start:end]
            start = end
        yield text[start:]

    def encode(self, block: Block) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each of SPLITS the tokens of its texts, and where documents begin in them."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes the socket
    os.environ["TOKENIZERS_PARALLELISM"] = "0"
    encoder = Encoder(Tokenizer.from_file(path), int(document_token), dtype)
    parent = Connection(int(socket))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            parent.send(encoder.encode(parent.recv()))


if __name__ == "__main__":
    main(*sys.argv[1:])
