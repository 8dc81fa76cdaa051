"""The spaces of Gymnasium's MuJoCo v5 environments, known without importing them.

Processes that do not step environments can therefore skip the import of Gymnasium and MuJoCo. The
spaces of these environments do not change unless another environment is registered under the same
name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..task import EnvSpec

#: The sizes of observations and actions, the action bound, and the step limit.
_SPACES: Mapping[str, tuple[int, int, float, int]] = {
    "Ant-v5": (105, 8, 1.0, 1000),
    "HalfCheetah-v5": (17, 6, 1.0, 1000),
    "Hopper-v5": (11, 3, 1.0, 1000),
    "Humanoid-v5": (348, 17, 0.4, 1000),
    "InvertedDoublePendulum-v5": (9, 1, 1.0, 1000),
    "InvertedPendulum-v5": (4, 1, 3.0, 1000),
    "Pusher-v5": (23, 7, 2.0, 100),
    "Reacher-v5": (10, 2, 1.0, 50),
    "Swimmer-v5": (8, 2, 1.0, 1000),
    "Walker2d-v5": (17, 6, 1.0, 1000),
}
MUJOCO_PACKAGE = "gymnasium.envs.mujoco."
#: The first digits of the SHA-256 of source files in Gymnasium 1.4.0. rlflame's own MuJoCo loop was
#: compared with these files.
SOURCE_HASHES: Mapping[str, str] = {
    "gymnasium.core": "2a7a1bef059c8be0",
    "gymnasium.utils.seeding": "eb2a223b92604b7d",
    "gymnasium.wrappers.common": "ef31d8b3c302ba12",
    f"{MUJOCO_PACKAGE}mujoco_env": "77e8205c380d8e0d",
    f"{MUJOCO_PACKAGE}ant_v5": "03be9596a1fbc171",
    f"{MUJOCO_PACKAGE}half_cheetah_v5": "c6520e364985f471",
    f"{MUJOCO_PACKAGE}hopper_v5": "daa2951970f5f558",
    f"{MUJOCO_PACKAGE}humanoid_v5": "53792f8fd48efbee",
    f"{MUJOCO_PACKAGE}inverted_double_pendulum_v5": "a4ce6cadb4daf557",
    f"{MUJOCO_PACKAGE}inverted_pendulum_v5": "860e8436475689a4",
    f"{MUJOCO_PACKAGE}pusher_v5": "e51893fd93ab0e72",
    f"{MUJOCO_PACKAGE}reacher_v5": "be2f75d48b6b19e6",
    f"{MUJOCO_PACKAGE}swimmer_v5": "5bdb513ea955bc2e",
    f"{MUJOCO_PACKAGE}walker2d_v5": "10219f0e6b5208d6",
}
#: If one of these variables is set, the import of MuJoCo can fail, so the import must be tried.
_RENDERING = ("MUJOCO_GL", "PYOPENGL_PLATFORM")


def is_known_id(id: str) -> bool:
    """Return whether the spaces of this environment are known."""
    return id in _SPACES


def find_known_spec(
    id: str, kwargs: Mapping[str, Any], max_episode_steps: int | None
) -> EnvSpec | None:
    """Return an environment's spec, or None if `read_env_spec` must determine it."""
    if id not in _SPACES or kwargs or any(name in os.environ for name in _RENDERING):
        return None
    if any(importlib.util.find_spec(package) is None for package in ("gymnasium", "mujoco")):
        return None
    if not _is_gymnasium_env(id):
        return None
    observation_size, action_size, bound, _ = _SPACES[id]
    high = (float(np.float32(bound)),) * action_size
    low = tuple(-x for x in high)
    return EnvSpec(
        id,
        kwargs,
        max_episode_steps,
        observation_size,
        action_kind="continuous",
        action_size=action_size,
        action_start=0,
        action_low=low,
        action_high=high,
        action_shape=(action_size,),
    )


def find_unverified_version(id: str) -> str | None:
    """Return Gymnasium's version if its source files are unverified, otherwise None."""
    if id not in _SPACES or importlib.util.find_spec("gymnasium") is None:
        return None
    if not _is_gymnasium_env(id) or all(map(is_verified, SOURCE_HASHES)):
        return None
    return importlib.metadata.version("gymnasium")


@cache
def is_verified(module: str) -> bool:
    """Return whether a Gymnasium source file is identical to the tested one."""
    try:
        digest = hashlib.sha256(_find_file(module).read_bytes()).hexdigest()
    except OSError:
        return False
    return digest.startswith(SOURCE_HASHES.get(module, "none"))


def _find_file(module: str) -> Path:
    """Return the source file of a Gymnasium module, without importing the module."""
    package = importlib.util.find_spec("gymnasium")
    folder = Path(str(package and package.origin)).parents[1]
    return folder.joinpath(*module.split(".")).with_suffix(".py")


def find_episode_limit(id: str) -> int | None:
    """Return the registered step limit of an environment, or None."""
    if id in _SPACES and _is_gymnasium_env(id):
        return _SPACES[id][3]
    from ..envs.make import find_step_limit  # imports Gymnasium

    return find_step_limit(id)


def _is_gymnasium_env(id: str) -> bool:
    """Return whether the name still refers to Gymnasium's own environment."""
    # A user's file, or a package that Gymnasium imports, may have replaced it.
    if importlib.metadata.entry_points(group="gymnasium.envs"):
        return False
    gymnasium: Any = sys.modules.get("gymnasium")
    if gymnasium is None:
        return True
    registration = gymnasium.registry.get(id)
    return (
        registration is not None
        and str(registration.entry_point).startswith("gymnasium.envs.mujoco.")
        and not registration.kwargs
        and not registration.additional_wrappers
    )
