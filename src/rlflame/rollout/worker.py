"""RolloutWorker: runs one task to its Fragment, the same wherever and whenever it runs.

Reads no clock, no global random state, no worker identity; keeps caches (policies by content,
environments by the state they were left in) that can only save time. Must not know: processes,
pipes, clusters, learning.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from .actions import noise_size
from .lockstep import EnvRow
from .noise import NOISE_BLOCK, HeldNoise, NoiseSource, StepNoise
from .policy import Policy
from .seeding import Role, reset_seed, stream
from .spec import (
    Array,
    EnvironmentFault,
    EnvSpec,
    EnvState,
    EpisodeStat,
    Float32,
    Fragment,
    PolicyArrays,
    PolicySpec,
    RolloutFailure,
    RolloutTask,
)

_POLICIES_KEPT = 4
_SLOTS_KEPT = 64


class RolloutWorker:
    """What runs inside every worker process, on every fleet.

    `new_row` makes its rows; whoever draws an episode has rows that draw.
    """

    def __init__(self, new_row: Callable[[EnvSpec, int], EnvRow] = EnvRow) -> None:
        self._new_row = new_row
        #: The row being stepped now, for whoever watches over a hang.
        self.current: EnvRow | None = None
        self._policies: OrderedDict[tuple[str, PolicySpec], Policy] = OrderedDict()
        #: Environments by slot, with the tokens of the states they were left in.
        self._slots: OrderedDict[tuple[str, int], tuple[tuple[str, ...], list[EnvRow]]] = (
            OrderedDict()
        )

    def run(
        self, task: RolloutTask, weights: Callable[[], PolicyArrays]
    ) -> Fragment | RolloutFailure:
        """The fragment of a task; an environment's misbehaviour comes back as a value."""
        held, rows = self._take(task)
        try:
            policy = self._policy(task, weights)
            fragment = _Rollout(self, task, policy, rows, held).fragment()
        except EnvironmentFault as fault:
            for row in rows:
                row.close()
            cause = fault.__cause__
            text = "".join(traceback.format_exception(cause)) if cause is not None else ""
            return RolloutFailure(
                task.iteration, task.slot, fault.row, fault.seed, fault.step, str(fault), text, ""
            )
        finally:
            self.current = None
        self._keep(task, tuple(state.token for state in fragment.states), rows)
        return fragment

    def close(self) -> None:
        for _, rows in self._slots.values():
            for row in rows:
                row.close()
        self._slots.clear()

    def _take(self, task: RolloutTask) -> tuple[tuple[str, ...], list[EnvRow]]:
        """The slot's environments and where they stand; out of the cache while they move."""
        held, rows = self._slots.pop(_place(task), ((), []))
        if rows and len(rows) == task.rows and rows[0].spec == task.env:
            return held, rows
        for row in rows:
            row.close()
        return (), [self._new_row(task.env, row) for row in range(task.rows)]

    def _keep(self, task: RolloutTask, held: tuple[str, ...], rows: list[EnvRow]) -> None:
        """Remember where a slot's environments stand, so that the next task need not restore."""
        self._slots[_place(task)] = (held, rows)
        while len(self._slots) > _SLOTS_KEPT:
            for row in self._slots.popitem(last=False)[1][1]:
                row.close()

    def _policy(self, task: RolloutTask, weights: Callable[[], PolicyArrays]) -> Policy:
        key = (task.policy_id, task.policy)
        policy = self._policies.pop(key, None) or Policy(task.policy, weights())
        self._policies[key] = policy
        while len(self._policies) > _POLICIES_KEPT:
            self._policies.popitem(last=False)
        return policy


def _place(task: RolloutTask) -> tuple[str, int]:
    """Where a task's environments are kept: whole episodes share theirs, whatever their slot."""
    return task.run, task.slot if task.unit == "steps" else -1 - task.rows


