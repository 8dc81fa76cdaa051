"""Runs a task: chooses actions, steps the environments and records the results.

Results do not depend on the time or on global random state. The random numbers for actions come
from keyed generators (see `seeding.py`), so they are the same no matter which worker runs a task
and how often the task is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .distributions import NoiseBlock, compute_noise_size, draw_noise
from .envs.vector_env import EpisodePosition, VectorEnv, make_fault
from .policy import Policy
from .seeding import Key, Role, make_reset_seeds, make_stream, make_streams
from .task import (
    STEP_ENDS,
    STEP_FIELDS,
    Array,
    EnvState,
    EpisodeStat,
    Float32,
    Fragment,
    RolloutTask,
)

#: The number of steps whose noise is drawn at once, and the initial capacity for whole episodes.
_BLOCK_STEPS = 256
_INVALID_OBSERVATION = (
    "returned an observation with NaN, infinity or a number too large for float32"
)


class ActionSampler:
    """Chooses the actions for all rows, and draws the noise for many steps at once."""

    def __init__(self, task: RolloutTask, policy: Policy, vector_env: VectorEnv) -> None:
        self._task = task
        self._policy = policy
        self._vector_env = vector_env
        self._uses_gsde = task.acting == "sample" and task.policy.exploration == "gsde"
        #: The number of steps for which noise is drawn at once.
        self._steps = 1 if self._uses_gsde else min(_BLOCK_STEPS, task.steps)
        self._block: NoiseBlock = ()
        if task.acting == "best":
            return
        height = task.policy.width * len(task.slots)
        size = compute_noise_size(task.policy, task.acting)
        self._noise = np.zeros((self._steps, height, size), np.float32)
        #: The part of an episode for which the noise of each row was drawn.
        self._episode_parts = [(-1, -1)] * task.rows
        if not self._uses_gsde:
            self._streams = self._make_streams()

    def act(self, observations: Float32, t: int) -> tuple[Array, Float32 | None]:
        """Return the actions for step `t`, and their log-densities if they are random."""
        acting, policy = self._task.acting, self._policy
        if acting == "best":
            return policy.mode(observations), None
        step = t % self._steps
        if step == 0:
            if self._uses_gsde:
                self._draw_episode_parts()
            else:
                self._draw_steps()
            if acting == "sample":
                self._block = policy.distribution.prepare_noise(self._noise)
        if acting == "uniform":
            return policy.distribution.sample_uniform(self._noise[step])
        return policy.distribution.sample(policy.forward(observations), self._block, step)

    def _make_streams(self) -> list[np.random.Generator]:
        """Return the random stream of each row."""
        task, rows = self._task, range(self._task.columns)
        if task.purpose == "evaluate":
            keys: list[Key] = [(task.get_episode(row),) for row in rows]
            return make_streams(task.seed, Role.EVALUATION_ACTION, keys)
        keys = [(*task.locate(row), task.iteration) for row in rows]
        return make_streams(task.seed, Role.ACTION, keys)

    def _draw_steps(self) -> None:
        """Draw noise for the next block of steps, using one random stream per row."""
        task = self._task
        task_rows = self._noise[:, task.row_slice]
        for row, generator in enumerate(self._streams):
            task_rows[:, row] = draw_noise(task.policy, task.acting, generator, self._steps)

    def _draw_episode_parts(self) -> None:
        """Draw new noise for each row that has reached a new part of its episode."""
        # The part is the key of the random stream, so a task that begins inside a part uses the
        # same noise as the previous task.
        task, interval = self._task, self._task.policy.exploration_interval
        for i in range(task.rows):
            position = self._vector_env.get_position(i)
            part = (position.episode, position.elapsed // interval if interval is not None else 0)
            if part == self._episode_parts[i]:
                continue
            self._episode_parts[i] = part
            if task.purpose == "evaluate":
                generator = make_stream(task.seed, Role.EVALUATION_EXPLORATION, *part)
            else:
                generator = make_stream(task.seed, Role.EXPLORATION, task.slot, i, *part)
            self._noise[:, task.first_row + i] = draw_noise(task.policy, "sample", generator, 1)


class ResetSeeds:
    """The reset seeds of a task's episodes, computed for all rows at once."""

    def __init__(self, task: RolloutTask, vector_env: VectorEnv) -> None:
        self._task, self._vector_env = task, vector_env
        self._seeds: dict[tuple[int, int], int] = {}

    def get(self, row: int, episode: int) -> int:
        """Return the seed of an episode of a row."""
        if (row, episode) not in self._seeds:
            self._compute()
        return self._seeds[row, episode]

    def _compute(self) -> None:
        """Compute the seed of each row's next episode, and pass them to the environments."""
        task, rows = self._task, range(self._task.columns)
        if task.unit == "episodes":
            places = [(row, task.get_episode(row)) for row in rows]
        else:
            places = [(row, self._vector_env.get_position(row).episode + 1) for row in rows]
        if task.purpose == "evaluate":
            keys: list[Key] = [(episode,) for _, episode in places]
            seeds = make_reset_seeds(task.seed, Role.EVALUATION_RESET, keys)
        else:
            keys = [(*task.locate(row), episode) for row, episode in places]
            seeds = make_reset_seeds(task.seed, Role.RESET, keys)
        self._seeds = dict(zip(places, seeds, strict=True))
        self._vector_env.prepare_resets(seeds)


