"""Modules that are loaded at the first access to one of their attributes.

MuJoCo and Gymnasium's environments on it import everything for windows and pictures at once. That
takes as long to load as MuJoCo itself, in every process, and processes that only step never use it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

DRAWING_MODULES = ("glfw", "imageio")
_LOADING_LOCK = threading.RLock()
_SAFE_PATH = "PYTHONSAFEPATH"


class _LazyModule(ModuleType):
    """Not importlib's LazyLoader: that loads as soon as a second import statement names it."""

    _loader: Any

    def __getattr__(self, name: str) -> Any:
        with _LOADING_LOCK:
            loader = self.__dict__.pop("_loader", None)
            if loader is not None:
                try:
                    with _exclude_current_folder():
                        loader.exec_module(self)
                except BaseException:
                    self._loader = loader
                    raise
                self.__class__ = ModuleType  # type: ignore[assignment]
        if type(self) is _LazyModule:  # asked for by itself, half loaded
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


@contextlib.contextmanager
def _exclude_current_folder() -> Iterator[None]:
    """glfw runs `python -c` while it loads, which would search the current folder for modules."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def defer_imports(*names: str) -> None:
    """Make these modules importable without running them yet."""
    for name in names:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            continue
        module: Any = importlib.util.module_from_spec(spec)
        module._loader = spec.loader
        module.__class__ = _LazyModule
        sys.modules[name] = module
