"""Keyed random streams: every draw in rlflame comes from a generator named by what it is for.

No generator outlives its use, so there is no random state to save, ship or restore. Must not
know: environments, tasks, workers, time.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


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


def stream(seed: int, role: Role, *key: int) -> np.random.Generator:
    """The generator of one purpose; counter based, so streams never overlap."""
    sequence = np.random.SeedSequence(seed, spawn_key=(int(role), *key))
    return np.random.Generator(np.random.Philox(sequence))


def reset_seed(seed: int, role: Role, *key: int) -> int:
    """A 32-bit number to hand to `env.reset(seed=...)`, which wants an integer, not a stream."""
    sequence = np.random.SeedSequence(seed, spawn_key=(int(role), *key))
    return int(sequence.generate_state(1, np.uint32)[0])
