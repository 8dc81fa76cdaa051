"""The Python modules that an environment id names, and the ones a task may import.

An id such as `my_env:Mine-v0` asks for the module `my_env`, and importing a module runs its code.
The driver decides which modules may be imported and lists them in the environment's spec.
Must not know: who trusts a module, how environments are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: The argument by which an environment of another library (shimmy) names an id of its own.
_INNER_ID = "env_id"


class ModuleAccessError(ImportError):
    """An environment asks for a module that its spec does not list."""


def find_named_modules(id: str, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that making this environment would import by name."""
    inner = kwargs.get(_INNER_ID)
    ids = [id, inner] if isinstance(inner, str) else [id]
    return tuple(module for module in (text.rpartition(":")[0] for text in ids) if module)


def check_allowed(id: str, kwargs: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise ModuleNotAllowed for the first module that is not in the list."""
    for module in find_named_modules(id, kwargs):
        if module not in allowed:
            raise ModuleAccessError(f"{id} asks for the module {module!r}, which is not allowed")
