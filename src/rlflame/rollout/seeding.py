"""Keyed random streams: every draw in rlflame comes from a generator named by what it is for.

No generator outlives its use, so there is no random state to save, ship or restore. Must not
know: environments, tasks, workers, time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from . import seed_sequence

#: What fits 32 bits.
_MAX_WORD = 2**32 - 1
_ZEROS = np.zeros(4, np.uint64)
#: The state of a Philox that has drawn nothing yet, but for its key.
_INITIAL_STATE = {
    "bit_generator": "Philox",
    "buffer": _ZEROS,
    "buffer_pos": 4,
    "has_uint32": 0,
    "uinteger": 0,
}


class Role(IntEnum):
    """What a stream is for. The numbers are part of every recipe's meaning: never renumber."""

    RESET = 1  # slot, row, episode
    ACTION = 2  # slot, row, iteration
    EVALUATION_RESET = 3  # episode
    EVALUATION_ACTION = 4  # episode
    INITIALISE = 5  # parameter index
    SHUFFLE = 6  # update, epoch
    BOOTSTRAP = 7  # resampling in statistics
    REPLAY = 8  # update
    LEARN = 9  # update
    EXPLORATION = 10  # slot, row, episode, interval of the episode
    EVALUATION_EXPLORATION = 11  # episode, interval of the episode


def make_stream(seed: int, role: Role, *key: int) -> np.random.Generator:
    """The generator of one purpose; counter based, so streams never overlap."""
    return np.random.Generator(np.random.Philox(_make_sequence(seed, role, key)))


def make_reset_seed(seed: int, role: Role, *key: int) -> int:
    """A 32-bit number to hand to `env.reset(seed=...)`, which wants an integer, not a stream."""
    return int(_make_sequence(seed, role, key).generate_state(1, np.uint32)[0])


class StreamPool:
    """`make_stream` of many keys, by generators that are used again: making one takes ten times as
    long as giving it another key."""

    def __init__(self) -> None:
        self._generators: list[np.random.Generator] = []

    def take(
        self, seed: int, role: Role, keys: Sequence[tuple[int, ...]]
    ) -> list[np.random.Generator]:
        """Of each key, until the next are taken; keys are as long as each other."""
        if not _is_word_sized(seed, keys):
            return [make_stream(seed, role, *key) for key in keys]
        while len(self._generators) < len(keys):
            self._generators.append(make_stream(0, role))
        pools = seed_sequence.spawn_pools(seed, [(int(role), *key) for key in keys])
        generators = self._generators[: len(keys)]
        for generator, key in zip(
            generators, seed_sequence.generate_long_words(pools, 2), strict=True
        ):
            generator.bit_generator.state = {
                **_INITIAL_STATE,
                "state": {"counter": _ZEROS, "key": key},
            }
        return generators


def make_reset_seeds(seed: int, role: Role, keys: Sequence[tuple[int, ...]]) -> list[int]:
    """`make_reset_seed` of each key; keys are as long as each other."""
    if not _is_word_sized(seed, keys):
        return [make_reset_seed(seed, role, *key) for key in keys]
    pools = seed_sequence.spawn_pools(seed, [(int(role), *key) for key in keys])
    seeds: list[int] = seed_sequence.generate_words(pools, 1)[:, 0].tolist()
    return seeds


def make_reset_streams(seeds: Sequence[int]) -> list[np.random.Generator]:
    """What `env.reset(seed=...)` of Gymnasium's draws from."""
    if max(seeds, default=0) > _MAX_WORD:
        return [np.random.Generator(np.random.PCG64(np.random.SeedSequence(s))) for s in seeds]
    return [
        np.random.Generator(np.random.PCG64(sequence))
        for sequence in map(
            seed_sequence.as_seed_sequence,
            seed_sequence.generate_long_words(seed_sequence.make_pools(seeds), 4),
        )
    ]


def _is_word_sized(seed: int, keys: Sequence[tuple[int, ...]]) -> bool:
    return seed <= _MAX_WORD and all(max(key, default=0) <= _MAX_WORD for key in keys)


def _make_sequence(seed: int, role: Role, key: tuple[int, ...]) -> np.random.SeedSequence:
    """`SeedSequence(seed, spawn_key=(role, *key))`.

    Where each number is one word, the words are put together here as numpy would, which looks at
    each by itself and takes twice as long.
    """
    if seed <= _MAX_WORD and max(key, default=0) <= _MAX_WORD:
        return np.random.SeedSequence(np.array((seed, 0, 0, 0, role, *key), np.uint32))
    return np.random.SeedSequence(seed, spawn_key=(int(role), *key))
