"""Imports the user's environment code: a file, or a module that an ID or a wrapper names.

The file is loaded by its path, and its folder is searched last, so the folder's other files cannot
shadow a module. `load_env_file` rejects a file with the name of another module. An ID such as
`my_env:Mine-v0` names the module `my_env`, and importing a module runs its code. The driver
therefore decides which modules may be imported, and lists them in the environment's spec.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

#: The environment variable with the path of the file, for worker processes.
FILE_VARIABLE = "RLFLAME_ENV_FILE"
#: The environment variable with the folder of a module that the user named, for worker processes.
FOLDER_VARIABLE = "RLFLAME_MODULE_FOLDER"
#: The argument that contains a second ID, if the environment wraps another library (shimmy).
_INNER_ID = "env_id"
#: The module with the wrappers of Gymnasium.
_WRAPPER_MODULE = "gymnasium.wrappers"
#: Wrappers of Gymnasium that any file may name, because they only transform values. They write no
#: files, import no packages and call nothing that an argument names.
SAFE_WRAPPERS = frozenset(
    f"{_WRAPPER_MODULE}:{name}"
    for name in (
        "ClipAction",
        "ClipReward",
        "DelayObservation",
        "DiscretizeAction",
        "DiscretizeObservation",
        "FilterObservation",
        "FlattenObservation",
        "FrameStackObservation",
        "GrayscaleObservation",
        "MaxAndSkipObservation",
        "NormalizeObservation",
        "NormalizeReward",
        "RepeatAction",
        "RescaleAction",
        "RescaleObservation",
        "ReshapeObservation",
        "StickyAction",
        "TimeAwareObservation",
    )
)


def load(path: str) -> None:
    """Import the file unless this process has already imported it."""
    name = os.path.splitext(os.path.basename(path))[0]
    loaded_module = sys.modules.get(name)
    if loaded_module is not None and getattr(loaded_module, "__file__", None) == path:
        return
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def add_folder(folder: str) -> None:
    """Append a folder to the module path of this process and of later workers."""
    os.environ[FOLDER_VARIABLE] = folder
    if folder not in sys.path:
        sys.path.append(folder)


def load_from_environment() -> None:
    """Add the folder and load the file that the environment variables name."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        add_folder(folder)
    path = os.environ.get(FILE_VARIABLE)
    if path:
        load(path)


class ModuleAccessError(ImportError):
    """Raised if an environment names a module that its spec does not list."""


def find_named_modules(
    id: str, kwargs: Mapping[str, Any], wrappers: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the modules that an environment's ID, arguments and names of wrappers contain."""
    inner = kwargs.get(_INNER_ID)
    names = [id, inner] if isinstance(inner, str) else [id]
    names += [wrapper for wrapper in wrappers if wrapper not in SAFE_WRAPPERS]
    return tuple(module for module in (text.rpartition(":")[0] for text in names) if module)


def check_allowed(
    id: str, kwargs: Mapping[str, Any], modules: Sequence[str], wrappers: Sequence[str] = ()
) -> None:
    """Raise ModuleAccessError if the environment names a module outside `modules`."""
    for module in find_named_modules(id, kwargs, wrappers):
        if module not in modules:
            raise ModuleAccessError(f"{id} asks for the module {module!r}, which is not allowed")


def load_wrapper(name: str) -> Any:
    """Import a wrapper; the caller has checked that its module is allowed."""
    module, _, attribute = name.rpartition(":")
    return getattr(importlib.import_module(module), attribute)
