"""Steps N simulations of one MuJoCo model, and copies their data to tables.

If `mujoco.batch` exists and no contact forces are read, one call steps all simulations. Otherwise,
each simulation has its own `MjData`. Both methods return bit-identical results.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import mujoco
import numpy as np

from ..task import Array, Float64

_INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION


class DataSlice(NamedTuple):
    """A part of a field of MuJoCo's `MjData`."""

    field: str
    #: The index into the field; by default, the whole field.
    index: Any = ...


POSITIONS = DataSlice("qpos")
VELOCITIES = DataSlice("qvel")


class StartState(NamedTuple):
    """The state at the start of an episode, and the row of each table that belongs to it."""

    physics: Float64
    table_rows: tuple[Float64, ...]


class Simulation:
    """N simulations of one model, each in an `MjData` or all in one batch."""

    #: The row that is being stepped or set, if known.
    current_row = 0
    #: The controls `[N, controls]` for the next step, which callers write.
    controls: Float64

    def __init__(self, model: Any, skip: int, count: int, reads_forces: bool) -> None:
        """One step of the environment consists of `skip` physics steps."""
        self.count = count
        self._model, self._skip, self._reads_forces = model, skip, reads_forces
        self._batch: Any = None if reads_forces else _make_batch(model, count)
        if self._batch is None:
            self._data = [mujoco.MjData(model) for _ in range(count)]
            self.controls = np.zeros((count, model.nu), np.float64)
        else:
            self._data = []
            self.controls = self._batch.bind("ctrl")
        #: Computes start states. A batch's `forward` rejects positions that MuJoCo accepts.
        self._start_data = mujoco.MjData(model)
        self._tables: list[Float64] = []
        #: A row of each table that belongs to `_start_data`.
        self._start_rows: list[Float64] = []
        #: Pairs of columns in these rows and the fields that are copied to them.
        self._start_copies: list[tuple[Array, Array]] = []
        #: For each `MjData`, pairs of table columns and the fields that are copied to them.
        self._row_copies: list[list[tuple[Array, Array]]] = [[] for _ in self._data]
        #: The same for all rows of a batch.
        self._batch_copies: list[tuple[Array, Array]] = []
        self._active: Sequence[int] = range(count)
        self._ids: Array | None = None

    def track(self, *parts: DataSlice) -> Float64:
        """Return a table `[N, columns]` of these parts, updated by each step and reset.

        The table is a copy, so a task may write to it.
        """
        sizes = [_make_view(self._start_data, part).size for part in parts]
        starts = list(accumulate(sizes, initial=0))
        table = np.zeros((self.count, starts.pop()), np.float64)
        layout = [item for item in zip(parts, starts, sizes, strict=True) if item[2]]
        start_row = np.zeros(table.shape[1], np.float64)
        self._tables.append(table)
        self._start_rows.append(start_row)
        owners = [(self._start_data, start_row, self._start_copies)]
        if self._batch is None:
            owners += zip(self._data, table, self._row_copies, strict=True)
        for data, row, copies in owners:
            for part, start, size in layout:
                view = _make_view(data, part)
                copies.append((row[start : start + size].reshape(view.shape), view))
        if self._batch is None:
            return table
        if parts[:2] == (POSITIONS, VELOCITIES):
            # Positions and velocities are adjacent in a state, after the time.
            size = self._model.nq + self._model.nv
            self._batch_copies.append((table[:, :size], self._batch.state[:, 1 : 1 + size]))
            layout = layout[2:]
        for part, start, size in layout:
            index = part.index if isinstance(part.index, tuple) else (part.index,)
            rows = self._batch.bind(part.field)[(slice(None), *index)]
            self._batch_copies.append((table[:, start : start + size].reshape(rows.shape), rows))
        return table

    def compute_start(self, qpos: Float64, qvel: Float64) -> StartState:
        """Compute the state of an episode that starts with these positions and velocities."""
        model, data = self._model, self._start_data
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(model, data)
        for columns, source in self._start_copies:
            columns[...] = source
        rows = tuple(row.copy() for row in self._start_rows)
        return StartState(read_state(model, data), rows)

    def reset_row(self, row: int, start: StartState) -> None:
        self.current_row = row
        if self._batch is None:
            # A physics state does not contain warnings and solver statistics.
            mujoco.mj_resetData(self._model, self._data[row])
        self.set_state(row, start.physics)
        for table, table_row in zip(self._tables, start.table_rows, strict=True):
            table[row] = table_row

    def step(self, active: Sequence[int]) -> None:
        """Take one step of the environment in each active row."""
        if self._batch is not None:
            self._step_batch(active)
            return
        step, forces, controls = mujoco.mj_step, mujoco.mj_rnePostConstraint, self.controls
        model, skip, reads_forces = self._model, self._skip, self._reads_forces
        for row in active:
            self.current_row = row
            data = self._data[row]
            data.ctrl[...] = controls[row]
            step(model, data, skip)
            if reads_forces:
                forces(model, data)
            for columns, source in self._row_copies[row]:
                columns[...] = source

    def copy_states(self) -> Float64:
        """Return a copy `[N, numbers]` of the physics states."""
        if self._batch is not None:
            return np.array(self._batch.state)
        return np.array([read_state(self._model, data) for data in self._data])

    def set_state(self, row: int, state: Float64) -> None:
        """Set the physics state of a row. The next step updates the tables."""
        if self._batch is not None:
            self._batch.state[row] = state
        else:
            write_state(self._model, self._data[row], state)

    def _step_batch(self, active: Sequence[int]) -> None:
        if active is not self._active:
            self._active = active
            self._ids = None if len(active) == self.count else np.array(active, np.int32)
        try:
            self._batch.step(self._ids, self._skip)
        except RuntimeError as error:
            self.current_row = int(getattr(error, "ids", [self.current_row])[0])
            raise
        for columns, source in self._batch_copies:
            columns[...] = source


def read_state(model: Any, data: Any) -> Float64:
    """Return the physics state of one simulation."""
    state = np.zeros(mujoco.mj_stateSize(model, _INTEGRATION), np.float64)
    mujoco.mj_getState(model, data, state, _INTEGRATION)
    return state


def write_state(model: Any, data: Any, state: Float64) -> None:
    mujoco.mj_setState(model, data, state, _INTEGRATION)


def _make_batch(model: Any, count: int) -> Any:
    """Return a batch that steps all rows in one call, or None if MuJoCo is too old."""
    try:
        batch = importlib.import_module("mujoco.batch")
    except ImportError:
        return None
    # One thread, because there are as many workers as cores.
    return batch.Batch(model, count, 1)


def _make_view(data: Any, part: DataSlice) -> Array:
    """Return a view of a part of a field in MuJoCo's memory."""
    view: Array = getattr(data, part.field)[part.index]
    return view
