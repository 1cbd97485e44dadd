"""Which heads win what: the tokens that each head of a gate wins, by their kind, and those it wins more often than others do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headmax.analysis.gates import Gate

KINDS = ("word starts", "rests of words", "digits", "punctuation", "other")
SPACES = ("▁", "Ġ")
"""What tokenizers write for the space before a word."""
TELLING = 4
"""Tokens that are named for a head."""


def kind(tokenizer: Any, token: int) -> int:
    """Which of KINDS."""
    text, piece = tokenizer.decode([token], skip_special_tokens=True).strip(), tokenizer.convert_ids_to_tokens(token)
    if text.isdigit():
        return 2
    if text.replace("'", "").isalpha():
        return 0 if piece.startswith(SPACES) else 1
    return 3 if text and text.isprintable() and not any(map(str.isalnum, text)) else 4


class Tokens:
    """A text's tokens `ids` [time], whose kinds are found once for all gates."""

    def __init__(self, ids: Tensor, tokenizer: Any) -> None:
        there, self.index = ids.unique(return_inverse=True)
        self.names: list[str] = tokenizer.convert_ids_to_tokens(there.tolist())
        self.kinds = torch.tensor([kind(tokenizer, token) for token in there.tolist()])

    def wins(self, gate: Gate) -> dict[str, list[list[Any]]]:
        """What each head of a gate won of them: `kinds` [heads][KINDS], how many, and `tokens` [heads], those that it won most often
        beyond its part of all tokens. A token whose lead is shared counts for no head."""
        won = gate.winners >= 0
        counts = torch.zeros(gate.heads, len(self.names))
        counts.index_put_((gate.winners[won], self.index[won]), torch.ones(int(won.sum())), accumulate=True)
        beyond = counts - counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum().clamp(min=1)
        most = beyond.topk(min(TELLING, len(self.names)))
        rows = zip(most.indices.tolist(), most.values.tolist(), strict=True)
        tokens = [[self.names[n] for n, more in zip(*row, strict=True) if more > 0] for row in rows]
        kinds = torch.zeros(gate.heads, len(KINDS)).index_add_(1, self.kinds, counts)
        return {"kinds": kinds.int().tolist(), "tokens": tokens}


def information(counts: Sequence[Sequence[float]]) -> float:
    """How much the kind of a token says about which head wins it, in bits: 0 if nothing. From tokens won [heads][kinds]."""
    total = sum(map(sum, counts))
    heads, kinds = [sum(row) for row in counts], [sum(column) for column in zip(*counts, strict=True)]
    return sum(n / total * math.log2(n * total / (heads[h] * kinds[k])) for h, row in enumerate(counts) for k, n in enumerate(row) if n > 0)
