"""One run of one task: the loop that acts, steps, and fills a fragment.

Reads no clock, no global random state, no worker identity. Must not know: caches, processes,
pipes, clusters, learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .distributions import Drawn, noise_size
from .envs.vector_env import Rows
from .noise import NOISE_BLOCK, HeldNoise, NoiseSource, StepNoise
from .policy import Policy
from .reset_seed_cache import NextSeeds
from .seeding import Role, Streams, reset_seed
from .spec import Array, EnvironmentFault, EnvState, EpisodeStat, Float32, Fragment, RolloutTask


@dataclass(frozen=True, slots=True)
class Held:
    """The environments of a task's slots, and the tokens of the states they were left in."""

    rows: Rows
    count: int
    seeds: NextSeeds
    tokens: tuple[str, ...] = ()


class Rollout:
    """One run of one task: its growing arrays and the loop that fills them."""

    def __init__(self, task: RolloutTask, policy: Policy, held: Held, generators: Streams) -> None:
        self._generators = generators
        self.task = task
        self.policy = policy
        self.policy.attend(range(len(task.slots)))
        self.rows = held.rows
        self.held = held
        self.episodes: list[EpisodeStat] = []
        self.boundaries: list[tuple[int, int, Float32]] = []
        self.capacity = task.steps if task.unit == "steps" else min(task.steps, NOISE_BLOCK)
        n, size = task.columns, task.policy.observation_size
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
        self._height = task.policy.width * len(task.slots)
        self._lines = task.lines
        self._noise = np.zeros((self._block, self._height, numbers), np.float32)
        self._drawn: Drawn | None = None

    def fragment(self) -> Fragment:
        task = self.task
        # Rows past the task's own stay zero: every pass has the policy's full width.
        full = np.zeros((self._height, task.policy.observation_size), np.float32)
        mine = full[self._lines]
        if not mine.flags.c_contiguous:  # what steps environments is faster where it is
            mine = np.zeros(mine.shape, np.float32)
        self._position(mine)
        steps = self._loop(full, mine)
        states: tuple[EnvState, ...] = ()
        if task.unit == "steps":
            states = tuple(self.rows.snapshot(row, mine[row]) for row in range(task.columns))
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
            beside=task.beside,
        )

    def _position(self, mine: Float32) -> None:
        """Bring every row to where the task begins, and its observation into `mine`."""
        task = self.task
        tokens = tuple(state.token for state in task.states)
        there = task.unit == "steps" and self.held.tokens == tokens
        states = task.states if task.unit == "steps" else (None,) * task.columns
        for row, state in zip(range(task.columns), states, strict=True):
            if state is None:
                self.rows.begin(row, self._episode(row), self._reset_seed(row), mine[row])
            elif there:
                mine[row] = state.observation
            else:
                self.rows.restore(row, state, mine[row])
            self.rows.check_finite(row, mine[row])

    def _loop(self, full: Float32, mine: Float32) -> int:
        task, rows = self.task, self.rows
        whole = task.unit == "steps"
        flat = mine.reshape(-1)
        copied = mine.base is not full
        active: Sequence[int] = range(task.columns)
        t = 0
        while active and t < task.steps:
            if t == self.capacity:
                self._grow()
            if task.record:
                self.observations[t] = mine
            if copied:
                full[self._lines] = mine
            given = self._act(full, t)
            if whole and t == task.steps - 1:
                rows.hold()
            ended = rows.step(
                active, given, mine, self.rewards[t], self.terminated[t], self.truncated[t]
            )
            if not whole and t == task.steps - 1:
                ended = self._cut(active, t)
            # A sum of squares is finite only where all of them are.
            if not math.isfinite(flat.dot(flat)):
                for row in active:
                    rows.check_finite(row, mine[row])
            for row in ended:
                self._end(row, t, mine[row])
            t += 1
            if ended and not whole:
                active = [row for row in active if row not in ended]
                self.policy.attend({row // task.rows for row in active})
        if whole:
            self.lengths[:] = t
        self._check_actions()
        return t

    def _act(self, full: Float32, t: int) -> Array:
        """What every environment is given; the action and its log-density are kept."""
        task, policy, mine = self.task, self.policy, self._lines
        if task.acting == "best":
            actions = policy.best(full)
        else:
            at = t % self._block
            if at == 0:
                self._draw()
            if self._drawn is None:
                actions, log_probs = policy.uniform(self._noise[at])
            else:
                actions, log_probs = policy.act(full, self._drawn, at)
            if task.record:
                self.log_probs[t] = log_probs[mine]
        if task.record:
            self.actions[t] = actions[mine]
        return policy.to_environment(actions)[mine]

    def _cut(self, active: Sequence[int], t: int) -> Sequence[int]:
        """The cap on an episode's length truncates whatever has not ended by itself."""
        for row in active:
            self.truncated[t, row] = not self.terminated[t, row]
        return active

    def _end(self, row: int, t: int, observation: Float32) -> None:
        """Close an episode, and begin the next where steps are counted."""
        task, rows = self.task, self.rows
        at = rows.standing(row)
        truncated = bool(self.truncated[t, row])
        self.lengths[row] = t + 1
        if truncated and task.record:
            self.boundaries.append((t, row, observation.copy()))
        self.episodes.append(
            EpisodeStat(row, at.episode, at.seed, at.episode_return, at.elapsed, truncated, t)
        )
        if task.unit == "steps":
            seed = self.held.seeds.take(task, row, at.episode + 1)
            rows.begin(row, at.episode + 1, seed, observation)
            if not math.isfinite(observation.dot(observation)):
                rows.check_finite(row, observation)

    def _check_actions(self) -> None:
        """Weights that have diverged give actions that not every environment minds."""
        if np.isfinite(self.log_probs).all() and np.isfinite(self.actions).all():
            return
        fine = np.isfinite(self.actions.reshape(*self.log_probs.shape, -1)).all(axis=2)
        fine &= np.isfinite(self.log_probs)
        # What stands behind a slot's last step is nobody's.
        ends = self.lengths.reshape(-1, self.task.rows).max(axis=1).repeat(self.task.rows)
        fine |= np.arange(len(fine))[:, None] >= ends
        if fine.all():
            return
        t, row = np.argwhere(~fine)[0]
        raise EnvironmentFault(
            f"environment {self.task.env.id} was given NaN or infinity: the policy has diverged",
            int(row),
            self.rows.standing(int(row)).seed,
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
        return reset_seed(self.task.seed, Role.RESET, *self.task.place(row), self.task.iteration)

    def _streams(self, rows: Sequence[int]) -> list[np.random.Generator]:
        task = self.task
        if task.purpose == "evaluate":
            keys: list[tuple[int, ...]] = [(self._episode(row),) for row in rows]
            return self._generators.take(task.seed, Role.EVALUATION_ACTION, keys)
        keys = [(*task.place(row), task.iteration) for row in rows]
        return self._generators.take(task.seed, Role.ACTION, keys)

    def _noise_source(self) -> NoiseSource:
        task = self.task
        if task.acting == "sample" and task.policy.exploration == "gsde":
            return HeldNoise(task, self.rows)
        rows = range(task.columns) if task.acting != "best" else ()
        return StepNoise(task, self._streams(rows))

    def _draw(self) -> None:
        """The numbers of the next block of steps."""
        self._source.draw(self._noise)
        if self.task.acting == "sample":
            self._drawn = self.policy.drawn(self._noise)

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
