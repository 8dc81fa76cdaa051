"""Gymnasium's v5 MuJoCo environments straight on one MjModel and an MjData for each row.

What Gymnasium does between two calls of MuJoCo is done for all rows at once (`v5_*.py`);
resets are Gymnasium's own, on our data. The bits are Gymnasium's: whatever is not exactly what was
compared with it, down to the text of its source files, is refused. Must not know: policies, tasks,
how states travel.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium.wrappers import TimeLimit

from .lockstep import KNOWN_WRAPPERS, make, misbehaved, said, sealed
from .rows import Standing
from .spec import Array, EnvironmentFault, EnvSpec, EnvState, Float32, Float64
from .v5_fixed import InvertedDoublePendulum, InvertedPendulum, Pusher, Reacher
from .v5_parts import Gathering, Task
from .v5_runners import Ant, HalfCheetah, Hopper, Humanoid, Swimmer, Walker2d

_ROOM = "gymnasium.envs.mujoco."
#: By module and class of Gymnasium's.
_TASKS: dict[str, type[Task]] = {
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
#: Beginnings of the SHA-256 of the files that were compared: those of Gymnasium 1.4.0.
_SOURCES: Mapping[str, str] = {
    "gymnasium.wrappers.common": "ef31d8b3c302ba12",
    f"{_ROOM}mujoco_env": "77e8205c380d8e0d",
    f"{_ROOM}ant_v5": "03be9596a1fbc171",
    f"{_ROOM}half_cheetah_v5": "c6520e364985f471",
    f"{_ROOM}hopper_v5": "daa2951970f5f558",
    f"{_ROOM}humanoid_v5": "53792f8fd48efbee",
    f"{_ROOM}inverted_double_pendulum_v5": "a4ce6cadb4daf557",
    f"{_ROOM}inverted_pendulum_v5": "860e8436475689a4",
    f"{_ROOM}pusher_v5": "e51893fd93ab0e72",
    f"{_ROOM}reacher_v5": "be2f75d48b6b19e6",
    f"{_ROOM}swimmer_v5": "5bdb513ea955bc2e",
    f"{_ROOM}walker2d_v5": "10219f0e6b5208d6",
}
_INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION
_NO_LIMIT = sys.maxsize
#: Up to here an integer and its float are the same number.
_EXACT_INTEGER = 2**53
_NO_PHYSICS: Float64 = np.zeros(0, np.float64)


def open_rows(spec: EnvSpec, count: int) -> MujocoRows | str:
    """Rows of this environment, or why it is left to Gymnasium; raises what making it raises."""
    env = make(spec)
    world: Any = env.unwrapped
    kind = type(world)
    name = f"{kind.__module__.removeprefix(_ROOM)}.{kind.__qualname__}"
    task = _TASKS.get(name) if kind.__module__.startswith(_ROOM) else None
    reason = "its rewards are not written here" if task is None else _refusal(env, task)
    if task is None or reason is not None:
        env.close()
        return str(reason)
    return MujocoRows(spec, count, env, task)


def _refusal(env: gymnasium.Env[Any, Any], task: type[Task]) -> str | None:
    """Why the bits might not be Gymnasium's."""
    world: Any = env.unwrapped
    layer: Any = env
    while layer is not world:
        if type(layer) not in KNOWN_WRAPPERS:
            return f"it is wrapped in {type(layer).__name__}"
        layer = layer.env
    for module in ("gymnasium.wrappers.common", f"{_ROOM}mujoco_env", type(world).__module__):
        if not _is_compared(module):
            return f"Gymnasium {gymnasium.__version__} is not the version it was compared with"
    for kind in type(world).__mro__[:2]:
        for name, part in vars(kind).items():
            code = getattr(getattr(part, "fget", part), "__code__", None)
            if code is not None and code.co_filename != _file(kind.__module__):
                return f"{kind.__name__}.{name} was changed"
    if Path(world.fullpath) != Path(_file(f"{_ROOM}mujoco_env")).parent / "assets" / task.model:
        return "it has a model file of its own"
    if world.render_mode is not None:
        return "it is drawn"
    if type(world.frame_skip) is not int or world.frame_skip < 1:
        return f"frame_skip is {world.frame_skip!r}"
    for names, fits in (
        (task.numbers, _is_number),
        (task.ranges, _is_range),
        (task.flags, lambda value: type(value) is bool),
    ):
        for name in names:
            if not fits(getattr(world, name)):
                return f"{name.lstrip('_')} is {getattr(world, name)!r}"
    return None


@cache
def _is_compared(module: str) -> bool:
    """Whether a module of Gymnasium's is word for word the one that was compared with."""
    try:
        text = Path(_file(module)).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(text).hexdigest().startswith(_SOURCES[module])


def _file(module: str) -> str:
    return str(sys.modules[module].__file__)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _EXACT_INTEGER
    return type(value) is float


def _is_range(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) == 2 and all(map(_is_number, value))


