"""Builds the data that is sent to a cluster: code, requests and dependencies.

Source code is sent with the session, so executors that have the dependencies install nothing. Other
executors install an empty package that requires this machine's versions of the dependencies. Flame
requires pickles for requests. Answers are never unpickled.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import tarfile
import zipfile
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import rlflame
from rlflame.errors import ConfigError

#: The files that are sent in addition to all modules of `rollout`.
_FILES = (
    "__init__.py",
    "errors.py",
    "fleet/__init__.py",
    "fleet/flame/__init__.py",
    "fleet/flame/timed_call.py",
    "fleet/flame/object_cache.py",
    "fleet/flame/service.py",
)
#: The packages that environments use; each is pinned to this machine's version.
PIN_REQUIREMENTS = {
    "numpy": "numpy",
    "gymnasium": "gymnasium[box2d,classic-control,mujoco]",
    "mujoco": "mujoco",
    "box2d": "box2d",
}
_FIXED_TIME = (2020, 1, 1, 0, 0, 0)
_SUPERVISOR = "rlflame.fleet.flame.service_supervisor"


class Loader:
    """Unpacks a worker's modules. Flame creates one instance per executor.

    The class is sent as text, so it must not use names from this module. A subclass, which is also
    sent, holds the archive of modules and the settings of the service.
    """

    archive = b""
    settings: dict[str, Any] = {}  # noqa: RUF012 - replaced as a whole in the subclass

    def __init__(self) -> None:
        import atexit
        import io
        import shutil
        import sys
        import tempfile
        import zipfile

        folder = tempfile.mkdtemp(prefix="rlflame-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        zipfile.ZipFile(io.BytesIO(self.archive)).extractall(folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "rlflame"]:
            del sys.modules[name]
        sys.path.insert(0, folder)
        self._service: Any = None

    def greet(self, wait_s: float = 0.0) -> Any:
        """Return a description of this executor as JSON. This requires only flamepy.

        The call takes at least `wait_s`, so that several calls reach different executors.
        """
        import json
        import os
        import time

        from rlflame.rollout.machine import describe_host, list_flame_pythons

        time.sleep(wait_s)
        place = {"pid": os.getpid(), "folder": os.getcwd(), "clock": time.time()}
        greeting = {**describe_host(), **place, "pythons": list_flame_pythons()}
        return self._make_array(json.dumps(greeting).encode())

    def ping(self) -> Any:
        """Return an empty array, so that callers can measure the round-trip time."""
        return self._make_array(b"")

    def _make_array(self, content: bytes) -> Any:
        """Return the bytes as an Arrow array, without importing numpy."""
        import pyarrow as pa

        return pa.Array.from_buffers(pa.uint8(), len(content), [None, pa.py_buffer(content)])

    def run(self, tasks: Any, policy: str, endpoint: str, key: str) -> Any:
        """Run encoded tasks with the weights at `endpoint` and `key`; return the answers."""
        if self._service is None:
            from rlflame.fleet.flame.service import Service

            self._service = Service(**self.settings)
        return self._service.run(tasks, policy, endpoint, key)


def make_loader_text() -> str:
    """Return `Loader` as source code, which every Python version can load.

    Bytecode from another Python version would crash the worker process and block its executor.
    """
    return f"from __future__ import annotations\n\n{inspect.getsource(Loader)}"


def make_archive(env_file: str | None = None) -> bytes:
    """Return a reproducible ZIP file with a worker's modules and `env_file`, if any."""
    package = Path(rlflame.__file__).absolute().parent
    paths = [*(package / file for file in _FILES), *(package / "rollout").rglob("*.py")]
    files = {path.relative_to(package.parent).as_posix(): _read(path) for path in paths}
    if env_file is not None:
        files[os.path.basename(env_file)] = _read(env_file)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _FIXED_TIME), files[name], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def make_request(method: str, *arguments: Any) -> bytes:
    """Encode a call to a method of `Loader` for flamepy."""
    import cloudpickle
    from flamepy.runner.types import RunnerRequest

    payload: bytes = cloudpickle.dumps(RunnerRequest(method, tuple(arguments)))
    return payload


def make_context(archive: bytes, settings: dict[str, Any]) -> bytes:
    """Encode the worker class that the executors of a session load."""
    import cloudpickle
    from flamepy.runner.types import RunnerContext

    text, attributes = make_loader_text(), {"archive": archive, "settings": settings}
    service = type("RlflameWorker", (Loader,), attributes)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if obj is Loader:
                scope = {"__name__": "rlflame_loader"}
                return eval, (f"(lambda own: exec({text!r}, own) or own['Loader'])({scope!r})",)
            if obj is service:
                return type, (service.__name__, service.__bases__, attributes)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(RunnerContext(service))
    return buffer.getvalue()


def add_supervisor(arguments: list[str]) -> list[str]:
    """Return the template's arguments, changed to start rlflame's supervisor."""
    if arguments[-2:] == ["-m", "flamepy.runner.runpy"]:
        return [*arguments[:-2], "-c", inspect.getsource(import_module(_SUPERVISOR))]
    return arguments  # a custom template keeps its command line


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}.", "name a Python file"
        ) from error


def list_dependencies(extra: Sequence[str] = ()) -> list[str]:
    """Return the requirements of a worker: the pinned packages and `extra`."""
    requirements = []
    for package, requirement in PIN_REQUIREMENTS.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            requirements.append(f"{requirement}=={metadata.version(package)}")
    return [*requirements, *extra]


def make_package(name: str, requirements: Sequence[str]) -> bytes:
    """Return a source package that declares dependencies and builds offline."""
    files = {
        "pyproject.toml": f"""[build-system]
requires = []
build-backend = "empty"
backend-path = ["."]

[project]
name = "{name}"
version = "1.0"
dependencies = [{", ".join(f'"{requirement}"' for requirement in requirements)}]
""",
        "empty.py": _BACKEND.format(name=name.replace("-", "_"), requirements=list(requirements)),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


#: A PEP 517 build backend without dependencies, so that the build needs no package index.
_BACKEND = '''"""Builds an empty wheel that requires the dependencies."""
import os
import zipfile


def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "{name}-1.0-py3-none-any.whl"
    info = "{name}-1.0.dist-info/"
    lines = ["Metadata-Version: 2.1", "Name: {name}", "Version: 1.0"]
    lines += ["Requires-Dist: " + each for each in {requirements}]
    files = {{
        info + "METADATA": "\\n".join(lines) + "\\n",
        info + "WHEEL": "Wheel-Version: 1.0\\nGenerator: empty\\nRoot-Is-Purelib: true\\n"
        "Tag: py3-none-any\\n",
    }}
    files[info + "RECORD"] = "".join(path + ",,\\n" for path in [*files, info + "RECORD"])
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name


def get_requires_for_build_wheel(config_settings=None):
    return []
'''
