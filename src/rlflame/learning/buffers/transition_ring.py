"""A ring buffer that holds a run's latest steps and gathers transitions.

A column holds the steps of one environment, and a row holds one step of every column. Rows are
numbered from zero, and a new row overwrites the oldest one. The observation after a step is stored
only once, in the next row. After a truncation, the next row holds the start of the next episode, so
a separate table holds the final observation.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlflame.errors import LearningError
from rlflame.rollout.task import Array, Float32

from ..base import State, Transitions

Int64 = NDArray[np.int64]
_TERMINATED, _TRUNCATED = 1, 2


class TransitionRing:
    """Stores the latest `rows` rows. A position is `row * columns + column`."""

    def __init__(self, rows: int, columns: int, observation_size: int, action_size: int) -> None:
        self.columns = columns
        #: The number of rows ever written.
        self.rows_written = 0
        # An additional row holds the observations after the latest row.
        self._rows = rows + 1
        self._cells = self._rows * columns
        # Zeros take no memory until they are written to.
        self._observations: Float32 = np.zeros((self._cells, observation_size), np.float32)
        self._actions: Float32 = np.zeros((self._cells, action_size), np.float32)
        self._rewards: Float32 = np.zeros(self._cells, np.float32)
        self._end_flags: NDArray[np.uint8] = np.zeros(self._cells, np.uint8)
        #: The final observations of truncated episodes, sorted by position.
        self._final_positions: Int64 = np.zeros(0, np.int64)
        self._final_observations: Float32 = np.zeros((0, observation_size), np.float32)

    @property
    def nbytes(self) -> int:
        cells = (self._observations, self._actions, self._rewards, self._end_flags)
        table = (self._final_positions, self._final_observations)
        return sum(array.nbytes for array in (*cells, *table))

    def list_shapes(self, steps: int, table: int) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Return the types and shapes of `steps` rows with `table` final observations."""
        cells, size = (steps, self.columns), self._observations.shape[1]
        return {
            "observations": (np.float32, (*cells, size)),
            "actions": (np.float32, (*cells, self._actions.shape[1])),
            "rewards": (np.float32, cells),
            "terminated": (np.bool_, cells),
            "truncated": (np.bool_, cells),
            "boundary_index": (np.int64, (table, 2)),
            "boundary_observations": (np.float32, (table, size)),
        }

    def append(self, steps: Mapping[str, Array]) -> None:
        """Append rows with the types and shapes from `list_shapes`.

        Each boundary index is a pair (row, column), with rows counted from the first new row.
        """
        rewards = steps["rewards"]
        cells = self._find_cells(self.rows_written, self.rows_written + len(rewards))
        self._observations[cells] = _flatten(steps["observations"])
        self._actions[cells] = _flatten(steps["actions"])
        self._rewards[cells] = rewards.reshape(-1)
        truncated, terminated = steps["truncated"].reshape(-1), steps["terminated"].reshape(-1)
        self._end_flags[cells] = terminated * _TERMINATED + truncated * _TRUNCATED
        positions = np.asarray(steps["boundary_index"] @ (self.columns, 1), np.int64)
        order = np.argsort(positions, kind="stable")
        missing = np.setdiff1d(np.flatnonzero(truncated & ~terminated), positions)
        is_outside = len(positions) and not 0 <= positions[order[0]] <= positions[order[-1]] < len(
            cells
        )
        if len(missing) or is_outside:
            raise LearningError("The final observations do not match the truncated episodes.")
        positions = positions[order] + self.rows_written * self.columns
        self.rows_written += len(rewards)
        oldest = (self.rows_written - self._rows + 1) * self.columns
        drop_count = int(np.searchsorted(self._final_positions, oldest))
        if drop_count or len(positions):
            self._final_positions = np.concatenate([self._final_positions[drop_count:], positions])
            self._final_observations = np.concatenate(
                [self._final_observations[drop_count:], steps["boundary_observations"][order]]
            )

    def set_next_observations(self, observations: Float32) -> None:
        """Set the observation that follows the latest step of each column."""
        self._observations[self._find_cells(self.rows_written, self.rows_written + 1)] = (
            observations
        )

    def get_next_observations(self) -> Float32:
        return self._observations[self._find_cells(self.rows_written, self.rows_written + 1)]

    def copy_rows(self, first: int, stop: int) -> State:
        """Return copies of the rows from `first` up to `stop` in the format of `append`."""
        cells = self._find_cells(first, stop)
        ends = self._end_flags[cells]
        bounds = (first * self.columns, stop * self.columns)
        finals = slice(*np.searchsorted(self._final_positions, bounds))
        positions = self._final_positions[finals]
        arrays: State = {
            "observations": self._observations[cells],
            "actions": self._actions[cells],
            "rewards": self._rewards[cells],
            "terminated": (ends & _TERMINATED) != 0,
            "truncated": (ends & _TRUNCATED) != 0,
        }
        rows = {n: a.reshape(stop - first, self.columns, *a.shape[1:]) for n, a in arrays.items()}
        index = np.stack(np.divmod(positions, self.columns), axis=1) - np.array([first, 0])
        return {
            **rows,
            "boundary_index": index,
            "boundary_observations": self._final_observations[finals].copy(),
        }

    def gather(self, positions: Int64, powers: Float32, out: Transitions) -> None:
        """Write the transitions that begin at these positions to `out`.

        `powers[k]` is the discount over k steps. `len(powers) - 1` rewards are summed, or fewer at
        the end of an episode or of the stored rows.
        """
        cells = positions % self._cells
        # mode="clip" skips the index check and writes directly to `out`.
        np.take(self._observations, cells, axis=0, out=out.observations, mode="clip")
        np.take(self._actions, cells, axis=0, out=out.actions, mode="clip")
        np.take(self._rewards, cells, out=out.rewards, mode="clip")
        ends = np.take(self._end_flags, cells, mode="clip")
        last: Int64 = positions
        reward_counts: Int64 | int = 1
        if len(powers) > 2:
            last, reward_counts = self._sum_rewards(positions, ends, powers, out.rewards)
        np.take(
            self._observations,
            (last + self.columns) % self._cells,
            axis=0,
            out=out.next_observations,
            mode="clip",
        )
        truncated = np.flatnonzero(ends == _TRUNCATED)
        if len(truncated):
            places = np.searchsorted(self._final_positions, last[truncated])
            out.next_observations[truncated] = self._final_observations[places]
        out.bootstrap[:] = powers[reward_counts]
        out.bootstrap[(ends & _TERMINATED) != 0] = 0.0

    def find_ends(self, positions: Int64) -> NDArray[np.bool_]:
        """Return whether an episode ends at each of these positions."""
        return np.not_equal(self._end_flags[positions % self._cells], 0)

    def _sum_rewards(
        self, positions: Int64, ends: NDArray[np.uint8], powers: Float32, rewards: Float32
    ) -> tuple[Int64, Int64]:
        """Add later rewards, update `ends`, and return last positions and step counts."""
        last, reward_counts = positions.copy(), np.ones(len(positions), np.int64)
        running = np.arange(len(positions))
        for k in range(1, len(powers) - 1):
            next_positions = last[running] + self.columns
            running = running[
                (ends[running] == 0) & (next_positions < self.rows_written * self.columns)
            ]
            if not len(running):
                break
            last[running] += self.columns
            cells = last[running] % self._cells
            rewards[running] += powers[k] * self._rewards[cells]
            ends[running] = self._end_flags[cells]
            reward_counts[running] = k + 1
        return last, reward_counts

    def _find_cells(self, first: int, stop: int) -> Int64:
        return np.arange(first * self.columns, stop * self.columns) % self._cells


def count_final_observation_bytes(observation_size: int) -> int:
    """Return the bytes per final observation, including one temporary copy."""
    return 2 * (4 * observation_size + 8)


def _flatten(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])
