"""Computes rewards, terminations and observations of v5 MuJoCo environments.

A task repeats the operations of a Gymnasium class with the same types, because results must be
bit-identical. Rows are computed one by one where an operation on the whole array may round
differently (powers, sines, dot products). Settings are read from an instance of Gymnasium's class,
so this module has no defaults. Settings are stored as arrays, because numpy would convert a number
at each use, which takes as long as the operation.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ..task import Array, Float32, Float64
from .simulation import POSITIONS, VELOCITIES, DataSlice, Simulation


class MujocoTask:
    """Everything in an environment except the physics, for all rows at once."""

    #: Whether contact forces are read; MuJoCo computes them only on request.
    reads_forces: bool = False
    #: Whether initial velocities have normal noise; all other initial values have uniform noise.
    _normal_speeds: bool = False
    _observed_state: Float64

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        self._start_qpos, self._start_qvel = base_env.init_qpos.copy(), base_env.init_qvel.copy()
        self._noise_scale = getattr(base_env, "_reset_noise_scale", 0.0)

    def draw_start(self, generator: np.random.Generator) -> tuple[Float64, Float64]:
        """Draw the positions and velocities at the start of an episode."""
        qpos, qvel, scale = self._start_qpos, self._start_qvel, self._noise_scale
        qpos = qpos + generator.uniform(-scale, scale, qpos.size)
        if self._normal_speeds:
            return qpos, qvel + scale * generator.standard_normal(qvel.size)
        return qpos, qvel + generator.uniform(-scale, scale, qvel.size)

    def reset_row(self, row: int) -> None:
        """Start an episode in a row whose new state is already in the tables."""

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        """Write the rewards of a step; return a mask of terminated rows, or None."""
        raise NotImplementedError

    def observe(self, out: Array) -> None:
        """Write the observations of all rows, after `compute_rewards` or `reset_row`."""
        out[...] = self._observed_state


class _Locomotion(MujocoTask):
    """A task that rewards forward speed and health, and penalises large controls."""

    _hidden_positions = 1
    #: The fields that settings can add to observations, with the first index that is used.
    _optional_fields: ClassVar[dict[str, int]] = {}

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        rows = simulation.count
        optional = (
            DataSlice(field, np.s_[first:])
            for field, first in self._optional_fields.items()
            if getattr(base_env, f"_include_{field}_in_observation")
        )
        self._state = simulation.track(POSITIONS, VELOCITIES, *optional)
        is_hidden = base_env._exclude_current_positions_from_observation
        self._observed_state = self._state[:, self._hidden_positions if is_hidden else 0 :]
        self._place = self._track_place(base_env, simulation)
        self._previous_place = self._place.copy()
        self._dt = np.full(rows, base_env.dt, np.float64)
        self._forward_weights = np.full(rows, base_env._forward_reward_weight, np.float64)
        self._control_weights = np.full(rows, base_env._ctrl_cost_weight, np.float32)
        self._is_weighted = base_env._forward_reward_weight != 1
        self._squared_controls = np.zeros((rows, base_env.model.nu), np.float32)
        self._control_costs = np.zeros(rows, np.float32)
        columns, low, high = self._find_healthy_range(base_env)
        self._limited_state = self._state[:, columns]
        self._low, self._high = np.zeros((2, *self._limited_state.shape))
        self._low[...], self._high[...] = low, high
        self._range_masks = np.zeros((2, *self._low.shape), np.bool_)
        self._low_mask, self._high_mask = self._range_masks
        self._healthy_rewards = np.full(rows, getattr(base_env, "_healthy_reward", 0.0), np.float64)
        self._is_terminal = getattr(base_env, "_terminate_when_unhealthy", False)

    def reset_row(self, row: int) -> None:
        self._previous_place[row] = self._place[row]

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        np.subtract(self._place, self._previous_place, rewards)
        np.divide(rewards, self._dt, rewards)
        if self._is_weighted:
            np.multiply(rewards, self._forward_weights, rewards)
        self._previous_place[...] = self._place
        ends = self._add_healthy_rewards(rewards) if self._low.size else None
        np.subtract(rewards, self._compute_costs(actions), rewards)
        return ends

    def _track_place(self, base_env: Any, simulation: Simulation) -> Float64:
        """Return each row's coordinate in the rewarded direction."""
        return self._state[:, 0]

    def _find_healthy_range(self, base_env: Any) -> tuple[slice, Any, Any]:
        """Return the state columns that have a healthy range, and the bounds."""
        return slice(0), 0.0, 0.0

    def _add_healthy_rewards(self, rewards: Float64) -> Array | None:
        """Add the healthy reward; return a mask of the rows that terminate, or None."""
        np.less(self._low, self._limited_state, self._low_mask)
        np.less(self._limited_state, self._high, self._high_mask)
        if np.count_nonzero(self._range_masks) == self._range_masks.size:
            np.add(rewards, self._healthy_rewards, rewards)
            return None
        healthy = np.logical_and.reduce(self._low_mask & self._high_mask, axis=1)
        np.add(rewards, healthy * self._healthy_rewards, rewards)
        return ~healthy if self._is_terminal else None

    def _compute_costs(self, actions: Float32) -> Array:
        """Return the weighted sum of the squared actions in float32, their own type."""
        np.square(actions, self._squared_controls)
        np.add.reduce(self._squared_controls, axis=1, out=self._control_costs)
        return np.multiply(self._control_costs, self._control_weights, self._control_costs)


