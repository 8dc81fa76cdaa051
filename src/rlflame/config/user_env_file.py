"""Loads the user's own file with an environment, and holds a recipe to the file it began with."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rlflame.config.module_trust import allow_modules
from rlflame.config.recipe import Recipe
from rlflame.errors import ConfigError, format_shell
from rlflame.rollout.envs import user_code


def load_env_file(path: str) -> str:
    """Run a file that the user named in this command, here and in workers; return its SHA-256."""
    path = os.path.abspath(path)
    module, extension = os.path.splitext(os.path.basename(path))
    if not os.path.isfile(path):
        raise ConfigError(f"There is no file {path!r}.", "name an environment's: --env-file PATH")
    if extension != ".py":
        raise ConfigError(f"--env-file {path!r} is no Python file.", "name a file that ends .py")
    loaded_path = getattr(sys.modules.get(module), "__file__", path)
    if not module.isidentifier() or module in sys.stdlib_module_names or loaded_path != path:
        raise ConfigError(
            f"--env-file {path!r} has the name of a module that Python or rlflame uses, or one "
            "that cannot be imported.",
            f"rename it: {format_shell('mv', Path(path), Path(path).with_name('my_env.py'))}",
        )
    try:
        user_code.load(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(
            f"--env-file {path!r} does not load: {type(error).__name__}: {error}.",
            f"{format_shell('python', Path(path))} shows where",
        ) from error
    os.environ[user_code.FILE_VARIABLE] = path
    allow_modules([module])
    return _hash_file(path)


def get_loaded_digest() -> str | None:
    """The SHA-256 of the file that this command loaded; None without one."""
    path = os.environ.get(user_code.FILE_VARIABLE)
    return _hash_file(path) if path else None


def _hash_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"--env-file {path!r} cannot be read: {error.strerror}.", "make it readable"
        ) from error


def pin_env_file(
    recipe: Recipe, path: str | None, read_recorded_path: Callable[[], str | None] = lambda: None
) -> Recipe:
    """Load the file that the command names, and write its digest into the recipe.

    A recipe with a digest takes that file and no other. `read_recorded_path` gives the path in the
    run's config.toml, which is shown and never loaded.
    """
    expected = recipe.learning.environment.file_digest
    if path is None:
        if expected is None:
            return recipe
        raise ConfigError(
            f"This run's environment comes from a file (SHA-256 {expected[:12]}), and the command "
            "names none.",
            f"add {format_shell('--env-file', read_recorded_path() or 'FILE.py')}, which runs "
            "the file",
        )
    digest = load_env_file(path)
    if expected is not None and digest != expected:
        raise ConfigError(
            f"The environment file {path} has the SHA-256 {digest[:12]}, and this run was begun "
            f"with {expected[:12]}.",
            "put its code back, or start a new run",
        )
    environment = recipe.learning.environment.model_copy(update={"file_digest": digest})
    learning = recipe.learning.model_copy(update={"environment": environment})
    return recipe.model_copy(update={"learning": learning})
