"""The user's own file with an environment: found, loaded, refused in words.

Must not know: who ships it, who makes the environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlflame.errors import ConfigError, shell
from rlflame.rollout import own


def admit(path: str) -> None:
    """Make a file's environments known here and to workers; find out first that it loads."""
    path = os.path.abspath(path)
    module, extension = os.path.splitext(os.path.basename(path))
    if not os.path.isfile(path):
        raise ConfigError(f"There is no file {path!r}.", "name an environment's: --env-file PATH")
    if extension != ".py":
        raise ConfigError(f"--env-file {path!r} is no Python file.", "name a file that ends .py")
    there = getattr(sys.modules.get(module), "__file__", path)
    if not module.isidentifier() or module in sys.stdlib_module_names or there != path:
        raise ConfigError(
            f"--env-file {path!r} has the name of a module that Python or rlflame uses, or one "
            "that cannot be imported.",
            f"rename it: {shell('mv', Path(path), Path(path).with_name('my_env.py'))}",
        )
    try:
        own.load(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(
            f"--env-file {path!r} does not load: {type(error).__name__}: {error}.",
            f"{shell('python', Path(path))} shows where",
        ) from error
    os.environ[own.VARIABLE] = path
