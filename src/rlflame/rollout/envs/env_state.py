"""Where an environment stands, as a value with a name of its own.

Must not know: environments, how states travel.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from ..spec import Array, EnvState, Float32, Float64

NO_PHYSICS: Float64 = np.zeros(0, np.float64)
_NO_OBSERVATION: Float32 = np.zeros(0, np.float32)


def make_fresh_state(episode: int, seed: int) -> EnvState:
    """The state of an episode that has not begun anywhere yet."""
    return make_state("fresh", episode, seed, 0, 0.0, np.zeros(0, np.float32), NO_PHYSICS)


def make_state(
    kind: Any,
    episode: int,
    seed: int,
    elapsed: int,
    episode_return: float,
    actions: Array,
    physics: Float64,
    observation: Float32 = _NO_OBSERVATION,
) -> EnvState:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{kind}|{episode}|{seed}|{elapsed}|{episode_return!r}".encode())
    for array in (actions, physics, observation):
        digest.update(np.ascontiguousarray(array).tobytes())
    return EnvState(
        kind,
        episode,
        seed,
        elapsed,
        episode_return,
        actions,
        physics,
        observation,
        digest.hexdigest(),
    )
