"""Computes the same words as numpy's `SeedSequence`, for many keys at once.

numpy computes one key at a time, which takes about ten times as long. Each function works on a pool
of four words per key, `[N, 4]`; the names and constants are those of numpy's C code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Words = NDArray[np.uint32]
LongWords = NDArray[np.uint64]

_POOL_SIZE = 4
_MAX_KEY_LENGTH = 16


def _make_constants(first: int, factor: int, count: int) -> Words:
    """Return the constants of consecutive hashes: each is the one before times `factor`."""
    return np.array([first * pow(factor, n, 2**32) % 2**32 for n in range(count)], np.uint32)


_HASH_CONSTANTS = _make_constants(
    0x43B0D7E5, 0x931E8875, _POOL_SIZE * (_POOL_SIZE + _MAX_KEY_LENGTH) + 1
)
_OUTPUT_CONSTANTS = _make_constants(0x8B51F9DD, 0x58F38DED, 2 * _POOL_SIZE + 1)
# Arrays, because numpy converts a number at each use.
_MIX_LEFT, _MIX_RIGHT, _SHIFT = np.array([[0xCA01F9DD], [0x4973F715], [16]], np.uint32)


class WordSequence(ISeedSequence):
    """A seed sequence whose words are already known, for a new bit generator."""

    def __init__(self, words: LongWords) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> LongWords:
        assert (n_words, dtype) == (len(self._words), np.uint64)
        return self._words


def mix_keys(seed: int, keys: Sequence[tuple[int, ...]]) -> Words:
    """Return the pools of `SeedSequence(seed, spawn_key=key)`.

    All keys have the same length, at most 16 numbers. All numbers must fit in 32 bits.
    """
    pools: Words = _mix_seed(seed).repeat(len(keys), axis=0)
    for position, words in enumerate(zip(*keys, strict=True), _POOL_SIZE):
        column = np.array(words, np.uint32)[:, None]
        pools = _mix(pools, _hash(column, _POOL_SIZE * position, _POOL_SIZE))
    return pools


def mix_seeds(seeds: Sequence[int]) -> Words:
    """Return the pools of `SeedSequence(seed)`; the seeds must fit in 32 bits."""
    pools = np.zeros((len(seeds), _POOL_SIZE), np.uint32)
    pools[:, 0] = seeds
    pools = _hash(pools, 0, _POOL_SIZE)
    index = _POOL_SIZE
    for source in range(_POOL_SIZE):
        targets = [target for target in range(_POOL_SIZE) if target != source]
        hashes = _hash(pools[:, source, None], index, len(targets))
        pools[:, targets] = _mix(pools[:, targets], hashes)
        index += len(targets)
    return pools


def generate_words(pools: Words, count: int) -> Words:
    """Return `generate_state(count)` of each pool, for up to twice as many words as in a pool."""
    words = np.concatenate((pools, pools), axis=1)[:, :count] ^ _OUTPUT_CONSTANTS[:count]
    words *= _OUTPUT_CONSTANTS[1 : count + 1]
    words ^= words >> _SHIFT
    return words


def generate_long_words(pools: Words, count: int) -> LongWords:
    """Return `generate_state(count, np.uint64)` of each pool."""
    words = generate_words(pools, 2 * count).astype("<u4")
    return words.view("<u8").astype(np.uint64)


@lru_cache(maxsize=64)
def _mix_seed(seed: int) -> Words:
    return mix_seeds([seed])


def _hash(words: Words, index: int, count: int) -> Words:
    """Return `count` hashes of the words of each row; `index` is the number of earlier hashes."""
    hashes: Words = words ^ _HASH_CONSTANTS[index : index + count]
    hashes *= _HASH_CONSTANTS[index + 1 : index + count + 1]
    hashes ^= hashes >> _SHIFT
    return hashes


def _mix(pools: Words, hashes: Words) -> Words:
    new_pools: Words = _MIX_LEFT * pools - _MIX_RIGHT * hashes
    new_pools ^= new_pools >> _SHIFT
    return new_pools
