"""The wheel is complete: rlflame can train without the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = [
    *("train", "--env", "cartpole", "--quiet", "--set", "stop_at_iterations=2"),
    *("--set", "rollout.num_slots=2", "--set", "rollout.envs_per_slot=2"),
    *("--set", "rollout.steps=16", "--set", "evaluation.final_episodes=2"),
]


def call(*words: str | Path, cwd: Path) -> str:
    """Run a command that cannot import the tests or the source checkout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    result = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy to keep the clone clean and old files out."""
    folder = tmp_path_factory.mktemp("wheel")
    clone = folder / "clone"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", clone / "src", ignore=unwanted)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, clone / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    call(sys.executable, "-c", code, folder, cwd=clone)
    shutil.rmtree(clone)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel and this interpreter's dependencies."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    options = ("--no-deps", "--no-index", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    call(*pip, "install", *options, wheel, cwd=folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    # A path does not process .pth files, which would make the clone importable.
    places = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(places) + "\n")
    return folder


def test_every_file_of_the_source_travels(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "rlflame").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "rlflame/py.typed" in expected
    assert any(name.endswith(".toml") for name in expected)
    assert expected - names == set()
    assert {name for name in names if ".dist-info/" not in name} - expected == set()


def test_what_is_imported_lies_in_the_environment(installed: Path, tmp_path: Path) -> None:
    code = "import rlflame; print(rlflame.__file__)"
    found = Path(call(installed / "bin" / "python", "-c", code, cwd=tmp_path).strip())
    assert found.is_relative_to(installed)


@pytest.mark.parametrize("fleet", ["inline", "local"])
def test_it_trains_outside_the_clone(fleet: str, installed: Path, tmp_path: Path) -> None:
    command: list[str | Path] = [installed / "bin" / "rlflame"]
    if fleet == "local":
        command = [installed / "bin" / "python", "-m", "rlflame"]
    options = ["--fleet", fleet, "--out", "run"]
    call(*command, *SMALL, *options, cwd=tmp_path)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert (tmp_path / "run" / "best.safetensors").exists()
