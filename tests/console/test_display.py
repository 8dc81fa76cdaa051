"""The choice of a display for each mode, and the displays of real commands."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys

import pytest
from commands import TINY, finished, process

from rlflame.console.display import QuietDisplay, make_display
from rlflame.console.json_lines import JsonDisplay
from rlflame.console.live import LiveDisplay
from rlflame.console.plain import PlainDisplay


@pytest.mark.parametrize("sweep", [False, True])
def test_which_display_for_which_mode(monkeypatch, sweep):
    modes = {
        "json": JsonDisplay, "quiet": QuietDisplay, "plain": PlainDisplay, "live": LiveDisplay,
        "auto": PlainDisplay,
    }  # fmt: skip
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    for mode, kind in modes.items():
        assert type(make_display(mode, sweep=sweep)) is kind
    monkeypatch.setattr(sys, "stdout", None)
    assert type(make_display("auto")) is PlainDisplay


def seen_on_a_terminal(*words, environment) -> str:
    """The output of a command on its own terminal."""
    ours, theirs = pty.openpty()
    running = process(*words, stdout=theirs, stderr=theirs, environment=environment)
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], 60.0)[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux raises this when the other side is closed
            break
        if not data:
            break
        seen += data
    os.close(ours)
    assert running.wait(60) == 0
    return seen.decode()


def plainly(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize(
    ("environment", "escapes", "colours"),
    [
        ({"TERM": "xterm-256color"}, True, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_a_terminal_gets_a_view_that_leaves_it_as_it_was(tmp_path, environment, escapes, colours):
    words = ("train", *TINY, "--steps", "640", "--out", tmp_path / "x")
    environment = {"COLUMNS": "80", "LINES": "40", "NO_COLOR": "", **environment}
    seen = seen_on_a_terminal(*words, environment=environment)
    assert ("\x1b[" in seen) == escapes
    assert bool(re.search(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])(?:;\d+)*m", seen)) == colours
    assert "CartPole-v1: 4 observations, 2 discrete actions" in plainly(seen)
    assert "rlflame eval" in plainly(seen)
    if escapes:
        assert "100%" in plainly(seen) or "progress" in plainly(seen)
        assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l")


def test_a_pipe_gets_no_escapes(tmp_path):
    words = ("train", *TINY, "--steps", "128", "--out", tmp_path / "x")
    spoken = finished(process(*words, environment={"TERM": "xterm", "FORCE_COLOR": "1"}))
    assert spoken.code == 0
    assert "\x1b" not in spoken.out + spoken.err
    assert spoken.err == ""


def test_nobody_listening_is_no_reason_to_stop(tmp_path):
    """The reader of the output closes it after one line, but the run continues."""
    running = process("train", *TINY, "--steps", "6400", "--out", tmp_path / "x")
    assert running.stdout.readline() == "rlflame 0.1.0\n"
    running.stdout.close()
    assert running.wait(60) == 0
    assert running.stderr.read() == ""
    assert (tmp_path / "x/result.json").exists()
