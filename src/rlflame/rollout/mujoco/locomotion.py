"""Locomotion tasks of the v5 MuJoCo environments, as in Gymnasium's classes of these names."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..task import Array, Float32, Float64
from .simulation import POSITIONS, VELOCITIES, DataSlice, MujocoTask, Simulation

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


class _LocomotionTask(MujocoTask):
    """Moves forward; no state ends an episode."""

    _hidden_positions = 1
    _max_speed: float | None = None

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        rows, nq = simulation.count, base_env.model.nq
        self._state = simulation.track(POSITIONS, VELOCITIES)
        self._forward_reward = ForwardReward(base_env, self._state[:, 0])
        self._control_cost = ControlCost(base_env._ctrl_cost_weight, rows, base_env.model.nu)
        skipped = (
            self._hidden_positions if base_env._exclude_current_positions_from_observation else 0
        )
        self._observed_state = self._state[:, skipped:]
        self._speeds = self._state[:, nq:]
        if self._max_speed is not None:
            self._highest_speeds = np.full_like(self._speeds, self._max_speed)
            self._lowest_speeds = -self._highest_speeds
        self._healthy_reward = self._make_healthy_reward(base_env)

    def reset_row(self, row: int) -> None:
        self._forward_reward.reset_row(row)

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        self._forward_reward.compute(rewards)
        ended = self._healthy_reward.add(rewards) if self._healthy_reward is not None else None
        np.subtract(rewards, self._control_cost.compute(actions), rewards)
        return ended

    def observe(self, out: Array) -> None:
        if self._max_speed is not None:
            np.maximum(self._speeds, self._lowest_speeds, out=self._speeds)
            np.minimum(self._speeds, self._highest_speeds, out=self._speeds)
        out[...] = self._observed_state

    def _make_healthy_reward(self, base_env: Any) -> HealthyReward | None:
        del base_env
        return None


class HalfCheetah(_LocomotionTask):
    normal_speeds = True


class Swimmer(_LocomotionTask):
    _hidden_positions = 2


class Walker2d(_LocomotionTask):
    _max_speed = 10.0

    def _make_healthy_reward(self, base_env: Any) -> HealthyReward | None:
        low, high = np.array(
            [base_env._healthy_z_range, base_env._healthy_angle_range], np.float64
        ).T
        return HealthyReward(base_env, self._state[:, 1:3], low, high)


class Hopper(Walker2d):
    def _make_healthy_reward(self, base_env: Any) -> HealthyReward | None:
        columns = self._state[:, 1:]
        low, high = (
            np.full(columns.shape[1], bound, np.float64) for bound in base_env._healthy_state_range
        )
        # The height has bounds of its own; the angle must keep within both.
        low[0], high[0] = base_env._healthy_z_range
        low[1] = np.maximum(low[1], base_env._healthy_angle_range[0])
        high[1] = np.minimum(high[1], base_env._healthy_angle_range[1])
        return HealthyReward(base_env, columns, low, high)


class Ant(MujocoTask):
    normal_speeds = True
    reads_forces = True

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        rows = simulation.count
        body = base_env.data.body(base_env._main_body).id
        self._state = simulation.track(POSITIONS, VELOCITIES)
        self._forces = simulation.track(DataSlice("cfrc_ext"))
        self._clipped = np.zeros_like(self._forces)
        self._squares = np.zeros_like(self._forces)
        self._force_range = tuple(base_env._contact_force_range)
        self._contact_weights = np.full(rows, base_env._contact_cost_weight, np.float64)
        self._forward_reward = ForwardReward(
            base_env, simulation.track(DataSlice("xpos", np.s_[body, :1]))[:, 0]
        )
        self._control_cost = ControlCost(base_env._ctrl_cost_weight, rows, base_env.model.nu)
        self._healthy_reward = self._make_healthy_reward(base_env)
        self._observed_state = self._state[
            :, 2 if base_env._exclude_current_positions_from_observation else 0 :
        ]
        shows_forces = base_env._include_cfrc_ext_in_observation
        self._observed_forces = self._clipped[:, 6:] if shows_forces else self._clipped[:, :0]

    def _make_healthy_reward(self, base_env: Any) -> HealthyReward:
        # Every number of the state must be finite, and the height may be equal to its bounds.
        low = np.full(self._state.shape[1], -np.inf)
        high = -low
        low[2] = np.nextafter(np.float64(base_env._healthy_z_range[0]), -np.inf)
        high[2] = np.nextafter(np.float64(base_env._healthy_z_range[1]), np.inf)
        return HealthyReward(base_env, self._state, low, high)

    def reset_row(self, row: int) -> None:
        self._forward_reward.reset_row(row)
        self._clip()

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        self._forward_reward.compute(rewards)
        ended = self._healthy_reward.add(rewards)
        self._clip()
        np.square(self._clipped, self._squares)
        costs = np.add.reduce(self._squares, 1)
        np.multiply(costs, self._contact_weights, costs)
        np.add(self._control_cost.compute(actions), costs, costs)
        np.subtract(rewards, costs, rewards)
        return ended

    def observe(self, out: Array) -> None:
        split = self._observed_state.shape[1]
        out[:, :split] = self._observed_state
        if self._observed_forces.size:
            out[:, split:] = self._observed_forces

    def _clip(self) -> None:
        # The method and not two comparisons: zeros have signs.
        self._forces.clip(*self._force_range, out=self._clipped)


class Humanoid(MujocoTask):
    reads_forces = True

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        rows, body_count = simulation.count, base_env.model.nbody
        hidden = 2 if base_env._exclude_current_positions_from_observation else 0
        optional = [
            (base_env._include_cinert_in_observation, DataSlice("cinert", np.s_[1:])),
            (base_env._include_cvel_in_observation, DataSlice("cvel", np.s_[1:])),
            (base_env._include_qfrc_actuator_in_observation, DataSlice("qfrc_actuator", np.s_[6:])),
            (base_env._include_cfrc_ext_in_observation, DataSlice("cfrc_ext", np.s_[1:])),
        ]
        self._observed_state = simulation.track(
            DataSlice("qpos", np.s_[hidden:]),
            VELOCITIES,
            *(part for is_included, part in optional if is_included),
        )
        self._forces = simulation.track(DataSlice("cfrc_ext"))
        self._controls = simulation.track(DataSlice("ctrl"))
        self._body_positions = simulation.track(DataSlice("xipos")).reshape(rows, body_count, 3)
        self._mass = base_env.model.body_mass
        self._total_mass = self._mass.sum()
        self._centre = np.zeros(rows)
        self._forward_reward = ForwardReward(base_env, self._centre)
        low, high = np.array([base_env._healthy_z_range], np.float64).T
        self._healthy_reward = HealthyReward(
            base_env, simulation.track(DataSlice("qpos", np.s_[2:3])), low, high
        )
        self._cost_range = tuple(base_env._contact_cost_range)
        self._contact_weight = base_env._contact_cost_weight
        self._control_weight = base_env._ctrl_cost_weight

    def reset_row(self, row: int) -> None:
        self._find_centre()
        self._forward_reward.reset_row(row)

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        del actions  # what MuJoCo was given counts, not what was asked for
        self._find_centre()
        self._forward_reward.compute(rewards)
        ended = self._healthy_reward.add(rewards)
        contact = np.add.reduce(np.square(self._forces), 1)
        contact = (self._contact_weight * contact).clip(*self._cost_range)
        control = self._control_weight * np.add.reduce(np.square(self._controls), 1)
        np.subtract(rewards, control + contact, rewards)
        return ended

    def observe(self, out: Array) -> None:
        out[...] = self._observed_state

    def _find_centre(self) -> None:
        # All three axes, row by row: a sum over one alone might be taken in another order.
        for row, places in enumerate(self._body_positions):
            moment = np.einsum("b,bj->j", self._mass, places)
            self._centre[row] = moment[0] / self._total_mass
