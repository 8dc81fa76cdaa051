"""Gymnasium's v5 MuJoCo environments straight on MuJoCo, the rows of a slot together.

The work of Gymnasium between two calls of MuJoCo is done for all rows at once (`locomotion.py` and
`pendulums_and_arms.py`, on `simulation.py`), and its resets are repeated draw by draw. The bits are
Gymnasium's: environments are refused unless everything down to the text of their source files is
what was compared.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from ..envs.gymnasium_env import KNOWN_WRAPPERS, iterate_wrappers
from ..envs.make import (
    REPLAY_MISMATCH,
    explain_invalid_observation,
    format_error,
    is_env_error,
    make_env,
)
from ..envs.vector_env import EpisodePosition
from ..seeding import make_reset_stream
from ..task import (
    Array,
    EnvironmentFault,
    EnvSpec,
    EnvState,
    Float32,
    Float64,
    make_fresh_state,
)
from .known_spaces import MUJOCO_PACKAGE as _PACKAGE
from .known_spaces import SOURCE_HASHES, hash_file
from .locomotion import Ant, HalfCheetah, Hopper, Humanoid, Swimmer, Walker2d
from .pendulums_and_arms import InvertedDoublePendulum, InvertedPendulum, Pusher, Reacher
from .simulation import MujocoTask, make_simulation

#: By module and class of Gymnasium's.
_TASKS: dict[str, type[MujocoTask]] = {
    "ant_v5.AntEnv": Ant,
    "half_cheetah_v5.HalfCheetahEnv": HalfCheetah,
    "hopper_v5.HopperEnv": Hopper,
    "humanoid_v5.HumanoidEnv": Humanoid,
    "inverted_double_pendulum_v5.InvertedDoublePendulumEnv": InvertedDoublePendulum,
    "inverted_pendulum_v5.InvertedPendulumEnv": InvertedPendulum,
    "pusher_v5.PusherEnv": Pusher,
    "reacher_v5.ReacherEnv": Reacher,
    "swimmer_v5.SwimmerEnv": Swimmer,
    "walker2d_v5.Walker2dEnv": Walker2d,
}
#: Where resets and wrappers are; every class depends on them.
_COMMON_MODULES = ("gymnasium.core", "gymnasium.utils.seeding", "gymnasium.wrappers.common")
#: Up to here an integer and its float are the same number.
_EXACT_INTEGER = 2**53


def make_mujoco_vector_env(spec: EnvSpec, count: int) -> MujocoVectorEnv | str:
    """Rows of this environment, or why it is left to Gymnasium; raises what making it raises."""
    env = make_env(spec)
    try:
        task = find_verified_task(env)
        return task if isinstance(task, str) else MujocoVectorEnv(spec, count, env, task)
    finally:
        env.close()


class MujocoVectorEnv:
    """The contract of `envs/vector_env.py` for one known environment."""

    def __init__(
        self, spec: EnvSpec, count: int, env: gymnasium.Env[Any, Any], task: type[MujocoTask]
    ) -> None:
        self.spec = spec
        base_env: Any = env.unwrapped
        self._simulation = make_simulation(
            base_env.model, base_env.frame_skip, count, task.reads_forces
        )
        self._task = task(base_env, self._simulation)
        self._observations = np.zeros((count, spec.observation_size), np.float32)
        limits = (
            layer._max_episode_steps
            for layer in iterate_wrappers(env)
            if isinstance(layer, TimeLimit)
        )
        #: After how many steps an episode is truncated.
        self._limit = min(limits, default=sys.maxsize)
        self._saved_physics: Float64 = np.zeros((count, 0), np.float64)
        self._rewards = np.zeros(count, np.float64)
        self._returns = np.zeros(count, np.float64)
        self._episodes, self._seeds = [0] * count, [0] * count
        #: Rows step together, so one clock serves them: a row has stepped since its beginning.
        self._clock = 0
        self._start_clocks = [0] * count
        #: Steps until a time limit may be reached.
        self._steps_to_limit = 0

    @property
    def current_row(self) -> int:
        return self._simulation.current_row

    def reset_row(self, row: int, episode: int, seed: int, out: Float32) -> None:
        self._simulation.current_row = row
        self._episodes[row], self._seeds[row] = episode, seed
        self._start_clocks[row] = self._clock
        self._returns[row] = 0.0
        self._steps_to_limit = min(self._steps_to_limit, self._limit)
        try:
            self._simulation.reset_row(row, *self._task.draw_start(make_reset_stream(seed)))
        except BaseException as error:
            self._fail("failed in reset", error)
        self._task.reset_row(row)
        self._task.observe(self._observations)
        out[:] = self._observations[row]

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        self.reset_row(row, state.episode, state.seed, out)
        steps_before = state.elapsed - len(state.actions)
        if state.kind == "mujoco":
            if state.physics.shape != self._simulation.copy_states().shape[1:]:
                raise self._make_fault(row, "cannot take up a state of another MuJoCo model")
            self._simulation.set_state(row, state.physics)
        for count, action in enumerate(state.actions, steps_before + 1):
            self._start_clocks[row] = self._clock - count
            self._simulation.controls[row] = action
            self._step_physics([row])
            # The reward is in the state already; the rows that did not move are unharmed.
            self._task.compute_rewards(self._simulation.controls.astype(np.float32), self._rewards)
            self._task.observe(self._observations)
            out[:] = self._observations[row]
        self._returns[row] = state.episode_return
        self._steps_to_limit = 0
        if state.observation.size and not np.array_equal(state.observation, out):
            raise self._make_fault(row, REPLAY_MISMATCH)

    def step(
        self,
        active: Sequence[int],
        actions: Array,
        out: Float32,
        rewards: Float64,
        terminated: Array,
        truncated: Array,
    ) -> Sequence[int]:
        self._simulation.controls[...] = actions
        # Counted before it is taken, so that an error names the step it happened in.
        self._clock += 1
        self._steps_to_limit -= 1
        if len(active) < self._simulation.count:  # one that is over is not what hangs
            self._simulation.current_row = active[0]
        self._step_physics(active)
        if len(active) == self._simulation.count:
            ended = self._task.compute_rewards(actions, rewards)
        else:
            ended = self._task.compute_rewards(actions, self._rewards)
            rewards[active] = self._rewards[active]
        self._task.observe(out)
        np.add(self._returns, rewards, self._returns)
        if not math.isfinite(self._returns.dot(self._returns)):
            self._check_returns(active, rewards)
        if ended is None and self._steps_to_limit > 0:
            return ()
        return self._find_ended_rows(active, ended, terminated, truncated)

    def prepare_snapshot(self) -> None:
        self._saved_physics = self._simulation.copy_states()

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        _, episode, seed, episode_return, elapsed = self.get_position(row)
        last_action = self._simulation.controls[row : row + 1].astype(np.float32)
        if elapsed == 0:
            return make_fresh_state(episode, seed, last_action[:0], observation.copy())
        place = (episode, seed, elapsed, episode_return)
        physics = self._saved_physics[row]
        return EnvState("mujoco", *place, last_action, physics, observation.copy())

    def get_position(self, row: int) -> EpisodePosition:
        return EpisodePosition(
            row,
            self._episodes[row],
            self._seeds[row],
            float(self._returns[row]),
            self._clock - self._start_clocks[row],
        )

    def check_finite(self, row: int, observation: Float32) -> None:
        if np.isfinite(observation).all():
            return
        exact = np.zeros((self._simulation.count, len(observation)), np.float64)
        self._task.observe(exact)
        raise self._make_fault(row, explain_invalid_observation(exact[row]))

    def close(self) -> None:
        """Nothing is open."""

    def _step_physics(self, active: Sequence[int]) -> None:
        try:
            self._simulation.step(active)
        except BaseException as error:
            self._fail("failed in step", error)

    def _find_ended_rows(
        self, active: Sequence[int], ended: Array | None, terminated: Array, truncated: Array
    ) -> Sequence[int]:
        """Mark the rows whose episode is over, and count the steps until a limit anew."""
        ended_rows: list[int] = []
        if ended is not None and self._steps_to_limit > 0:
            flags = ended.tolist()
            ended_rows = [row for row in active if flags[row]]
            terminated[ended_rows] = True
            return ended_rows
        self._steps_to_limit = self._limit
        for row in active:
            steps_left = self._limit - (self._clock - self._start_clocks[row])
            terminal = ended is not None and bool(ended[row])
            if terminal or steps_left <= 0:
                terminated[row], truncated[row] = terminal, not terminal
                ended_rows.append(row)
            else:
                self._steps_to_limit = min(self._steps_to_limit, steps_left)
        return ended_rows

    def _check_returns(self, active: Sequence[int], rewards: Float64) -> None:
        for row in active:
            if not math.isfinite(rewards[row]):
                raise self._make_fault(row, f"returned the reward {float(rewards[row])}")
            if not math.isfinite(self._returns[row]):
                raise self._make_fault(row, "returned rewards that add up to infinity")

    def _fail(self, message: str, error: BaseException) -> NoReturn:
        """Raise the fault of an environment's error; what is none passes as it is."""
        if not is_env_error(error):
            raise error
        raise self._make_fault(self.current_row, f"{message}: {format_error(error)}") from error

    def _make_fault(self, row: int, message: str) -> EnvironmentFault:
        position = self.get_position(row)
        return EnvironmentFault(
            f"environment {self.spec.id} {message}", row, position.seed, position.elapsed
        )


