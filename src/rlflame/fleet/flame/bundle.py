"""What is shipped to a cluster: kilobytes of source, and the names of what to install.

Code goes by value, so that a prepared executor installs nothing; the package that other executors
install holds nothing but its dependencies, pinned to what this machine has. Must not know:
sessions, connections, tasks.
"""

from __future__ import annotations

import importlib.util
import io
import os
import tarfile
import zipfile
from collections.abc import Sequence
from importlib import metadata

import rlflame
from rlflame.errors import ConfigError

_MODULES = (
    "rlflame",
    "rlflame.errors",
    "rlflame.fleet",
    "rlflame.fleet.flame",
    "rlflame.fleet.flame.timed_call",
    "rlflame.fleet.flame.lease",
    "rlflame.fleet.flame.raw_object",
    "rlflame.fleet.flame.service",
)
#: Shipped with all that is below it.
_PACKAGE = "rlflame.rollout"
#: What environments are made of; each is pinned to this machine's version.
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
    """What a worker installs: numpy and Gymnasium as they are here, and what the user adds."""
    requirements = []
    for package, requirement in PINNED.items():
        try:
            requirements.append(f"{requirement}=={metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return [*requirements, *extra]


def make_package(name: str, requirements: Sequence[str]) -> bytes:
    """A source package that is nothing but its dependencies, and builds without a download."""
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
