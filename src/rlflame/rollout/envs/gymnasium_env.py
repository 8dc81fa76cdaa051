"""Steps, saves and restores a slot's environments through the Gymnasium API.

The state of an environment is stored in an `EnvState`, which any process can restore, because
different processes of a cluster may run the same slot.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from textwrap import shorten
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from ..mujoco.known_spaces import SOURCE_HASHES
from ..space_codec import ActionDecoder, MaskEncoder, ObservationEncoder, SpaceError
from ..task import (
    NO_PHYSICS,
    Array,
    EnvironmentFault,
    EnvSpec,
    EnvState,
    Float32,
    Float64,
    make_fresh_state,
)
from .make import make_env
from .spaces import MaskReader, has_equal_leaves
from .vector_env import (
    GLOBAL_RANDOM_CAUSE,
    REPLAY_MISMATCH,
    REUSE_CAUSE,
    EpisodePosition,
    make_fault,
    report_fault,
)

#: Gymnasium's MuJoCo environments, whose physics state can be set exactly.
_EXACT_MUJOCO = {module for module in SOURCE_HASHES if module.endswith("_v5")}
_EXACT_MUJOCO |= {"gymnasium.envs.mujoco.humanoidstandup_v5"}
#: Modules whose environments were tested to reset a used instance exactly like a new one.
_REUSABLE = _EXACT_MUJOCO | {
    f"gymnasium.envs.classic_control.{name}"
    for name in ("acrobot", "cartpole", "continuous_mountain_car", "mountain_car", "pendulum")
}
_REUSABLE |= {f"gymnasium.envs.box2d.{name}" for name in ("lunar_lander", "bipedal_walker")}
#: Packages with state that a few episodes do not always show: MinAtar's last action, which it
#: sometimes repeats in the next episode, and the contacts of the Bullet engine.
_STATEFUL_PACKAGES = {"minatar", "panda_gym", "pybullet_envs_gymnasium"}
_COLLECTIONS = (str, bytes, tuple, list, set, dict)
KNOWN_WRAPPERS = (TimeLimit, OrderEnforcing, PassiveEnvChecker)


def is_known_reusable(id: str) -> bool:
    """Return whether the environment of an ID was tested to reset like a new instance."""
    registration = gymnasium.registry.get(id)
    if registration is None or registration.additional_wrappers:
        return False
    return _find_module(id) in _REUSABLE


def is_known_stateful(id: str) -> bool:
    """Return whether an environment's package is known to keep state between episodes."""
    modules = (id.rpartition(":")[0], _find_module(id.rpartition(":")[2]))
    return any(module.partition(".")[0] in _STATEFUL_PACKAGES for module in modules)


def _find_module(id: str) -> str:
    """Return the module of a registered environment, or an empty string."""
    entry = getattr(gymnasium.registry.get(id), "entry_point", None) or ""
    return entry.partition(":")[0] if isinstance(entry, str) else entry.__module__


def read_global_random() -> bytes:
    """Return the state of np.random, which changes whenever numbers are drawn from it."""
    _, keys, *position = np.random.get_state(legacy=True)
    return np.asarray(keys).tobytes() + repr(position).encode()


