"""A learner that only serves to learn from a replay, for whole runs of the files around it.

Its weights begin as PPO's and are moved by every number that is drawn: any transition that came
back another, or was drawn at another update, shows in the digest.
"""

from __future__ import annotations

from unittest import mock

import numpy as np

from rlflame import build
from rlflame.learner import replay

CAPACITY, SEGMENT = 40, 12


class Drifter:
    """Everything but `update` is the wrapped algorithm's."""

    def __init__(self, inner):
        self._inner = inner
        self.policy, self.state, self.load_state = inner.policy, inner.state, inner.load_state

    def update(self, batch, progress):
        weights = self._inner._parameters.data
        for update, drawn in batch:
            names = drawn.__slots__
            moved = sum(
                np.cos(np.float64(i + 1) * getattr(drawn, n)).sum() for i, n in enumerate(names)
            )
            weights[update % len(weights)] += np.float32(1e-3 * moved)
        return {"n_updates": float(batch.first_update + batch.updates)}


def experience(learning, env, **changes):
    wanted = {
        "seed": learning.seed,
        "batch_size": 6,
        "discount": 0.9,
        "n_step": 2,
        "updates_per_step": 0.5,
        "learning_starts": 20,
    }
    return replay.ReplayBuffer(
        CAPACITY,
        learning.rollout.columns,
        env.observation_size,
        env.action_size,
        **{**wanted, **changes},
    )


def installed():
    """While this is entered, or once it is started, what is built learns from a replay."""
    inner = build.algorithm
    return mock.patch.multiple(
        build,
        algorithm=lambda *args: Drifter(inner(*args)),
        experience=experience,
    )


def small_segments():
    return mock.patch.object(replay, "SEGMENT_TRANSITIONS", SEGMENT)


#: What a config needs for it: numbers as actions, and episodes that end in both ways.
LEARNING = {
    "environment": {
        "id": "fakes:Fake-v0",
        "kwargs": {"continuous": True, "length": 7},
        "max_episode_steps": 5,
    }
}
