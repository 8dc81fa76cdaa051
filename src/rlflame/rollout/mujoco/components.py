"""What tasks on Gymnasium's v5 MuJoCo environments are made of, for all rows at once.

A task repeats one of Gymnasium's classes, operation for operation and type for type, because the
bits must be the same: where a whole array may round otherwise than a row alone (powers, sines, dot
products), rows are worked on one by one. Settings are read from an instance of Gymnasium's own
class, so no default stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..task import Array, Float32, Float64


@dataclass(frozen=True, slots=True)
class DataSlice:
    """What of a field of MuJoCo's `MjData`."""

    field: str
    #: As it would stand in brackets behind the field; all of it by default.
    index: Any = ...


POSITIONS = DataSlice("qpos")
VELOCITIES = DataSlice("qvel")


class StateTables(Protocol):
    """What tasks ask of the bodies."""

    count: int

    def track(self, *parts: DataSlice) -> Float64:
        """A table `[N, columns]` of these parts, one after the other, renewed by whatever moves.

        A task may write into it: it is a copy.
        """


class ResetSampler(Protocol):
    def draw(self, generator: np.random.Generator) -> tuple[Float64, Float64]:
        """Positions and speeds at the beginning of an episode."""


class MujocoTask(Protocol):
    """What is asked of an environment, apart from its physics."""

    #: Names of the settings that must be numbers, pairs of numbers, and flags.
    numbers: tuple[str, ...]
    ranges: tuple[str, ...]
    flags: tuple[str, ...]
    #: The model file; another has other bodies.
    model: str
    #: Whether contact forces are read, which MuJoCo computes only when asked.
    reads_forces: bool

    reset_sampler: ResetSampler

    def __init__(self, base_env: Any, tables: StateTables) -> None: ...

    def reset_row(self, row: int) -> None:
        """An episode of this row begins; the tables show it."""

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        """The rewards of the step just taken, and whom it ended; None where nobody."""

    def observe(self, out: Array) -> None:
        """What every row sees, after it was rated or has begun."""


class ResetNoise:
    """Begins somewhat off where the model has it: evenly, or the speeds by normal numbers."""

    def __init__(self, base_env: Any, normal_speeds: bool = False) -> None:
        self._qpos, self._qvel = base_env.init_qpos.copy(), base_env.init_qvel.copy()
        self._scale = base_env._reset_noise_scale
        self._normal_speeds = normal_speeds

    def draw(self, generator: np.random.Generator) -> tuple[Float64, Float64]:
        low, high, size = -self._scale, self._scale, self._qpos.size
        if self._normal_speeds:
            qpos = self._qpos + generator.uniform(low, high, size)
            return qpos, self._qvel + self._scale * generator.standard_normal(self._qvel.size)
        # The numbers of two calls, one for each.
        noise = generator.uniform(low, high, size + self._qvel.size)
        return self._qpos + noise[:size], self._qvel + noise[size:]


# Settings stand in arrays below: a number is made an array at each use, which takes as long as
# what is done with it.


class ControlCost:
    """A weight times the sum of the squared actions, in the actions' own float32."""

    def __init__(self, weight: float, rows: int, actions: int) -> None:
        self._weights = None if weight == 1 else np.full(rows, weight, np.float32)
        self._squares = np.zeros((rows, actions), np.float32)
        self._sums = np.zeros(rows, np.float32)

    def compute(self, actions: Float32) -> Float32:
        np.square(actions, self._squares)
        np.add.reduce(self._squares, axis=1, out=self._sums)
        if self._weights is not None:
            np.multiply(self._sums, self._weights, self._sums)
        return self._sums


class ForwardReward:
    """A weight times the speed at which a column of positions has grown."""

    def __init__(self, base_env: Any, column: Float64) -> None:
        self._column = column
        self._dt = np.full(column.shape, base_env.dt, np.float64)
        weight = base_env._forward_reward_weight
        self._weights = None if weight == 1 else np.full(column.shape, weight, np.float64)
        self._previous = column.copy()

    def reset_row(self, row: int) -> None:
        self._previous[row] = self._column[row]

    def compute(self, out: Float64) -> None:
        np.subtract(self._column, self._previous, out)
        np.divide(out, self._dt, out)
        if self._weights is not None:
            np.multiply(out, self._weights, out)
        self._previous[...] = self._column


class HealthyReward:
    """Strict bounds on columns, and what a row inside them earns."""

    def __init__(self, base_env: Any, columns: Float64, low: Float64, high: Float64) -> None:
        self._columns = columns
        shape = columns.shape
        self._low, self._high = np.zeros(shape), np.zeros(shape)
        self._low[...], self._high[...] = low, high
        self._within = np.zeros((2, *shape), np.bool_)
        self._above, self._below = self._within
        self._healthy = np.zeros(shape[0], np.bool_)
        self._rewards = np.full(shape[0], base_env._healthy_reward, np.float64)
        self._is_terminal = base_env._terminate_when_unhealthy

    def add(self, rewards: Float64) -> Array | None:
        """Add what being healthy earns; who is not, where that ends an episode."""
        np.less(self._low, self._columns, self._above)
        np.less(self._columns, self._high, self._below)
        if np.count_nonzero(self._within) == self._within.size:
            np.add(rewards, self._rewards, rewards)
            return None
        np.logical_and(self._above, self._below, self._above)
        healthy = np.logical_and.reduce(self._above, axis=1, out=self._healthy)
        np.add(rewards, healthy * self._rewards, rewards)
        return ~healthy if self._is_terminal else None
