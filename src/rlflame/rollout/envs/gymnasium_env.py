"""One environment of a slot over the Gymnasium API: stepped, snapshotted and restored exactly.

An environment's position is a value (EnvState), because a cluster promises no affinity between a
slot and a process. Must not know: policies, batches, how states travel.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from ..spec import Array, EnvironmentFault, EnvSpec, EnvState, Float32, Float64
from .env_state import NO_PHYSICS, sealed
from .make import NOT_AS_BEFORE, make, misbehaved, said, short

_MUJOCO = "gymnasium.envs.mujoco."
_EXACT_MUJOCO = frozenset(
    f"{_MUJOCO}{name}_v5"
    for name in (
        "ant",
        "half_cheetah",
        "hopper",
        "humanoid",
        "humanoidstandup",
        "inverted_double_pendulum",
        "inverted_pendulum",
        "pusher",
        "reacher",
        "swimmer",
        "walker2d",
    )
)
#: Types whose reset on a used instance was tested to equal the reset of a fresh one.
_REUSABLE = _EXACT_MUJOCO | {
    f"gymnasium.envs.classic_control.{name}"
    for name in ("acrobot", "cartpole", "continuous_mountain_car", "mountain_car", "pendulum")
}
_REUSABLE |= {"gymnasium.envs.box2d.lunar_lander"}


def _nothing(env: Any) -> None:
    """Its reset alone makes a used instance a fresh one."""


def _new_world(env: Any) -> None:
    """Bodies meet in another order in a world in which others were before."""
    env._destroy()
    env.world = type(env.world)()


#: What is done to a used instance before its reset, for it to be as a fresh one.
_RENEWALS: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(_REUSABLE, _nothing),
    "gymnasium.envs.box2d.bipedal_walker": _new_world,
}
_STEP = ("observation", "reward", "terminated", "truncated", "info")
_RESET = ("observation", "info")
KNOWN_WRAPPERS = (TimeLimit, OrderEnforcing, PassiveEnvChecker)


class EnvRow:
    """One row of a slot: an environment instance and where its episode stands."""

    def __init__(self, spec: EnvSpec, row: int, render_mode: str | None = None) -> None:
        self.spec = spec
        self.row = row
        self._render_mode = render_mode
        self.episode = 0
        self.seed = 0
        self.elapsed = 0
        self.episode_return = 0.0
        self._env: gymnasium.Env[Any, Any] | None = None
        self._step: Callable[[Any], tuple[Any, Any, Any, Any, Any]]
        #: Steps of an episode, where that is not left to Gymnasium's wrapper.
        self._limit: float = math.inf
        #: What makes a used instance a fresh one; None where nothing is known to.
        self._renew: Callable[[Any], None] | None = None
        self._exact_mujoco = False
        self._held: Float64 = NO_PHYSICS
        self._last_action: Any = None
        #: The last observation as the environment returned it.
        self._given: Any = None
        self._shape: tuple[int, ...] = ()
        self._action_shape: tuple[int, ...] = ()
        self._discrete = spec.action_kind == "discrete"
        self._history: Array = np.zeros(
            64 if self._discrete else (64, spec.action_size),
            np.int64 if self._discrete else np.float32,
        )

    def begin(self, episode: int, seed: int, out: Float32) -> None:
        """Start an episode; on a fresh instance unless reuse is known to be exact."""
        self.episode, self.seed, self.elapsed, self.episode_return = episode, seed, 0, 0.0
        try:
            if self._env is None or self._renew is None:
                self.close()
                self._open()
            else:
                self._renew(self._env.unwrapped)
            assert self._env is not None
            given = self._env.reset(seed=seed)
            self._write(self._parts(given, "reset", _RESET)[0], out)
        except BaseException as error:
            # What a reset left half done is never taken up again.
            self.close()
            if isinstance(error, EnvironmentFault) or not misbehaved(error):
                raise
            raise self._fault(f"failed in reset: {said(error)}") from error

    def step(self, action: Any, out: Float32) -> tuple[float, bool, bool]:
        """One transition: the new observation into `out`; reward, terminated, truncated."""
        if not self._exact_mujoco:
            self._remember(action)
        self._last_action = action
        # Counted before it is taken, so that a hang or an error names the step it happened in.
        self.elapsed += 1
        try:
            if self._discrete:
                given: Any = int(action) + self.spec.action_start
            elif len(self._action_shape) == 1:
                given = action
            else:
                given = action.reshape(self._action_shape)
            found = self._step(given)
            try:
                observation, reward, terminated, truncated, _ = found
            except (TypeError, ValueError):
                self._parts(found, "step", _STEP)
                raise
            try:
                reward = float(reward)
            except (TypeError, ValueError):
                raise self._fault(f"returned the reward {short(reward)}, no number") from None
            terminated, truncated = bool(terminated), bool(truncated)
            truncated = truncated or self.elapsed >= self._limit
            self._write(observation, out)
        except EnvironmentFault:
            raise
        except BaseException as error:
            if not misbehaved(error):
                raise
            raise self._fault(f"failed in step: {said(error)}") from error
        if not math.isfinite(reward):
            raise self._fault(f"returned the reward {reward}")
        self.episode_return += reward
        if not math.isfinite(self.episode_return):
            raise self._fault("returned rewards that add up to infinity")
        return reward, terminated, truncated

    def hold(self) -> None:
        """Called before a fragment's last step: a MuJoCo snapshot needs the state before it."""
        if self._exact_mujoco:
            self._held = self._physics()

    def snapshot(self, observation: Float32) -> EnvState:
        """Where this row stands, as a value."""
        shown = observation.copy()
        if self.elapsed == 0:
            empty = self._history[:0].copy()
            return sealed("fresh", self.episode, self.seed, 0, 0.0, empty, NO_PHYSICS, shown)
        position = (self.episode, self.seed, self.elapsed, self.episode_return)
        if self._exact_mujoco:
            last = np.array(self._last_action, np.float32).reshape(1, -1)
            return sealed("mujoco", *position, last, self._held, shown)
        history = self._history[: self.elapsed].copy()
        return sealed("replay", *position, history, NO_PHYSICS, shown)

    def restore(self, state: EnvState, out: Float32) -> None:
        """Take up an episode where another process, or an earlier one, left it."""
        self.begin(state.episode, state.seed, out)
        if state.kind == "mujoco":
            if not self._exact_mujoco:
                raise self._fault("cannot take up a MuJoCo state")
            self._set_physics(state.physics)
            self.elapsed = state.elapsed - 1
            self._limit_elapsed(self.elapsed)
            self.step(np.array(state.actions[0]), out)
        elif state.kind == "replay":
            for action in state.actions:
                self.step(np.array(action), out)
        self.episode_return = state.episode_return
        if state.observation.size and not np.array_equal(state.observation, out):
            raise self._fault(NOT_AS_BEFORE)

    def render(self) -> Any:
        """What the environment draws of itself, in the mode that the row was made with."""
        assert self._env is not None
        try:
            return self._env.render()
        except BaseException as error:
            if not misbehaved(error):
                raise
            raise self._fault(f"cannot be drawn: {said(error)}") from error

    def close(self) -> None:
        if self._env is not None:
            env, self._env = self._env, None
            # Its episode is over and its data are safe: a failure to tidy up changes nothing.
            with contextlib.suppress(Exception):
                env.close()

    def check_finite(self, observation: Float32) -> None:
        if np.isfinite(observation).all():
            return
        given = np.asarray(self._given, np.float64)
        if np.isfinite(given).all():
            largest = np.abs(given).max()
            raise self._fault(
                f"returned the number {largest:.3g} in its observation, which does not fit float32"
            )
        raise self._fault("returned NaN or infinity in its observation")

    def _open(self) -> None:
        env = make(self.spec, self._render_mode)
        self._env = env
        module = type(env.unwrapped).__module__
        plain = True
        layer: Any = env
        while layer is not env.unwrapped:
            plain = plain and type(layer) in KNOWN_WRAPPERS
            layer = layer.env
        self._step, self._limit = _without_wrappers(env)
        self._renew = _RENEWALS.get(module) if plain else None
        self._exact_mujoco = plain and module in _EXACT_MUJOCO
        self._shape = env.observation_space.shape or ()
        self._action_shape = env.action_space.shape or ()
        size, expected = math.prod(self._shape), self.spec.observation_size
        if size != expected:
            raise self._fault(f"observes {size} numbers here, {expected} where it was described")

    def _parts(self, found: Any, method: str, wanted: tuple[str, ...]) -> tuple[Any, ...]:
        """What a method returned, if it is as many values as Gymnasium's returns."""
        several = isinstance(found, tuple | list)
        if several and len(found) == len(wanted):
            return tuple(found)
        what = f"{len(found)} values" if several else short(found)
        raise self._fault(
            f"returned {what} from {method}, where Gymnasium's returns {', '.join(wanted)}"
        )

    def _write(self, observation: Any, out: Float32) -> None:
        shape = observation.shape if type(observation) is np.ndarray else np.shape(observation)
        if shape != self._shape:
            raise self._fault(
                f"returned an observation of shape {shape} where its space says {self._shape}"
            )
        self._given = observation
        out[:] = observation if len(shape) == 1 else np.ravel(observation)

    def _remember(self, action: Any) -> None:
        if self.elapsed >= len(self._history):
            self._history = np.concatenate([self._history, np.zeros_like(self._history)])
        self._history[self.elapsed] = action

    def _physics(self) -> Float64:
        import mujoco

        env: Any = self._env.unwrapped  # type: ignore[union-attr]
        what = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.zeros(mujoco.mj_stateSize(env.model, what), np.float64)
        mujoco.mj_getState(env.model, env.data, state, what)
        return state

    def _set_physics(self, state: Float64) -> None:
        import mujoco

        env: Any = self._env.unwrapped  # type: ignore[union-attr]
        what = mujoco.mjtState.mjSTATE_INTEGRATION
        if state.shape != (mujoco.mj_stateSize(env.model, what),):
            raise self._fault("cannot take up a state of another MuJoCo model")
        mujoco.mj_setState(env.model, env.data, np.array(state), what)

    def _limit_elapsed(self, elapsed: int) -> None:
        layer: Any = self._env
        while layer is not layer.unwrapped:
            if isinstance(layer, TimeLimit):
                setattr(layer, "_elapsed_steps", elapsed)  # noqa: B010 (declared as None there)
            layer = layer.env

    def _fault(self, message: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"environment {self.spec.id} {message}", self.row, self.seed, self.elapsed
        )


def _without_wrappers(env: gymnasium.Env[Any, Any]) -> tuple[Callable[[Any], Any], float]:
    """An environment's step, and after how many of them an episode is truncated.

    What only counts and looks on costs a microsecond a step, and is gone around.
    """
    limit, layer = math.inf, env
    while layer is not env.unwrapped:
        if type(layer) not in (TimeLimit, OrderEnforcing):
            return env.step, math.inf
        if isinstance(layer, TimeLimit):
            limit = min(limit, layer._max_episode_steps)
        layer = layer.env  # type: ignore[attr-defined]
    return layer.step, limit
