"""Which environments are exactly those of Gymnasium's that our own loop was compared with.

Down to the text of the source files: whatever else there is, is refused. Must not know: how any of
them is stepped.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium

from ..envs.gymnasium_env import KNOWN_WRAPPERS
from .components import MujocoTask
from .locomotion import Ant, HalfCheetah, Hopper, Humanoid, Swimmer, Walker2d
from .manipulation import InvertedDoublePendulum, InvertedPendulum, Pusher, Reacher

_PACKAGE = "gymnasium.envs.mujoco."
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
#: Beginnings of the SHA-256 of the files that were compared: those of Gymnasium 1.4.0.
_SOURCE_HASHES: Mapping[str, str] = {
    "gymnasium.core": "2a7a1bef059c8be0",
    "gymnasium.utils.seeding": "eb2a223b92604b7d",
    "gymnasium.wrappers.common": "ef31d8b3c302ba12",
    f"{_PACKAGE}mujoco_env": "77e8205c380d8e0d",
    f"{_PACKAGE}ant_v5": "03be9596a1fbc171",
    f"{_PACKAGE}half_cheetah_v5": "c6520e364985f471",
    f"{_PACKAGE}hopper_v5": "daa2951970f5f558",
    f"{_PACKAGE}humanoid_v5": "53792f8fd48efbee",
    f"{_PACKAGE}inverted_double_pendulum_v5": "a4ce6cadb4daf557",
    f"{_PACKAGE}inverted_pendulum_v5": "860e8436475689a4",
    f"{_PACKAGE}pusher_v5": "e51893fd93ab0e72",
    f"{_PACKAGE}reacher_v5": "be2f75d48b6b19e6",
    f"{_PACKAGE}swimmer_v5": "5bdb513ea955bc2e",
    f"{_PACKAGE}walker2d_v5": "10219f0e6b5208d6",
}
#: Where resets and wrappers are; every class depends on them.
_COMMON_MODULES = ("gymnasium.core", "gymnasium.utils.seeding", "gymnasium.wrappers.common")
#: Up to here an integer and its float are the same number.
_EXACT_INTEGER = 2**53


def find_verified_task(env: gymnasium.Env[Any, Any]) -> type[MujocoTask] | str:
    """The task that repeats this environment, or why none does."""
    kind = type(env.unwrapped)
    name = f"{kind.__module__.removeprefix(_PACKAGE)}.{kind.__qualname__}"
    task = _TASKS.get(name) if kind.__module__.startswith(_PACKAGE) else None
    if task is None:
        return "its rewards are not written here"
    return _explain_refusal(env, task) or task


def _explain_refusal(env: gymnasium.Env[Any, Any], task: type[MujocoTask]) -> str | None:
    """Why the bits might not be Gymnasium's."""
    base_env: Any = env.unwrapped
    layer: Any = env
    while layer is not base_env:
        if type(layer) not in KNOWN_WRAPPERS:
            return f"it is wrapped in {type(layer).__name__}"
        layer = layer.env
    for module in (*_COMMON_MODULES, f"{_PACKAGE}mujoco_env", type(base_env).__module__):
        if not _is_verified(module):
            return f"Gymnasium {gymnasium.__version__} is not the version it was compared with"
    for kind in type(base_env).__mro__[:2]:
        for name, part in vars(kind).items():
            code = getattr(getattr(part, "fget", part), "__code__", None)
            if code is not None and code.co_filename != _find_file(kind.__module__):
                return f"{kind.__name__}.{name} was changed"
    if (
        Path(base_env.fullpath)
        != Path(_find_file(f"{_PACKAGE}mujoco_env")).parent / "assets" / task.model
    ):
        return "it has a model file of its own"
    if base_env.render_mode is not None:
        return "it is drawn"
    if type(base_env.frame_skip) is not int or base_env.frame_skip < 1:
        return f"frame_skip is {base_env.frame_skip!r}"
    for names, fits in (
        (task.numbers, _is_number),
        (task.ranges, _is_range),
        (task.flags, lambda value: type(value) is bool),
    ):
        for name in names:
            if not fits(getattr(base_env, name)):
                return f"{name.lstrip('_')} is {getattr(base_env, name)!r}"
    return None


@cache
def _is_verified(module: str) -> bool:
    """Whether a module of Gymnasium's is word for word the one that was compared with."""
    try:
        text = Path(_find_file(module)).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(text).hexdigest().startswith(_SOURCE_HASHES[module])


def _find_file(module: str) -> str:
    return str(sys.modules[module].__file__)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _EXACT_INTEGER
    return type(value) is float


def _is_range(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) == 2 and all(map(_is_number, value))
