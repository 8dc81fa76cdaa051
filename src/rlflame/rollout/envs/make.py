"""Environments made through Gymnasium, and read: their spaces, and what goes wrong in them.

Must not know: steps, episodes, policies.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import stat
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ..lazy_import import DRAWING, load_later
from ..spec import EnvSpec
from .module_access import check_allowed

load_later(*DRAWING)


def misbehaved(error: BaseException) -> bool:
    """Whether it is the environment that raised this; `sys.exit()` is a favourite.

    A KeyboardInterrupt is the user's, except where Ctrl-C is ignored, as in worker processes.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return ignored or not isinstance(error, KeyboardInterrupt)


#: Of an episode that is taken up again; which of the two it is cannot be seen from here.
NOT_AS_BEFORE = (
    "led to another observation by the same seed and actions than before: put its code back if "
    "that has changed since, or else it is not deterministic, its episodes cannot be moved or "
    "resumed half-way, and a new run of it needs --set rollout.unit=episodes"
)


class UnsupportedSpace(ValueError):
    """A space that this project does not learn in, named."""


def make(spec: EnvSpec, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """The environment of a spec, without Gymnasium's own chatter."""
    options: dict[str, Any] = {key: _listed(value) for key, value in spec.kwargs.items()}
    if spec.max_episode_steps is not None:
        options["max_episode_steps"] = spec.max_episode_steps
    if render_mode is not None:
        options["render_mode"] = render_mode
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_allowed(spec.id, spec.kwargs, spec.modules)
        _check_model_file(spec.kwargs)
        import_code(spec.id)
        # Before anything is made: loading a model may warn already.
        _quiet_mujoco()
        env: gymnasium.Env[Any, Any] = gymnasium.make(spec.id, disable_env_checker=True, **options)
    _quiet_mujoco()
    return env


def _check_model_file(kwargs: Mapping[str, Any]) -> None:
    """Refuse a pipe or a device as MuJoCo's model: opening one may wait or read for ever."""
    path = kwargs.get("xml_file")
    if isinstance(path, str) and path.startswith(("/", ".", "~")):  # else one of Gymnasium's
        with contextlib.suppress(FileNotFoundError, ValueError):
            mode = os.stat(os.path.expanduser(path)).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "its model is no regular file", path)


def registered_limit(id: str) -> int | None:
    """The steps after which an environment ends an episode, where it is registered and does."""
    registered = gymnasium.registry.get(id.partition(":")[2] or id)
    return None if registered is None else registered.max_episode_steps


def import_code(id: str) -> None:
    """Import what an id needs; what is wrong with it is for `gymnasium.make` to say.

    A module that the id names is imported by `gymnasium.make`, once it is known to be allowed.
    """
    module, _, name = id.rpartition(":")
    if module and module not in sys.modules:
        return
    with contextlib.suppress(Exception):
        entry = gymnasium.spec(name).entry_point
        if isinstance(entry, str):
            importlib.import_module(entry.partition(":")[0])


def _listed(value: Any) -> Any:
    """Sequences as lists, whether a spec was written here or has travelled (as tuples)."""
    if isinstance(value, tuple | list):
        return [_listed(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return value


def _quiet_mujoco() -> None:
    """MuJoCo's warnings would go to the terminal and to MUJOCO_LOG.TXT in the user's folder."""
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_ignore_warning)


def _ignore_warning(message: str) -> None:
    del message


def describe(
    id: str, kwargs: dict[str, Any], max_episode_steps: int | None, modules: tuple[str, ...] = ()
) -> EnvSpec:
    """Read the spaces of an environment; raises UnsupportedSpace, or whatever making it raises."""
    blank = EnvSpec(id, kwargs, max_episode_steps, 0, "discrete", 0, 0, (), (), modules=modules)
    # What a constructor prints here would stand between the user's own results.
    with contextlib.redirect_stdout(io.StringIO()):
        env = make(blank)
    try:
        observed, acted = env.observation_space, env.action_space
        if not isinstance(observed, spaces.Box):
            raise UnsupportedSpace(f"observations of type {type(observed).__name__}")
        if observed.dtype == np.uint8 and len(observed.shape) >= 2:
            raise UnsupportedSpace(f"image observations of shape {observed.shape}")
        size = int(np.prod(observed.shape, dtype=np.int64))
        if size == 0:
            raise UnsupportedSpace(f"empty observations of shape {observed.shape}")
        if isinstance(acted, spaces.Discrete):
            start = int(acted.start)
            return EnvSpec(
                id, kwargs, max_episode_steps, size, "discrete", int(acted.n), start, (), (), (),
                modules,
            )  # fmt: skip
        if isinstance(acted, spaces.Box) and acted.dtype is not None and acted.dtype.kind == "f":
            if acted.low.size == 0:
                raise UnsupportedSpace(f"empty actions of shape {acted.shape}")
            low = tuple(float(x) for x in acted.low.ravel())
            high = tuple(float(x) for x in acted.high.ravel())
            n, shape = len(low), tuple(int(length) for length in acted.shape)
            return EnvSpec(
                id, kwargs, max_episode_steps, size, "continuous", n, 0, low, high, shape, modules
            )
        dtype = f" of {acted.dtype}" if isinstance(acted, spaces.Box) else ""
        raise UnsupportedSpace(f"actions of type {type(acted).__name__}{dtype}")
    finally:
        env.close()


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:80] + " ..."


def said(error: BaseException) -> str:
    last = " ".join(traceback.format_exception_only(type(error), error)[-1].split())
    return last if len(last) < 500 else last[:500] + " ..."
