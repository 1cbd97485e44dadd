"""The tokenizer trained on the spot, bytes per token, bits per byte, and reuse of prepared data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headmax.data.source import Batch
from headmax.data.tokenizer import byte_lengths, train_bpe
from headmax.demo.tokens import MANIFEST, bits_per_byte, count_predicted, tokenize
from tests.demo.small import make_corpus


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = train_bpe(["def read(path):\n    return 'é 🙂'\n" * 20, "class Reader:\n\tpass\r\n" * 20], 300).tokenizer
    tokenizer.encode_special_tokens = True  # as `headmax data prepare` encodes
    return tokenizer


@given(text=st.text())
@example(text="def read(path):\n    return 'é 🙂👩‍👩‍👧'\r\n")
@example(text="\x00\x01\x1b[0m\x7f\x85\u2028\ufeff")
@example(text="<s> names the special token")
def test_byte_lengths_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    lengths, encoding = byte_lengths(tokenizer), tokenizer.encode(text)
    assert encoding.ids[0] == tokenizer.token_to_id("<s>")
    assert lengths[encoding.ids[0]] == 0
    assert sum(lengths[token] for token in encoding.ids) == len(text.encode())
    assert tokenizer.decode(encoding.ids) == text or "<s>" in text


def test_a_trained_tokenizer_is_the_same_every_time(tokenizer: Tokenizer) -> None:
    texts = [document.text for document in make_corpus().train]
    first, second = (train_bpe(texts, 400) for _ in range(2))
    assert first.files() == second.files()
    assert first.document_token() == 0
    assert all(length > 0 for length in byte_lengths(tokenizer)[1:])


def test_bits_per_byte_by_hand() -> None:
    assert bits_per_byte(math.log(256), 1, 1) == pytest.approx(8)  # a uniform guess among all bytes
    assert bits_per_byte(3 * math.log(2), 10, 20) == pytest.approx(1.5)  # 3 bits per token of 2 bytes
    assert bits_per_byte(0.0, 10, 20) == 0


@dataclass
class TwoWindows:
    num_samples: int = 2

    def batch(self, indices: Sequence[int]) -> Batch:
        ids = torch.tensor([[1, 2, 3], [2, 0, 3]])[list(indices)]
        return Batch(ids, ids, None)


def test_the_first_token_of_a_window_is_not_predicted() -> None:
    tokens, text_bytes = count_predicted(TwoWindows(), np.array([0, 1, 10, 100]))  # type: ignore[arg-type]
    assert (tokens, text_bytes) == (4, 10 + 100 + 0 + 100)


def test_prepared_data_is_reused_for_the_same_corpus_only(tmp_path: Path) -> None:
    first = tokenize(make_corpus(), tmp_path, lambda line: None)
    files = [tmp_path / "corpus/tokenizer.json", tmp_path / "data/index.json", tmp_path / "data/train-00000.tokens"]
    before = [path.stat().st_mtime_ns for path in files]
    said: list[str] = []
    again = tokenize(make_corpus(), tmp_path, said.append)
    assert [path.stat().st_mtime_ns for path in files] == before
    assert again.index == first.index
    assert [line.split(":")[0] for line in said] == ["Corpus", "Tokenizer", "Tokens"]

    other = tokenize(make_corpus("other"), tmp_path, lambda line: None)
    assert other.index.tokenizer_sha256 != first.index.tokenizer_sha256
    (tmp_path / "corpus" / MANIFEST).unlink()  # as if it had been killed before the tokenizer was complete
    (tmp_path / "corpus/tokenizer.json").write_text("{}")
    assert tokenize(make_corpus(), tmp_path, lambda line: None).index == first.index
