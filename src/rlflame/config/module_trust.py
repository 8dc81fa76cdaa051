"""Decides which user code may run: modules that files name, and `--env-file`.

A checkpoint, a config or a run folder can name a module (`my_env:Mine-v0`), and importing a module
runs its code. Therefore, the user must name the module in the command, or have trusted it before.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflame.errors import ConfigError, format_command, format_shell
from rlflame.rollout.envs import user_code
from rlflame.rollout.envs.user_code import find_named_modules

if TYPE_CHECKING:
    from rlflame.config.recipe import Recipe

_FILE_NAME = "trusted_modules"
#: The group of entry points that Gymnasium imports to register environments.
_PLUGINS = "gymnasium.envs"
_MAX_BYTES = 1 << 16

_command_modules: set[str] = set()
#: The environments that each loaded file has registered.
_registered_ids: dict[str, list[str]] = {}


def allow_modules(modules: Iterable[str]) -> None:
    """Allow modules that the user named in this command.

    If a module is not installed, this process and its workers import it from the current folder.
    """
    for module in modules:
        _check_name(module)
        _command_modules.add(module)
        top = module.partition(".")[0]
        is_local = os.path.isdir(top) or os.path.isfile(f"{top}.py")
        if is_local and top not in sys.modules and importlib.util.find_spec(top) is None:
            user_code.add_folder(os.getcwd())


def list_allowed_modules() -> list[str]:
    """Return the modules allowed by this command, for the processes that it starts."""
    return sorted(_command_modules)


def check_modules(
    id: str, kwargs: Mapping[str, Any], wrappers: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the modules that an environment and its wrappers name.

    Raise ConfigError if one of them is not allowed.
    """
    modules = find_named_modules(id, kwargs, wrappers)
    for module in modules:
        _check_name(module)
        if not _is_allowed(module):
            raise ConfigError(
                # Escaped, so that a look-alike letter of another alphabet is visible.
                f"The environment {id} needs the module {module!a}, and importing a module runs "
                "its code.",
                f"if you trust it: --allow-module {module}, or for every command: "
                f"{format_command('trust', 'add', module)}",
            )
    return modules


def format_module_options(
    id: str, kwargs: Mapping[str, Any], wrappers: Sequence[str] = (), env_file: str | None = None
) -> list[str]:
    """Return the options that allow a later command to use this environment.

    The option --env-file also allows the file's own module.
    """
    names = dict.fromkeys(find_named_modules(id, kwargs, wrappers))
    exempt = [*read_trusted_modules(), *([Path(env_file).stem] if env_file else [])]
    modules = (module for module in names if module not in exempt)
    return [word for module in modules for word in ("--allow-module", module)]


def read_trusted_modules() -> list[str]:
    """Return the modules that the user trusts in every command."""
    path = _get_trust_path()
    if path is None:
        return []
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = open(os.open(path, flags), "rb")  # noqa: SIM115
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"The list of trusted modules, {path}, cannot be read: {error.strerror}.",
            f"remove it: {format_shell('rm', '-r', path)}",
        ) from error
    with file:
        status = os.fstat(file.fileno())
        is_owned = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_owned or status.st_mode & 0o077:
            raise ConfigError(
                f"The list of trusted modules, {path}, is not a regular file that only this user "
                f"(uid {os.geteuid()}) can access.",
                f"check its entries, then: {format_shell('chmod', '600', path)}; or set HOME or "
                "XDG_CONFIG_HOME to a folder of this user",
            )
        lines = file.read(_MAX_BYTES).decode("utf-8", "replace").splitlines()
    return sorted({line.strip() for line in lines if _is_module_name(line.strip())})


def add_trusted(modules: Iterable[str]) -> None:
    for module in modules:
        _check_name(module)
    _write_trusted({*read_trusted_modules(), *modules})


def remove_trusted(modules: Iterable[str]) -> None:
    trusted_modules = set(read_trusted_modules())
    for module in modules:
        if module not in trusted_modules:
            raise ConfigError(
                f"The module {module!r} is not trusted.",
                f"{format_command('trust', 'list')} lists the trusted modules",
            )
    _write_trusted(trusted_modules.difference(modules))