class RestorableEnv:
    """One environment of a slot, and the position in its current episode."""

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
        #: The step limit of an episode, if Gymnasium's wrapper does not apply it.
        self._limit: float = math.inf
        self._is_reusable = False
        self._exact_mujoco = False
        self._saved_physics: Float64 = NO_PHYSICS
        self._last_action: Any = None
        self._observation_shape: tuple[int, ...] = ()
        self._encoder = ObservationEncoder(spec.observation_leaves)
        self._decode_action = ActionDecoder(spec).decode
        self._mask_encoder = MaskEncoder(spec) if spec.mask_size else None
        self._mask_reader: MaskReader | None = None
        discrete = spec.action_kind == "discrete"
        self._action_history: Array = np.zeros(
            64 if discrete else (64, spec.action_size), np.int64 if discrete else np.float32
        )

    @property
    def position(self) -> EpisodePosition:
        return EpisodePosition(self.row, self.episode, self.seed, self.episode_return, self.elapsed)

    def reset(self, episode: int, seed: int, out: Float32) -> None:
        """Start an episode, in a new instance unless reusing one is safe."""
        self.episode, self.seed, self.elapsed, self.episode_return = episode, seed, 0, 0.0
        try:
            if self._env is None or not self._is_reusable:
                self.close()
                self._env = self._open()
            base_env: Any = self._env.unwrapped
            if type(base_env).__module__ == "gymnasium.envs.box2d.bipedal_walker":
                # In a used world, Box2D's bodies would touch the ground in another order.
                base_env._destroy()
                base_env.world = type(base_env.world)()
            observation, info = self._env.reset(seed=seed)
            self._write_row(observation, info, out)
        except BaseException as error:
            # An instance whose reset has failed is not used again.
            self.close()
            report_fault(self.spec, self.position, "failed in reset", error)

    def step(self, action: Any, out: Float32) -> tuple[float, bool, bool]:
        """Take a step and write the observation; return the reward and end flags."""
        if not self._exact_mujoco:
            if self.elapsed >= len(self._action_history):
                room = np.zeros_like(self._action_history)
                self._action_history = np.concatenate([self._action_history, room])
            self._action_history[self.elapsed] = action
        self._last_action = action
        # Count before the step, so that a hang or an error names the step in which it occurred.
        self.elapsed += 1
        try:
            result = self._step(self._decode_action(action))
            observation, reward, terminated, truncated, info = result
            reward = self._read_reward(reward)
            if terminated is not False:
                terminated = self._read_flag("terminated", terminated)
            if truncated is not False:
                truncated = self._read_flag("truncated", truncated)
            truncated = truncated or self.elapsed >= self._limit
            self._write_row(observation, info, out, terminated or truncated)
        except BaseException as error:
            report_fault(self.spec, self.position, "failed in step", error)
        if not math.isfinite(reward):
            raise self._make_fault(f"returned the reward {reward}")
        self.episode_return += reward
        if not math.isfinite(self.episode_return):
            raise self._make_fault("returned rewards that add up to infinity")
        return reward, terminated, truncated

    def _read_reward(self, reward: Any) -> float:
        try:
            return float(reward)
        except (TypeError, ValueError):
            text = shorten(repr(reward), 100)
            raise self._make_fault(f"returned the reward {text}, which is not one number") from None

    def _read_flag(self, name: str, flag: Any) -> bool:
        """Convert a flag; a collection with a flag per agent would count as true."""
        if not isinstance(flag, _COLLECTIONS):
            with contextlib.suppress(TypeError, ValueError):
                return bool(flag)
        text = shorten(repr(flag), 100)
        raise self._make_fault(f"returned {name} as {text}, which is neither True nor False")

    def prepare_snapshot(self) -> None:
        """Save the MuJoCo state for the snapshot, before the last step of a fragment."""
        if self._exact_mujoco:
            self._saved_physics = self._read_physics()

    def _read_physics(self) -> Float64:
        from ..mujoco.simulation import read_state

        base_env: Any = self._env and self._env.unwrapped
        return read_state(base_env.model, base_env.data)

    def snapshot(self, observation: Float32) -> EnvState:
        """Return the state of this environment, from which any process can restore it."""
        observation = observation.copy()
        history = self._action_history[: self.elapsed].copy()
        if self.elapsed == 0:
            return make_fresh_state(self.episode, self.seed, history, observation)
        place = (self.episode, self.seed, self.elapsed, self.episode_return)
        if self._exact_mujoco:
            last_action = np.array(self._last_action, np.float32).reshape(1, -1)
            return EnvState("mujoco", *place, last_action, self._saved_physics, observation)
        return EnvState("replay", *place, history, NO_PHYSICS, observation)

    def restore(self, state: EnvState, out: Float32) -> None:
        """Restore an episode that began in another process."""
        random_state = read_global_random()
        self.reset(state.episode, state.seed, out)
        if state.kind == "mujoco":
            if not self._exact_mujoco:
                raise self._make_fault("cannot restore a MuJoCo state")
            from ..mujoco.simulation import write_state

            if state.physics.shape != self._read_physics().shape:
                raise self._make_fault("cannot restore the state of another MuJoCo model")
            base_env: Any = self._env and self._env.unwrapped
            write_state(base_env.model, base_env.data, np.array(state.physics))
            self.elapsed = state.elapsed - 1
            for layer in iterate_wrappers(self._env):
                if isinstance(layer, TimeLimit):
                    # An assignment fails type checking: Gymnasium declares the attribute as None.
                    setattr(layer, "_elapsed_steps", self.elapsed)  # noqa: B010
        for action in state.actions:  # one action for a MuJoCo state, none for a fresh one
            self.step(action.copy(), out)
        self.episode_return = state.episode_return
        if state.observation.size and not np.array_equal(state.observation, out):
            uses_global_random = read_global_random() != random_state
            causes = uses_global_random * GLOBAL_RANDOM_CAUSE
            causes += (self.spec.episodes == "reuse") * REUSE_CAUSE
            raise self._make_fault(REPLAY_MISMATCH + causes)

    def render(self) -> Any:
        """Render the environment in the mode that was passed to the constructor."""
        assert self._env is not None
        try:
            return self._env.render()
        except BaseException as error:
            report_fault(self.spec, self.position, "cannot be rendered", error)

    def close(self) -> None:
        if self._env is not None:
            env, self._env = self._env, None
            # The instance is no longer needed, so a failure to close it does not matter.
            with contextlib.suppress(Exception):
                env.close()

    def _open(self) -> gymnasium.Env[Any, Any]:
        self._env = env = make_env(self.spec, self._render_mode)
        module = type(env.unwrapped).__module__
        plain = all(type(layer) in KNOWN_WRAPPERS for layer in iterate_wrappers(env))
        self._step, self._limit = _unwrap_step(env)
        self._is_reusable = plain and module in _REUSABLE
        if self.spec.episodes != "auto":
            self._is_reusable = self.spec.episodes == "reuse"
        self._exact_mujoco = plain and module in _EXACT_MUJOCO
        if self.spec.mask_size:
            self._mask_reader = MaskReader(env, self.spec.mask_source)
        leaves = self.spec.observation_leaves
        self._observation_shape = env.observation_space.shape or ()
        if not leaves:
            size, expected = math.prod(self._observation_shape), self.spec.observation_size
            if size != expected:
                raise self._make_fault(f"has observations of {size} numbers here, not {expected}")
        elif not has_equal_leaves(env.observation_space, leaves):
            raise self._make_fault(f"has other observations here: {env.observation_space}")
        return env

    def _write_row(
        self, observation: Any, info: Any, out: Float32, has_ended: bool = False
    ) -> None:
        """Write an observation and any action mask; `has_ended` ends the episode."""
        reader, encoder = self._mask_reader, self._mask_encoder
        if reader is None or encoder is None:
            self._write_observation(observation, out)
            return
        size = self.spec.observation_size
        self._write_observation(observation, out[:size])
        if has_ended:
            # No action follows, and environments may report a mask without any choice.
            out[size:] = 1.0
            return
        try:
            encoder.write(reader.read(observation, info), out[size:])
        except SpaceError as error:
            raise self._make_fault(str(error)) from None

    def _write_observation(self, observation: Any, out: Float32) -> None:
        if self.spec.observation_leaves:
            try:
                self._encoder.write(observation, out)
            except SpaceError as error:
                raise self._make_fault(f"returned an observation {error}") from None
            return
        shape = observation.shape if type(observation) is np.ndarray else np.shape(observation)
        if shape != self._observation_shape:
            raise self._make_fault(
                f"returned an observation of shape {shape}, but its space has the shape "
                f"{self._observation_shape}"
            )
        out[:] = observation if len(shape) == 1 else np.ravel(observation)

    def _make_fault(self, message: str) -> EnvironmentFault:
        return make_fault(self.spec, self.position, message)


