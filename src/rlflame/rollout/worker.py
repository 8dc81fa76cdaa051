"""Runs rollout tasks. All workers return identical fragments for the same task.

Results do not depend on the time, on global random state or on which worker runs the task. A worker
caches policies and environments only to save time.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable

from .envs.vector_env import VectorEnv, make_vector_env
from .policy import Policy
from .rollout import Rollout
from .task import (
    EnvironmentFault,
    EnvSpec,
    Fragment,
    PolicyArrays,
    PolicySpec,
    RolloutFailure,
    RolloutTask,
    TaskPosition,
)

#: The run, the number of environments, and the slots (none for whole episodes).
SlotKey = tuple[str, int, tuple[int, ...]]
#: Each version of the weights needs one policy per number of merged slots, and others for
#: evaluations.
_MAX_POLICIES = 8
_MAX_SLOTS = 64


class RolloutWorker:
    """Runs the rollout tasks of one worker; all fleets use this class.

    `env_factory` makes a slot's environments. Renderers pass a factory of renderable environments.
    """

    def __init__(self, env_factory: Callable[[EnvSpec, int], VectorEnv] = make_vector_env) -> None:
        self._env_factory = env_factory
        self._active: tuple[RolloutTask, VectorEnv] | None = None
        self._policies: OrderedDict[tuple[str, PolicySpec, int], Policy] = OrderedDict()
        #: The environments of each group of slots, with the tokens of their states.
        self._slots: OrderedDict[SlotKey, tuple[VectorEnv, tuple[str, ...]]] = OrderedDict()

    @property
    def position(self) -> TaskPosition | None:
        """The position of the environment being stepped, for messages about a hang."""
        active = self._active
        if active is None:
            return None
        task, vector_env = active
        row_position = vector_env.get_position(vector_env.current_row)
        return (*task.locate(row_position.row), row_position.seed, row_position.elapsed)

    def run(
        self, task: RolloutTask, weights: Callable[[], PolicyArrays]
    ) -> Fragment | RolloutFailure:
        """Run a task; return its fragment, or the failure of an environment."""
        key = (task.run, task.columns, task.slots if task.unit == "steps" else ())
        # Remove the environments from the cache while they are stepped.
        vector_env, tokens = self._slots.pop(key, (None, ()))
        if vector_env is None or vector_env.spec != task.env:
            if vector_env is not None:
                vector_env.close()
            vector_env, tokens = self._env_factory(task.env, task.columns), ()
        self._active = task, vector_env
        try:
            policy = self._get_policy(task, weights)
            fragment = Rollout(task, policy, vector_env, tokens).collect()
        except EnvironmentFault as fault:
            vector_env.close()
            cause = fault.__cause__
            text = "".join(traceback.format_exception(cause)) if cause is not None else ""
            slot, row = task.locate(fault.row)
            return RolloutFailure(
                task.iteration, slot, row, fault.seed, fault.step, str(fault), text, ""
            )
        finally:
            self._active = None
        # Store the tokens of the states, so that the next task need not restore the states.
        self._slots[key] = vector_env, tuple(state.token for state in fragment.states)
        while len(self._slots) > _MAX_SLOTS:
            self._slots.popitem(last=False)[1][0].close()
        return fragment

    def close(self) -> None:
        for vector_env, _ in self._slots.values():
            vector_env.close()
        self._slots.clear()

    def _get_policy(self, task: RolloutTask, weights: Callable[[], PolicyArrays]) -> Policy:
        key = (task.policy_id, task.policy, len(task.slots))
        policy = self._policies.pop(key, None)
        policy = policy or Policy(task.policy, weights(), len(task.slots))
        self._policies[key] = policy
        while len(self._policies) > _MAX_POLICIES:
            self._policies.popitem(last=False)
        return policy
