"""Steps all rows of a slot at once, for Gymnasium's MuJoCo v5 environments.

The work between two calls to MuJoCo is done for all rows together (see `mujoco_task.py` and
`simulation.py`). Resets make the same random draws as Gymnasium. Results must be bit-identical to
Gymnasium's, so other environments and other versions of Gymnasium's source files are not accepted.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from ..envs.gymnasium_env import KNOWN_WRAPPERS, iterate_wrappers
from ..envs.make import make_env
from ..envs.vector_env import REPLAY_MISMATCH, EpisodePosition, make_fault, report_fault
from ..seeding import make_reset_streams
from ..task import Array, EnvSpec, EnvState, Float32, Float64, make_fresh_state
from .known_spaces import MUJOCO_PACKAGE, is_verified
from .mujoco_task import TASKS
from .simulation import Simulation, StartState

#: The modules of resets and wrappers, which every class depends on.
_COMMON_MODULES = (
    "gymnasium.core",
    "gymnasium.utils.seeding",
    "gymnasium.wrappers.common",
    f"{MUJOCO_PACKAGE}mujoco_env",
)
#: A float can represent every integer up to this one exactly.
_EXACT_INTEGER = 2**53


def make_mujoco_vector_env(spec: EnvSpec, count: int) -> MujocoVectorEnv | None:
    """Make `count` environments, or return None if results may differ from Gymnasium's.

    Raises the same errors as `make_env`.
    """
    env = make_env(spec)
    try:
        return MujocoVectorEnv(spec, count, env) if _is_known(env) else None
    finally:
        env.close()


class MujocoVectorEnv:
    """Implements `VectorEnv` for one of the known MuJoCo environments."""

    def __init__(self, spec: EnvSpec, count: int, env: gymnasium.Env[Any, Any]) -> None:
        self.spec = spec
        base_env: Any = env.unwrapped
        task = TASKS[type(base_env).__name__]
        self._simulation = Simulation(base_env.model, base_env.frame_skip, count, task.reads_forces)
        self._task = task(base_env, self._simulation)
        self._observations = np.zeros((count, spec.observation_size), np.float32)
        limits = (
            layer._max_episode_steps
            for layer in iterate_wrappers(env)
            if isinstance(layer, TimeLimit)
        )
        #: The step limit of an episode.
        self._limit = min(limits, default=sys.maxsize)
        self._saved_physics: Float64 = np.zeros((count, 0), np.float64)
        self._rewards = np.zeros(count, np.float64)
        self._returns = np.zeros(count, np.float64)
        self._episodes, self._seeds = [0] * count, [0] * count
        #: All rows step together and share one clock. Each row stores the time of its reset.
        self._clock = 0
        self._start_clocks = [0] * count
        #: After this number of steps, a row may reach the time limit.
        self._steps_to_limit = 0
        #: The start states of episodes that may follow, by the seeds of their resets.
        self._starts: dict[int, StartState] = {}

    @property
    def current_row(self) -> int:
        return self._simulation.current_row

    def reset_row(self, row: int, episode: int, seed: int, out: Float32) -> None:
        self._simulation.current_row = row
        self._episodes[row], self._seeds[row] = episode, seed
        self._start_clocks[row] = self._clock
        self._returns[row] = 0.0
        try:
            start = self._starts.pop(seed, None) or self._compute_starts([seed])[seed]
            self._simulation.reset_row(row, start)
        except BaseException as error:
            report_fault(self.spec, self.get_position(row), "failed in reset", error)
        self._task.reset_row(row)
        self._task.observe(self._observations)
        out[:] = self._observations[row]

    def prepare_resets(self, seeds: Sequence[int]) -> None:
        starts = {seed: self._starts[seed] for seed in seeds if seed in self._starts}
        # An error is raised again, and reported, in the reset of the episode that causes it.
        with contextlib.suppress(Exception):
            starts |= self._compute_starts([seed for seed in seeds if seed not in starts])
        self._starts = starts

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        self.reset_row(row, state.episode, state.seed, out)
        steps_before = state.elapsed - len(state.actions)
        if state.kind == "mujoco":
            if state.physics.shape != self._simulation.copy_states().shape[1:]:
                raise make_fault(
                    self.spec,
                    self.get_position(row),
                    "cannot restore the state of another MuJoCo model",
                )
            self._simulation.set_state(row, state.physics)
        for count, action in enumerate(state.actions, steps_before + 1):
            self._start_clocks[row] = self._clock - count
            self._simulation.controls[row] = action
            self._step_physics([row])
            # The rewards are not added, because the saved return includes them. Rows that did not
            # move are unchanged.
            self._task.compute_rewards(self._simulation.controls.astype(np.float32), self._rewards)
            self._task.observe(self._observations)
            out[:] = self._observations[row]
        self._returns[row] = state.episode_return
        self._steps_to_limit = 0
        if state.observation.size and not np.array_equal(state.observation, out):
            raise make_fault(self.spec, self.get_position(row), REPLAY_MISMATCH)

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
        # Count before the step, so that an error names the step in which it occurred.
        self._clock += 1
        self._steps_to_limit -= 1
        if len(active) < self._simulation.count:  # the current row must be an active one
            self._simulation.current_row = active[0]
        self._step_physics(active)
        if len(active) == self._simulation.count:
            ends = self._task.compute_rewards(actions, rewards)
        else:
            ends = self._task.compute_rewards(actions, self._rewards)
            rewards[active] = self._rewards[active]
        self._task.observe(out)
        np.add(self._returns, rewards, self._returns)
        if not math.isfinite(self._returns.dot(self._returns)):
            self._check_returns(active, rewards)
        if self._steps_to_limit <= 0:
            return self._find_ended_rows(active, ends, terminated, truncated)
        if ends is None:
            return ()
        flags = ends.tolist()
        ended_rows = [row for row in active if flags[row]]
        terminated[ended_rows], truncated[ended_rows] = True, False
        return ended_rows

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

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""

    def _compute_starts(self, seeds: Sequence[int]) -> dict[int, StartState]:
        draw_start, compute_start = self._task.draw_start, self._simulation.compute_start
        streams = make_reset_streams(seeds)
        return {
            seed: compute_start(*draw_start(stream))
            for seed, stream in zip(seeds, streams, strict=True)
        }

    def _step_physics(self, active: Sequence[int]) -> None:
        try:
            self._simulation.step(active)
        except BaseException as error:
            report_fault(self.spec, self.get_position(self.current_row), "failed in step", error)

    def _find_ended_rows(
        self, active: Sequence[int], ends: Array | None, terminated: Array, truncated: Array
    ) -> Sequence[int]:
        """Mark and return the rows whose episodes have ended; update `_steps_to_limit`."""
        ended_rows: list[int] = []
        self._steps_to_limit = self._limit
        for row in active:
            steps_left = self._limit - (self._clock - self._start_clocks[row])
            terminal = ends is not None and bool(ends[row])
            if terminal or steps_left <= 0:
                terminated[row], truncated[row] = terminal, not terminal
                ended_rows.append(row)
            else:
                self._steps_to_limit = min(self._steps_to_limit, steps_left)
        return ended_rows

    def _check_returns(self, active: Sequence[int], rewards: Float64) -> None:
        for row in active:
            if not math.isfinite(rewards[row]):
                raise make_fault(
                    self.spec, self.get_position(row), f"returned the reward {float(rewards[row])}"
                )
            if not math.isfinite(self._returns[row]):
                raise make_fault(
                    self.spec, self.get_position(row), "returned rewards that add up to infinity"
                )


def _is_known(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether the environment and its source files match the tested ones."""
    base_env: Any = env.unwrapped
    kind = type(base_env)
    modules = (*_COMMON_MODULES, kind.__module__)
    if kind.__name__ not in TASKS or not all(map(is_verified, modules)):
        return False
    if any(type(layer) not in KNOWN_WRAPPERS for layer in iterate_wrappers(env)):
        return False
    for owner in kind.__mro__[:2]:
        for part in vars(owner).values():
            code = getattr(getattr(part, "fget", part), "__code__", None)
            if code is not None and code.co_filename != sys.modules[owner.__module__].__file__:
                return False  # a method was replaced while this process ran
    settings = inspect.signature(kind.__init__).parameters
    assets = Path(inspect.getfile(kind)).parent / "assets"
    return (
        Path(base_env.fullpath) == assets / settings["xml_file"].default
        and base_env.render_mode is None
        and type(base_env.frame_skip) is int
        and base_env.frame_skip >= 1
        and all(
            _is_plain(getattr(base_env, f"_{name}"), parameter.default)
            for name, parameter in settings.items()
            if isinstance(parameter.default, bool | int | float | tuple)
            and name not in ("frame_skip", "main_body")
        )
    )


def _is_plain(value: Any, default: Any) -> bool:
    """Return whether results were tested for settings of this type."""
    if isinstance(default, tuple):
        is_range = type(value) in (list, tuple) and len(value) == 2
        return is_range and all(_is_plain(bound, 0.0) for bound in value)
    if isinstance(default, bool):
        return type(value) is bool
    return type(value) is float or (type(value) is int and abs(value) <= _EXACT_INTEGER)
