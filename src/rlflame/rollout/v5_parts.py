"""What tasks on Gymnasium's v5 MuJoCo environments are made of, for all rows at once.

A task repeats one of Gymnasium's classes, operation for operation and type for type, because the
bits must be the same: where a whole array may round otherwise than a row alone (powers, sines, dot
products), rows are worked on one by one. Settings are read from an instance of Gymnasium's own
class, so no default stands here. Must not know: stepping, resets, time limits, episodes, policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from .spec import Array, Float32, Float64


class Gathering:
    """Tables of ours into which MuJoCo's own arrays are copied, row by row, after each step."""

    def __init__(self, bodies: Sequence[Any]) -> None:
        #: One `MjData` for each row.
        self.bodies = bodies
        #: For each row what is copied: where to, and from which view of MuJoCo's memory.
        self.copies: list[list[tuple[Array, Array]]] = [[] for _ in bodies]

    def take(self, *parts: Callable[[Any], Array]) -> Float64:
        """A table `[N, columns]` of these parts of each row's data, one after the other."""
        size = sum(part(self.bodies[0]).size for part in parts)
        table = np.zeros((len(self.bodies), size), np.float64)
        for line, data, copies in zip(table, self.bodies, self.copies, strict=True):
            at = 0
            for part in parts:
                view = part(data)
                if view.size:
                    copies.append((line[at : at + view.size].reshape(view.shape), view))
                at += view.size
        return table


class Task(Protocol):
    """What is asked of an environment, apart from its physics."""

    #: Names of the settings that must be numbers, pairs of numbers, and flags.
    numbers: tuple[str, ...]
    ranges: tuple[str, ...]
    flags: tuple[str, ...]
    #: The model file; another has other bodies.
    model: str
    #: Whether contact forces are read, which MuJoCo computes only when asked.
    reads_forces: bool

    def __init__(self, world: Any, gathering: Gathering) -> None: ...

    def begin(self, row: int) -> None:
        """An episode of this row begins; its columns have been gathered."""

    def rate(self, actions: Float32, rewards: Float64) -> Array | None:
        """The rewards of the step just taken, and whom it ended; None where nobody."""

    def observe(self, out: Array) -> None:
        """What every row sees, after it was rated."""


def positions(data: Any) -> Array:
    view: Array = data.qpos
    return view


def velocities(data: Any) -> Array:
    view: Array = data.qvel
    return view


class Control:
    """A weight times the sum of the squared actions, in the actions' own float32."""

    def __init__(self, weight: float, rows: int, actions: int) -> None:
        self._weight = weight
        self._squares = np.zeros((rows, actions), np.float32)
        self._sums = np.zeros(rows, np.float32)

    def cost(self, actions: Float32) -> Float32:
        np.square(actions, self._squares)
        np.add.reduce(self._squares, axis=1, out=self._sums)
        if self._weight != 1:
            np.multiply(self._sums, self._weight, self._sums)
        return self._sums


class Progress:
    """A weight times the speed at which a column of positions has grown."""

    def __init__(self, world: Any, column: Float64) -> None:
        self._column, self._dt = column, world.dt
        self._weight = world._forward_reward_weight
        self._before = column.copy()

    def begin(self, row: int) -> None:
        self._before[row] = self._column[row]

    def reward(self, out: Float64) -> None:
        np.subtract(self._column, self._before, out)
        np.divide(out, self._dt, out)
        if self._weight != 1:
            np.multiply(out, self._weight, out)
        self._before[...] = self._column


class Health:
    """Strict bounds on columns, and what a row inside them earns."""

    def __init__(self, world: Any, columns: Float64, low: Float64, high: Float64) -> None:
        self._columns = columns
        shape = columns.shape
        self._low, self._high = np.zeros(shape), np.zeros(shape)
        self._low[...], self._high[...] = low, high
        self._above, self._below = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        self._healthy = np.zeros(shape[0], np.bool_)
        self._reward = world._healthy_reward
        self._ends = world._terminate_when_unhealthy

    def add(self, rewards: Float64) -> Array | None:
        """Add what being healthy earns; who is not, where that ends an episode."""
        np.less(self._low, self._columns, self._above)
        np.less(self._columns, self._high, self._below)
        np.logical_and(self._above, self._below, self._above)
        if np.count_nonzero(self._above) == self._above.size:
            np.add(rewards, self._reward, rewards)
            return None
        healthy = np.logical_and.reduce(self._above, axis=1, out=self._healthy)
        np.add(rewards, healthy * self._reward, rewards)
        return ~healthy if self._ends else None
