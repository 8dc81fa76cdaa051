"""PPO for tests of several learners: a learner, batches, and state comparison."""

from __future__ import annotations

import numpy as np
from batches import policy_spec, random_batch

from rlflame.config.recipe import LearningSettings
from rlflame.learning.base import Batch, State
from rlflame.learning.factory import make_algorithm
from rlflame.learning.ppo.ppo import Ppo
from rlflame.rollout.task import PolicySpec

#: 96 samples per iteration, 2 epochs of 4 minibatches.
SETTINGS = {
    "environment": {"id": "CartPole-v1"},
    "rollout": {"num_slots": 1, "envs_per_slot": 8, "steps": 12},
    "network": {"hidden": [16, 16]},
    "ppo": {"epochs": 2, "minibatch_size": 24, "recompute_advantages": True},
}


def settings(**ppo: object) -> LearningSettings:
    return LearningSettings.model_validate({**SETTINGS, "ppo": {**SETTINGS["ppo"], **ppo}})


def learner(learning: LearningSettings, spec: PolicySpec) -> Ppo:
    result = make_algorithm(learning, spec)
    assert isinstance(result, Ppo)
    return result


def spec_of(kind: str = "continuous") -> PolicySpec:
    return policy_spec(kind, normalise=True)


def batches(spec: PolicySpec, learning: LearningSettings, count: int, **shape: int) -> list[Batch]:
    """Batches that are all collected with the initial weights."""
    arrays = learner(learning, spec).get_policy()
    found = [random_batch(np.random.default_rng(n), spec, arrays, **shape) for n in range(count)]
    for number, batch in enumerate(found):
        batch.valid[9:, number] = False  # idle steps
    return found


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
