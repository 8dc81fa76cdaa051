"""One run of one task: the loop that acts, steps, and records.

Reads no clock, no global random state, no worker identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .action_sampler import ActionSampler
from .envs.vector_env import VectorEnv
from .fragment_recorder import FragmentRecorder
from .policy import Policy
from .seeding import Role, make_reset_seed
from .task import Array, EnvironmentFault, Float32, Fragment, RolloutTask


@dataclass(frozen=True, slots=True)
class SlotEnvs:
    """The environments of a task's slots, and the tokens of the states they were left in."""

    vector_env: VectorEnv
    count: int
    tokens: tuple[str, ...] = ()


class Rollout:
    """One run of one task."""

    def __init__(self, task: RolloutTask, policy: Policy, slot_envs: SlotEnvs) -> None:
        self._task = task
        self._row_slice = task.row_slice
        self._policy = policy
        self._policy.set_active_slots(range(len(task.slots)))
        self._slot_envs = slot_envs
        self._vector_env = slot_envs.vector_env
        self._sampler = ActionSampler(task, policy, self._vector_env)
        self._recorder = FragmentRecorder(task)

    def collect(self) -> Fragment:
        task = self._task
        height = task.policy.width * len(task.slots)
        # Rows past the task's own stay zero: every pass has the policy's full width.
        padded = np.zeros((height, task.policy.observation_size), np.float32)
        task_rows = padded[self._row_slice]
        if not task_rows.flags.c_contiguous:  # environments write faster into contiguous rows
            task_rows = np.zeros(task_rows.shape, np.float32)
        self._restore_rows(task_rows)
        steps = self._run_loop(padded, task_rows)
        states = (
            self._vector_env.snapshot(row, task_rows[row])
            for row in (range(task.columns) if task.unit == "steps" else ())
        )
        return self._recorder.make_fragment(steps, task_rows, tuple(states))

    def _restore_rows(self, task_rows: Float32) -> None:
        """Bring every row to where the task begins, and write its observation."""
        task, vector_env = self._task, self._vector_env
        if task.unit == "episodes":
            for row in range(task.columns):
                episode = task.get_episode(row)
                seed = self._make_reset_seed(row, episode)
                vector_env.reset_row(row, episode, seed, task_rows[row])
                vector_env.check_finite(row, task_rows[row])
            return
        is_restored = self._slot_envs.tokens == tuple(state.token for state in task.states)
        for row, state in zip(range(task.columns), task.states, strict=True):
            if is_restored:
                task_rows[row] = state.observation
            else:
                vector_env.restore(row, state, task_rows[row])
            vector_env.check_finite(row, task_rows[row])

    def _run_loop(self, padded: Float32, task_rows: Float32) -> int:
        """Step until the task's steps are taken or its episodes have ended; returns the steps."""
        task, vector_env, recorder = self._task, self._vector_env, self._recorder
        fixed_length = task.unit == "steps"
        flat = task_rows.reshape(-1)
        needs_copy = task_rows.base is not padded
        active: Sequence[int] = range(task.columns)
        t = 0
        while active and t < task.steps:
            recorder.ensure_capacity(t)
            if task.record:
                recorder.observations[t] = task_rows
            if needs_copy:
                padded[self._row_slice] = task_rows
            env_actions = self._act(padded, t)
            is_last = t == task.steps - 1
            if fixed_length and is_last:
                vector_env.prepare_snapshot()
            ended = vector_env.step(
                active,
                env_actions,
                task_rows,
                recorder.rewards[t],
                recorder.terminated[t],
                recorder.truncated[t],
            )
            if not fixed_length and is_last:
                ended = self._truncate(active, t)
            # A sum of squares is finite only where all of them are.
            if not math.isfinite(flat.dot(flat)):
                for row in active:
                    vector_env.check_finite(row, task_rows[row])
            for row in ended:
                self._finish_episode(row, t, task_rows[row])
            t += 1
            if ended and not fixed_length:
                active = [row for row in active if row not in ended]
                self._policy.set_active_slots({row // task.rows for row in active})
        if fixed_length:
            recorder.lengths[:] = t
        self._check_actions()
        return t

    def _act(self, padded: Float32, t: int) -> Array:
        """The actions that environments are given; the policy's own are recorded."""
        row_slice = self._row_slice
        actions, log_probs = self._sampler.act(padded, t)
        if self._task.record:
            self._recorder.actions[t] = actions[row_slice]
            if log_probs is not None:
                self._recorder.log_probs[t] = log_probs[row_slice]
        return self._policy.to_environment(actions)[row_slice]

    def _truncate(self, active: Sequence[int], t: int) -> Sequence[int]:
        """The cap on an episode's length truncates every episode that has not ended by itself."""
        for row in active:
            self._recorder.truncated[t, row] = not self._recorder.terminated[t, row]
        return active

    def _finish_episode(self, row: int, t: int, observation: Float32) -> None:
        """Record an episode, and begin the next where steps are counted."""
        task, vector_env = self._task, self._vector_env
        position = vector_env.get_position(row)
        self._recorder.add_episode(position, t, observation)
        if task.unit == "steps":
            episode = position.episode + 1
            seed = self._make_reset_seed(row, episode)
            vector_env.reset_row(row, episode, seed, observation)
            if not math.isfinite(observation.dot(observation)):
                vector_env.check_finite(row, observation)

    def _check_actions(self) -> None:
        """Refuse the actions of weights that have diverged: some environments accept NaN."""
        place = self._recorder.find_invalid_action()
        if place is not None:
            t, row = place
            raise EnvironmentFault(
                f"environment {self._task.env.id} was given NaN or infinity: "
                "the policy has diverged",
                row,
                self._vector_env.get_position(row).seed,
                t,
            )

    def _make_reset_seed(self, row: int, episode: int) -> int:
        task = self._task
        if task.purpose == "evaluate":
            return make_reset_seed(task.seed, Role.EVALUATION_RESET, episode)
        return make_reset_seed(task.seed, Role.RESET, *task.locate(row), episode)
