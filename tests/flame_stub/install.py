"""The preparation of a worker: fetch the package and set the variables.

This module does not know sessions or tasks. It does not install dependencies, so the interpreter of
the stub must have them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlparse

from flame_stub.records import Application

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

#: Runs first in each worker, which ends if the stub is killed.
LEASH = """\
import ctypes
import os
import signal
import sys

if sys.platform == "linux" and os.environ.get("FLAME_STUB_PID") == str(os.getppid()):
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
"""

#: Hides modules, as on a machine where they are not installed. They are still found in the worker's
#: PYTHONPATH and where the worker itself adds a path.
BLINDFOLD = """\
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}
SHIPPED = os.environ.get("PYTHONPATH", "").split(os.pathsep)
INSTALLED = [entry for entry in sys.path if entry not in SHIPPED]


class Blindfold:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in HIDDEN or path is not None:
            return None
        found = PathFinder.find_spec(name, [e for e in sys.path if e not in INSTALLED])
        if found is None:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return found


sys.meta_path.insert(0, Blindfold)
"""


class InstallFailed(Exception):
    """The text for return code 10."""


class Installer:
    """A node's package store. As in Flame, a known name and URL is installed."""

    def __init__(
        self,
        home: Path,
        fetch: Callable[[str, str], bytes],
        hidden: Sequence[str],
        site: Sequence[str],
    ) -> None:
        self._home = home
        self._fetch = fetch
        library = home / "lib" / f"python{PYTHON}" / "site-packages"
        self._site = [str(library), *site]
        self._lock = threading.Lock()
        self._installed: dict[str, Path] = {}
        blindfold = BLINDFOLD.format(hidden=tuple(hidden)) if hidden else ""
        library.mkdir(parents=True)
        (library / "sitecustomize.py").write_text(LEASH + blindfold)

    def variables(self, application: Application) -> dict[str, str]:
        """The worker's variables, after installing the packages of the application."""
        asked = application.environment
        version = asked.get("FLAME_PYTHON_VERSION", PYTHON)
        if version != PYTHON:
            log = self._home / "logs" / "install" / f"{application.name}.log"
            said = f"Python installation failed for app <{application.name}>. See log: {log}"
            raise InstallFailed(said)
        search = [*self._site]
        spec = application.spec
        if spec.HasField("installer"):
            if spec.installer != "python":
                raise InstallFailed(f"unknown installer: {spec.installer}")
            if spec.HasField("url"):
                with self._lock:
                    source = self._source(application.name, spec.url, version)
                search = [str(source), str(source / "src"), *search]
        search += filter(None, [asked.get("PYTHONPATH")])
        level = os.environ.get("RUST_LOG", "info")
        own = {
            "FLAME_HOME": str(self._home),
            "FLAME_PYTHON_VERSION": version,
            "UV_CACHE_DIR": str(self._home / "data/cache/uv"),
            "PIP_CACHE_DIR": str(self._home / "data/cache/pip"),
            "FLAME_STUB_PID": str(os.getpid()),
        }
        logs = {"RUST_LOG": level, "FLAME_LOG": level}
        return own | asked | logs | {"PYTHONPATH": os.pathsep.join(search)}

    def _source(self, name: str, url: str, version: str) -> Path:
        key = hashlib.sha256(f"{name} {url} {version}".encode()).hexdigest()
        if key in self._installed:
            return self._installed[key]
        folder = self._home / "data" / "apps" / name / "releases" / key / "src"
        package = self._home / "data" / "apps" / name / "releases" / key / "package.tar.gz"
        package.parent.mkdir(parents=True, exist_ok=True)
        if not package.exists():
            parts = urlparse(url)
            package.write_bytes(self._fetch(f"{parts.scheme}://{parts.netloc}", parts.path[1:]))
        with tarfile.open(package) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(folder, filter="data")
            else:  # Python before 3.11.4
                archive.extractall(folder)
        if not any((folder / f).exists() for f in ("pyproject.toml", "setup.py", "setup.cfg")):
            raise InstallFailed(f"No Python package found in {folder}")
        self._installed[key] = folder
        return folder
