"""The user's own file with environments, loaded as a module wherever rollouts run.

Loaded by its path, so that neither its folder nor its name can hide anything else; its folder is
searched last. Must not know: who ships it.
"""

from __future__ import annotations

import importlib.util
import os
import sys

#: Where a worker process is told of the file.
FILE_VARIABLE = "RLFLAME_ENV_FILE"
#: Where a worker process is told of the folder in which a module lies that the user named.
FOLDER_VARIABLE = "RLFLAME_MODULE_FOLDER"


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
    """The folder and the file that this process was told of."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        add_folder(folder)
    path = os.environ.get(FILE_VARIABLE)
    if path:
        load(path)
