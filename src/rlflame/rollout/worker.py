"""RolloutWorker: runs one task to its Fragment, the same wherever and whenever it runs.

Reads no clock, no global random state, no worker identity; keeps caches (policies by content,
environments by the state they were left in) that can only save time. Must not know: processes,
pipes, clusters, learning.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from .collect import Held, Rollout
from .envs.factory import open_rows
from .envs.vector_env import Rows
from .policy import Policy
from .reset_seed_cache import NextSeeds
from .seeding import Streams
from .spec import (
    EnvironmentFault,
    EnvSpec,
    Fragment,
    PolicyArrays,
    PolicySpec,
    RolloutFailure,
    RolloutTask,
    Whereabouts,
)

#: Of one version there is one for each size of a group of slots, and evaluations have another.
_POLICIES_KEPT = 8
_SLOTS_KEPT = 64


class RolloutWorker:
    """What runs inside every worker process, on every fleet.

    `new_rows` makes a slot's environments; whoever draws an episode has some that draw.
    """

    def __init__(self, new_rows: Callable[[EnvSpec, int], Rows] = open_rows) -> None:
        self._new_rows = new_rows
        self._moving: tuple[RolloutTask, Rows] | None = None
        self._generators = Streams()
        self._policies: OrderedDict[tuple[str, PolicySpec, int], Policy] = OrderedDict()
        #: Environments by their slots, with the tokens of the states they were left in.
        self._slots: OrderedDict[tuple[str, tuple[int, ...]], Held] = OrderedDict()

    @property
    def current(self) -> Whereabouts | None:
        """What is being stepped now, for whoever watches over a hang."""
        moving = self._moving
        if moving is None:
            return None
        task, rows = moving
        at = rows.current()
        return (*task.place(at.row), at.seed, at.elapsed)

    def run(
        self, task: RolloutTask, weights: Callable[[], PolicyArrays]
    ) -> Fragment | RolloutFailure:
        """The fragment of a task; an environment's misbehaviour comes back as a value."""
        held = self._take(task)
        self._moving = task, held.rows
        try:
            policy = self._policy(task, weights)
            fragment = Rollout(task, policy, held, self._generators).fragment()
        except EnvironmentFault as fault:
            held.rows.close()
            cause = fault.__cause__
            text = "".join(traceback.format_exception(cause)) if cause is not None else ""
            slot, row = task.place(fault.row)
            return RolloutFailure(
                task.iteration, slot, row, fault.seed, fault.step, str(fault), text, ""
            )
        finally:
            self._moving = None
        tokens = tuple(state.token for state in fragment.states)
        self._keep(task, replace(held, tokens=tokens))
        return fragment

    def close(self) -> None:
        for held in self._slots.values():
            held.rows.close()
        self._slots.clear()

    def _take(self, task: RolloutTask) -> Held:
        """The slot's environments and where they stand; out of the cache while they move."""
        held = self._slots.pop(_place(task), None)
        if held is not None:
            if (held.rows.spec, held.count) == (task.env, task.columns):
                return held
            held.rows.close()
        rows = self._new_rows(task.env, task.columns)
        return Held(rows, task.columns, NextSeeds(rows))

    def _keep(self, task: RolloutTask, held: Held) -> None:
        """Remember where a slot's environments stand, so that the next task need not restore."""
        self._slots[_place(task)] = held
        while len(self._slots) > _SLOTS_KEPT:
            self._slots.popitem(last=False)[1].rows.close()

    def _policy(self, task: RolloutTask, weights: Callable[[], PolicyArrays]) -> Policy:
        key = (task.policy_id, task.policy, len(task.slots))
        policy = self._policies.pop(key, None)
        policy = policy or Policy(task.policy, weights(), len(task.slots))
        self._policies[key] = policy
        while len(self._policies) > _POLICIES_KEPT:
            self._policies.popitem(last=False)
        return policy


def _place(task: RolloutTask) -> tuple[str, tuple[int, ...]]:
    """Where a task's environments are kept: whole episodes share theirs, whatever their slot."""
    return task.run, task.slots if task.unit == "steps" else (-1 - task.columns,)