class GymnasiumVectorEnv:
    """Steps one Gymnasium instance per row, one after the other.

    `env_factory` makes the instances. Renderers pass a factory of renderable instances.
    """

    def __init__(
        self,
        spec: EnvSpec,
        count: int,
        env_factory: Callable[[EnvSpec, int], RestorableEnv] = RestorableEnv,
    ) -> None:
        self.spec = spec
        self._envs = [env_factory(spec, row) for row in range(count)]
        self.current_row = 0

    def reset_row(self, row: int, episode: int, seed: int, out: Float32) -> None:
        self.current_row = row
        self._envs[row].reset(episode, seed, out)

    def prepare_resets(self, seeds: Sequence[int]) -> None:
        """Do nothing, because instances are reset when an episode starts."""

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        self.current_row = row
        self._envs[row].restore(state, out)

    def step(
        self,
        active: Sequence[int],
        actions: Array,
        out: Float32,
        rewards: Float64,
        terminated: Array,
        truncated: Array,
    ) -> Sequence[int]:
        ends: list[int] = []
        for i in active:
            self.current_row = i
            rewards[i], terminal, at_limit = self._envs[i].step(actions[i], out[i])
            if terminal or at_limit:
                terminated[i], truncated[i] = terminal, not terminal
                ends.append(i)
        return ends

    def prepare_snapshot(self) -> None:
        for env in self._envs:
            env.prepare_snapshot()

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        return self._envs[row].snapshot(observation)

    def get_position(self, row: int) -> EpisodePosition:
        return self._envs[row].position

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _unwrap_step(env: gymnasium.Env[Any, Any]) -> tuple[Callable[[Any], Any], float]:
    """Return the step function, unwrapped if possible, and the step limit."""
    # Bypassing the wrappers that only count and check saves a microsecond per step.
    limit = math.inf
    for layer in iterate_wrappers(env):
        if type(layer) not in (TimeLimit, OrderEnforcing):
            return env.step, math.inf
        if isinstance(layer, TimeLimit):
            limit = min(limit, layer._max_episode_steps)
    return env.unwrapped.step, limit


def iterate_wrappers(env: Any) -> Iterator[Any]:
    """Yield the wrappers of an environment, from the outermost to the innermost."""
    while env is not env.unwrapped:
        yield env
        env = env.env
