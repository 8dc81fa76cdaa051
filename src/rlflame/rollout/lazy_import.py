"""Modules that are loaded when somebody first asks for something in them.

MuJoCo and Gymnasium's environments on it import at once what windows and pictures need, which takes
as long to load as MuJoCo itself, in every process, and whoever only steps never uses. Must not
know: who draws.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

DRAWING = ("glfw", "imageio")
_LOADING = threading.RLock()


class _Later(ModuleType):
    """Not importlib's LazyLoader: that loads as soon as a second import statement names it."""

    _loader: Any

    def __getattr__(self, name: str) -> Any:
        with _LOADING:
            loader = self.__dict__.pop("_loader", None)
            if loader is not None:
                try:
                    loader.exec_module(self)
                except BaseException:
                    self._loader = loader
                    raise
                self.__class__ = ModuleType  # type: ignore[assignment]
        if type(self) is _Later:  # asked for by itself, half loaded
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


def load_later(*names: str) -> None:
    """Put these where an import finds them, without running them yet."""
    for name in names:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            continue
        module: Any = importlib.util.module_from_spec(spec)
        module._loader = spec.loader
        module.__class__ = _Later
        sys.modules[name] = module
