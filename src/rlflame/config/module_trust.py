"""The modules whose code a file may ask for: named in this command, or trusted by the user before.

A checkpoint, a config or a run folder can name a module (`my_env:Mine-v0`); importing it runs code.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rlflame.errors import ConfigError, format_command, format_shell
from rlflame.rollout.envs import user_code
from rlflame.rollout.envs.user_code import find_named_modules

_FILE_NAME = "trusted_modules"
#: Where Gymnasium looks for packages that register environments when it is imported.
_PLUGINS = "gymnasium.envs"
_MAX_BYTES = 1 << 16

_command_modules: set[str] = set()


def allow_modules(modules: Iterable[str]) -> None:
    """Allow modules that the user named in this command.

    A module that is not installed and lies in the current folder is found there, by this process
    and by its workers.
    """
    for module in modules:
        _check_name(module)
        _command_modules.add(module)
        _add_current_folder_for(module)


def list_allowed_modules() -> list[str]:
    """The modules that this command named, for the processes that it starts."""
    return sorted(_command_modules)


def check_modules(id: str, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that an environment asks for; an error for one that nobody has allowed."""
    modules = find_named_modules(id, kwargs)
    for module in modules:
        _check_name(module)
        if not _is_allowed(module):
            raise ConfigError(
                # Escaped, so that a letter of another alphabet does not look like a trusted name.
                f"The environment {id} asks for the module {module!a}, and importing a module runs "
                "its code.",
                f"if you trust it: --allow-module {module}, or for every command: "
                f"{format_command('trust', 'add', module)}",
            )
    return modules


def format_module_options(id: str, kwargs: Mapping[str, Any]) -> list[str]:
    """What a later command has to say so that this environment may import its modules."""
    trusted = read_trusted_modules()
    options = [
        ("--allow-module", module)
        for module in find_named_modules(id, kwargs)
        if module not in trusted
    ]
    return [option for pair in options for option in pair]


def read_trusted_modules() -> list[str]:
    """The modules that the user trusts in every command."""
    path = _get_trust_path()
    if path is None:
        return []
    try:
        file = open(path, "rb", opener=_open_list)  # noqa: SIM115
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"The list of trusted modules, {path}, cannot be read: {error.strerror}.",
            f"remove it: {format_shell('rm', '-r', path)}",
        ) from error
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(
                f"The list of trusted modules, {path}, is not a file of this user "
                f"(uid {os.geteuid()}).",
                "set HOME or XDG_CONFIG_HOME to a folder of this user",
            )
        if status.st_mode & 0o077:
            raise ConfigError(
                f"The list of trusted modules, {path}, is not owner-only.",
                f"check what it lists, then: {format_shell('chmod', '600', path)}",
            )
        text = file.read(_MAX_BYTES).decode("utf-8", "replace")
    return sorted({line.strip() for line in text.splitlines() if _is_module_name(line.strip())})


def _open_list(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def add_trusted(modules: Iterable[str]) -> None:
    for module in modules:
        _check_name(module)
    _write_trusted({*read_trusted_modules(), *modules})


def remove_trusted(modules: Iterable[str]) -> None:
    trusted = set(read_trusted_modules())
    for module in modules:
        if module not in trusted:
            raise ConfigError(
                f"The module {module!r} is not trusted.",
                f"{format_command('trust', 'list')} shows them",
            )
        trusted.remove(module)
    _write_trusted(trusted)


def _write_trusted(modules: Iterable[str]) -> None:
    path = _get_trust_path()
    if path is None:
        raise ConfigError(
            "The list of trusted modules has no place: this user has no home folder.",
            "set HOME, or name the module in each command instead: --allow-module MODULE",
        )
    temporary = path.with_name(f".{_FILE_NAME}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.writelines(f"{module}\n" for module in sorted(modules))
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"The list of trusted modules, {path}, cannot be written: {error.strerror}.",
            "name the module in each command instead: --allow-module MODULE",
        ) from error


def _get_trust_path() -> Path | None:
    """The path of the list; None for a user without a home folder.

    A relative path is ignored, because the current folder must not decide what is trusted.
    """
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(configured):
        configured = os.path.expanduser("~/.config")
    return Path(configured, "rlflame", _FILE_NAME) if os.path.isabs(configured) else None


def _is_allowed(module: str) -> bool:
    if module in _find_plugin_modules():
        return True
    names = {*_command_modules, *read_trusted_modules()}
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _find_plugin_modules() -> set[str]:
    """Modules that Gymnasium imports by itself, so that naming them imports nothing more.

    Importing `a.b` imports `a` too, and not the other modules in `a`.
    """
    modules = set()
    for point in metadata.entry_points(group=_PLUGINS):
        parts = point.value.partition(":")[0].split(".")
        modules |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    return modules


def _is_module_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _check_name(module: str) -> None:
    if not _is_module_name(module):
        raise ConfigError(f"{module!r} is not the name of a Python module.", "my_package.my_module")


def _add_current_folder_for(module: str) -> None:
    """Search the current folder, last, for a module that the user named and that lies there."""
    top, folder = module.partition(".")[0], os.getcwd()
    is_local = os.path.isdir(top) or os.path.isfile(f"{top}.py")
    if is_local and top not in sys.modules and importlib.util.find_spec(top) is None:
        user_code.add_folder(folder)
