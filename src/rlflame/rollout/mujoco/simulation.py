"""N simulations of one MuJoCo model, and the contract of the tasks on them.

Controls go in, and tables of what is observed come out.

`mujoco.batch` steps all of them in one call, where it exists and computes everything that is read;
otherwise each is an `MjData`. The bits are the same.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mujoco
import numpy as np

from ..task import Array, Float32, Float64

_INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION


@dataclass(frozen=True, slots=True)
class DataSlice:
    """What of a field of MuJoCo's `MjData`."""

    field: str
    #: As it would stand in brackets behind the field; all of it by default.
    index: Any = ...


POSITIONS = DataSlice("qpos")
VELOCITIES = DataSlice("qvel")


class MujocoTask(Protocol):
    """An environment apart from its physics, for all rows at once.

    A task repeats one of Gymnasium's classes, operation for operation and type for type, because
    the bits must be the same: where a whole array may round otherwise than a row alone (powers,
    sines, dot products), rows are worked on one by one. Settings are read from an instance of
    Gymnasium's own class, so no default stands here.
    """

    #: Whether contact forces are read, which MuJoCo computes only when asked.
    reads_forces: bool = False
    #: Whether speeds begin off the model's by normal numbers; positions, and others, evenly.
    normal_speeds: bool = False
    _start_qpos: Float64
    _start_qvel: Float64
    _noise_scale: float

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        self._start_qpos, self._start_qvel = base_env.init_qpos.copy(), base_env.init_qvel.copy()
        self._noise_scale = getattr(base_env, "_reset_noise_scale", 0.0)

    def draw_start(self, generator: np.random.Generator) -> tuple[Float64, Float64]:
        """Positions and speeds at the beginning of an episode."""
        qpos, qvel, scale = self._start_qpos, self._start_qvel, self._noise_scale
        if self.normal_speeds:
            qpos = qpos + generator.uniform(-scale, scale, qpos.size)
            return qpos, qvel + scale * generator.standard_normal(qvel.size)
        # The numbers of two calls, one for each.
        noise = generator.uniform(-scale, scale, qpos.size + qvel.size)
        return qpos + noise[: qpos.size], qvel + noise[qpos.size :]

    def reset_row(self, row: int) -> None:
        """An episode of this row begins; the tables show it. Most tasks remember nothing of it."""
        del row

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        """The rewards of the step just taken, and whom it ended; None where nobody."""

    def observe(self, out: Array) -> None:
        """What every row sees, after it was rated or has begun."""


def make_simulation(model: Any, skip: int, count: int, reads_forces: bool) -> Simulation:
    """The fastest there are; `skip` steps of physics make one of the environment's."""
    if not reads_forces:
        with contextlib.suppress(ImportError):  # new in MuJoCo 4
            return BatchSimulation(importlib.import_module("mujoco.batch"), model, skip, count)
    return SerialSimulation(model, skip, count, reads_forces)


def _make_view(data: Any, part: DataSlice) -> Array:
    """Of MuJoCo's memory."""
    view: Array = getattr(data, part.field)[part.index]
    return view


def _slice_columns(table: Array, at: int, shape: tuple[int, ...]) -> Array:
    """Of a table, or of one line of it, those that an array of this shape goes to."""
    size = int(np.prod(shape, dtype=np.int64))
    return table[..., at : at + size].reshape(*table.shape[:-1], *shape)


