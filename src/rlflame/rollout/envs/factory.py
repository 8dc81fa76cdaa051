"""Makes the vector environment of a slot: rlflame's own MuJoCo loop, or Gymnasium's instances.

Both have the same bits. Must not know: policies, tasks, how states travel.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from ..spec import EnvSpec
from .make import import_env_code, is_env_error
from .vector_env import GymnasiumVectorEnv, VectorEnv

_MUJOCO_LOOP = "stepped by rlflame's own MuJoCo loop"


def make_vector_env(spec: EnvSpec, count: int) -> VectorEnv:
    """The fastest rows there are for an environment; the bits are the same."""
    env_or_reason = _make_mujoco_vector_env(spec, count)
    return GymnasiumVectorEnv(spec, count) if isinstance(env_or_reason, str) else env_or_reason


def preload_env(id: str) -> None:
    """Load what an environment of this id will need, as far as that is known without making it."""
    try:
        import_env_code(id)
        if _is_gymnasium_mujoco(id):
            from ..mujoco import mujoco_env  # noqa: F401
    except BaseException as error:
        # What is wrong shows again, and is told with its place, when an environment is made.
        if not is_env_error(error):
            raise


def describe_stepping(spec: EnvSpec) -> str:
    """Who steps an environment, and why it is not somebody faster, in a few words."""
    env_or_reason = _make_mujoco_vector_env(spec, 1)
    if isinstance(env_or_reason, str):
        return f"stepped by Gymnasium: {env_or_reason}"
    env_or_reason.close()
    return _MUJOCO_LOOP


def _is_gymnasium_mujoco(id: str) -> bool:
    registration: Any = gymnasium.registry.get(id)
    entry = getattr(registration, "entry_point", None)
    return isinstance(entry, str) and entry.startswith("gymnasium.envs.mujoco.")


def _make_mujoco_vector_env(spec: EnvSpec, count: int) -> VectorEnv | str:
    """Rows of `mujoco/mujoco_env.py`, or the reason why there are none."""
    if not _is_gymnasium_mujoco(spec.id):
        return "it is none of Gymnasium's MuJoCo environments"
    try:
        from ..mujoco import mujoco_env

        return mujoco_env.make_mujoco_vector_env(spec, count)
    except BaseException as error:
        if not is_env_error(error):
            raise
        # Whatever is wrong shows again, and is reported with its place, in the first reset.
        return "it could not be made"
