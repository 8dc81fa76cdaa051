"""Gymnasium's v5 MuJoCo environments straight on MuJoCo, the rows of a slot together.

What Gymnasium does between two calls of MuJoCo is done for all rows at once (`v5_*.py`, on
`mujoco/simulation.py`), and its resets are repeated draw by draw. The bits are Gymnasium's:
whatever is not exactly what was compared with it is refused (`mujoco/compatibility.py`). Must not
know: policies, tasks, how states travel.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from ..envs.env_state import NO_PHYSICS, sealed
from ..envs.make import NOT_AS_BEFORE, make, misbehaved, said
from ..envs.vector_env import Standing
from ..seeding import reset_streams
from ..spec import Array, EnvironmentFault, EnvSpec, EnvState, Float32, Float64
from .compatibility import task_of
from .components import Task
from .simulation import Beginning, make_bodies

_NO_LIMIT = sys.maxsize
#: Beginnings that are kept for episodes which may never come.
_MOST_PREPARED = 256


def open_rows(spec: EnvSpec, count: int) -> MujocoRows | str:
    """Rows of this environment, or why it is left to Gymnasium; raises what making it raises."""
    env = make(spec)
    try:
        task = task_of(env)
        return task if isinstance(task, str) else MujocoRows(spec, count, env, task)
    finally:
        env.close()


class MujocoRows:
    """The contract of `envs/vector_env.py` for one known environment."""

    def __init__(
        self, spec: EnvSpec, count: int, env: gymnasium.Env[Any, Any], task: type[Task]
    ) -> None:
        self.spec = spec
        world: Any = env.unwrapped
        self._bodies = make_bodies(world.model, world.frame_skip, count, task.reads_forces)
        self._task = task(world, self._bodies)
        self._seen = np.zeros((count, spec.observation_size), np.float32)
        self._limit = _time_limit(env)
        self._held: Float64 = np.zeros((count, 0), np.float64)
        self._rewards = np.zeros(count, np.float64)
        self._returns = np.zeros(count, np.float64)
        self._episodes, self._seeds = [0] * count, [0] * count
        #: Rows step together, so one clock serves them: a row has stepped since its beginning.
        self._clock = 0
        self._begun = [0] * count
        #: Steps until a time limit may be reached.
        self._room = 0
        #: By the seed of the reset.
        self._prepared: dict[int, Beginning] = {}

    def begin(self, row: int, episode: int, seed: int, out: Float32) -> None:
        self._bodies.current = row
        self._episodes[row], self._seeds[row] = episode, seed
        self._begun[row] = self._clock
        self._returns[row] = 0.0
        self._room = min(self._room, self._limit)
        try:
            if seed not in self._prepared:
                self._prepare([seed])
            self._bodies.begin(row, self._prepared.pop(seed))
        except BaseException as error:
            if not misbehaved(error):
                raise
            raise self._fault(row, f"failed in reset: {said(error)}") from error
        self._task.begin(row)
        self._task.observe(self._seen)
        out[:] = self._seen[row]

    def expect(self, seeds: Sequence[int]) -> None:
        if len(self._prepared) + len(seeds) > _MOST_PREPARED:
            self._prepared.clear()
        # What is wrong shows again in the episode that begins so, and is told there.
        with contextlib.suppress(Exception):
            self._prepare(seeds)

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        self.begin(row, state.episode, state.seed, out)
        before = state.elapsed - len(state.actions)
        if state.kind == "mujoco":
            if state.physics.shape != self._bodies.states().shape[1:]:
                raise self._fault(row, "cannot take up a state of another MuJoCo model")
            self._bodies.set_state(row, state.physics)
        for count, action in enumerate(state.actions, before + 1):
            self._begun[row] = self._clock - count
            self._bodies.controls[row] = action
            self._move([row])
            # The reward is in the state already; the rows that did not move are unharmed.
            self._task.rate(self._bodies.controls.astype(np.float32), self._rewards)
            self._task.observe(self._seen)
            out[:] = self._seen[row]
        self._returns[row] = state.episode_return
        self._room = 0
        if state.observation.size and not np.array_equal(state.observation, out):
            raise self._fault(row, NOT_AS_BEFORE)

    def step(
        self,
        active: Sequence[int],
        actions: Array,
        out: Float32,
        rewards: Float64,
        terminated: Array,
        truncated: Array,
    ) -> Sequence[int]:
        self._bodies.controls[...] = actions
        # Counted before it is taken, so that an error names the step it happened in.
        self._clock += 1
        self._room -= 1
        if len(active) < self._bodies.count:  # one that is over is not what hangs
            self._bodies.current = active[0]
        self._move(active)
        if len(active) == self._bodies.count:
            ended = self._task.rate(actions, rewards)
        else:
            ended = self._task.rate(actions, self._rewards)
            rewards[active] = self._rewards[active]
        self._task.observe(out)
        np.add(self._returns, rewards, self._returns)
        if not math.isfinite(self._returns.dot(self._returns)):
            self._check_returns(active, rewards)
        if ended is None and self._room > 0:
            return ()
        return self._ends(active, ended, terminated, truncated)

    def hold(self) -> None:
        self._held = self._bodies.states()

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        at = self.standing(row)
        shown = observation.copy()
        if at.elapsed == 0:
            nothing = np.zeros((0, self.spec.action_size), np.float32)
            return sealed("fresh", at.episode, at.seed, 0, 0.0, nothing, NO_PHYSICS, shown)
        last = self._bodies.controls[row : row + 1].astype(np.float32)
        position = (at.episode, at.seed, at.elapsed, at.episode_return)
        return sealed("mujoco", *position, last, self._held[row], shown)

    def standing(self, row: int) -> Standing:
        return Standing(
            row,
            self._episodes[row],
            self._seeds[row],
            self._clock - self._begun[row],
            float(self._returns[row]),
        )

    def current(self) -> Standing:
        return self.standing(self._bodies.current)

    def check_finite(self, row: int, observation: Float32) -> None:
        if np.isfinite(observation).all():
            return
        exact = np.zeros((self._bodies.count, len(observation)), np.float64)
        self._task.observe(exact)
        if np.isfinite(exact[row]).all():
            raise self._fault(
                row,
                f"returned the number {np.abs(exact[row]).max():.3g} in its observation, "
                "which does not fit float32",
            )
        raise self._fault(row, "returned NaN or infinity in its observation")

    def close(self) -> None:
        """Nothing is open."""

    def _prepare(self, seeds: Sequence[int]) -> None:
        draw, prepare = self._task.start.draw, self._bodies.prepare
        for seed, generator in zip(seeds, reset_streams(seeds), strict=True):
            self._prepared[seed] = prepare(*draw(generator))

    def _move(self, active: Sequence[int]) -> None:
        try:
            self._bodies.step(active)
        except BaseException as error:
            if not misbehaved(error):
                raise
            raise self._fault(self._bodies.current, f"failed in step: {said(error)}") from error

    def _ends(
        self, active: Sequence[int], ended: Array | None, terminated: Array, truncated: Array
    ) -> Sequence[int]:
        """Mark the rows whose episode is over, and count the steps until a limit anew."""
        over: list[int] = []
        if ended is not None and self._room > 0:
            flags = ended.tolist()
            over = [row for row in active if flags[row]]
            terminated[over] = True
            return over
        self._room = self._limit
        for row in active:
            left = self._limit - (self._clock - self._begun[row])
            terminal = ended is not None and bool(ended[row])
            if terminal or left <= 0:
                terminated[row], truncated[row] = terminal, not terminal
                over.append(row)
            else:
                self._room = min(self._room, left)
        return over

    def _check_returns(self, active: Sequence[int], rewards: Float64) -> None:
        for row in active:
            if not math.isfinite(rewards[row]):
                raise self._fault(row, f"returned the reward {float(rewards[row])}")
            if not math.isfinite(self._returns[row]):
                raise self._fault(row, "returned rewards that add up to infinity")

    def _fault(self, row: int, message: str) -> EnvironmentFault:
        at = self.standing(row)
        return EnvironmentFault(f"environment {self.spec.id} {message}", row, at.seed, at.elapsed)


def _time_limit(env: gymnasium.Env[Any, Any]) -> int:
    """After how many steps an episode is truncated."""
    limit = _NO_LIMIT
    layer: Any = env
    while layer is not env.unwrapped:
        if isinstance(layer, TimeLimit):
            limit = min(limit, layer._max_episode_steps)
        layer = layer.env
    return limit
