"""From source files to tokens by the library's own pipeline: a tokenizer trained on the spot, shards, and the bytes of every token."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headmax import durable
from headmax.data.dataset import TokenShards
from headmax.data.prepare import PrepareConfig, prepare
from headmax.data.shards import Index
from headmax.data.tokenizer import byte_lengths, train_bpe
from headmax.demo.corpus import Corpus, size

VOCABULARY = 1024
MANIFEST = "corpus.json"
"""Written when corpus and tokenizer are complete: which text they are of."""


@dataclass(frozen=True)
class Text:
    """A corpus as tokens."""

    corpus: Corpus
    folder: Path
    """What `headmax.data.prepare` wrote."""
    index: Index

    def source(self, length: int, seed: int) -> TokenShards:
        return TokenShards(self.folder, length=length, seed=seed)

    def held_out(self, length: int) -> TokenShards:
        return TokenShards(self.folder, length=length, seed=0, split="valid")

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """[vocabulary]: bytes of text that each token stands for, none for the one that begins a document."""
        return np.array(byte_lengths(Tokenizer.from_file(str(self.folder / "tokenizer.json"))))

    @property
    def train_rate(self) -> float:
        """Tokens per byte of the text to train on."""
        return self.index.tokens("train") / size(self.corpus.train)


def make(corpus: Corpus, out: Path, say: Callable[[str], None]) -> Text:
    """Corpus, tokenizer and tokens below `out`; what is there of the same text is kept, and what another text left is removed."""
    folder, data = out / "corpus", out / "data"
    summary = {"python": corpus.version, "sha256": corpus.sha256, "vocabulary": VOCABULARY}
    held = f"{len(corpus.valid)} of them held out, {size(corpus.valid) / 1e6:.1f} MB"
    megabytes = (size(corpus.train) + size(corpus.valid)) / 1e6
    say(f"Text: the standard library of {corpus.version}, {len(corpus.train) + len(corpus.valid)} files, {megabytes:.1f} MB; {held}.")
    if not (folder / MANIFEST).exists() or durable.read_json(folder / MANIFEST) != summary:
        for old in (folder, data):
            shutil.rmtree(old, ignore_errors=True)
        corpus.write(folder)
        train_bpe((document.text for document in corpus.train), VOCABULARY).save(folder)
        durable.write(folder / MANIFEST, json.dumps(summary, indent=2) + "\n")
    say(f"Tokenizer: a byte-level BPE of the files to train on, {VOCABULARY:,} tokens.")
    config = PrepareConfig(inputs=(str(folder / "train.jsonl"),), valid=(str(folder / "valid.jsonl"),), tokenizer=str(folder))
    text = Text(corpus, data, prepare(config, data))
    train, valid = (text.index.tokens(split) for split in ("train", "valid"))
    say(f"Tokens: {train:,} to train on, {valid:,} held out, {1 / text.train_rate:.2f} bytes each.")
    return text


def predicted_bytes(source: TokenShards, token_bytes: np.ndarray) -> tuple[int, int]:
    """Over one epoch: the tokens that are predicted, and the bytes of text that they stand for.

    A window's first token is given, not predicted, so neither it nor its bytes count. The token that begins a document is predicted
    like any other and stands for no bytes: saying where a file ends has its price.
    """
    ids = source.batch(range(source.num_samples)).input_ids[:, 1:].numpy()
    return ids.size, int(token_bytes[ids].sum())


def bits_per_byte(loss: float, tokens: int, text_bytes: int) -> float:
    """From nats per token, over `tokens` that stand for `text_bytes`."""
    return loss * tokens / text_bytes / math.log(2)
