"""The environments of one slot, stepped together: the contract, and the choice of implementation.

rlflame's own MuJoCo loop and Gymnasium's instances have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium

from ..task import Array, EnvSpec, EnvState, Float32, Float64
from .make import import_env_code, is_env_error


class EpisodePosition(NamedTuple):
    """Where a row's episode stands: the first fields of an `EpisodeStat`."""

    row: int
    episode: int
    seed: int
    episode_return: float
    elapsed: int


class VectorEnv(Protocol):
    """The environments of a slot; `out` is the row's line, or all lines, of what is observed."""

    spec: EnvSpec

    @property
    def current_row(self) -> int:
        """The row being stepped now, for messages about a hang."""

    def reset_row(self, row: int, episode: int, seed: int, out: Float32) -> None:
        """Start an episode."""

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        """Continue an episode from where another process, or an earlier one, left it."""

    def step(
        self,
        active: Sequence[int],
        actions: Array,
        out: Float32,
        rewards: Float64,
        terminated: Array,
        truncated: Array,
    ) -> Sequence[int]:
        """One transition of the active rows; returns those whose episode has ended.

        `actions` is not written to later, so an environment may keep it. The ends are written
        where they are true; an end by the environment itself wins over a time limit.
        """

    def prepare_snapshot(self) -> None:
        """Called before a fragment's last step."""

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        """Where the row stands, as a value."""

    def get_position(self, row: int) -> EpisodePosition: ...

    def check_finite(self, row: int, observation: Float32) -> None: ...

    def close(self) -> None: ...


def make_vector_env(spec: EnvSpec, count: int) -> VectorEnv:
    """The fastest implementation for an environment; all have the same bits."""
    from .gymnasium_env import GymnasiumVectorEnv

    env_or_reason = _make_mujoco_vector_env(spec, count)
    return GymnasiumVectorEnv(spec, count) if isinstance(env_or_reason, str) else env_or_reason


def preload_env(id: str) -> None:
    """Load what an environment of this id will need, as far as that is known without making it."""
    from . import gymnasium_env  # noqa: F401

    try:
        import_env_code(id)
        if _is_gymnasium_mujoco(id):
            from ..mujoco import mujoco_env  # noqa: F401
    except BaseException as error:
        # The same error is raised and reported when an environment is made.
        if not is_env_error(error):
            raise


def describe_stepping(spec: EnvSpec) -> str:
    """Which implementation steps an environment, and why not the faster one."""
    env_or_reason = _make_mujoco_vector_env(spec, 1)
    if isinstance(env_or_reason, str):
        return f"stepped by Gymnasium: {env_or_reason}"
    env_or_reason.close()
    return "stepped by rlflame's own MuJoCo loop"


def _is_gymnasium_mujoco(id: str) -> bool:
    registration: Any = gymnasium.registry.get(id)
    entry = getattr(registration, "entry_point", None)
    return isinstance(entry, str) and entry.startswith("gymnasium.envs.mujoco.")


def _make_mujoco_vector_env(spec: EnvSpec, count: int) -> VectorEnv | str:
    """The environments in `mujoco/mujoco_env.py`, or the reason why there are none."""
    if not _is_gymnasium_mujoco(spec.id):
        return "it is none of Gymnasium's MuJoCo environments"
    try:
        from ..mujoco import mujoco_env

        return mujoco_env.make_mujoco_vector_env(spec, count)
    except BaseException as error:
        if not is_env_error(error):
            raise
        # The same error is raised and reported in the first reset.
        return "it could not be made"
