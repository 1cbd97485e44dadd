"""The recall task."""

import pytest
import torch

from headmax.data.mqar import MQAR


def test_every_query_asks_for_a_value_given_before() -> None:
    task = MQAR(num_pairs=12, vocab_size=64)
    source = task.samples(seed=0)
    ids, labels, packing = source.batch(range(50))[:3]
    assert ids.shape == labels.shape == (50, 37)
    assert (task.chance, source.length, source.vocab_size, packing) == (1 / 32, 37, 64, None)
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        keys, values, queries = row[:24:2], row[1:24:2], row[24:36]
        assert sorted(queries) == sorted(keys)
        assert len(set(keys)) == 12
        assert max(keys) < 32 <= min(values)
        assert label[:25] == [-100] * 25
        assert [dict(zip(keys, values, strict=True))[query] for query in queries] == label[25:]  # one place after the query


def test_a_sample_depends_on_the_seed_and_its_number_alone() -> None:
    source = MQAR().samples(seed=3)
    ids = source.batch([5, 900, 6]).input_ids
    assert torch.equal(ids, MQAR().samples(seed=3).batch([6, 900, 5]).input_ids[[2, 1, 0]])
    assert len({tuple(row) for row in source.batch(range(200)).input_ids.tolist()}) == 200
    for other in (MQAR().samples(seed=4), MQAR().held_out(seed=3)):
        assert not torch.equal(ids, other.batch([5, 900, 6]).input_ids)
        assert other.identity != source.identity


def test_too_many_pairs() -> None:
    with pytest.raises(ValueError, match="num_pairs must be between 1 and vocab_size / 2 = 8, got 9"):
        MQAR(num_pairs=9, vocab_size=16)
