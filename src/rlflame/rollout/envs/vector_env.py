"""The interface to the environments of a slot, which a worker steps together.

The two implementations, rlflame's MuJoCo loop and a loop over Gymnasium's environments, return
bit-identical results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

import gymnasium

from ..mujoco.known_spaces import MUJOCO_PACKAGE
from ..task import Array, EnvironmentFault, EnvSpec, EnvState, Float32, Float64
from .make import format_error, import_env_code, is_env_error

#: The error for an episode that cannot be restored. The two causes cannot be told apart.
REPLAY_MISMATCH = (
    "returned a different observation for the same seed and actions as before: if its code has "
    "changed, restore the old code; if not, the environment is not deterministic, its episodes "
    "cannot be moved or resumed, and a new run needs --set rollout.unit=episodes"
)

#: Added to it if instances play several episodes.
REUSE_CAUSE = (
    "; if it only keeps state between episodes, --set environment.episodes=fresh is enough"
)
#: Added to errors about episodes that cannot be repeated, if np.random was used in them.
GLOBAL_RANDOM_CAUSE = (
    "; the likely cause is that it draws numbers from np.random, which reset(seed=...) does not "
    "seed: use self.np_random instead"
)


class EpisodePosition(NamedTuple):
    """The current episode of a row, as in the first fields of an `EpisodeStat`."""

    row: int
    episode: int
    seed: int
    episode_return: float
    elapsed: int


class VectorEnv(Protocol):
    """The environments of a slot. Methods write observations to `out`."""

    spec: EnvSpec

    @property
    def current_row(self) -> int:
        """The row that is being stepped, to be reported if it hangs."""

    def reset_row(self, row: int, episode: int, seed: int, out: Float32) -> None:
        """Start a new episode in one row."""

    def prepare_resets(self, seeds: Sequence[int]) -> None:
        """Prepare for the next episode of each row, which will probably start with these seeds.

        Each call replaces the seeds of the previous call. Errors are raised in `reset_row`.
        """

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        """Continue an episode that began in another process."""

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

        Callers do not change `actions` later, so an environment may keep the array. `terminated`
        and `truncated` are written only for the returned rows, and exactly one of them is true.
        """

    def prepare_snapshot(self) -> None:
        """Prepare for snapshots. Callers call this before the last step of a fragment."""

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        """Return the state of a row, from which any process can restore it."""

    def get_position(self, row: int) -> EpisodePosition: ...

    def close(self) -> None: ...


def make_fault(spec: EnvSpec, position: EpisodePosition, message: str) -> EnvironmentFault:
    """Make an EnvironmentFault; `message` follows the environment's ID in its text."""
    text = f"Environment {spec.id} {message}"
    return EnvironmentFault(text, position.row, position.seed, position.elapsed)


def report_fault(
    spec: EnvSpec, position: EpisodePosition, message: str, error: BaseException
) -> NoReturn:
    """Raise an environment's error as an EnvironmentFault; raise others unchanged."""
    if isinstance(error, EnvironmentFault) or not is_env_error(error):
        raise error
    raise make_fault(spec, position, f"{message}: {format_error(error)}") from error


def make_vector_env(spec: EnvSpec, count: int) -> VectorEnv:
    """Make `count` environments, using the fastest implementation that supports them."""
    from .gymnasium_env import GymnasiumVectorEnv

    if spec.episodes == "compare":
        from .episode_comparison import ComparisonEnv

        return ComparisonEnv(spec)
    return _make_mujoco_vector_env(spec, count) or GymnasiumVectorEnv(spec, count)


def preload_env(id: str) -> None:
    """Import the modules of an environment, without making the environment."""
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
    """Return a phrase that names the implementation that steps an environment."""
    is_ours = _make_mujoco_vector_env(spec, 1) is not None
    return "stepped by rlflame's own MuJoCo loop" if is_ours else "stepped by Gymnasium"


def _is_gymnasium_mujoco(id: str) -> bool:
    entry = getattr(gymnasium.registry.get(id), "entry_point", None)
    return isinstance(entry, str) and entry.startswith(MUJOCO_PACKAGE)


def _make_mujoco_vector_env(spec: EnvSpec, count: int) -> VectorEnv | None:
    """Make rlflame's own MuJoCo environments, or return None if unsupported."""
    if spec.wrappers or not _is_gymnasium_mujoco(spec.id):
        return None
    try:
        from ..mujoco import mujoco_env

        return mujoco_env.make_mujoco_vector_env(spec, count)
    except BaseException as error:
        if not is_env_error(error):
            raise
        return None  # the same error is raised and reported in the first reset
