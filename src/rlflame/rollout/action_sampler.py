"""The actions of a task, and the random numbers that they are drawn with.

The numbers are keyed, so that they do not depend on where a task begins or how often it is run.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .distributions import NoiseBlock, compute_noise_size, draw_noise
from .envs.vector_env import VectorEnv
from .policy import Policy
from .seeding import Role, make_stream
from .task import Array, Float32, RolloutTask

#: Steps for which numbers are drawn at once.
_BLOCK_STEPS = 256


class NoiseSource(Protocol):
    """The random numbers of a task's actions."""

    #: How many steps one draw is for.
    steps: int

    def draw(self, into: Float32) -> None:
        """Fill the task's rows of `[steps, width, noise_size]`."""


class StepNoise:
    """New numbers for every step, from one stream for each row."""

    def __init__(self, task: RolloutTask) -> None:
        self.steps = min(_BLOCK_STEPS, task.steps)
        self._task = task
        self._streams = [self._make_stream(row) for row in range(task.columns)]

    def draw(self, into: Float32) -> None:
        task = self._task
        task_rows = into[:, task.row_slice]
        for row, generator in enumerate(self._streams):
            task_rows[:, row] = draw_noise(task.policy, task.acting, generator, self.steps)

    def _make_stream(self, row: int) -> np.random.Generator:
        task = self._task
        if task.purpose == "evaluate":
            return make_stream(task.seed, Role.EVALUATION_ACTION, task.get_episode(row))
        return make_stream(task.seed, Role.ACTION, *task.locate(row), task.iteration)


class GsdeNoise:
    """Numbers that stay for a part of an episode, from a stream that is keyed by the part.

    So a task that begins in the middle of a part uses the numbers of the task before it.
    """

    steps = 1

    def __init__(self, task: RolloutTask, vector_env: VectorEnv) -> None:
        self._task = task
        self._vector_env = vector_env
        self._episode_parts = [(-1, -1)] * task.rows

    def draw(self, into: Float32) -> None:
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
            into[:, task.first_row + i] = draw_noise(task.policy, task.acting, generator, 1)


class ActionSampler:
    """Acts for all rows of a task; noise is drawn for a block of steps at once."""

    def __init__(self, task: RolloutTask, policy: Policy, vector_env: VectorEnv) -> None:
        self._task = task
        self._policy = policy
        self._source: NoiseSource | None = None
        self._block: NoiseBlock | None = None
        if task.acting == "best":
            return
        uses_gsde = task.acting == "sample" and task.policy.exploration == "gsde"
        self._source = GsdeNoise(task, vector_env) if uses_gsde else StepNoise(task)
        height = task.policy.width * len(task.slots)
        shape = self._source.steps, height, compute_noise_size(task.policy, task.acting)
        self._noise = np.zeros(shape, np.float32)

    def act(self, observations: Float32, t: int) -> tuple[Array, Float32 | None]:
        """The actions of step `t`; log-densities only of actions that are drawn."""
        if self._source is None:
            return self._policy.mode(observations), None
        step = t % self._source.steps
        if step == 0:
            self._source.draw(self._noise)
            if self._task.acting == "sample":
                self._block = self._policy.prepare_noise(self._noise)
        if self._block is None:
            return self._policy.sample_uniform(self._noise[step])
        return self._policy.act(observations, self._block, step)
