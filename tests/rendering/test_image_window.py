"""Images open in the viewer of the desktop if there is a display."""

from __future__ import annotations

import sys
import time

import pytest

from rlflame.rendering import image_window


@pytest.fixture
def viewer(tmp_path, monkeypatch):
    """A desktop whose viewer writes the path of the image into a file."""
    name, record = "open" if sys.platform == "darwin" else "xdg-open", tmp_path / "record"
    script = tmp_path / name
    script.write_text(f'#!/bin/sh\necho "$1" > {record}.new\nmv {record}.new {record}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("CI", raising=False)
    return record


def test_an_image_opens_where_there_is_a_display(viewer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert image_window.open_image(tmp_path / "a b.png")
    for _ in range(1000):
        if viewer.exists():
            break
        time.sleep(0.01)
    assert viewer.read_text() == f"{tmp_path / 'a b.png'}\n"


@pytest.mark.parametrize("obstacle", ["display", "viewer", "CI"])
def test_without_a_display_or_a_viewer_or_in_ci_nothing_opens(viewer, monkeypatch, obstacle):
    if obstacle == "CI":
        monkeypatch.setenv("CI", "true")
    elif obstacle == "display" and sys.platform != "darwin":
        monkeypatch.delenv("DISPLAY")
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    else:
        monkeypatch.setenv("PATH", "/nonexistent")
    assert not image_window.open_image(viewer)
    assert not viewer.exists()


def test_a_viewer_that_cannot_start_is_ignored(viewer, tmp_path):
    (script,) = (path for path in tmp_path.iterdir() if path.name.endswith("open"))
    script.write_text("#!/nonexistent/shell\n")
    assert not image_window.open_image(viewer)
