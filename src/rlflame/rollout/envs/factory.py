"""Makes the vector environment of a slot: rlflame's own MuJoCo loop, or Gymnasium's instances.

Both have the same bits. Must not know: policies, tasks, how states travel.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from ..spec import EnvSpec
from .make import import_code, misbehaved
from .vector_env import GymnasiumRows, Rows

_OWN_PHYSICS = "stepped by rlflame's own MuJoCo loop"


def open_rows(spec: EnvSpec, count: int) -> Rows:
    """The fastest rows there are for an environment; the bits are the same."""
    rows = _known_physics(spec, count)
    return GymnasiumRows(spec, count) if isinstance(rows, str) else rows


def prepare(id: str) -> None:
    """Load what an environment of this id will need, as far as that is known without making it."""
    try:
        import_code(id)
        if _is_of_mujoco(id):
            from ..mujoco import mujoco_env  # noqa: F401
    except BaseException as error:
        # What is wrong shows again, and is told with its place, when an environment is made.
        if not misbehaved(error):
            raise


def stepped_by(spec: EnvSpec) -> str:
    """Who steps an environment, and why it is not somebody faster, in a few words."""
    rows = _known_physics(spec, 1)
    if isinstance(rows, str):
        return f"stepped by Gymnasium: {rows}"
    rows.close()
    return _OWN_PHYSICS


def _is_of_mujoco(id: str) -> bool:
    registered: Any = gymnasium.registry.get(id)
    entry = getattr(registered, "entry_point", None)
    return isinstance(entry, str) and entry.startswith("gymnasium.envs.mujoco.")


def _known_physics(spec: EnvSpec, count: int) -> Rows | str:
    """Rows of `mujoco/mujoco_env.py`, or the reason why there are none."""
    if not _is_of_mujoco(spec.id):
        return "it is none of Gymnasium's MuJoCo environments"
    try:
        from ..mujoco import mujoco_env

        return mujoco_env.open_rows(spec, count)
    except BaseException as error:
        if not misbehaved(error):
            raise
        # Whatever is wrong shows again, and is reported with its place, in the first reset.
        return "it could not be made"
