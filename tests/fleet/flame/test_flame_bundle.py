"""The bundle for Flame executors needs only numpy, Gymnasium and flamepy."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import rollouts
import test_architecture as architecture

from rlflame.fleet.flame import bundle
from rlflame.rollout import blas, wire
from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.task import RolloutTask
from rlflame.rollout.worker import RolloutWorker

#: The packages on a prepared executor, and their dependencies.
INSTALLED = ("numpy", "gymnasium", "mujoco", "mujoco-core", "cloudpickle", "farama-notifications",
             "typing-extensions", "packaging", "imageio", "pillow", "glfw", "pyarrow")  # fmt: skip
HEAVY = (*architecture.HEAVY, "scipy")
#: The part of flamepy that reads objects. In these tests, objects are files.
FLAMEPY = """
import os
import pyarrow as pa

class Reader:
    def __init__(self, table):
        self.read_all = lambda: table

class Client:
    def __init__(self, endpoint):
        self.folder = endpoint

    def do_get(self, ticket):
        path = os.path.join(self.folder, ticket.ticket.decode().removesuffix(":0"))
        try:
            with open(path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            raise KeyError(path) from None
        batch = pa.record_batch([pa.array(memoryview(content), pa.uint8())], ["data"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        row = b"FLM\\x03" + sink.getvalue().to_pybytes()
        return Reader(pa.table({"data": pa.array([row], pa.binary())}))

def _get_flight_client(endpoint, tls):
    return Client(endpoint)

def _get_cache_tls_config():
    return None
"""
#: A user's file that prints which modules of rlflame are loaded when it is imported.
ENV_FILE = """
import json, sys
modules = {name: module.__file__ for name, module in sys.modules.items()
           if name.split(".")[0] == "rlflame"}
print("MODULES", json.dumps(modules))
"""
#: An executor: gets the loader by value, as from flamepy, and runs one call.
EXECUTOR = """
import json, os, sys
from pathlib import Path
here = Path(sys.argv[1])
settings = json.loads((here / "settings.json").read_text())
scope = {"__name__": "loader"}
exec((here / "loader.py").read_text(), scope)
Shipped = type("Shipped", (scope["Loader"],), {
    "archive": (here / "bundle.zip").read_bytes(), "settings": settings})
loader = Shipped()
def content(array):
    return bytes(memoryview(array.buffers()[1]))[array.offset : array.offset + len(array)]
greeting = json.loads(content(loader.greet()))
tasks = loader._make_array((here / "tasks").read_bytes())
answers = loader.run(tasks, "weights", str(here), "policy")
(here / "answers").write_bytes(content(answers))
print(json.dumps({
    "packages": greeting["packages"],
    "folder": sys.path[0],
    "modules": {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "rlflame"},
}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that finds only some packages of this one."""
    folder = tmp_path_factory.mktemp("executor") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    for name in INSTALLED:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(distribution.locate_file(top)))
    (site / "flamepy" / "core").mkdir(parents=True)
    (site / "flamepy" / "__init__.py").touch()
    (site / "flamepy" / "core" / "__init__.py").touch()
    (site / "flamepy" / "core" / "cache.py").write_text(FLAMEPY)
    return folder / "bin" / "python"


def run_python(python: Path, *words: str | Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    result = subprocess.run(
        [python, *words],
        env=environment,
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def bundled_modules() -> dict[str, str]:
    """The modules in the bundle and their files."""
    names = zipfile.ZipFile(io.BytesIO(bundle.make_archive())).namelist()
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in names
    }


def test_the_executor_has_none_of_the_heavy_libraries(python: Path) -> None:
    code = (
        "import importlib.util as u; import numpy, gymnasium, mujoco\n"
        f"print([n for n in {(*HEAVY, 'rlflame')!r} if u.find_spec(n)])"
    )
    assert run_python(python, "-c", code).strip() == "['flamepy']"


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "Hopper-v5"])
def test_a_task_runs_there_to_the_same_bytes(env: str, python: Path, tmp_path: Path) -> None:
    spec = read_env_spec(env, {}, None)
    task: RolloutTask = rollouts.task(spec, steps=20)
    weights = rollouts.weights(task.policy)
    (tmp_path / "tasks").write_bytes(
        wire.encode({"tasks": [np.frombuffer(wire.encode(task), np.uint8)]})
    )
    (tmp_path / "policy").write_bytes(wire.encode({"id": task.policy_id, "arrays": weights}))
    (tmp_path / "users_file.py").write_text(ENV_FILE)
    (tmp_path / "bundle.zip").write_bytes(bundle.make_archive(str(tmp_path / "users_file.py")))
    (tmp_path / "loader.py").write_text(bundle.make_loader_text())
    settings = {
        "core": blas.read_core_name(),
        "step_deadline_s": 60.0,
        "lease": {"endpoint": str(tmp_path), "key": "lease"},
        "env_file": "users_file.py",
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "executor.py").write_text(EXECUTOR)
    shown = json.loads(run_python(python, tmp_path / "executor.py", tmp_path))
    assert "torch" not in shown["packages"]

    (answer,) = wire.decode((tmp_path / "answers").read_bytes())["answers"]
    assert answer["kind"] == "result", answer
    worker = RolloutWorker()
    assert bytes(answer["body"]) == wire.encode(worker.run(task, lambda: weights))
    worker.close()

    _, _, line = answer["printed"].partition("MODULES ")
    child = json.loads(line.splitlines()[0])
    for modules in (shown["modules"], child):
        assert len(modules) > 4
        assert set(modules) <= set(bundled_modules())
        for name, file in modules.items():
            assert Path(file) == Path(shown["folder"], bundled_modules()[name])


def test_every_module_in_the_bundle_can_be_imported_there(python: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(io.BytesIO(bundle.make_archive())).extractall(tmp_path)
    modules = sorted(bundled_modules())
    code = (
        f"import sys, importlib; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"for name in {modules!r}:\n    importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {set(HEAVY)!r}))"
    )
    assert run_python(python, "-c", code).strip() in ("[]", "['flamepy']")


def test_the_bundle_has_whatever_its_modules_import_wherever_they_do() -> None:
    """This includes imports inside functions, which run only in case of an error."""
    modules = bundled_modules()
    assert {"rlflame", "rlflame.rollout", "rlflame.rollout.worker"} <= set(modules)
    missing = []
    for name in modules:
        if name == "rlflame":
            continue
        for imported in architecture.imports(name.removeprefix("rlflame.")):
            ours = imported.split(".")[0] == "rlflame" and imported != "rlflame.__version__"
            if ours and imported not in modules:
                missing.append(f"{name} imports {imported}")
    assert not missing


def test_the_bundle_has_every_module_of_the_rollouts_in_folders_below_too() -> None:
    spec = importlib.util.find_spec("rlflame.rollout")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    expected = {
        f"rlflame/rollout/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")
    }
    assert expected <= set(bundled_modules().values())
