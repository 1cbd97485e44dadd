"""The computed shuffle."""

import numpy as np
import pytest

from headmax.data.permutation import permute


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 4097, 100_000])
def test_it_is_a_permutation(n: int) -> None:
    for key in ((0, 0), (0, 1), (-1, 2**63)):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_the_key_decides_and_parts_agree_with_the_whole() -> None:
    whole = permute(np.arange(5000), 5000, (7, 3))
    assert np.array_equal(permute(np.array([4999, 17, 17, 0]), 5000, (7, 3)), whole[[4999, 17, 17, 0]])
    for key in ((7, 4), (8, 3), (3, 7)):
        assert (permute(np.arange(5000), 5000, key) == whole).mean() < 0.005


def test_it_looks_like_chance() -> None:
    n = 30_000
    for epoch in range(5):
        places = permute(np.arange(n), n, (0, epoch))
        assert abs(np.corrcoef(places, np.arange(n))[0, 1]) < 4 / n**0.5
        assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 4 / n**0.5
        assert (np.abs(np.diff(places)) == 1).sum() < 15  # 2 by chance
        counts = np.histogram2d(np.arange(n), places, bins=10)[0]
        assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 150  # chi squared of 81 degrees of freedom: 81 +- 13


def test_it_is_the_same_everywhere_and_for_ever() -> None:
    assert permute(np.arange(4), 10**12, (1, 2)).tolist() == [501476575072, 412987828393, 920280205539, 356390283998]
