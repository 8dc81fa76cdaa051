"""One run of one task: the loop that acts, steps, and fills a fragment.

Reads no clock, no global random state, no worker identity. Must not know: caches, processes,
pipes, clusters, learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .distributions import NoiseBlock, compute_noise_size
from .envs.vector_env import VectorEnv
from .noise import NOISE_BLOCK_STEPS, GsdeNoise, NoiseSource, StepNoise
from .policy import Policy
from .reset_seed_cache import ResetSeedCache
from .seeding import Role, StreamPool, make_reset_seed
from .spec import Array, EnvironmentFault, EnvState, EpisodeStat, Float32, Fragment, RolloutTask


@dataclass(frozen=True, slots=True)
class SlotEnvs:
    """The environments of a task's slots, and the tokens of the states they were left in."""

    vector_env: VectorEnv
    count: int
    seeds: ResetSeedCache
    tokens: tuple[str, ...] = ()


class Rollout:
    """One run of one task: its growing arrays and the loop that fills them."""

    def __init__(
        self, task: RolloutTask, policy: Policy, slot_envs: SlotEnvs, streams: StreamPool
    ) -> None:
        self._stream_pool = streams
        self.task = task
        self.policy = policy
        self.policy.set_active_slots(range(len(task.slots)))
        self.vector_env = slot_envs.vector_env
        self.slot_envs = slot_envs
        self.episodes: list[EpisodeStat] = []
        self.boundaries: list[tuple[int, int, Float32]] = []
        self.capacity = task.steps if task.unit == "steps" else min(task.steps, NOISE_BLOCK_STEPS)
        n, size = task.columns, task.policy.observation_size
        recorded_steps = self.capacity if task.record else 0
        continuous = task.policy.action_kind == "continuous"
        self.observations: Array = np.zeros((recorded_steps, n, size), np.float32)
        self.actions: Array = (
            np.zeros((recorded_steps, n, task.policy.action_size), np.float32)
            if continuous
            else np.zeros((recorded_steps, n), np.int64)
        )
        self.log_probs: Array = np.zeros((recorded_steps, n), np.float32)
        self.rewards: Array = np.zeros((self.capacity, n), np.float64)
        self.terminated: Array = np.zeros((self.capacity, n), np.bool_)
        self.truncated: Array = np.zeros((self.capacity, n), np.bool_)
        self.lengths = np.zeros(n, np.int64)
        self._noise_source = self._make_noise_source()
        self._block_steps = self._noise_source.steps
        noise_count = compute_noise_size(task.policy, task.acting)
        self._height = task.policy.width * len(task.slots)
        self._row_slice = task.row_slice
        self._noise = np.zeros((self._block_steps, self._height, noise_count), np.float32)
        self._noise_block: NoiseBlock | None = None

    def collect(self) -> Fragment:
        task = self.task
        # Rows past the task's own stay zero: every pass has the policy's full width.
        padded = np.zeros((self._height, task.policy.observation_size), np.float32)
        task_rows = padded[self._row_slice]
        if not task_rows.flags.c_contiguous:  # what steps environments is faster where it is
            task_rows = np.zeros(task_rows.shape, np.float32)
        self._restore_rows(task_rows)
        steps = self._run_loop(padded, task_rows)
        states: tuple[EnvState, ...] = ()
        if task.unit == "steps":
            states = tuple(
                self.vector_env.snapshot(row, task_rows[row]) for row in range(task.columns)
            )
        index = np.array([(t, row) for t, row, _ in self.boundaries], np.int64).reshape(-1, 2)
        hidden = [observation for _, _, observation in self.boundaries]
        size = task.policy.observation_size
        recorded_steps = steps if task.record else 0
        return Fragment(
            iteration=task.iteration,
            slot=task.slot,
            observations=self.observations[:recorded_steps],
            actions=self.actions[:recorded_steps],
            log_probs=self.log_probs[:recorded_steps],
            rewards=self.rewards[:recorded_steps],
            terminated=self.terminated[:recorded_steps],
            truncated=self.truncated[:recorded_steps],
            lengths=self.lengths,
            last_observations=task_rows.copy(),
            boundary_index=index,
            boundary_observations=np.array(hidden, np.float32).reshape(-1, size),
            episodes=tuple(self.episodes),
            states=states,
            extra_slots=task.extra_slots,
        )

    def _restore_rows(self, task_rows: Float32) -> None:
        """Bring every row to where the task begins, and its observation into `mine`."""
        task = self.task
        tokens = tuple(state.token for state in task.states)
        is_restored = task.unit == "steps" and self.slot_envs.tokens == tokens
        states = task.states if task.unit == "steps" else (None,) * task.columns
        for row, state in zip(range(task.columns), states, strict=True):
            if state is None:
                self.vector_env.reset_row(
                    row, self._get_episode(row), self._make_reset_seed(row), task_rows[row]
                )
            elif is_restored:
                task_rows[row] = state.observation
            else:
                self.vector_env.restore(row, state, task_rows[row])
            self.vector_env.check_finite(row, task_rows[row])

    def _run_loop(self, padded: Float32, task_rows: Float32) -> int:
        task, vector_env = self.task, self.vector_env
        fixed_length = task.unit == "steps"
        flat = task_rows.reshape(-1)
        needs_copy = task_rows.base is not padded
        active: Sequence[int] = range(task.columns)
        t = 0
        while active and t < task.steps:
            if t == self.capacity:
                self._grow()
            if task.record:
                self.observations[t] = task_rows
            if needs_copy:
                padded[self._row_slice] = task_rows
            env_actions = self._act(padded, t)
            if fixed_length and t == task.steps - 1:
                vector_env.prepare_snapshot()
            ended = vector_env.step(
                active,
                env_actions,
                task_rows,
                self.rewards[t],
                self.terminated[t],
                self.truncated[t],
            )
            if not fixed_length and t == task.steps - 1:
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
                self.policy.set_active_slots({row // task.rows for row in active})
        if fixed_length:
            self.lengths[:] = t
        self._check_actions()
        return t

    def _act(self, padded: Float32, t: int) -> Array:
        """What every environment is given; the action and its log-density are kept."""
        task, policy, row_slice = self.task, self.policy, self._row_slice
        if task.acting == "best":
            actions = policy.mode(padded)
        else:
            block_step = t % self._block_steps
            if block_step == 0:
                self._draw_noise()
            if self._noise_block is None:
                actions, log_probs = policy.sample_uniform(self._noise[block_step])
            else:
                actions, log_probs = policy.act(padded, self._noise_block, block_step)
            if task.record:
                self.log_probs[t] = log_probs[row_slice]
        if task.record:
            self.actions[t] = actions[row_slice]
        return policy.to_environment(actions)[row_slice]

    def _truncate(self, active: Sequence[int], t: int) -> Sequence[int]:
        """The cap on an episode's length truncates whatever has not ended by itself."""
        for row in active:
            self.truncated[t, row] = not self.terminated[t, row]
        return active

    def _finish_episode(self, row: int, t: int, observation: Float32) -> None:
        """Close an episode, and begin the next where steps are counted."""
        task, vector_env = self.task, self.vector_env
        position = vector_env.get_position(row)
        truncated = bool(self.truncated[t, row])
        self.lengths[row] = t + 1
        if truncated and task.record:
            self.boundaries.append((t, row, observation.copy()))
        self.episodes.append(
            EpisodeStat(
                row,
                position.episode,
                position.seed,
                position.episode_return,
                position.elapsed,
                truncated,
                t,
            )
        )
        if task.unit == "steps":
            seed = self.slot_envs.seeds.take(task, row, position.episode + 1)
            vector_env.reset_row(row, position.episode + 1, seed, observation)
            if not math.isfinite(observation.dot(observation)):
                vector_env.check_finite(row, observation)

    def _check_actions(self) -> None:
        """Weights that have diverged give actions that not every environment minds."""
        if np.isfinite(self.log_probs).all() and np.isfinite(self.actions).all():
            return
        is_finite = np.isfinite(self.actions.reshape(*self.log_probs.shape, -1)).all(axis=2)
        is_finite &= np.isfinite(self.log_probs)
        # What stands behind a slot's last step is nobody's.
        slot_lengths = self.lengths.reshape(-1, self.task.rows).max(axis=1).repeat(self.task.rows)
        is_finite |= np.arange(len(is_finite))[:, None] >= slot_lengths
        if is_finite.all():
            return
        t, row = np.argwhere(~is_finite)[0]
        raise EnvironmentFault(
            f"environment {self.task.env.id} was given NaN or infinity: the policy has diverged",
            int(row),
            self.vector_env.get_position(int(row)).seed,
            int(t),
        )

    def _get_episode(self, row: int) -> int:
        """The number of a whole episode: of the slot's row, or of the evaluation."""
        if self.task.purpose == "evaluate":
            return self.task.iteration * self.task.policy.width + self.task.first_row + row
        return self.task.iteration

    def _make_reset_seed(self, row: int) -> int:
        if self.task.purpose == "evaluate":
            return make_reset_seed(self.task.seed, Role.EVALUATION_RESET, self._get_episode(row))
        return make_reset_seed(
            self.task.seed, Role.RESET, *self.task.locate(row), self.task.iteration
        )

    def _make_streams(self, rows: Sequence[int]) -> list[np.random.Generator]:
        task = self.task
        if task.purpose == "evaluate":
            keys: list[tuple[int, ...]] = [(self._get_episode(row),) for row in rows]
            return self._stream_pool.take(task.seed, Role.EVALUATION_ACTION, keys)
        keys = [(*task.locate(row), task.iteration) for row in rows]
        return self._stream_pool.take(task.seed, Role.ACTION, keys)

    def _make_noise_source(self) -> NoiseSource:
        task = self.task
        if task.acting == "sample" and task.policy.exploration == "gsde":
            return GsdeNoise(task, self.vector_env)
        rows = range(task.columns) if task.acting != "best" else ()
        return StepNoise(task, self._make_streams(rows))

    def _draw_noise(self) -> None:
        """The numbers of the next block of steps."""
        self._noise_source.draw(self._noise)
        if self.task.acting == "sample":
            self._noise_block = self.policy.prepare_noise(self._noise)

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
