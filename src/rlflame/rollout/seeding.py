"""Makes random generators, each keyed by a seed and a purpose.

No generator outlives its use, so there is no random state to save, send or restore.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

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


def make_reset_seed(seed: int, role: Role, *key: int) -> int:
    """Return a 32-bit integer to pass to `env.reset(seed=...)`."""
    return int(_make_sequence(seed, role, key).generate_state(1, np.uint32)[0])


def make_reset_stream(seed: int) -> np.random.Generator:
    """Return the generator that Gymnasium's `env.reset(seed=...)` uses."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


def _make_sequence(seed: int, role: Role, key: tuple[int, ...]) -> np.random.SeedSequence:
    """Return `SeedSequence(seed, spawn_key=(role, *key))`."""
    # Join 32-bit numbers in the same way as numpy, but in half the time.
    if seed <= _MAX_WORD and max(key, default=0) <= _MAX_WORD:
        return np.random.SeedSequence(np.array((seed, 0, 0, 0, role, *key), np.uint32))
    return np.random.SeedSequence(seed, spawn_key=(int(role), *key))
