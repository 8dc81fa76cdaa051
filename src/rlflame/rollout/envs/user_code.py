"""Code of the user that environments need: a file, and the modules that an id names.

The file is loaded by its path, so that neither its folder nor its name can hide anything else; its
folder is searched last. An id such as `my_env:Mine-v0` asks for the module `my_env`, and importing
a module runs its code. So the driver decides which modules may be imported, and lists them in the
environment's spec.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

#: Names the file for worker processes.
FILE_VARIABLE = "RLFLAME_ENV_FILE"
#: Names for worker processes the folder of a module that the user named.
FOLDER_VARIABLE = "RLFLAME_MODULE_FOLDER"
#: The argument by which an environment of another library (shimmy) names an id of its own.
_INNER_ID = "env_id"


def load(path: str) -> None:
    """Run the file once in this process; raises what it raises."""
    name = os.path.splitext(os.path.basename(path))[0]
    loaded_module = sys.modules.get(name)
    if loaded_module is not None and getattr(loaded_module, "__file__", None) == path:
        return
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def add_folder(folder: str) -> None:
    """Search a folder last, here and in the worker processes that start from now on."""
    os.environ[FOLDER_VARIABLE] = folder
    if folder not in sys.path:
        sys.path.append(folder)


def load_from_environment() -> None:
    """Load the folder and the file that the environment variables name."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        add_folder(folder)
    path = os.environ.get(FILE_VARIABLE)
    if path:
        load(path)


class ModuleAccessError(ImportError):
    """An environment asks for a module that its spec does not list."""


def find_named_modules(id: str, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that making this environment would import by name."""
    inner = kwargs.get(_INNER_ID)
    ids = [id, inner] if isinstance(inner, str) else [id]
    return tuple(module for module in (text.rpartition(":")[0] for text in ids) if module)


def check_allowed(id: str, kwargs: Mapping[str, Any], modules: Sequence[str]) -> None:
    """Raise ModuleAccessError for the first module that is not in the list."""
    for module in find_named_modules(id, kwargs):
        if module not in modules:
            raise ModuleAccessError(f"{id} asks for the module {module!r}, which is not allowed")
