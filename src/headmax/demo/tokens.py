"""Tokenizes the corpus with the library's own pipeline: trains a tokenizer, writes token shards, counts bytes per token."""

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
from headmax.data.shards import FORMAT, Index
from headmax.data.tokenizer import byte_lengths, train_bpe
from headmax.demo.corpus import Corpus, count_bytes

VOCABULARY = 1024
MANIFEST = "corpus.json"
"""Written last, with the origin of the corpus and the tokenizer."""


@dataclass(frozen=True)
class TokenizedCorpus:
    corpus: Corpus
    folder: Path
    """Written by `headmax.data.prepare`."""
    index: Index

    def train(self, length: int, seed: int) -> TokenShards:
        """Windows of the training files."""
        return TokenShards(self.folder, length=length, seed=seed)

    def held_out(self, length: int) -> TokenShards:
        """Windows of the held-out files, the same for every seed."""
        return TokenShards(self.folder, length=length, seed=0, split="valid")

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """[vocabulary]: bytes of text per token; 0 for the token that begins a document."""
        return np.array(byte_lengths(Tokenizer.from_file(str(self.folder / "tokenizer.json"))))

    @property
    def tokens_per_byte(self) -> float:
        """Of the training files."""
        return self.index.tokens("train") / count_bytes(self.corpus.train)


def tokenize(corpus: Corpus, out: Path, log: Callable[[str], None]) -> TokenizedCorpus:
    """Writes corpus, tokenizer and tokens below `out`, or reuses those of an earlier run on the same corpus."""
    text, data = out / "corpus", out / "data"
    sizes = [count_bytes(documents) / 1e6 for documents in (corpus.train, corpus.valid)]
    log(
        f"Corpus: the standard library of {corpus.version}, {len(corpus.train) + len(corpus.valid)} files, {sum(sizes):.1f} MB, "
        f"of which {len(corpus.valid)} files, {sizes[1]:.1f} MB, are held out."
    )
    made_from = {"python": corpus.version, "sha256": corpus.sha256, "vocabulary": VOCABULARY, "format": FORMAT}
    if not (text / MANIFEST).exists() or durable.read_json(text / MANIFEST) != made_from:
        (text / MANIFEST).unlink(missing_ok=True)
        for stale in (data, text):
            if stale.exists():
                shutil.rmtree(stale)
        corpus.write(text)
        train_bpe((document.text for document in corpus.train), VOCABULARY).save(text)
        durable.write(text / MANIFEST, json.dumps(made_from, indent=2) + "\n")
    log(f"Tokenizer: byte-level BPE trained on the training files, {VOCABULARY:,} tokens.")
    config = PrepareConfig(inputs=(str(text / "train.jsonl"),), valid=(str(text / "valid.jsonl"),), tokenizer=str(text))
    tokenized = TokenizedCorpus(corpus, data, prepare(config, data))
    train, valid = (tokenized.index.tokens(split) for split in ("train", "valid"))
    log(f"Tokens: {train:,} for training, {valid:,} held out, {1 / tokenized.tokens_per_byte:.2f} bytes per token.")
    return tokenized


def count_predicted(source: TokenShards, token_bytes: np.ndarray) -> tuple[int, int]:
    """Tokens that a model predicts in one epoch, and the bytes of text in them.

    The first token of a window is not predicted, so neither it nor its bytes count. The token that begins a document is predicted like
    any other but has no bytes, so that predicting the end of a file costs bits too.
    """
    ids = source.batch(range(source.num_samples)).input_ids[:, 1:].numpy()
    return ids.size, int(token_bytes[ids].sum())


def bits_per_byte(loss: float, tokens: float, text_bytes: float) -> float:
    """Converts a loss in nats per token, given the tokens and bytes it is over."""
    return loss * tokens / text_bytes / math.log(2)
