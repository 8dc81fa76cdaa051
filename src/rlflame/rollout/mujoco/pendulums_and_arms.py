"""Pendulums and arms of the v5 MuJoCo environments, as in Gymnasium's classes of these names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..task import Array, Float32, Float64
from .simulation import POSITIONS, VELOCITIES, DataSlice, MujocoTask, Simulation


class InvertedPendulum(MujocoTask):
    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._state = simulation.track(POSITIONS, VELOCITIES)

    def compute_rewards(self, actions: Float32, rewards: Float64) -> Array | None:
        del actions
        ended: Array = ~np.isfinite(self._state).all(axis=1) | (np.abs(self._state[:, 1]) > 0.2)
        np.logical_not(ended, out=rewards)
        return ended if np.count_nonzero(ended) else None

    def observe(self, out: Array) -> None:
        out[...] = self._state


class InvertedDoublePendulum(MujocoTask):
    normal_speeds = True

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
        ended: Array = self._tip[:, 2] <= 1
        for row, ((x, _, y), speeds) in enumerate(zip(self._tip, self._speeds, strict=True)):
            v1, v2 = speeds[1:3]
            alive = self._reward * int(not ended[row])
            distance = 0.01 * x**2 + (y - 2) ** 2
            rewards[row] = alive - distance - (1e-3 * v1**2 + 5e-3 * v2**2)
        return ended if np.count_nonzero(ended) else None

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
    """Of each row, as `numpy.linalg.norm` has it: the root of the product with itself."""
    return np.array([math.sqrt(vector.dot(vector)) for vector in vectors])


class _ReachTask(MujocoTask):
    """Between named bodies."""

    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._simulation = simulation
        self._base_env = base_env
        self._control_weight = base_env._reward_control_weight
        self._distance_weight = base_env._reward_dist_weight

    def _track_body(self, body: str) -> Float64:
        number = self._base_env.data.body(body).id
        return self._simulation.track(DataSlice("xpos", number))

    def _compute_effort(self, actions: Float32) -> Float32:
        effort: Float32 = -np.add.reduce(np.square(actions), 1) * self._control_weight
        return effort


class Reacher(_ReachTask):
    def __init__(self, base_env: Any, simulation: Simulation) -> None:
        super().__init__(base_env, simulation)
        self._tip, self._target = self._track_body("fingertip"), self._track_body("target")
        self._angles = simulation.track(DataSlice("qpos", np.s_[:2]))
        self._rest = simulation.track(DataSlice("qpos", np.s_[2:]), DataSlice("qvel", np.s_[:2]))

    def draw_start(self, generator: np.random.Generator) -> tuple[Float64, Float64]:
        """The arm nearly straight, and a goal that is drawn until it is within reach."""
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
        self._joints = simulation.track(DataSlice("qpos", np.s_[:7]), DataSlice("qvel", np.s_[:7]))
        self._tip, self._object = self._track_body("tips_arm"), self._track_body("object")
        self._goal = self._track_body("goal")

    def draw_start(self, generator: np.random.Generator) -> tuple[Float64, Float64]:
        """The arm at rest, and an object that is drawn until it is off its goal."""
        while True:
            across, along = generator.uniform(-0.3, 0, 1), generator.uniform(-0.2, 0.2, 1)
            position = np.concatenate([across, along])
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

    def observe(self, out: Array) -> None:
        for at, part in ((0, self._joints), (14, self._tip), (17, self._object), (20, self._goal)):
            out[:, at : at + part.shape[1]] = part