class MujocoRows:
    """The contract of `rows.py` for one known environment."""

    def __init__(
        self, spec: EnvSpec, count: int, env: gymnasium.Env[Any, Any], task: type[Task]
    ) -> None:
        self.spec = spec
        self._env = env
        world: Any = env.unwrapped
        self._world = world
        self._model = world.model
        self._skip: int = world.frame_skip
        self._bodies = [mujoco.MjData(self._model) for _ in range(count)]
        gathering = Gathering(self._bodies)
        self._task = task(world, gathering)
        self._reads_forces = task.reads_forces
        self._given = np.zeros((count, spec.action_size), np.float64)
        #: What a row's step touches: MuJoCo's controls and ours, its data, and what is copied.
        self._moves: list[tuple[Array, Array, Any, list[tuple[Array, Array]]]] = [
            (data.ctrl, given, data, copies)
            for data, given, copies in zip(self._bodies, self._given, gathering.copies, strict=True)
        ]
        self._limit = _time_limit(env)
        self._held = [_NO_PHYSICS] * count
        self._rewards = np.zeros(count, np.float64)
        self._returns = np.zeros(count, np.float64)
        self._episodes, self._seeds = [0] * count, [0] * count
        #: Rows step together, so one clock serves them: a row has stepped since its beginning.
        self._clock = 0
        self._begun = [0] * count
        #: Steps until a time limit may be reached.
        self._room = 0
        self._current = 0

    def begin(self, row: int, episode: int, seed: int, out: Float32) -> None:
        self._current = row
        self._episodes[row], self._seeds[row] = episode, seed
        self._begun[row] = self._clock
        self._returns[row] = 0.0
        self._room = min(self._room, self._limit)
        try:
            self._world.data = self._bodies[row]
            out[:], _ = self._world.reset(seed=seed)
        except BaseException as error:
            if not misbehaved(error):
                raise
            raise self._fault(row, f"failed in reset: {said(error)}") from error
        for to, source in self._moves[row][3]:
            to[...] = source
        self._task.begin(row)

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        self.begin(row, state.episode, state.seed, out)
        before = state.elapsed - len(state.actions)
        if state.kind == "mujoco":
            if state.physics.shape != (mujoco.mj_stateSize(self._model, _INTEGRATION),):
                raise self._fault(row, "cannot take up a state of another MuJoCo model")
            mujoco.mj_setState(self._model, self._bodies[row], state.physics, _INTEGRATION)
        seen = np.zeros((len(self._bodies), len(out)), np.float32)
        for count, action in enumerate(state.actions, before + 1):
            self._begun[row] = self._clock - count
            self._given[row] = action
            self._move([row])
            # The reward is in the state already; the rows that did not move are unharmed.
            self._task.rate(self._given.astype(np.float32), self._rewards)
            self._task.observe(seen)
            out[:] = seen[row]
        self._returns[row] = state.episode_return
        self._room = 0
        if state.observation.size and not np.array_equal(state.observation, out):
            raise self._fault(
                row,
                "is not deterministic: the same seed and actions led to another observation, so "
                "its episodes cannot be moved or resumed half-way "
                "(use whole episodes: --set rollout.unit=episodes)",
            )

    def step(
        self,
        active: Sequence[int],
        actions: Array,
        out: Float32,
        rewards: Float64,
        terminated: Array,
        truncated: Array,
    ) -> Sequence[int]:
        self._given[...] = actions
        # Counted before it is taken, so that an error names the step it happened in.
        self._clock += 1
        self._room -= 1
        self._move(active)
        if len(active) == len(self._bodies):
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
        size = mujoco.mj_stateSize(self._model, _INTEGRATION)
        self._held = [np.zeros(size, np.float64) for _ in self._bodies]
        for data, held in zip(self._bodies, self._held, strict=True):
            mujoco.mj_getState(self._model, data, held, _INTEGRATION)

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        at = self.standing(row)
        shown = observation.copy()
        if at.elapsed == 0:
            nothing = np.zeros((0, self.spec.action_size), np.float32)
            return sealed("fresh", at.episode, at.seed, 0, 0.0, nothing, _NO_PHYSICS, shown)
        last = self._given[row : row + 1].astype(np.float32)
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
        return self.standing(self._current)

    def check_finite(self, row: int, observation: Float32) -> None:
        if np.isfinite(observation).all():
            return
        exact = np.zeros((len(self._bodies), len(observation)), np.float64)
        self._task.observe(exact)
        if np.isfinite(exact[row]).all():
            raise self._fault(
                row,
                f"returned the number {np.abs(exact[row]).max():.3g} in its observation, "
                "which does not fit float32",
            )
        raise self._fault(row, "returned NaN or infinity in its observation")

    def close(self) -> None:
        self._env.close()

    def _move(self, active: Sequence[int]) -> None:
        step, forces = mujoco.mj_step, mujoco.mj_rnePostConstraint
        model, skip, reads_forces, moves = self._model, self._skip, self._reads_forces, self._moves
        try:
            for row in active:
                self._current = row
                control, given, data, copies = moves[row]
                control[...] = given
                step(model, data, skip)
                if reads_forces:
                    forces(model, data)
                for to, source in copies:
                    to[...] = source
        except BaseException as error:
            if not misbehaved(error):
                raise
            raise self._fault(self._current, f"failed in step: {said(error)}") from error

    def _ends(
        self, active: Sequence[int], ended: Array | None, terminated: Array, truncated: Array
    ) -> Sequence[int]:
        """Mark the rows whose episode is over, and count the steps until a limit anew."""
        over: list[int] = []
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
