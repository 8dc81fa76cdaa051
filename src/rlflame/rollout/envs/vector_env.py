"""A slot's environments, stepped together: interface and implementations.

rlflame's MuJoCo loop and Gymnasium's instances have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

import gymnasium

from ..mujoco.known_spaces import MUJOCO_PACKAGE
from ..task import Array, EnvironmentFault, EnvSpec, EnvState, Float32, Float64
from .make import format_error, import_env_code, is_env_error

#: The error of an episode that cannot be restored; both causes look alike here.
REPLAY_MISMATCH = (
    "led to another observation by the same seed and actions than before: put its code back if "
    "that has changed since, or else it is not deterministic, its episodes cannot be moved or "
    "resumed half-way, and a new run of it needs --set rollout.unit=episodes"
)


class EpisodePosition(NamedTuple):
    """The position of a row's episode: the first fields of an `EpisodeStat`."""

    row: int
    episode: int
    seed: int
    episode_return: float
    elapsed: int


class VectorEnv(Protocol):
    """The environments of a slot; `out` is the row of an observation, or all rows."""

    spec: EnvSpec

    @property
    def current_row(self) -> int:
        """The row that is being stepped, for messages about a hang."""

    def reset_row(self, row: int, episode: int, seed: int, out: Float32) -> None:
        """Start an episode."""

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        """Continue an episode from another process or an earlier one."""

    def step(
        self,
        active: Sequence[int],
        actions: Array,
        out: Float32,
        rewards: Float64,
        terminated: Array,
        truncated: Array,
    ) -> Sequence[int]:
        """Step the active rows; return the rows whose episode has ended.

        `actions` is not written to later, so an environment may keep it. Only true ends are
        written. An end by the environment takes precedence over a time limit.
        """

    def prepare_snapshot(self) -> None:
        """Prepare a snapshot before a fragment's last step."""

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        """Return the state of the row as a value."""

    def get_position(self, row: int) -> EpisodePosition: ...

    def close(self) -> None: ...


def make_fault(spec: EnvSpec, position: EpisodePosition, message: str) -> EnvironmentFault:
    """Make an environment's fault at this position; `message` follows its name."""
    text = f"environment {spec.id} {message}"
    return EnvironmentFault(text, position.row, position.seed, position.elapsed)


def report_fault(
    spec: EnvSpec, position: EpisodePosition, message: str, error: BaseException
) -> NoReturn:
    """Raise the fault of an environment's error; pass on other errors."""
    if isinstance(error, EnvironmentFault) or not is_env_error(error):
        raise error
    raise make_fault(spec, position, f"{message}: {format_error(error)}") from error


def make_vector_env(spec: EnvSpec, count: int) -> VectorEnv:
    """Make the fastest implementation of an environment; all have the same bits."""
    from .gymnasium_env import GymnasiumVectorEnv

    return _make_mujoco_vector_env(spec, count) or GymnasiumVectorEnv(spec, count)


def preload_env(id: str) -> None:
    """Import what an id's environment needs, if known without making it."""
    from . import gymnasium_env  # noqa: F401

    try:
        import_env_code(id)
        if _is_gymnasium_mujoco(id):
            from ..mujoco import mujoco_env  # noqa: F401
    except BaseException as error:
        # The same error is raised and reported when the environment is made.
        if not is_env_error(error):
            raise


def describe_stepping(spec: EnvSpec) -> str:
    """Describe which implementation steps an environment."""
    is_ours = _make_mujoco_vector_env(spec, 1) is not None
    return "stepped by rlflame's own MuJoCo loop" if is_ours else "stepped by Gymnasium"


def _is_gymnasium_mujoco(id: str) -> bool:
    entry = getattr(gymnasium.registry.get(id), "entry_point", None)
    return isinstance(entry, str) and entry.startswith(MUJOCO_PACKAGE)


def _make_mujoco_vector_env(spec: EnvSpec, count: int) -> VectorEnv | None:
    """Make the environments of `mujoco/mujoco_env.py`, or None if they do not apply."""
    if not _is_gymnasium_mujoco(spec.id):
        return None
    try:
        from ..mujoco import mujoco_env

        return mujoco_env.make_mujoco_vector_env(spec, count)
    except BaseException as error:
        if not is_env_error(error):
            raise
        return None  # the same error is raised and reported in the first reset