def _join_copies(copies: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """As few copies as do the same: positions and speeds stand side by side in a batch's states."""
    joined: list[tuple[Array, Array]] = []
    for columns, source in copies:
        last = joined[-1] if joined else None
        if last is not None and all(map(_is_adjacent, last, (columns, source))):
            joined[-1] = _join_arrays(last[0], columns), _join_arrays(last[1], source)
        else:
            joined.append((columns, source))
    return joined


def _is_adjacent(left: Array, right: Array) -> bool:
    """Whether two tables are one, cut between two columns."""
    return (
        left.ndim == right.ndim == 2
        and left.strides == right.strides
        and left.ctypes.data + left.shape[1] * left.strides[1] == right.ctypes.data
    )


def _join_arrays(left: Array, right: Array) -> Array:
    shape = len(left), left.shape[1] + right.shape[1]
    return np.lib.stride_tricks.as_strided(left, shape, left.strides)


class SerialSimulation:
    """An `MjData` each, stepped one after the other."""

    #: What the next step's actuators are given, to be written `[N, controls]`.
    controls: Float64
    #: The one being stepped or set now, as far as that can be told.
    current_row: int

    def __init__(self, model: Any, skip: int, count: int, reads_forces: bool) -> None:
        self.count, self.current_row = count, 0
        self.controls = np.zeros((count, model.nu), np.float64)
        self._model, self._skip, self._reads_forces = model, skip, reads_forces
        self._data = [mujoco.MjData(model) for _ in range(count)]
        #: What a step touches: MuJoCo's controls and ours, its data, and what is copied.
        self._row_arrays: list[tuple[Array, Array, Any, list[tuple[Array, Array]]]] = [
            (data.ctrl, controls, data, [])
            for data, controls in zip(self._data, self.controls, strict=True)
        ]

    def track(self, *parts: DataSlice) -> Float64:
        """A table `[N, columns]` of these parts, one after the other, renewed by whatever moves.

        A task may write into it: it is a copy.
        """
        sizes = [_make_view(self._data[0], part).size for part in parts]
        table = np.zeros((self.count, sum(sizes)), np.float64)
        for line, (_, _, data, copies) in zip(table, self._row_arrays, strict=True):
            at = 0
            for part, size in zip(parts, sizes, strict=True):
                view = _make_view(data, part)
                if size:
                    copies.append((_slice_columns(line, at, view.shape), view))
                at += size
        return table

    def reset_row(self, row: int, qpos: Float64, qvel: Float64) -> None:
        self.current_row = row
        _, _, data, copies = self._row_arrays[row]
        mujoco.mj_resetData(self._model, data)
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(self._model, data)
        for to, source in copies:
            to[...] = source

    def step(self, active: Sequence[int]) -> None:
        """As many steps of physics as make one of the environment's."""
        step, forces, row_arrays = mujoco.mj_step, mujoco.mj_rnePostConstraint, self._row_arrays
        model, skip, reads_forces = self._model, self._skip, self._reads_forces
        for row in active:
            self.current_row = row
            control, controls, data, copies = row_arrays[row]
            control[...] = controls
            step(model, data, skip)
            if reads_forces:
                forces(model, data)
            for to, source in copies:
                to[...] = source

    def copy_states(self) -> Float64:
        """A copy `[N, numbers]` of all that physics goes on from."""
        size = mujoco.mj_stateSize(self._model, _INTEGRATION)
        states = np.zeros((self.count, size), np.float64)
        for data, line in zip(self._data, states, strict=True):
            mujoco.mj_getState(self._model, data, line, _INTEGRATION)
        return states

    def set_state(self, row: int, state: Float64) -> None:
        """Take up such a line; tables are renewed with the next step."""
        mujoco.mj_setState(self._model, self._data[row], state, _INTEGRATION)


class BatchSimulation:
    """Lines of one array, stepped in one call. The methods are those of `SerialSimulation`."""

    def __init__(self, batch: Any, model: Any, skip: int, count: int) -> None:
        self.count, self.current_row = count, 0
        # One thread: there are as many workers as processors.
        self._batch = batch.Batch(model, count, 1)
        self._failure: type[Exception] = batch.SimulationError
        self._skip = skip
        self._states: Float64 = self._batch.state
        self.controls = self._batch.bind("ctrl")
        #: Where beginnings are computed: a batch's `forward` refuses positions that MuJoCo's takes.
        self._model, self._data = model, mujoco.MjData(model)
        #: Columns of tables, and what they show of all bodies.
        self._copies: list[tuple[Array, Array]] = []
        #: Columns of tables, and what they show of the beginning of an episode.
        self._reset_copies: list[tuple[Array, Array]] = []
        self._active: Sequence[int] = range(count)
        self._ids: Array | None = None

    def track(self, *parts: DataSlice) -> Float64:
        views = [_make_view(self._data, part) for part in parts]
        table = np.zeros((self.count, sum(view.size for view in views)), np.float64)
        copies = []
        at = 0
        for part, source in zip(parts, views, strict=True):
            if source.size:
                columns = _slice_columns(table, at, source.shape)
                self._reset_copies.append((columns, source))
                copies.append((columns, self._make_view(part)))
            at += source.size
        self._copies += _join_copies(copies)
        return table

    def reset_row(self, row: int, qpos: Float64, qvel: Float64) -> None:
        self.current_row = row
        model, data = self._model, self._data
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(model, data)
        mujoco.mj_getState(model, data, self._states[row], _INTEGRATION)
        for columns, source in self._reset_copies:
            columns[row] = source

    def step(self, active: Sequence[int]) -> None:
        if active is not self._active:
            self._active = active
            self._ids = None if len(active) == self.count else np.array(active, np.int32)
        try:
            self._batch.step(self._ids, self._skip)
        except self._failure as error:
            self.current_row = int(error.ids[0])  # type: ignore[attr-defined]
            raise
        for columns, source in self._copies:
            columns[...] = source

    def copy_states(self) -> Float64:
        return self._states.copy()

    def set_state(self, row: int, state: Float64) -> None:
        self._states[row] = state

    def _make_view(self, part: DataSlice) -> Array:
        index = part.index if isinstance(part.index, tuple) else (part.index,)
        view: Array = self._batch.bind(part.field)[(slice(None), *index)]
        return view


Simulation = SerialSimulation | BatchSimulation
