"""Tasks of the v5 MuJoCo environments that are about getting along.

As in Gymnasium's classes of these names. Must not know: stepping, resets, episodes, policies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..spec import Array, Float32, Float64
from .components import (
    POSITIONS,
    VELOCITIES,
    Around,
    Control,
    Health,
    Part,
    Progress,
    Start,
    Tables,
)


class _Runner:
    """Gets along; nothing ends it."""

    numbers: tuple[str, ...] = (
        "_forward_reward_weight",
        "_ctrl_cost_weight",
        "_reset_noise_scale",
    )
    ranges: tuple[str, ...] = ()
    flags: tuple[str, ...] = ("_exclude_current_positions_from_observation",)
    reads_forces = False
    _hidden = 1
    _normal_speeds = False
    _fastest: float | None = None

    def __init__(self, world: Any, bodies: Tables) -> None:
        self.start: Start = Around(world, self._normal_speeds)
        rows, nq = bodies.count, world.model.nq
        self._state = bodies.take(POSITIONS, VELOCITIES)
        self._progress = Progress(world, self._state[:, 0])
        self._control = Control(world._ctrl_cost_weight, rows, world.model.nu)
        skipped = self._hidden if world._exclude_current_positions_from_observation else 0
        self._shown = self._state[:, skipped:]
        self._speeds = self._state[:, nq:]
        if self._fastest is not None:
            self._fast = np.full_like(self._speeds, self._fastest)
            self._fast_backwards = -self._fast
        self._health = self._bounds(world)

    def begin(self, row: int) -> None:
        self._progress.begin(row)

    def rate(self, actions: Float32, rewards: Float64) -> Array | None:
        self._progress.reward(rewards)
        ended = self._health.add(rewards) if self._health is not None else None
        np.subtract(rewards, self._control.cost(actions), rewards)
        return ended

    def observe(self, out: Array) -> None:
        if self._fastest is not None:
            np.maximum(self._speeds, self._fast_backwards, out=self._speeds)
            np.minimum(self._speeds, self._fast, out=self._speeds)
        out[...] = self._shown

    def _bounds(self, world: Any) -> Health | None:
        del world
        return None


class HalfCheetah(_Runner):
    model = "half_cheetah.xml"
    _normal_speeds = True


class Swimmer(_Runner):
    model = "swimmer.xml"
    _hidden = 2


class Walker2d(_Runner):
    model = "walker2d_v5.xml"
    numbers = (*_Runner.numbers, "_healthy_reward")
    ranges: tuple[str, ...] = ("_healthy_z_range", "_healthy_angle_range")
    flags = (*_Runner.flags, "_terminate_when_unhealthy")
    _fastest = 10.0

    def _bounds(self, world: Any) -> Health | None:
        low, high = np.array([world._healthy_z_range, world._healthy_angle_range], np.float64).T
        return Health(world, self._state[:, 1:3], low, high)


class Hopper(Walker2d):
    model = "hopper.xml"
    ranges = (*Walker2d.ranges, "_healthy_state_range")

    def _bounds(self, world: Any) -> Health | None:
        columns = self._state[:, 1:]
        low, high = (
            np.full(columns.shape[1], bound, np.float64) for bound in world._healthy_state_range
        )
        # The height has bounds of its own; the angle must keep within both.
        low[0], high[0] = world._healthy_z_range
        low[1] = np.maximum(low[1], world._healthy_angle_range[0])
        high[1] = np.minimum(high[1], world._healthy_angle_range[1])
        return Health(world, columns, low, high)


class Ant:
    model = "ant.xml"
    numbers: tuple[str, ...] = (*Walker2d.numbers, "_contact_cost_weight")
    ranges: tuple[str, ...] = ("_healthy_z_range", "_contact_force_range")
    flags: tuple[str, ...] = (*Walker2d.flags, "_include_cfrc_ext_in_observation")
    reads_forces = True

    def __init__(self, world: Any, bodies: Tables) -> None:
        self.start: Start = Around(world, normal_speeds=True)
        rows = bodies.count
        body = world.data.body(world._main_body).id
        self._state = bodies.take(POSITIONS, VELOCITIES)
        self._forces = bodies.take(Part("cfrc_ext"))
        self._clipped = np.zeros_like(self._forces)
        self._squares = np.zeros_like(self._forces)
        self._force_range = tuple(world._contact_force_range)
        self._contact_weights = np.full(rows, world._contact_cost_weight, np.float64)
        self._progress = Progress(world, bodies.take(Part("xpos", np.s_[body, :1]))[:, 0])
        self._control = Control(world._ctrl_cost_weight, rows, world.model.nu)
        self._health = self._bounds(world)
        self._shown = self._state[
            :, 2 if world._exclude_current_positions_from_observation else 0 :
        ]
        shows_forces = world._include_cfrc_ext_in_observation
        self._felt = self._clipped[:, 6:] if shows_forces else self._clipped[:, :0]

    def _bounds(self, world: Any) -> Health:
        # Every number of the state must be finite, and the height may be equal to its bounds.
        low = np.full(self._state.shape[1], -np.inf)
        high = -low
        low[2] = np.nextafter(np.float64(world._healthy_z_range[0]), -np.inf)
        high[2] = np.nextafter(np.float64(world._healthy_z_range[1]), np.inf)
        return Health(world, self._state, low, high)

    def begin(self, row: int) -> None:
        self._progress.begin(row)
        self._clip()

    def rate(self, actions: Float32, rewards: Float64) -> Array | None:
        self._progress.reward(rewards)
        ended = self._health.add(rewards)
        self._clip()
        np.square(self._clipped, self._squares)
        costs = np.add.reduce(self._squares, 1)
        np.multiply(costs, self._contact_weights, costs)
        np.add(self._control.cost(actions), costs, costs)
        np.subtract(rewards, costs, rewards)
        return ended

    def observe(self, out: Array) -> None:
        split = self._shown.shape[1]
        out[:, :split] = self._shown
        if self._felt.size:
            out[:, split:] = self._felt

    def _clip(self) -> None:
        # The method and not two comparisons: zeros have signs.
        self._forces.clip(*self._force_range, out=self._clipped)


class Humanoid:
    model = "humanoid.xml"
    numbers: tuple[str, ...] = Ant.numbers
    ranges: tuple[str, ...] = ("_healthy_z_range", "_contact_cost_range")
    flags: tuple[str, ...] = (
        *Walker2d.flags,
        "_include_cinert_in_observation",
        "_include_cvel_in_observation",
        "_include_qfrc_actuator_in_observation",
        "_include_cfrc_ext_in_observation",
    )
    reads_forces = True

    def __init__(self, world: Any, bodies: Tables) -> None:
        self.start: Start = Around(world)
        rows, pieces = bodies.count, world.model.nbody
        hidden = 2 if world._exclude_current_positions_from_observation else 0
        optional = [
            (world._include_cinert_in_observation, Part("cinert", np.s_[1:])),
            (world._include_cvel_in_observation, Part("cvel", np.s_[1:])),
            (world._include_qfrc_actuator_in_observation, Part("qfrc_actuator", np.s_[6:])),
            (world._include_cfrc_ext_in_observation, Part("cfrc_ext", np.s_[1:])),
        ]
        self._shown = bodies.take(
            Part("qpos", np.s_[hidden:]),
            VELOCITIES,
            *(part for wanted, part in optional if wanted),
        )
        self._forces = bodies.take(Part("cfrc_ext"))
        self._controls = bodies.take(Part("ctrl"))
        self._places = bodies.take(Part("xipos")).reshape(rows, pieces, 3)
        self._mass = world.model.body_mass
        self._whole_mass = self._mass.sum()
        self._centre = np.zeros(rows)
        self._progress = Progress(world, self._centre)
        low, high = np.array([world._healthy_z_range], np.float64).T
        self._health = Health(world, bodies.take(Part("qpos", np.s_[2:3])), low, high)
        self._cost_range = tuple(world._contact_cost_range)
        self._contact_weight = world._contact_cost_weight
        self._control_weight = world._ctrl_cost_weight

    def begin(self, row: int) -> None:
        self._find_centre()
        self._progress.begin(row)

    def rate(self, actions: Float32, rewards: Float64) -> Array | None:
        del actions  # what MuJoCo was given counts, not what was asked for
        self._find_centre()
        self._progress.reward(rewards)
        ended = self._health.add(rewards)
        contact = np.add.reduce(np.square(self._forces), 1)
        contact = (self._contact_weight * contact).clip(*self._cost_range)
        control = self._control_weight * np.add.reduce(np.square(self._controls), 1)
        np.subtract(rewards, control + contact, rewards)
        return ended

    def observe(self, out: Array) -> None:
        out[...] = self._shown

    def _find_centre(self) -> None:
        # All three axes, row by row: a sum over one alone might be taken in another order.
        for row, places in enumerate(self._places):
            moment = np.einsum("b,bj->j", self._mass, places)
            self._centre[row] = moment[0] / self._whole_mass
