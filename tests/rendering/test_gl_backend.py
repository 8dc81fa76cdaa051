"""The choice of a renderer: tests, the stored choice, hints if none works."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from rlflame.rendering import gl_backend
from rlflame.rendering.gl_backend import (
    BACKENDS,
    find_install_command,
    find_memory,
    list_backends,
    store_backend,
)


def test_the_user_s_choice_is_tried_first_and_then_the_one_that_worked_last(tmp_path):
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    assert list_backends(place) == list(BACKENDS)
    last = BACKENDS[-1]
    store_backend(last, place)
    assert list_backends(place) == [last, *BACKENDS[:-1]]
    choice = BACKENDS[0]
    assert list_backends({**place, "MUJOCO_GL": choice.upper()})[:2] == [choice, last]


@pytest.mark.parametrize("content", [b"", b"rm", b"\xff\x00"])
def test_a_damaged_memory_is_none(tmp_path, content):
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    store_backend("egl", place)
    find_memory(place).write_bytes(content)
    assert list_backends(place) == list(BACKENDS)


def test_a_memory_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    place = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    store_backend(BACKENDS[-1], place)
    assert list_backends(place) == list(BACKENDS)


def test_the_memory_follows_the_rules_of_the_desktop(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path / ".cache" / "rlflame" / "renderer"
    assert find_memory({}) == find_memory({"XDG_CACHE_HOME": "relative"}) == home
    assert find_memory({"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/rlflame/renderer")


@pytest.mark.skipif(BACKENDS[0] == "cgl", reason="macOS brings its own")
@pytest.mark.parametrize(
    ("release", "tool"),
    [
        ({"ID": "debian", "VERSION_ID": "12"}, "apt-get install"),
        ({"ID": "ubuntu", "ID_LIKE": "debian"}, "apt-get install"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "apt-get install"),
        ({"ID": "fedora"}, "dnf install"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "dnf install"),
        ({"ID": "opensuse-leap", "ID_LIKE": "suse opensuse"}, "zypper install"),
        ({"ID": "arch"}, "pacman -S"),
        ({"ID": "alpine"}, "apk add"),
        ({"ID": "plan9"}, "package manager"),
        ({}, "package manager"),
    ],
)
def test_the_package_is_named_for_this_system(monkeypatch, release, tool):
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    assert tool in find_install_command()


@pytest.mark.skipif(BACKENDS[0] == "cgl", reason="macOS brings its own")
def test_a_system_without_a_name_gets_a_hint_about_its_package_manager(monkeypatch):
    def fail():
        raise FileNotFoundError

    monkeypatch.setattr(platform, "freedesktop_os_release", fail)
    assert "package manager" in find_install_command()


def test_trying_leaves_this_process_s_environment_alone(tmp_path, monkeypatch):
    code = "import os; assert os.environ['MUJOCO_GL'] in ('egl', 'cgl')"
    (tmp_path / "trial.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(os.environ)
    facts = gl_backend.check_graphics("trial").facts
    reasons = facts["reasons"]
    assert facts["works"] == [BACKENDS[0]]
    assert "AssertionError" in reasons["glfw"]
    assert dict(os.environ) == before