def _write_trusted(modules: Iterable[str]) -> None:
    path, hint = _get_trust_path(), "or name the module in each command: --allow-module MODULE"
    if path is None:
        raise ConfigError("There is no home folder for trusted modules.", f"set HOME, {hint}")
    temporary = path.with_name(f".{_FILE_NAME}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.writelines(f"{module}\n" for module in sorted(modules))
        os.replace(temporary, path)
    except OSError as error:
        message = f"The list of trusted modules, {path}, cannot be written: {error.strerror}."
        raise ConfigError(message, f"make that path writable, {hint}") from error


def _get_trust_path() -> Path | None:
    """Return the path of the list of trusted modules, or None without a home folder.

    Relative paths are ignored, so that the current folder cannot add trusted modules.
    """
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):
        folder = os.path.expanduser("~/.config")
    return Path(folder, "rlflame", _FILE_NAME) if os.path.isabs(folder) else None


def _is_allowed(module: str) -> bool:
    # Gymnasium imports its plugins in any case, and Python imports `a` together with `a.b`.
    plugins = [point.value.partition(":")[0] for point in metadata.entry_points(group=_PLUGINS)]
    if any(f"{plugin}.".startswith(f"{module}.") for plugin in plugins):
        return True
    names = {*_command_modules, *read_trusted_modules()}
    return any(f"{module}.".startswith(f"{name}.") for name in names)


def _is_module_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _check_name(module: str) -> None:
    if not _is_module_name(module):
        raise ConfigError(f"{module!r} is not the name of a Python module.", "my_package.my_module")


def load_env_file(path: str, expected: str | None = None) -> str:
    """Run an environment file and return its SHA-256.

    Raise ConfigError if the file cannot be loaded or if its SHA-256 is not `expected`.
    """
    path = os.path.abspath(path)
    module, extension = os.path.splitext(os.path.basename(path))
    if not os.path.isfile(path):
        raise ConfigError(f"There is no file {path!r}.", "name an existing file: --env-file PATH")
    loaded_path = getattr(sys.modules.get(module), "__file__", path)
    is_free = module.isidentifier() and module not in sys.stdlib_module_names
    if extension != ".py" or not is_free or loaded_path != path:
        raise ConfigError(
            f"--env-file {path!r} has a name that is in use, or that Python cannot import.",
            f"rename it: {format_shell('mv', Path(path), Path(path).with_name('my_env.py'))}",
        )
    digest = _hash_file(path)
    if expected is not None and digest != expected:
        raise ConfigError(
            f"The environment file {path} has the SHA-256 {digest[:12]}, but this run started "
            f"with {expected[:12]}.",
            "restore the original file, or start a new run",
        )
    from rlflame.rollout.envs.make import list_registered_ids  # imports Gymnasium

    earlier_ids = set(list_registered_ids())
    try:
        user_code.load(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--env-file {path!r} cannot be loaded: {type(error).__name__}: {error}.",
            f"{format_shell('python', Path(path))} shows the traceback",
        ) from error
    _registered_ids.setdefault(path, [id for id in list_registered_ids() if id not in earlier_ids])
    os.environ[user_code.FILE_VARIABLE] = path
    allow_modules([module])
    return digest


def find_file_environment(path: str) -> str:
    """Load an environment file, and return the only ID that it registers.

    Raise ConfigError if it registers none or several.
    """
    load_env_file(path)
    ids, module = _registered_ids[os.path.abspath(path)], Path(path).stem
    if not ids:
        raise ConfigError(
            f"--env-file {path!r} registers no environment.",
            f"name a function or class that makes one: --env {module}:make_env",
        )
    if len(ids) > 1:
        raise ConfigError(
            f"--env-file {path!r} registers several environments: {', '.join(ids)}.",
            f"name one of them: {format_shell('--env', ids[0])}",
        )
    return ids[0]


def get_loaded_digest() -> str | None:
    """Return the SHA-256 of the environment file that this command loaded, or None."""
    path = os.environ.get(user_code.FILE_VARIABLE)
    return _hash_file(path) if path else None


def _hash_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def pin_env_file(recipe: Recipe, path: str | None) -> Recipe:
    """Load the file given with --env-file, and write its digest to the recipe.

    A recipe with a digest accepts only that file. The file that a run's config.toml names is never
    loaded.
    """
    expected = recipe.learning.environment.file_digest
    if path is None:
        if expected is None:
            return recipe
        raise ConfigError(
            f"This run's environment comes from a file (SHA-256 {expected[:12]}), but the command "
            "has no --env-file.",
            "add --env-file FILE.py, which runs the file; config.toml has its original path",
        )
    digest = load_env_file(path, expected)
    environment = recipe.learning.environment.model_copy(update={"file_digest": digest})
    learning = recipe.learning.model_copy(update={"environment": environment})
    return recipe.model_copy(update={"learning": learning})
