"""What is shipped to a cluster: kilobytes of source, calls, and the names of packages to install.

Code goes by value, so that a prepared executor installs nothing. The package that other executors
install holds nothing but its dependencies, pinned to the versions of this machine. Flame takes
pickles; no answer is ever loaded as one.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import os
import tarfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import rlflame
from rlflame.errors import ConfigError

from . import executor_bootstrap

_MODULES = (
    "rlflame",
    "rlflame.errors",
    "rlflame.fleet",
    "rlflame.fleet.flame",
    "rlflame.fleet.flame.timed_call",
    "rlflame.fleet.flame.lease",
    "rlflame.fleet.flame.object_cache",
    "rlflame.fleet.flame.service",
)
#: Shipped with all modules below it.
_PACKAGE = "rlflame.rollout"
#: The packages that environments use; each is pinned to this machine's version.
PINNED = {
    "numpy": "numpy",
    "gymnasium": "gymnasium[box2d,classic-control,mujoco]",
    "mujoco": "mujoco",
    "box2d": "box2d",
}
_FIXED_TIME = (2020, 1, 1, 0, 0, 0)


def make_archive(env_file: str | None = None) -> bytes:
    """A zip of the modules a worker needs, and of the user's environment file: equal content,
    equal bytes."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(rlflame.__file__)))
    files: dict[str, bytes] = {}
    for module in _MODULES:
        path = os.path.join(root, *module.split("."))
        file = f"{path}.py" if os.path.isfile(f"{path}.py") else f"{path}/__init__.py"
        files[os.path.relpath(file, root)] = _read(file)
    for folder, _, names in os.walk(os.path.join(root, *_PACKAGE.split("."))):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                files[os.path.relpath(path, root)] = _read(path)
    if env_file is not None:
        files[os.path.basename(env_file)] = _read(env_file)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in sorted(files):
            packed.writestr(zipfile.ZipInfo(name, _FIXED_TIME), files[name], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def make_request(method: str, *arguments: Any) -> bytes:
    """A call of a method of the object that executors hold, in flamepy's encoding."""
    import cloudpickle
    from flamepy.runner.types import RunnerRequest

    packed: bytes = cloudpickle.dumps(RunnerRequest(method, tuple(arguments)))
    return packed


def make_context(archive: bytes, settings: dict[str, Any]) -> bytes:
    """The class that executors load: a loader as text, which every Python reads.

    Bytecode of another version would crash the worker process, and with it wedge its executor.
    """
    import cloudpickle
    from flamepy.runner.types import RunnerContext

    text = inspect.getsource(executor_bootstrap)
    loader = executor_bootstrap.Loader
    service = type("RlflameWorker", (loader,), {"archive": archive, "settings": settings})

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if obj is loader:
                scope = {"__name__": "rlflame_loader"}
                return eval, (f"(lambda own: exec({text!r}, own) or own['Loader'])({scope!r})",)
            if obj is service:
                attributes = {"archive": archive, "settings": settings}
                return type, (service.__name__, service.__bases__, attributes)
            return super().reducer_override(obj)

    packed = io.BytesIO()
    Pickler(packed).dump(RunnerContext(service))
    return packed.getvalue()


def add_supervisor(arguments: list[str]) -> list[str]:
    """The template's command line with our service in the place of flamepy's."""
    if arguments[-2:] == ["-m", "flamepy.runner.runpy"]:
        return [*arguments[:-2], "-c", read_source("rlflame.fleet.flame.service_supervisor")]
    return arguments  # a template of the user's: its command line stays


def read_source(module: str) -> str:
    """A module of ours as text."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return _read(spec.origin).decode()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}.", "name a Python file"
        ) from error


def list_dependencies(extra: Sequence[str] = ()) -> list[str]:
    """The packages that a worker installs: those of environments, and the user's."""
    requirements = []
    for package, requirement in PINNED.items():
        try:
            requirements.append(f"{requirement}=={metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return [*requirements, *extra]


def make_package(name: str, requirements: Sequence[str]) -> bytes:
    """A source package of dependencies alone, which builds without a download."""
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
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            content = text.encode()
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


#: A build backend (PEP 517) that needs no other package, so that an executor needs no index for it.
_BACKEND = '''"""Builds a wheel that holds nothing and asks for the dependencies."""
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
