"""Makes random generators, each keyed by a seed and a purpose.

No generator outlives its use, so there is no random state to save, send or restore.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import chain
from typing import Any

import numpy as np

from .seed_sequence import WordSequence, generate_long_words, generate_words, mix_keys, mix_seeds

#: What a stream belongs to, such as a slot, a row and an episode.
Key = tuple[int, ...]

#: The largest unsigned number that fits in 32 bits.
_MAX_WORD = 2**32 - 1


class Role(IntEnum):
    """The purposes of random streams.

    Results depend on the numbers, so they must never change.
    """

    RESET = 1  # slot, row, episode
    ACTION = 2  # slot, row, iteration
    EVALUATION_RESET = 3  # episode
    EVALUATION_ACTION = 4  # episode
    INITIALISE = 5  # network, layer
    SHUFFLE = 6  # iteration, epoch
    BOOTSTRAP = 7  # resampling in statistics
    REPLAY = 8  # update
    LEARN = 9  # update
    EXPLORATION = 10  # slot, row, episode, interval of the episode
    EVALUATION_EXPLORATION = 11  # episode, interval of the episode


def make_stream(seed: int, role: Role, *key: int) -> np.random.Generator:
    """Return the random generator for a purpose and key; no two streams overlap."""
    return np.random.Generator(np.random.Philox(_make_sequence(seed, role, key)))


def make_streams(seed: int, role: Role, keys: Sequence[Key]) -> list[np.random.Generator]:
    """Return `make_stream` for each key; all keys have the same length, at most 15 numbers."""
    if not _fit_words(seed, keys):
        return [make_stream(seed, role, *key) for key in keys]
    pools = mix_keys(seed, [(int(role), *key) for key in keys])
    # numpy's type hints accept no other class than SeedSequence.
    sequences: Iterable[Any] = map(WordSequence, generate_long_words(pools, 2))
    return [np.random.Generator(np.random.Philox(sequence)) for sequence in sequences]


def make_reset_seed(seed: int, role: Role, *key: int) -> int:
    """Return a 32-bit integer to pass to `env.reset(seed=...)`."""
    return int(_make_sequence(seed, role, key).generate_state(1, np.uint32)[0])


def make_reset_seeds(seed: int, role: Role, keys: Sequence[Key]) -> list[int]:
    """Return `make_reset_seed` for each key; all keys have the same length, at most 15 numbers."""
    if not _fit_words(seed, keys):
        return [make_reset_seed(seed, role, *key) for key in keys]
    pools = mix_keys(seed, [(int(role), *key) for key in keys])
    seeds: list[int] = generate_words(pools, 1)[:, 0].tolist()
    return seeds


def make_reset_streams(seeds: Sequence[int]) -> list[np.random.Generator]:
    """Return the generators that Gymnasium's `env.reset(seed=...)` uses."""
    sequences: Iterable[Any]
    if _fit_words(0, [seeds]):
        sequences = map(WordSequence, generate_long_words(mix_seeds(seeds), 4))
    else:
        sequences = map(np.random.SeedSequence, seeds)
    return [np.random.Generator(np.random.PCG64(sequence)) for sequence in sequences]


def _fit_words(seed: int, keys: Sequence[Sequence[int]]) -> bool:
    numbers = [seed, *chain.from_iterable(keys)]
    return min(numbers) >= 0 and max(numbers) <= _MAX_WORD


def _make_sequence(seed: int, role: Role, key: Key) -> np.random.SeedSequence:
    """Return `SeedSequence(seed, spawn_key=(role, *key))`."""
    # Join 32-bit numbers in the same way as numpy, but in half the time.
    if _fit_words(seed, [key]):
        return np.random.SeedSequence(np.array((seed, 0, 0, 0, role, *key), np.uint32))
    return np.random.SeedSequence(seed, spawn_key=(int(role), *key))
