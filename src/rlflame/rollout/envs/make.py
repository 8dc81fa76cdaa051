"""Makes environments with Gymnasium, and reads their spaces."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import inspect
import io
import os
import signal
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.envs import registration

from ..task import EnvSpec, MaskSource, WrapperSpec
from .spaces import (
    find_mask_source,
    make_observation_fields,
    read_action_layout,
    read_observation_leaves,
)
from .user_code import check_allowed, load_wrapper

_LOADING_LOCK = threading.RLock()
#: Annotations of arguments that cannot be text.
_NUMBER_ANNOTATIONS = (inspect.Parameter.empty, bool, int, float, "bool", "int", "float")
_SAFE_PATH = "PYTHONSAFEPATH"


class _LazyModule(ModuleType):
    """A module that is loaded at the first attribute access, not when imported."""

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
        if type(self) is _LazyModule:  # requested by the module itself while it loads
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


@contextlib.contextmanager
def _exclude_current_folder() -> Iterator[None]:
    """Keep the current folder off the module path of the process that glfw starts."""
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
    """Register modules that are loaded at their first attribute access.

    MuJoCo and Gymnasium's MuJoCo environments immediately import modules for windows and images.
    These imports take as long as that of MuJoCo itself, and most processes do not need them.
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
    """Return whether an error, which may be SystemExit, came from the environment.

    KeyboardInterrupt comes from the user, except in processes that ignore Ctrl-C, such as workers.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return is_ignored or not isinstance(error, KeyboardInterrupt)


def make_env(spec: EnvSpec, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """Make the environment that a spec describes, without Gymnasium's warnings."""
    # Lists become tuples when a spec is sent.
    options: dict[str, Any] = _replace_lists(spec.kwargs, list)
    if spec.max_episode_steps is not None:
        options["max_episode_steps"] = spec.max_episode_steps
    if render_mode is not None:
        options["render_mode"] = render_mode
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_allowed(
            spec.id, spec.kwargs, spec.modules, [wrapper.name for wrapper in spec.wrappers]
        )
        _check_model_file(spec.kwargs)
        import_env_code(spec.id)
        # Silence MuJoCo before the environment is made, because loading a model may warn.
        _silence_mujoco()
        target = find_constructor(spec.id) or spec.id
        env: gymnasium.Env[Any, Any] = gymnasium.make(target, disable_env_checker=True, **options)
        for wrapper in spec.wrappers:
            # Gymnasium's wrappers require tuples, such as the shape of ResizeObservation.
            kind = tuple if wrapper.name.startswith("gymnasium.") else list
            env = load_wrapper(wrapper.name)(env, **_replace_lists(wrapper.kwargs, kind))
    _silence_mujoco()
    return env


@contextlib.contextmanager
def discard_output() -> Iterator[None]:
    """Discard the output of an environment, also of its C code, and keep that of rlflame."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stdout_fd = os.dup(1)
            stack.callback(os.close, stdout_fd)
            null_fd = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_fd, 1)
            os.close(null_fd)
            stack.callback(os.dup2, stdout_fd, 1)
            # C keeps output in a buffer, which it would write later.
            stack.callback(ctypes.CDLL(None).fflush, None)
        yield


def _check_model_file(kwargs: Mapping[str, Any]) -> None:
    """Reject a pipe or a device as MuJoCo's model, because a read may block forever."""
    path = kwargs.get("xml_file")
    # Other names refer to Gymnasium's own models.
    if isinstance(path, str) and path.startswith(("/", ".", "~")):
        with contextlib.suppress(FileNotFoundError, ValueError):
            mode = os.stat(os.path.expanduser(path)).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "its model is not a regular file", path)


def find_step_limit(id: str) -> int | None:
    """Return the registered step limit of an environment, or None if it has none."""
    spec = gymnasium.registry.get(id.partition(":")[2] or id)
    return None if spec is None else spec.max_episode_steps


def find_constructor(id: str) -> registration.EnvSpec | None:
    """Return a registration for `module:name` if it names a function or class, else None.

    An ID that the module registers has priority over its functions and classes. The module is
    imported, so callers must first check that it is allowed.
    """
    module, _, name = id.rpartition(":")
    if not module or not name.isidentifier():
        return None
    constructor = getattr(importlib.import_module(module), name, None)
    if not callable(constructor) or registration.find_highest_version(None, name) is not None:
        return None
    return registration.EnvSpec(id, entry_point=f"{module}:{name}")


