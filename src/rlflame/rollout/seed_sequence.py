"""What `np.random.SeedSequence` makes of many keys, all of them at once.

numpy makes one at a time, in ten times as long as its arithmetic takes for all. Must not know: what
a key is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_POOL = 4
_LONGEST_KEY = 16


def _powers(first: int, factor: int, count: int) -> Words:
    return np.array([first * pow(factor, n, 2**32) % 2**32 for n in range(count)], np.uint32)


# The numbers of numpy's SeedSequence, which are O'Neill's of seed_seq_fe.
_ABSORBING = _powers(0x43B0D7E5, 0x931E8875, _POOL * (_POOL + _LONGEST_KEY) + 1)
_GIVING = _powers(0x8B51F9DD, 0x58F38DED, 2 * _POOL + 1)
_LEFT, _RIGHT = np.array([0xCA01F9DD], np.uint32), np.array([0x4973F715], np.uint32)
_HALF = np.array(16, np.uint32)  # an array, because a number is made one at each use
_OTHERS = [[to for to in range(_POOL) if to != source] for source in range(_POOL)]


class _Given(ISeedSequence):
    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        assert (n_words, np.dtype(dtype)) == (len(self._words), self._words.dtype)
        return self._words


def given(words: NDArray[np.uint64]) -> Any:
    """Words that are known already, for a bit generator that asks for them."""
    return _Given(words)


def descendants(seed: int, keys: Sequence[Sequence[int]]) -> Words:
    """The pools of `SeedSequence(seed, spawn_key=key)`; each number is less than 2**32."""
    if not keys:
        return np.zeros((0, _POOL), np.uint32)
    pools = _pool(seed)
    table = np.array(keys, np.uint32)
    for place, column in enumerate(table.T):
        pools = _mixed(pools, _hashed(column[:, None], _POOL * (_POOL + place), _POOL))
    return pools


def roots(seeds: Sequence[int]) -> Words:
    """The pools of `SeedSequence(seed)`; each seed is less than 2**32."""
    pools = np.zeros((len(seeds), _POOL), np.uint32)
    pools[:, 0] = seeds
    pools = _hashed(pools, 0, _POOL)
    at = _POOL
    for source, others in enumerate(_OTHERS):
        hashed = _hashed(pools[:, source : source + 1], at, len(others))
        pools[:, others] = _mixed(pools[:, others], hashed)
        at += len(others)
    return pools


def generated(pools: Words, count: int) -> Words:
    """`generate_state(count)` of each; up to twice as many words as a pool has."""
    state = np.concatenate((pools, pools), axis=1)[:, :count] ^ _GIVING[:count]
    state *= _GIVING[1 : count + 1]
    state ^= state >> _HALF
    return state


def generated_long(pools: Words, count: int) -> NDArray[np.uint64]:
    """`generate_state(count, np.uint64)` of each."""
    state = generated(pools, 2 * count).astype(np.uint64)
    return state[:, ::2] | state[:, 1::2] << np.uint64(32)


@lru_cache(maxsize=64)
def _pool(seed: int) -> Words:
    return roots([seed])


def _hashed(words: Words, at: int, count: int) -> Words:
    value: Words = words ^ _ABSORBING[at : at + count]
    value *= _ABSORBING[at + 1 : at + count + 1]
    value ^= value >> _HALF
    return value


def _mixed(pools: Words, hashed: Words) -> Words:
    value = _LEFT * pools - _RIGHT * hashed
    value ^= value >> _HALF
    return value
