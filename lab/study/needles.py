"""Needles to train on: rows filled with prompts of many lengths, of which only the answers are learnt."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headmax import durable
from headmax.data.niah import ANSWER_TOKENS, Needles, Sample
from headmax.data.source import Batch
from headmax.layers.loss import IGNORED

NEEDLES = "needles.npz"
LENGTHS = (256, 512, 1024, 1920)
"""Of prompts, in tokens at most; a row takes them as they come."""
SEED = 7
"""Not the evaluation's."""


class NeedleRows:
    """A `Source` of prepared rows [number, length], over and over."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; make it with `python -m lab study data`")
        with np.load(path) as file:
            self.tokens, self.answers = file["tokens"], file["answers"]
        self.length, self.vocab_size = self.tokens.shape[1], int(self.tokens.max()) + 1

    @property
    def identity(self) -> dict[str, str | int]:
        return {"needles": hashlib.sha256(self.tokens.tobytes()).hexdigest()}

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = np.asarray(indices) % len(self.tokens)
        ids = self.tokens[rows].astype(np.int64)
        return Batch(torch.from_numpy(ids), torch.from_numpy(np.where(self.answers[rows], ids, IGNORED)), None)


def write(path: Path, number: int, length: int, haystack: Sequence[str], tokenizer: Any) -> None:
    """`number` rows of `length` tokens: prompts of S-NIAH-1, 2 and 3 with their answers, then end-of-text tokens up to the end."""
    rng = random.Random(SEED)
    samples = {(task, most): prompts(task, most, haystack, tokenizer) for task in (1, 2, 3) for most in LENGTHS}
    tokens = np.full((number, length), tokenizer.eos_token_id, dtype=np.uint16)
    answers = np.zeros((number, length), dtype=bool)
    for row in range(number):
        end = 0
        while fitting := [most for most in LENGTHS if most <= length - end]:
            sample = next(samples[rng.choice((1, 2, 3)), rng.choice(fitting)])
            prompt, whole = (tokenizer.encode(text) for text in (sample.prompt, f"{sample.prompt} {sample.value}."))
            tokens[row, end : end + len(whole)] = whole
            answers[row, end + len(prompt) : end + len(whole)] = True
            end += len(whole)
    with durable.replacing(path) as file:
        np.savez_compressed(file, tokens=tokens, answers=answers)


def prompts(task: int, most: int, haystack: Sequence[str], tokenizer: Any) -> Iterator[Sample]:
    """Without end, each `most` tokens at most with its answer; haystacks begin at random places."""
    rng = random.Random(f"{SEED} {task} {most}")
    while True:
        start = rng.randrange(max(1, len(haystack) - 100))
        made = Needles(task, most - 64 + ANSWER_TOKENS, haystack[start : start + 400] if task > 1 else ())
        yield from made.samples(4, lambda text: len(tokenizer.encode(text)), rng.randrange(2**30))
