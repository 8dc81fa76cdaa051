"""Where the random numbers of a task's actions come from.

Keyed, so that they do not depend on where a task begins or how often it is run. Must not know:
weights, what the numbers are made into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .distributions import draw_noise
from .envs.vector_env import VectorEnv
from .seeding import Role, make_stream
from .spec import Float32, RolloutTask

#: Steps for which numbers are drawn at once.
NOISE_BLOCK_STEPS = 256


class NoiseSource(Protocol):
    """Fills in what the next steps' actions are drawn with."""

    #: How many steps `draw` is for.
    steps: int

    def draw(self, into: Float32) -> None:
        """The task's rows of `[steps, width, noise_size]`."""


class StepNoise:
    """Numbers of their own for every step, from one stream for each row."""

    def __init__(self, task: RolloutTask, streams: Sequence[np.random.Generator]) -> None:
        self.steps = min(NOISE_BLOCK_STEPS, task.steps)
        self._task = task
        self._streams = streams

    def draw(self, into: Float32) -> None:
        task = self._task
        task_rows = into[:, task.row_slice]
        for row, generator in enumerate(self._streams):
            task_rows[:, row] = draw_noise(task.policy, task.acting, generator, self.steps)


class GsdeNoise:
    """Numbers that stay for a part of an episode, and that the part itself names.

    So a task that begins in the middle of one finds those that the task before it ended with.
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
