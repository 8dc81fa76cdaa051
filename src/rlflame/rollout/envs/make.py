"""Environments made through Gymnasium, and read: their spaces, and what goes wrong in them."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import math
import os
import signal
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ..task import EnvSpec
from .user_code import check_allowed

_LOADING_LOCK = threading.RLock()
_SAFE_PATH = "PYTHONSAFEPATH"


class _LazyModule(ModuleType):
    """Not importlib's LazyLoader: that loads as soon as a second import statement names it."""

    _loader: Any

    def __getattr__(self, name: str) -> Any:
        with _LOADING_LOCK:
            loader = self.__dict__.pop("_loader", None)
            if loader is not None:
                try:
                    with _exclude_current_folder():
                        loader.exec_module(self)
                except BaseException:
                    self._loader = loader
                    raise
                self.__class__ = ModuleType  # type: ignore[assignment]
        if type(self) is _LazyModule:  # asked for by itself, half loaded
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


@contextlib.contextmanager
def _exclude_current_folder() -> Iterator[None]:
    """glfw runs `python -c` while it loads, which would search the current folder for modules."""
    previous = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = previous


def defer_imports(*names: str) -> None:
    """Make these modules importable; each is loaded at the first access to an attribute.

    MuJoCo and Gymnasium's environments on it import everything for windows and pictures at once.
    That takes as long as MuJoCo itself, and processes that only step never use it.
    """
    for name in names:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            continue
        module: Any = importlib.util.module_from_spec(spec)
        module._loader = spec.loader
        module.__class__ = _LazyModule
        sys.modules[name] = module


defer_imports("glfw", "imageio")


def is_env_error(error: BaseException) -> bool:
    """Whether it is the environment that raised this; `sys.exit()` is a favourite.

    A KeyboardInterrupt is the user's, except where Ctrl-C is ignored, as in worker processes.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return is_ignored or not isinstance(error, KeyboardInterrupt)


class UnsupportedSpace(ValueError):
    """A space that this project does not learn in, named."""


def make_env(spec: EnvSpec, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """The environment of a spec, without Gymnasium's own chatter."""
    options: dict[str, Any] = {key: _to_lists(value) for key, value in spec.kwargs.items()}
    if spec.max_episode_steps is not None:
        options["max_episode_steps"] = spec.max_episode_steps
    if render_mode is not None:
        options["render_mode"] = render_mode
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_allowed(spec.id, spec.kwargs, spec.modules)
        _check_model_file(spec.kwargs)
        import_env_code(spec.id)
        # Before anything is made: loading a model may warn already.
        _silence_mujoco()
        env: gymnasium.Env[Any, Any] = gymnasium.make(spec.id, disable_env_checker=True, **options)
    _silence_mujoco()
    return env


def _check_model_file(kwargs: Mapping[str, Any]) -> None:
    """Refuse a pipe or a device as MuJoCo's model: opening one may wait or read for ever."""
    path = kwargs.get("xml_file")
    if isinstance(path, str) and path.startswith(("/", ".", "~")):  # else one of Gymnasium's
        with contextlib.suppress(FileNotFoundError, ValueError):
            mode = os.stat(os.path.expanduser(path)).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "its model is no regular file", path)


def find_step_limit(id: str) -> int | None:
    """The steps after which an environment ends an episode, where it is registered and does."""
    registration = gymnasium.registry.get(id.partition(":")[2] or id)
    return None if registration is None else registration.max_episode_steps


def import_env_code(id: str) -> None:
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


def _to_lists(value: Any) -> Any:
    """Sequences as lists, whether a spec was written here or has travelled (as tuples)."""
    if isinstance(value, tuple | list):
        return [_to_lists(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _to_lists(item) for key, item in value.items()}
    return value


def _silence_mujoco() -> None:
    """MuJoCo's warnings would go to the terminal and to MUJOCO_LOG.TXT in the user's folder."""
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(lambda message: None)


def read_env_spec(
    id: str, kwargs: dict[str, Any], max_episode_steps: int | None, modules: tuple[str, ...] = ()
) -> EnvSpec:
    """Read the spaces of an environment; raises UnsupportedSpace, or whatever making it raises."""
    blank_spec = EnvSpec(
        id, kwargs, max_episode_steps, 0, "discrete", 0, 0, (), (), modules=modules
    )
    # What a constructor prints here would stand between the user's own results.
    with contextlib.redirect_stdout(io.StringIO()):
        env = make_env(blank_spec)
    with contextlib.closing(env):
        observations, actions = env.observation_space, env.action_space
    size = math.prod(observations.shape or ())
    is_image = observations.dtype == np.uint8 and len(observations.shape or ()) >= 2
    if not isinstance(observations, spaces.Box) or is_image or size == 0:
        raise UnsupportedSpace(f"observations in {observations}")
    make_spec = partial(EnvSpec, id, kwargs, max_episode_steps, size, modules=modules)
    if isinstance(actions, spaces.Discrete):
        return make_spec("discrete", int(actions.n), int(actions.start), (), (), ())
    if not isinstance(actions, spaces.Box) or actions.dtype.kind != "f" or actions.low.size == 0:
        raise UnsupportedSpace(f"actions in {actions}")
    low, high = actions.low.ravel().tolist(), actions.high.ravel().tolist()
    return make_spec("continuous", len(low), 0, tuple(low), tuple(high), actions.shape)


def format_error(error: BaseException) -> str:
    last_line = " ".join(traceback.format_exception_only(type(error), error)[-1].split())
    return last_line if len(last_line) < 500 else last_line[:500] + " ..."