def find_verified_task(env: gymnasium.Env[Any, Any]) -> type[MujocoTask] | str:
    """The task that repeats this environment, or why none does."""
    kind = type(env.unwrapped)
    name = f"{kind.__module__.removeprefix(_PACKAGE)}.{kind.__qualname__}"
    task = _TASKS.get(name) if kind.__module__.startswith(_PACKAGE) else None
    if task is None:
        return "its rewards are not written here"
    return _explain_refusal(env) or task


def _explain_refusal(env: gymnasium.Env[Any, Any]) -> str | None:
    """Why the bits might not be Gymnasium's."""
    base_env: Any = env.unwrapped
    for layer in iterate_wrappers(env):
        if type(layer) not in KNOWN_WRAPPERS:
            return f"it is wrapped in {type(layer).__name__}"
    for module in (*_COMMON_MODULES, f"{_PACKAGE}mujoco_env", type(base_env).__module__):
        if not _is_verified(module):
            return f"Gymnasium {gymnasium.__version__} is not the version it was compared with"
    for kind in type(base_env).__mro__[:2]:
        for name, part in vars(kind).items():
            code = getattr(getattr(part, "fget", part), "__code__", None)
            if code is not None and code.co_filename != _find_file(kind.__module__):
                return f"{kind.__name__}.{name} was changed"
    settings = inspect.signature(type(base_env).__init__).parameters
    assets = Path(_find_file(f"{_PACKAGE}mujoco_env")).parent / "assets"
    if Path(base_env.fullpath) != assets / settings["xml_file"].default:
        return "it has a model file of its own"
    if base_env.render_mode is not None:
        return "it is drawn"
    if type(base_env.frame_skip) is not int or base_env.frame_skip < 1:
        return f"frame_skip is {base_env.frame_skip!r}"
    for name, parameter in settings.items():
        fits = _SETTING_CHECKS.get(type(parameter.default))
        if fits is not None and name not in ("frame_skip", "main_body"):
            value = getattr(base_env, f"_{name}")
            if not fits(value):
                return f"{name} is {value!r}"
    return None


@cache
def _is_verified(module: str) -> bool:
    """Whether a module of Gymnasium's is word for word the one that was compared with."""
    try:
        return hash_file(Path(_find_file(module))).startswith(SOURCE_HASHES[module])
    except OSError:
        return False


def _find_file(module: str) -> str:
    return str(sys.modules[module].__file__)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _EXACT_INTEGER
    return type(value) is float


def _is_range(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) == 2 and all(map(_is_number, value))


#: Whether a setting is of the type that was compared, by the type of its default.
_SETTING_CHECKS: dict[type, Callable[[Any], bool]] = {
    bool: lambda value: type(value) is bool,
    int: _is_number,
    float: _is_number,
    tuple: _is_range,
}
