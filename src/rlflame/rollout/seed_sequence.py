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

_POOL_SIZE = 4
_MAX_KEY_LENGTH = 16


def _compute_powers(first: int, factor: int, count: int) -> Words:
    return np.array([first * pow(factor, n, 2**32) % 2**32 for n in range(count)], np.uint32)


# The numbers of numpy's SeedSequence, which are O'Neill's of seed_seq_fe.
_HASH_CONSTANTS = _compute_powers(
    0x43B0D7E5, 0x931E8875, _POOL_SIZE * (_POOL_SIZE + _MAX_KEY_LENGTH) + 1
)
_OUTPUT_CONSTANTS = _compute_powers(0x8B51F9DD, 0x58F38DED, 2 * _POOL_SIZE + 1)
_MIX_LEFT, _MIX_RIGHT = np.array([0xCA01F9DD], np.uint32), np.array([0x4973F715], np.uint32)
_SHIFT = np.array(16, np.uint32)  # an array, because a number is made one at each use
_REMAINING_WORDS = [
    [to for to in range(_POOL_SIZE) if to != source] for source in range(_POOL_SIZE)
]


class _PrecomputedSequence(ISeedSequence):
    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        assert (n_words, np.dtype(dtype)) == (len(self._words), self._words.dtype)
        return self._words


def as_seed_sequence(words: NDArray[np.uint64]) -> Any:
    """Words that are known already, for a bit generator that asks for them."""
    return _PrecomputedSequence(words)


def spawn_pools(seed: int, keys: Sequence[Sequence[int]]) -> Words:
    """The pools of `SeedSequence(seed, spawn_key=key)`; each number is less than 2**32."""
    if not keys:
        return np.zeros((0, _POOL_SIZE), np.uint32)
    pools = _make_pool(seed)
    table = np.array(keys, np.uint32)
    for index, column in enumerate(table.T):
        pools = _mix(pools, _hash(column[:, None], _POOL_SIZE * (_POOL_SIZE + index), _POOL_SIZE))
    return pools


def make_pools(seeds: Sequence[int]) -> Words:
    """The pools of `SeedSequence(seed)`; each seed is less than 2**32."""
    pools = np.zeros((len(seeds), _POOL_SIZE), np.uint32)
    pools[:, 0] = seeds
    pools = _hash(pools, 0, _POOL_SIZE)
    start = _POOL_SIZE
    for source, remaining in enumerate(_REMAINING_WORDS):
        hashed = _hash(pools[:, source : source + 1], start, len(remaining))
        pools[:, remaining] = _mix(pools[:, remaining], hashed)
        start += len(remaining)
    return pools


def generate_words(pools: Words, count: int) -> Words:
    """`generate_state(count)` of each; up to twice as many words as a pool has."""
    state = np.concatenate((pools, pools), axis=1)[:, :count] ^ _OUTPUT_CONSTANTS[:count]
    state *= _OUTPUT_CONSTANTS[1 : count + 1]
    state ^= state >> _SHIFT
    return state


def generate_long_words(pools: Words, count: int) -> NDArray[np.uint64]:
    """`generate_state(count, np.uint64)` of each."""
    state = generate_words(pools, 2 * count).astype(np.uint64)
    return state[:, ::2] | state[:, 1::2] << np.uint64(32)


@lru_cache(maxsize=64)
def _make_pool(seed: int) -> Words:
    return make_pools([seed])


def _hash(words: Words, start: int, count: int) -> Words:
    value: Words = words ^ _HASH_CONSTANTS[start : start + count]
    value *= _HASH_CONSTANTS[start + 1 : start + count + 1]
    value ^= value >> _SHIFT
    return value


def _mix(pools: Words, hashed: Words) -> Words:
    value = _MIX_LEFT * pools - _MIX_RIGHT * hashed
    value ^= value >> _SHIFT
    return value