class _Rollout:
    """One run of one task: its growing arrays and the loop that fills them."""

    def __init__(
        self,
        worker: RolloutWorker,
        task: RolloutTask,
        policy: Policy,
        rows: list[EnvRow],
        held: tuple[str, ...],
    ) -> None:
        self.worker = worker
        self.task = task
        self.policy = policy
        self.rows = rows
        self.held = held
        self.episodes: list[EpisodeStat] = []
        self.boundaries: list[tuple[int, int, Float32]] = []
        self.capacity = task.steps if task.unit == "steps" else min(task.steps, NOISE_BLOCK)
        n, size = task.rows, task.policy.observation_size
        recorded = self.capacity if task.record else 0
        continuous = task.policy.action_kind == "continuous"
        self.observations: Array = np.zeros((recorded, n, size), np.float32)
        self.actions: Array = (
            np.zeros((recorded, n, task.policy.action_size), np.float32)
            if continuous
            else np.zeros((recorded, n), np.int64)
        )
        self.log_probs: Array = np.zeros((recorded, n), np.float32)
        self.rewards: Array = np.zeros((self.capacity, n), np.float64)
        self.terminated: Array = np.zeros((self.capacity, n), np.bool_)
        self.truncated: Array = np.zeros((self.capacity, n), np.bool_)
        self.lengths = np.zeros(n, np.int64)
        self._source = self._noise_source()
        self._block = self._source.steps
        numbers = noise_size(task.policy, task.acting)
        self._noise = np.zeros((self._block, task.policy.width, numbers), np.float32)

    def fragment(self) -> Fragment:
        task = self.task
        # Rows past the task's own stay zero: every pass has the policy's full width.
        full = np.zeros((task.policy.width, task.policy.observation_size), np.float32)
        first = task.first_row
        mine = full[first : first + task.rows]
        self._position(mine)
        steps = self._loop(full, mine, first)
        states: tuple[EnvState, ...] = ()
        if task.unit == "steps":
            states = tuple(row.snapshot(mine[row.row]) for row in self.rows)
        index = np.array([(t, row) for t, row, _ in self.boundaries], np.int64).reshape(-1, 2)
        hidden = [observation for _, _, observation in self.boundaries]
        size = task.policy.observation_size
        recorded = steps if task.record else 0
        return Fragment(
            iteration=task.iteration,
            slot=task.slot,
            observations=self.observations[:recorded],
            actions=self.actions[:recorded],
            log_probs=self.log_probs[:recorded],
            rewards=self.rewards[:recorded],
            terminated=self.terminated[:recorded],
            truncated=self.truncated[:recorded],
            lengths=self.lengths,
            last_observations=mine.copy(),
            boundary_index=index,
            boundary_observations=np.array(hidden, np.float32).reshape(-1, size),
            episodes=tuple(self.episodes),
            states=states,
        )

    def _position(self, mine: Float32) -> None:
        """Bring every row to where the task begins, and its observation into `mine`."""
        task = self.task
        there = task.unit == "steps" and self.held == tuple(state.token for state in task.states)
        states = task.states if task.unit == "steps" else (None,) * task.rows
        for row, state in zip(self.rows, states, strict=True):
            self.worker.current = row
            if state is None:
                row.begin(self._episode(row.row), self._reset_seed(row.row), mine[row.row])
            elif there:
                mine[row.row] = state.observation
            else:
                row.restore(state, mine[row.row])
            row.check_finite(mine[row.row])

    def _loop(self, full: Float32, mine: Float32, first: int) -> int:
        task, policy = self.task, self.policy
        active, t = self.rows, 0
        while active and t < task.steps:
            if t == self.capacity:
                self._grow()
            if task.record:
                self.observations[t] = mine
            actions = self._act(full, t)[first : first + task.rows]
            if task.record:
                self.actions[t] = actions
            given = policy.to_environment(actions)
            if task.unit == "steps" and t == task.steps - 1:
                for row in self.rows:
                    row.hold()
            ended = self._step(active, given, mine, t)
            t += 1
            if task.unit == "episodes" and ended:
                active = [row for row in active if row.row not in ended]
        if task.unit == "steps":
            self.lengths[:] = t
        self._check_actions()
        return t

    def _act(self, full: Float32, t: int) -> Array:
        """An action for every row of the policy's width, and its log-density kept."""
        task, policy, first = self.task, self.policy, self.task.first_row
        if task.acting == "best":
            return policy.best(full)
        if t % self._block == 0:
            self._source.draw(self._noise)
        noise = self._noise[t % self._block]
        if task.acting == "uniform":
            actions, log_probs = policy.uniform(noise)
        else:
            actions, log_probs = policy.sample(full, noise)
        if task.record:
            self.log_probs[t] = log_probs[first : first + task.rows]
        return actions

    def _step(self, active: list[EnvRow], given: Array, mine: Float32, t: int) -> set[int]:
        """Step every active row once; returns the rows whose episode ended."""
        worker, rewards = self.worker, self.rewards[t]
        at_cap = self.task.unit == "episodes" and t == self.task.steps - 1
        ended: set[int] = set()
        for row in active:
            i = row.row
            worker.current = row
            reward, terminated, truncated = row.step(given[i], mine[i])
            rewards[i] = reward
            if terminated or truncated or at_cap:
                ended.add(i)
                self._end(row, t, terminated, mine)
        if not np.isfinite(mine).all():
            for row in active:
                row.check_finite(mine[row.row])
        return ended

    def _end(self, row: EnvRow, t: int, terminated: bool, mine: Float32) -> None:
        """Close an episode: an end by the environment itself wins over a time limit."""
        i = row.row
        row.check_finite(mine[i])
        self.terminated[t, i] = terminated
        self.truncated[t, i] = not terminated
        self.lengths[i] = t + 1
        if not terminated and self.task.record:
            self.boundaries.append((t, i, mine[i].copy()))
        self.episodes.append(
            EpisodeStat(
                i, row.episode, row.seed, row.episode_return, row.elapsed, not terminated, t
            )
        )
        if self.task.unit == "steps":
            following = row.episode + 1
            seed = reset_seed(self.task.seed, Role.RESET, self.task.slot, i, following)
            row.begin(following, seed, mine[i])

    def _check_actions(self) -> None:
        """Weights that have diverged give actions that not every environment minds."""
        if np.isfinite(self.log_probs).all() and np.isfinite(self.actions).all():
            return
        fine = np.isfinite(self.actions.reshape(*self.log_probs.shape, -1)).all(axis=2)
        t, row = np.argwhere(~(np.isfinite(self.log_probs) & fine))[0]
        raise EnvironmentFault(
            f"environment {self.task.env.id} was given NaN or infinity: the policy has diverged",
            int(row),
            self.rows[row].seed,
            int(t),
        )

    def _episode(self, row: int) -> int:
        """The number of a whole episode: of the slot's row, or of the evaluation."""
        if self.task.purpose == "evaluate":
            return self.task.iteration * self.task.policy.width + self.task.first_row + row
        return self.task.iteration

    def _reset_seed(self, row: int) -> int:
        if self.task.purpose == "evaluate":
            return reset_seed(self.task.seed, Role.EVALUATION_RESET, self._episode(row))
        return reset_seed(self.task.seed, Role.RESET, self.task.slot, row, self.task.iteration)

    def _stream(self, row: int) -> np.random.Generator:
        if self.task.purpose == "evaluate":
            return stream(self.task.seed, Role.EVALUATION_ACTION, self._episode(row))
        return stream(self.task.seed, Role.ACTION, self.task.slot, row, self.task.iteration)

    def _noise_source(self) -> NoiseSource:
        task = self.task
        if task.acting == "sample" and task.policy.exploration == "gsde":
            return HeldNoise(task, self.rows)
        rows = range(task.rows) if task.acting != "best" else ()
        return StepNoise(task, [self._stream(row) for row in rows])

    def _grow(self) -> None:
        self.capacity = min(self.task.steps, 2 * self.capacity)
        names = ["rewards", "terminated", "truncated"]
        if self.task.record:
            names += ["observations", "actions", "log_probs"]
        for name in names:
            old: Array = getattr(self, name)
            new = np.zeros((self.capacity, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
