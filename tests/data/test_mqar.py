"""The recall task."""

import pytest
import torch

from headmax.data.mqar import MQAR


def test_every_query_asks_for_a_value_given_before() -> None:
    task = MQAR(num_pairs=12, vocab_size=64)
    tokens, answers = task.batch(50, torch.Generator().manual_seed(0))
    assert tokens.shape == (50, 36)
    assert task.chance == 1 / 32
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        keys, values, queries = row[:24:2], row[1:24:2], row[24:]
        assert sorted(queries) == sorted(keys)
        assert len(set(keys)) == 12
        assert max(keys) < 32 <= min(values)
        assert [dict(zip(keys, values, strict=True))[query] for query in queries] == answer


def test_the_generator_decides() -> None:
    task = MQAR()
    first, again = (task.batch(4, torch.Generator().manual_seed(3))[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, task.batch(4, torch.Generator().manual_seed(4))[0])


def test_too_many_pairs() -> None:
    with pytest.raises(ValueError, match="num_pairs must be between 1 and vocab_size / 2 = 8, got 9"):
        MQAR(num_pairs=9, vocab_size=16)
