"""Runs small enough for a processor, and a folder as `headmax data prepare` writes it, by a tokenizer of the tests' own."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from headmax import records
from headmax.data.prepare import PrepareConfig, prepare
from headmax.reproduce import run, runs
from headmax.reproduce.runs import Run
from tests.eval.conftest import data_dir as eval_data
from tests.eval.conftest import one_thread, sentence, tokenizer

__all__ = ["eval_data", "one_thread", "tokenizer"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("reproduce")
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = random.Random(0)
    for name, documents in (("train", 400), ("valid", 40)):
        texts = (" ".join(sentence(rng, 12) for _ in range(10)) for _ in range(documents))
        (folder / f"{name}.txt").write_text("\n<|doc|>\n".join(texts))
    config = PrepareConfig(
        (str(folder / "train.txt"),), (str(folder / "valid.txt"),), tokenizer=str(folder / "tokenizer"), document_token="<s>"
    )
    prepare(config, folder / "data", workers=1)
    return folder / "data"


def tiny(seed: int) -> Iterator[Run]:
    yield from (Run("gla", variant, "1x32", seed=seed, steps=12) for variant in ("plain", "softmax"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two seeds of two models, and a recall of two."""
    for name, value in {"LENGTH": 64, "BATCH": 2, "RATE_STEPS": 4, "RECALL_STEPS": 3, "NEEDLE_STEPS": 2, "SEEDS": (0, 1)}.items():
        monkeypatch.setattr(runs, name, value)
    monkeypatch.setattr(runs, "SIZES", ("1x32",) * 3)
    monkeypatch.setattr(runs, "RATES", {"text": (1e-3, 1e-2), "recall": (1e-3, 1e-2)})
    monkeypatch.setattr(runs, "PAIRS", (4, 4, 4))
    monkeypatch.setitem(runs.PARTS, "language", tiny)
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results" / "reproduction.jsonl")
