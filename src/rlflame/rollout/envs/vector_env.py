"""The environments of one slot, stepped together: the contract, and the choice of implementation.

rlflame's own MuJoCo loop and Gymnasium's instances have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

import gymnasium

from ..mujoco.known_spaces import MUJOCO_PACKAGE
from ..task import Array, EnvironmentFault, EnvSpec, EnvState, Float32, Float64
from .make import format_error, import_env_code, is_env_error

#: Of an episode that is taken up again; which of the two it is cannot be seen from here.
REPLAY_MISMATCH = (
    "led to another observation by the same seed and actions than before: put its code back if "
    "that has changed since, or else it is not deterministic, its episodes cannot be moved or "
    "resumed half-way, and a new run of it needs --set rollout.unit=episodes"
)


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

    def close(self) -> None: ...


def make_fault(spec: EnvSpec, position: EpisodePosition, message: str) -> EnvironmentFault:
    """An environment has misbehaved at this position; the message follows its name."""
    text = f"environment {spec.id} {message}"
    return EnvironmentFault(text, position.row, position.seed, position.elapsed)


def report_fault(
    spec: EnvSpec, position: EpisodePosition, message: str, error: BaseException
) -> NoReturn:
    """Raise the fault of an environment's error; what is none passes as it is."""
    if isinstance(error, EnvironmentFault) or not is_env_error(error):
        raise error
    raise make_fault(spec, position, f"{message}: {format_error(error)}") from error


def make_vector_env(spec: EnvSpec, count: int) -> VectorEnv:
    """The fastest implementation for an environment; all have the same bits."""
    from .gymnasium_env import GymnasiumVectorEnv

    return _make_mujoco_vector_env(spec, count) or GymnasiumVectorEnv(spec, count)


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
    """Which implementation steps an environment."""
    is_ours = _make_mujoco_vector_env(spec, 1) is not None
    return "stepped by rlflame's own MuJoCo loop" if is_ours else "stepped by Gymnasium"


def _is_gymnasium_mujoco(id: str) -> bool:
    entry = getattr(gymnasium.registry.get(id), "entry_point", None)
    return isinstance(entry, str) and entry.startswith(MUJOCO_PACKAGE)


def _make_mujoco_vector_env(spec: EnvSpec, count: int) -> VectorEnv | None:
    """The environments in `mujoco/mujoco_env.py`; None where they cannot or must not be these."""
    if not _is_gymnasium_mujoco(spec.id):
        return None
    try:
        from ..mujoco import mujoco_env

        return mujoco_env.make_mujoco_vector_env(spec, count)
    except BaseException as error:
        if not is_env_error(error):
            raise
        return None  # the same error is raised and reported in the first reset
