"""The growing arrays of one run of a task, and the fragment that is made of them."""

from __future__ import annotations

import numpy as np

from .envs.vector_env import EpisodePosition
from .task import Array, EnvState, EpisodeStat, Float32, Fragment, RolloutTask

#: Steps of whole episodes for which there is room at first.
_FIRST_STEPS = 256


class FragmentRecorder:
    """Arrays `[T, N, ...]`, filled step by step. A task that records nothing fills only those
    of rewards and ends."""

    def __init__(self, task: RolloutTask) -> None:
        self._task = task
        self._capacity = task.steps if task.unit == "steps" else min(task.steps, _FIRST_STEPS)
        columns, spec = task.columns, task.policy
        recorded_steps = self._capacity if task.record else 0
        continuous = spec.action_kind == "continuous"
        self.observations: Array = np.zeros(
            (recorded_steps, columns, spec.observation_size), np.float32
        )
        self.actions: Array = np.zeros(
            (recorded_steps, columns, *((spec.action_size,) if continuous else ())),
            np.float32 if continuous else np.int64,
        )
        self.log_probs: Array = np.zeros((recorded_steps, columns), np.float32)
        self.rewards: Array = np.zeros((self._capacity, columns), np.float64)
        self.terminated: Array = np.zeros((self._capacity, columns), np.bool_)
        self.truncated: Array = np.zeros((self._capacity, columns), np.bool_)
        #: Steps taken by each row.
        self.lengths = np.zeros(columns, np.int64)
        self._episodes: list[EpisodeStat] = []
        self._boundaries: list[tuple[int, int, Float32]] = []

    def ensure_capacity(self, t: int) -> None:
        """Make room for step `t`."""
        if t < self._capacity:
            return
        self._capacity = min(self._task.steps, 2 * self._capacity)
        names = ["rewards", "terminated", "truncated"]
        if self._task.record:
            names += ["observations", "actions", "log_probs"]
        for name in names:
            old: Array = getattr(self, name)
            new = np.zeros((self._capacity, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def add_episode(self, position: EpisodePosition, t: int, observation: Float32) -> None:
        """The episode of a row has ended with step `t`, after which it observed this."""
        truncated = bool(self.truncated[t, position.row])
        self.lengths[position.row] = t + 1
        if truncated and self._task.record:
            self._boundaries.append((t, position.row, observation.copy()))
        self._episodes.append(
            EpisodeStat(
                position.row,
                position.episode,
                position.seed,
                position.episode_return,
                position.elapsed,
                truncated,
                t,
            )
        )

    def find_invalid_action(self) -> tuple[int, int] | None:
        """Step and row of the first action or log-density that is not finite."""
        if np.isfinite(self.log_probs).all() and np.isfinite(self.actions).all():
            return None
        is_finite = np.isfinite(self.actions.reshape(*self.log_probs.shape, -1)).all(axis=2)
        is_finite &= np.isfinite(self.log_probs)
        # Behind a slot's last step stand leftovers.
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
        size = task.policy.observation_size
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
            last_observations=last_observations.copy(),
            boundary_index=index,
            boundary_observations=np.array(hidden, np.float32).reshape(-1, size),
            episodes=tuple(self._episodes),
            states=states,
            extra_slots=task.extra_slots,
        )