def find_text_argument(id: str, kwargs: Mapping[str, Any]) -> tuple[str, bool | float] | None:
    """Return an argument that is text although its default is a boolean or a number.

    The second item is the default. Arguments whose annotation allows other types are ignored. The
    module of the environment must have been imported.
    """
    names = [name for name, value in kwargs.items() if isinstance(value, str)]
    spec = gymnasium.registry.get(id.rpartition(":")[2]) or find_constructor(id) if names else None
    if spec is None or spec.entry_point is None:
        return None
    creator: Any = spec.entry_point
    try:
        creator = registration.load_env_creator(creator) if isinstance(creator, str) else creator
        parameters = inspect.signature(creator).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    for name in names:
        parameter = parameters.get(name)
        if parameter is None or parameter.annotation not in _NUMBER_ANNOTATIONS:
            continue
        default = spec.kwargs.get(name, parameter.default)
        if isinstance(default, bool | int | float):
            return name, default
    return None


def list_registered_ids() -> list[str]:
    return list(gymnasium.registry)


def list_constructors(module: str) -> list[str]:
    """Return `module:Class` for each environment class in an imported module."""
    members = vars(sys.modules[module]) if module in sys.modules else {}
    return [
        f"{module}:{name}"
        for name, value in members.items()
        if isinstance(value, type)
        and issubclass(value, gymnasium.Env)
        and not value.__module__.startswith("gymnasium.")
    ]


def is_registered(id: str) -> bool:
    """Return whether an ID names an environment, a function or a class of a module."""
    return id.rpartition(":")[2] in gymnasium.registry or find_constructor(id) is not None


def import_env_code(id: str) -> None:
    """Import the module that implements an environment, and ignore errors.

    `gymnasium.make` raises the same errors. It also imports a module that the ID names, but only
    after a check that the module is allowed.
    """
    module, _, name = id.rpartition(":")
    if module and module not in sys.modules:
        return
    with contextlib.suppress(Exception):
        entry = gymnasium.spec(name).entry_point
        if isinstance(entry, str):
            importlib.import_module(entry.partition(":")[0])


def _replace_lists(value: Any, kind: type[list[Any]] | type[tuple[Any, ...]]) -> Any:
    """Convert tuples and lists, also those inside dictionaries, to lists or to tuples."""
    if isinstance(value, tuple | list):
        return kind(_replace_lists(item, kind) for item in value)
    if isinstance(value, Mapping):
        return {key: _replace_lists(item, kind) for key, item in value.items()}
    return value


def _silence_mujoco() -> None:
    """Suppress MuJoCo's warnings in the terminal and in MUJOCO_LOG.TXT."""
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(lambda message: None)


def read_env_spec(
    id: str,
    kwargs: dict[str, Any],
    max_episode_steps: int | None,
    modules: tuple[str, ...] = (),
    *,
    wrappers: tuple[WrapperSpec, ...] = (),
    ignore: Sequence[str] = (),
    masks: bool = True,
) -> EnvSpec:
    """Make an environment and return its spec.

    If `masks` is set, the spec says where the environment reports its action masks. Raises
    UnsupportedSpace, or the errors that the environment raises.
    """
    blank_spec = EnvSpec(
        id, kwargs, max_episode_steps, 0, "discrete", 0, 0, (), (), modules=modules,
        wrappers=wrappers,
    )  # fmt: skip
    source: MaskSource = "none"
    with discard_output():
        env = make_env(blank_spec)
        with contextlib.closing(env):
            layout = read_action_layout(env.action_space)
            if masks and layout.action_kind != "continuous":
                source = find_mask_source(env)
            leaves, omissions = read_observation_leaves(env.observation_space, ignore, source)
    return replace(
        blank_spec,
        **layout._asdict(),
        **make_observation_fields(leaves),
        mask_source=source,
        ignore=omissions,
    )


def format_error(error: BaseException) -> str:
    last_line = " ".join(traceback.format_exception_only(type(error), error)[-1].split())
    return last_line if len(last_line) < 500 else last_line[:500] + " ..."


def has_mujoco_object(env: Any, depth: int = 3) -> bool:
    """Return whether an environment, or one inside it, has a MuJoCo object."""
    values = list(vars(env).values())
    if any(type(value).__module__.partition(".")[0] == "mujoco" for value in values):
        return True
    inner = [value.unwrapped for value in values if isinstance(value, gymnasium.Env)]
    return depth > 0 and any(has_mujoco_object(value, depth - 1) for value in inner)