class HalfCheetah(_Locomotion):
    _normal_speeds = True


class Swimmer(_Locomotion):
    _hidden_positions = 2


class Walker2d(_Locomotion):
    """The Walker2d task, which clips observed velocities."""

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._speeds = self._state[:, base_env.model.nq :]
        self._highest_speeds = np.full_like(self._speeds, 10.0)
        self._lowest_speeds = -self._highest_speeds

    def observe(self, out: Array) -> None:
        np.maximum(self._speeds, self._lowest_speeds, out=self._speeds)
        np.minimum(self._speeds, self._highest_speeds, out=self._speeds)
        super().observe(out)

    def _find_healthy_range(self, base_env: Any) -> tuple[slice, Any, Any]:
        ranges = [base_env._healthy_z_range, base_env._healthy_angle_range]
        low, high = np.array(ranges, np.float64).T
        return slice(1, 3), low, high


class Hopper(Walker2d):
    def _find_healthy_range(self, base_env: Any) -> tuple[slice, Any, Any]:
        low, high = (
            np.full(self._state.shape[1] - 1, bound, np.float64)
            for bound in base_env._healthy_state_range
        )
        # The height has its own bounds. The angle has two ranges, and must lie within both.
        low[0], high[0] = base_env._healthy_z_range
        low[1] = np.maximum(low[1], base_env._healthy_angle_range[0])
        high[1] = np.minimum(high[1], base_env._healthy_angle_range[1])
        return slice(1, None), low, high


class Ant(_Locomotion):
    reads_forces = True
    _normal_speeds = True
    _hidden_positions = 2

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._forces = simulation.track(DataSlice("cfrc_ext"))
        self._squared_forces = np.zeros_like(self._forces)
        self._force_range = tuple(base_env._contact_force_range)
        self._contact_weights = np.full(simulation.count, base_env._contact_cost_weight, np.float64)
        is_shown = base_env._include_cfrc_ext_in_observation
        self._observed_forces = self._forces[:, 6:] if is_shown else self._forces[:, :0]

    def _track_place(self, base_env: Any, simulation: Simulation) -> Float64:
        body = base_env.data.body(base_env._main_body).id
        return simulation.track(DataSlice("xpos", np.s_[body, :1]))[:, 0]

    def _find_healthy_range(self, base_env: Any) -> tuple[slice, Any, Any]:
        # Every number of the state must be finite, and the height may equal its bounds.
        low = np.full(self._state.shape[1], -np.inf)
        high = -low
        low[2] = np.nextafter(np.float64(base_env._healthy_z_range[0]), -np.inf)
        high[2] = np.nextafter(np.float64(base_env._healthy_z_range[1]), np.inf)
        return slice(None), low, high

    def reset_row(self, row: int) -> None:
        super().reset_row(row)
        self._clip_forces()

    def _compute_costs(self, actions: Float32) -> Array:
        self._clip_forces()
        np.square(self._forces, self._squared_forces)
        costs = np.add.reduce(self._squared_forces, 1)
        np.multiply(costs, self._contact_weights, costs)
        return np.add(super()._compute_costs(actions), costs, costs)

    def observe(self, out: Array) -> None:
        split = self._observed_state.shape[1]
        out[:, :split] = self._observed_state
        out[:, split:] = self._observed_forces

    def _clip_forces(self) -> None:
        # Two comparisons instead of `clip` could change the sign of a zero.
        self._forces.clip(*self._force_range, out=self._forces)


