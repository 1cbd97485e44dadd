"""Runs small enough for a processor, and a folder as `headmax data prepare` writes it, by a tokenizer of the tests' own."""

import functools
import random
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from headmax.data.folder import ShardWriter
from headmax.data.shards import FORMAT, INDEX, Index
from lab.__main__ import LAB
from tests import command_line
from tests.command_line import Called
from tests.eval.conftest import data_dir as eval_data
from tests.eval.conftest import one_thread, sentence, tokenizer

__all__ = ["eval_data", "one_thread", "tokenizer"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tokenizer.save_pretrained(folder)
    rng, splits = random.Random(0), {}
    for split, documents in (("train", 400), ("valid", 40)):
        writer = ShardWriter(folder, f"{split}-00000", np.dtype(np.uint16))
        for _ in range(documents):
            writer.add(np.array([0, *tokenizer.encode(" ".join(sentence(rng, 12) for _ in range(10)))]), np.array([0]))
        splits[split] = (writer.finish(),)
    index = Index(FORMAT, "test", "uint16", len(tokenizer), 0, "", {}, splits)
    (folder / INDEX).write_bytes(index.dump())
    return folder


@pytest.fixture
def lab() -> Called:
    """`python -m lab` in this process: its exit code, output and errors."""
    return functools.partial(command_line.run, program=LAB)
