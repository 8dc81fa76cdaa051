"""The user's own file with an environment: found, loaded, refused in words.

Must not know: who ships it, who makes the environment.
"""

from __future__ import annotations

import importlib
import os
import sys

from rlflame.errors import ConfigError


def admit(path: str) -> None:
    """Make a file's environments known here, and find out that it loads before it is shipped."""
    folder, name = os.path.split(path)
    module, extension = os.path.splitext(name)
    if extension != ".py" or not os.path.exists(path):
        raise ConfigError(f"--env-file {path!r} is no Python file.", "name a file that ends .py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"--env-file {path!r} does not load: {type(error).__name__}: {error}.",
            f"python {path} shows where",
        ) from error