class Humanoid(_Locomotion):
    """The Humanoid task, which rewards the speed of the centre of mass."""

    reads_forces = True
    _hidden_positions = 2
    _optional_fields: ClassVar = {"cinert": 1, "cvel": 1, "qfrc_actuator": 6, "cfrc_ext": 1}

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._forces = simulation.track(DataSlice("cfrc_ext"))
        self._controls = simulation.track(DataSlice("ctrl"))
        self._mass = base_env.model.body_mass
        self._total_mass = self._mass.sum()
        self._cost_range = tuple(base_env._contact_cost_range)
        self._contact_weight = base_env._contact_cost_weight
        self._control_weight = base_env._ctrl_cost_weight

    def _track_place(self, base_env: Any, simulation: Simulation) -> Float64:
        body_positions = simulation.track(DataSlice("xipos"))
        self._body_positions = body_positions.reshape(len(body_positions), -1, 3)
        return np.zeros(simulation.count)

    def _find_healthy_range(self, base_env: Any) -> tuple[slice, Any, Any]:
        return slice(2, 3), *base_env._healthy_z_range

    def reset_row(self, row: int) -> None:
        self._find_centre()
        super().reset_row(row)

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        self._find_centre()
        return super().compute_rewards(actions, rewards)

    def _compute_costs(self, actions: Float32) -> Array:
        del actions  # the costs use the controls that MuJoCo received
        contact = np.add.reduce(np.square(self._forces), 1)
        contact = (self._contact_weight * contact).clip(*self._cost_range)
        control = self._control_weight * np.add.reduce(np.square(self._controls), 1)
        costs: Array = control + contact
        return costs

    def _find_centre(self) -> None:
        # Compute all three axes, row by row, because a sum over one axis may use another order.
        for row, places in enumerate(self._body_positions):
            moment = np.einsum("b,bj->j", self._mass, places)
            self._place[row] = moment[0] / self._total_mass


class InvertedPendulum(MujocoTask):
    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._observed_state = self._state = simulation.track(POSITIONS, VELOCITIES)

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        del actions
        ends: Array = ~np.isfinite(self._state).all(axis=1) | (np.abs(self._state[:, 1]) > 0.2)
        np.logical_not(ends, out=rewards)
        return ends if np.count_nonzero(ends) else None


class InvertedDoublePendulum(MujocoTask):
    _normal_speeds = True

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._reward = base_env._healthy_reward
        self._tip = simulation.track(DataSlice("site_xpos", 0))
        self._cart = simulation.track(DataSlice("qpos", np.s_[:1]))
        self._angles = simulation.track(DataSlice("qpos", np.s_[1:]))
        self._speeds = simulation.track(VELOCITIES)
        self._force = simulation.track(DataSlice("qfrc_constraint", np.s_[:1]))

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        del actions
        ends: Array = self._tip[:, 2] <= 1
        for row, ((x, _, y), speeds) in enumerate(zip(self._tip, self._speeds, strict=True)):
            v1, v2 = speeds[1:3]
            alive = self._reward * int(not ends[row])
            distance = 0.01 * x**2 + (y - 2) ** 2
            rewards[row] = alive - distance - (1e-3 * v1**2 + 5e-3 * v2**2)
        return ends if np.count_nonzero(ends) else None

    def observe(self, out: Array) -> None:
        n = self._angles.shape[1]
        out[:, :1] = self._cart
        for line, angles in zip(out, self._angles, strict=True):
            line[1 : 1 + n] = np.sin(angles)
            line[1 + n : 1 + 2 * n] = np.cos(angles)
        np.clip(self._speeds, -10, 10, out=self._speeds)
        out[:, 1 + 2 * n : -1] = self._speeds
        out[:, -1:] = np.clip(self._force, -10, 10)


