"""Which renderer is used: tried, remembered, forgotten, and what to install where none works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlflame.rendering import gl_backend
from rlflame.rendering.gl_backend import (
    BACKENDS,
    BackendFinder,
    GraphicsUnavailableError,
    find_cache_folder,
    find_install_command,
)


class Machine:
    """Renderers that work or do not, and which of them were tried."""

    def __init__(self, *working: str) -> None:
        self.working = working
        self.tried: list[str] = []

    def trial(self, backend: str) -> str:
        self.tried.append(backend)
        return "" if backend in self.working else f"no {backend} here"


def test_the_first_that_works_is_used_and_the_next_time_none_is_tried(tmp_path):
    last = BACKENDS[-1]
    machine, memory = Machine(last), tmp_path / "deep" / "graphics.json"
    finder = BackendFinder(machine.trial, memory, {})
    assert (finder.find(), finder.is_cached) == (last, False)
    assert machine.tried == list(BACKENDS)
    again = BackendFinder(machine.trial, memory, {})
    assert (again.find(), again.is_cached) == (last, True)
    assert machine.tried == list(BACKENDS)


def test_what_is_forgotten_is_tried_again_and_others_keep_their_memory(tmp_path):
    memory = tmp_path / "graphics.json"
    memory.write_text('{"another machine": "osmesa"}')
    machine = Machine(BACKENDS[0])
    finder = BackendFinder(machine.trial, memory, {})
    finder.find()
    machine.working = (BACKENDS[1],)
    finder.forget()
    assert finder.find() == BACKENDS[1]
    assert json.loads(memory.read_text())["another machine"] == "osmesa"


def test_the_user_s_own_choice_comes_first_and_is_no_command(tmp_path):
    wish = BACKENDS[-1]
    machine = Machine(*BACKENDS)
    assert BackendFinder(machine.trial, tmp_path / "a", {"MUJOCO_GL": wish.upper()}).find() == wish
    machine = Machine(BACKENDS[0])
    assert BackendFinder(machine.trial, tmp_path / "b", {"MUJOCO_GL": wish}).find() == BACKENDS[0]
    assert machine.tried == [wish, BACKENDS[0]]


def test_a_display_makes_another_machine_of_it(tmp_path):
    memory = tmp_path / "graphics.json"
    BackendFinder(Machine(BACKENDS[0]).trial, memory, {}).find()
    other = BackendFinder(Machine(BACKENDS[1]).trial, memory, {"DISPLAY": ":0"})
    assert other.find() == BACKENDS[1]
    assert len(json.loads(memory.read_text())) == 2


def test_where_none_works_each_reason_is_said_and_nothing_is_remembered(tmp_path):
    memory = tmp_path / "graphics.json"
    with pytest.raises(GraphicsUnavailableError) as caught:
        BackendFinder(Machine().trial, memory, {}).find()
    for backend in BACKENDS:
        assert f"{backend}: no {backend} here" in caught.value.message
    assert caught.value.hint == find_install_command()
    assert not memory.exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 3}', "\x00"])
def test_a_damaged_memory_is_none(tmp_path, content):
    memory = tmp_path / "graphics.json"
    memory.write_text(content)
    assert BackendFinder(Machine(BACKENDS[0]).trial, memory, {}).find() == BACKENDS[0]


def test_a_memory_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    finder = BackendFinder(Machine(BACKENDS[0]).trial, tmp_path / "file" / "graphics.json", {})
    assert finder.find() == BACKENDS[0]


def test_the_cache_folder_follows_the_rules_of_the_desktop(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache_folder({}) == tmp_path / ".cache" / "rlflame"
    assert find_cache_folder({"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/rlflame")
    assert find_cache_folder({"XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache" / "rlflame"


@pytest.mark.skipif(BACKENDS[0] == "cgl", reason="macOS brings its own")
@pytest.mark.parametrize(
    ("release", "tool"),
    [
        ('ID=debian\nVERSION_ID="12"', "apt-get install"),
        ('NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian', "apt-get install"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"', "apt-get install"),
        ("ID=fedora", "dnf install"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"', "dnf install"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"', "zypper install"),
        ("ID=arch", "pacman -S"),
        ("ID=alpine", "apk add"),
        ("ID=plan9", "package manager"),
        ("", "package manager"),
    ],
)
def test_the_package_is_named_for_this_system(tmp_path, release, tool):
    file = tmp_path / "os-release"
    file.write_text(release)
    assert tool in find_install_command(file)
    assert "package manager" in find_install_command(tmp_path / "absent")


def test_trying_leaves_this_process_s_environment_alone(tmp_path, monkeypatch):
    code = "import os; assert os.environ['MUJOCO_GL'] in ('egl', 'cgl')"
    (tmp_path / "trial.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(os.environ)
    trials = gl_backend.BackendProbe(module="trial")
    reasons = trials.find_failures()
    assert reasons[BACKENDS[0]] == ""
    assert "AssertionError" in reasons["glfw"]
    assert dict(os.environ) == before


_HINDERED = """
import sys
from rlflame.experiment import components as build
from rlflame.config.recipe import EnvironmentSettings
from rlflame.errors import ConfigError
from rlflame.rendering import gl_backend
gl_backend.make_gl_failure_error = lambda reason: ConfigError(f"hindered: {reason}")
try:
    kwargs = dict.fromkeys(sys.argv[2:], 1)
    build.make_env_spec(EnvironmentSettings(id=sys.argv[1], kwargs=kwargs))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("value", "words", "said"),
    [
        ("nonsense", ["Hopper-v5"], "hindered: invalid value for environment variable MUJOCO_GL"),
        ("nonsense", ["CartPole-v1"], ""),
        ("nonsense", ["CartPole-v1", "odd"], "CartPole-v1 cannot be made with {odd = 1}"),
        ("disable", ["Hopper-v5"], ""),
        ("disable", ["Hopper-v5", "odd"], "Hopper-v5 cannot be made with {odd = 1}"),
        ("", ["Hopper-v5"], ""),
    ],
)
def test_a_renderer_that_mujoco_does_not_load_with_is_blamed_and_nothing_else_is(
    value, words, said
):
    """MuJoCo reads the variable once, when it is loaded: in a process of its own."""
    spoken = subprocess.run(
        [sys.executable, "-c", _HINDERED, *words],
        env={**os.environ, "MUJOCO_GL": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert spoken.stdout.startswith(said)
    assert bool(spoken.stdout) == bool(said)


class Tried:
    def __init__(self, *working: str) -> None:
        self.working = working

    def find_failures(self) -> dict[str, str]:
        return {name: "" if name in self.working else "no" for name in BACKENDS}

    def close(self) -> None: ...


def test_the_variable_its_value_and_what_works_instead_are_named(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    error = gl_backend.make_gl_failure_error("no such thing", lambda: Tried(BACKENDS[0]))
    assert error.exit_code == 2
    assert error.message == "MuJoCo cannot be loaded with MUJOCO_GL='nonsense': no such thing."
    assert error.hint.startswith("unset MUJOCO_GL")
    assert all(name in error.hint for name in (*BACKENDS, "disable"))
    assert error.hint.endswith(f"of which {BACKENDS[0]} works here")
    none = gl_backend.make_gl_failure_error("no such thing", Tried)
    assert none.hint.endswith(f"of which none works here: {find_install_command()}")
