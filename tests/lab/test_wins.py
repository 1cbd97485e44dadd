"""Heads that win by rule are seen to."""

import math

import pytest
import torch

from headmax.analysis.gates import Gate
from lab.study.wins import KINDS, Tokens, information, kind

PIECES = ["<s>", "▁the", "ing", "7", "▁7", ",", "<0x0A>", "▁", "'s", "▁don't", "–"]
TEXTS = ["", "the", "ing", "7", "7", ",", "\n", "", "'s", "don't", "–"]


class Words:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(TEXTS[n] for n in ids)

    def convert_ids_to_tokens(self, ids: int | list[int]) -> str | list[str]:
        return PIECES[ids] if isinstance(ids, int) else [PIECES[n] for n in ids]


def test_kinds() -> None:
    found = [KINDS[kind(Words(), n)] for n in range(len(PIECES))]
    assert found == ["other", "word starts", "rests of words", "digits", "digits", "punctuation", "other", "other", "rests of words",
                     "word starts", "punctuation"]  # fmt: skip


def test_a_head_that_wins_all_commas_is_named() -> None:
    ids = torch.tensor([5, 1, 5, 1, 2, 5, 1, 3])
    winners = torch.tensor([1, 0, 1, 0, 0, 1, 0, 2])
    gate = Gate(torch.nn.functional.one_hot(winners, 4).float())
    found = Tokens(ids, Words()).wins(gate)
    assert found["kinds"] == [[3, 1, 0, 0, 0], [0, 0, 0, 3, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert found["tokens"] == [["▁the", "ing"], [","], ["7"], []]
    assert information(found["kinds"]) == pytest.approx(1.4056, abs=1e-4), "all there is to know: the winners' entropy"


def test_heads_that_win_alike_tell_nothing() -> None:
    assert information([[3, 1, 0], [6, 2, 0]]) == pytest.approx(0.0)
    assert information([[4, 0], [0, 4]]) == pytest.approx(math.log2(2))
    tied = Tokens(torch.tensor([1, 2, 5]), Words()).wins(Gate(torch.full((3, 4), 0.25)))
    assert tied == {"kinds": [[0] * len(KINDS)] * 4, "tokens": [[]] * 4}
    assert information(tied["kinds"]) == 0.0