def _compute_lengths(vectors: Float64) -> Float64:
    """Return the length of each vector, bit-identical to `numpy.linalg.norm`."""
    return np.array([math.sqrt(vector.dot(vector)) for vector in vectors])


def _slice_body(base_env: Any, name: str) -> DataSlice:
    """Return the slice that contains the position of a body."""
    return DataSlice("xpos", base_env.data.body(name).id)


class _ReachTask(MujocoTask):
    """A task that rewards small distances, and penalises large actions."""

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._control_weight = base_env._reward_control_weight
        self._distance_weight = base_env._reward_dist_weight

    def _compute_effort(self, actions: Float32) -> Float32:
        effort: Float32 = -np.add.reduce(np.square(actions), 1) * self._control_weight
        return effort


class Reacher(_ReachTask):
    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._tip = simulation.track(_slice_body(base_env, "fingertip"))
        self._target = simulation.track(_slice_body(base_env, "target"))
        self._angles = simulation.track(DataSlice("qpos", np.s_[:2]))
        self._rest = simulation.track(DataSlice("qpos", np.s_[2:]), DataSlice("qvel", np.s_[:2]))

    def draw_start(self, generator: np.random.Generator) -> tuple[Float64, Float64]:
        """Draw a nearly straight arm, a goal within reach, and small velocities."""
        qpos = generator.uniform(-0.1, 0.1, self._start_qpos.size) + self._start_qpos
        while True:
            goal = generator.uniform(-0.2, 0.2, 2)
            if np.linalg.norm(goal) < 0.2:
                break
        qpos[-2:] = goal
        qvel = self._start_qvel + generator.uniform(-0.005, 0.005, self._start_qvel.size)
        qvel[-2:] = 0
        return qpos, qvel

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        distance = -_compute_lengths(self._tip - self._target) * self._distance_weight
        np.add(distance, self._compute_effort(actions), rewards)
        return None

    def observe(self, out: Array) -> None:
        for line, angles in zip(out, self._angles, strict=True):
            line[:2] = np.cos(angles)
            line[2:4] = np.sin(angles)
        out[:, 4:-2] = self._rest
        out[:, -2:] = (self._tip - self._target)[:, :2]


class Pusher(_ReachTask):
    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._near_weight = base_env._reward_near_weight
        self._observed_state = simulation.track(
            DataSlice("qpos", np.s_[:7]),
            DataSlice("qvel", np.s_[:7]),
            *(_slice_body(base_env, name) for name in ("tips_arm", "object", "goal")),
        )
        _, self._tip, self._object, self._goal = np.split(self._observed_state, (14, 17, 20), 1)

    def draw_start(self, generator: np.random.Generator) -> tuple[Float64, Float64]:
        """Draw a position of the object away from its goal, and small arm velocities."""
        while True:
            x, y = generator.uniform(-0.3, 0, 1), generator.uniform(-0.2, 0.2, 1)
            position = np.concatenate([x, y])
            if np.linalg.norm(position) > 0.17:
                break
        qpos = self._start_qpos.copy()
        qpos[-4:-2], qpos[-2:] = position, 0
        qvel = self._start_qvel + generator.uniform(-0.005, 0.005, self._start_qvel.size)
        qvel[-4:] = 0
        return qpos, qvel

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        near = -_compute_lengths(self._object - self._tip) * self._near_weight
        distance = -_compute_lengths(self._object - self._goal) * self._distance_weight
        np.add(distance + self._compute_effort(actions), near, rewards)
        return None


_ARMS = (InvertedDoublePendulum, InvertedPendulum, Pusher, Reacher)
_WALKERS = (Ant, HalfCheetah, Hopper, Humanoid, Swimmer, Walker2d)
#: The tasks by the names of Gymnasium's classes.
TASKS: dict[str, type[MujocoTask]] = {f"{task.__name__}Env": task for task in (*_ARMS, *_WALKERS)}