class FragmentRecorder:
    """Records the steps of a task, or only rewards and end flags without `record`."""

    def __init__(self, task: RolloutTask) -> None:
        self._task = task
        self._capacity = task.steps if task.unit == "steps" else min(task.steps, _BLOCK_STEPS)
        columns, spec = task.columns, task.policy
        recorded_shape = (self._capacity if task.record else 0, columns)
        discrete = spec.action_kind == "discrete"
        self.observations = np.zeros((*recorded_shape, spec.row_size), np.float32)
        self.actions: Array = np.zeros(
            (*recorded_shape, *(() if discrete else (spec.action_size,))),
            np.int64 if discrete else np.float32,
        )
        self.log_probs = np.zeros(recorded_shape, np.float32)
        self.rewards = np.zeros((self._capacity, columns), np.float64)
        self.terminated = np.zeros((self._capacity, columns), np.bool_)
        self.truncated = np.zeros((self._capacity, columns), np.bool_)
        #: The number of steps of each row.
        self.lengths = np.zeros(columns, np.int64)
        self._episodes: list[EpisodeStat] = []
        self._boundaries: list[tuple[int, int, Float32]] = []

    def ensure_capacity(self, t: int) -> None:
        """Make room for step `t`."""
        if t < self._capacity:
            return
        self._capacity = min(self._task.steps, 2 * self._capacity)
        for name in STEP_FIELDS if self._task.record else STEP_ENDS:
            old: Array = getattr(self, name)
            new = np.zeros((self._capacity, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def add_episode(self, position: EpisodePosition, t: int, observation: Float32) -> None:
        """Record a row's episode, which ended at step `t` with this observation."""
        row = position.row
        truncated = bool(self.truncated[t, row])
        self.lengths[row] = t + 1
        if truncated and self._task.record:
            self._boundaries.append((t, row, observation.copy()))
        self._episodes.append(EpisodeStat(*position, truncated, t))

    def find_invalid_action(self) -> tuple[int, int] | None:
        """Return the step and row of the first non-finite action or log-density."""
        if np.isfinite(self.log_probs).all() and np.isfinite(self.actions).all():
            return None
        is_finite = np.isfinite(self.actions.reshape(*self.log_probs.shape, -1)).all(axis=2)
        is_finite &= np.isfinite(self.log_probs)
        # Values after a slot's last step are undefined.
        rows = self._task.rows
        slot_lengths = self.lengths.reshape(-1, rows).max(axis=1).repeat(rows)
        is_finite |= np.arange(len(is_finite))[:, None] >= slot_lengths
        if is_finite.all():
            return None
        t, row = np.argwhere(~is_finite)[0]
        return int(t), int(row)

    def make_fragment(
        self, steps: int, last_observations: Float32, states: tuple[EnvState, ...]
    ) -> Fragment:
        task = self._task
        recorded_steps = steps if task.record else 0
        index = np.array([(t, row) for t, row, _ in self._boundaries], np.int64).reshape(-1, 2)
        hidden = [observation for _, _, observation in self._boundaries]
        arrays: dict[str, Array] = {
            name: getattr(self, name)[:recorded_steps] for name in STEP_FIELDS
        }
        return Fragment(
            iteration=task.iteration,
            slot=task.slot,
            **arrays,
            lengths=self.lengths,
            last_observations=last_observations.copy(),
            boundary_index=index,
            boundary_observations=np.array(hidden, np.float32).reshape(-1, task.policy.row_size),
            episodes=tuple(self._episodes),
            states=states,
            extra_slots=task.extra_slots,
        )


class Rollout:
    """Runs one task. `tokens` identify the current states of the environments."""

    def __init__(
        self, task: RolloutTask, policy: Policy, vector_env: VectorEnv, tokens: tuple[str, ...]
    ) -> None:
        self._task = task
        self._row_slice = task.row_slice
        self._policy = policy
        self._policy.set_active_slots(range(len(task.slots)))
        self._vector_env, self._tokens = vector_env, tokens
        self._sampler = ActionSampler(task, policy, self._vector_env)
        self._reset_seeds = ResetSeeds(task, vector_env)
        self._recorder = FragmentRecorder(task)

    def collect(self) -> Fragment:
        task = self._task
        height = task.policy.width * len(task.slots)
        # Every forward pass has the policy's full width. Rows of other tasks stay zero.
        rows = np.zeros((height, task.policy.row_size), np.float32)
        task_rows = rows[self._row_slice]
        if not task_rows.flags.c_contiguous:  # environments write faster into contiguous rows
            task_rows = np.zeros(task_rows.shape, np.float32)
        self._restore_rows(task_rows)
        steps = self._run_loop(rows, task_rows)
        self._check_actions()
        states = (
            self._vector_env.snapshot(row, task_rows[row])
            for row in (range(task.columns) if task.unit == "steps" else ())
        )
        return self._recorder.make_fragment(steps, task_rows, tuple(states))

    def _restore_rows(self, task_rows: Float32) -> None:
        """Restore the initial state of every row, and write the first observations."""
        task, vector_env = self._task, self._vector_env
        if task.unit == "episodes":
            for row, observation in enumerate(task_rows):
                self._start_episode(row, task.get_episode(row), observation)
                self._check_finite(row, observation)
            return
        is_restored = self._tokens == tuple(state.token for state in task.states)
        if not is_restored:
            vector_env.prepare_resets([state.seed for state in task.states])
        for row, (state, observation) in enumerate(zip(task.states, task_rows, strict=True)):
            if is_restored:
                observation[:] = state.observation
            else:
                vector_env.restore(row, state, observation)
            self._check_finite(row, observation)

    def _run_loop(self, rows: Float32, task_rows: Float32) -> int:
        """Step until all steps are taken or all episodes end; return the number of steps."""
        task, vector_env, recorder = self._task, self._vector_env, self._recorder
        fixed_length = task.unit == "steps"
        flat = task_rows.reshape(-1)
        needs_copy = task_rows.base is not rows
        active: Sequence[int] = range(task.columns)
        t = 0
        while active and t < task.steps:
            recorder.ensure_capacity(t)
            if task.record:
                recorder.observations[t] = task_rows
            if needs_copy:
                rows[self._row_slice] = task_rows
            env_actions = self._act(rows, t)
            is_last = t == task.steps - 1
            if fixed_length and is_last:
                vector_env.prepare_snapshot()
            ends = vector_env.step(
                active,
                env_actions,
                task_rows,
                recorder.rewards[t],
                recorder.terminated[t],
                recorder.truncated[t],
            )
            if not fixed_length and is_last:
                # The limit on an episode's length truncates the episodes that have not ended.
                recorder.truncated[t, active] = ~recorder.terminated[t, active]
                ends = active
            if not _is_finite(flat):
                for row in active:
                    self._check_finite(row, task_rows[row])
            for row in ends:
                self._finish_episode(row, t, task_rows[row])
            t += 1
            if ends and not fixed_length:
                active = [row for row in active if row not in ends]
                self._policy.set_active_slots({row // task.rows for row in active})
        if fixed_length:
            recorder.lengths[:] = t
        return t

    def _act(self, rows: Float32, t: int) -> Array:
        """Choose and record actions; return them as the environments expect them."""
        row_slice = self._row_slice
        actions, log_probs = self._sampler.act(rows, t)
        if self._task.record:
            self._recorder.actions[t] = actions[row_slice]
            if log_probs is not None:
                self._recorder.log_probs[t] = log_probs[row_slice]
        return self._policy.to_environment(actions)[row_slice]

    def _finish_episode(self, row: int, t: int, observation: Float32) -> None:
        """Record a finished episode, and start the next one if the unit is `steps`."""
        position = self._vector_env.get_position(row)
        self._recorder.add_episode(position, t, observation)
        if self._task.unit == "steps":
            self._start_episode(row, position.episode + 1, observation)
            self._check_finite(row, observation)

    def _start_episode(self, row: int, episode: int, observation: Float32) -> None:
        seed = self._reset_seeds.get(row, episode)
        self._vector_env.reset_row(row, episode, seed, observation)

    def _check_finite(self, row: int, observation: Float32) -> None:
        if not _is_finite(observation):
            position = self._vector_env.get_position(row)
            raise make_fault(self._task.env, position, _INVALID_OBSERVATION)

    def _check_actions(self) -> None:
        """Raise an error if an action is not finite; some environments accept NaN."""
        place = self._recorder.find_invalid_action()
        if place is not None:
            t, row = place
            position = self._vector_env.get_position(row)._replace(elapsed=t)
            message = "was given an action with NaN or infinity: the policy has diverged"
            raise make_fault(self._task.env, position, message)


def _is_finite(array: Float32) -> bool:
    # The sum of squares is finite only if all values are, and takes one operation.
    return math.isfinite(array.dot(array)) or bool(np.isfinite(array).all())
