"""A shuffle of 0 ... n-1 that is computed, not stored: a keyed Feistel network with cycle walking."""

from __future__ import annotations

import numpy as np

ROUNDS = 6


def permute(indices: np.ndarray, n: int, key: tuple[int, int]) -> np.ndarray:
    """The images of `indices` under the shuffle of 0 ... n-1 by `key`: int64, identical on every machine and numpy version."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _mix(np.uint64(key[0] % 2**64) + _mix(np.uint64(key[1] % 2**64) + _mix(np.arange(1, ROUNDS + 1, dtype=np.uint64))))
    places = np.asarray(indices).astype(np.uint64)
    outside = np.ones(places.shape, dtype=bool)
    while outside.any():  # the network permutes up to 4n numbers; repeat it for results of n or more
        places[outside] = _feistel(places[outside], np.uint64(half), keys)
        outside = places >= n
    return places.astype(np.int64)


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & low
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & low)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
