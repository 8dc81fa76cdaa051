"""The commands in hints can be typed without changes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rlflame.errors import format_command, format_shell, replace_suffix


def test_advice_is_what_a_shell_reads_back():
    words = ["resume", "a run", "it's", "--set", "a=[1, 2]", "$HOME"]
    assert shlex.split(format_command(*words)) == ["rlflame", *words]


def test_a_path_is_no_option():
    assert format_command("eval", Path("-odd/best")) == "rlflame eval ./-odd/best"
    assert format_shell("rm", "-r", Path("plain")) == "rm -r plain"


@pytest.mark.parametrize(
    ("typed_name", "better"),
    [("x", "x.gif"), ("a/x.webm", "a/x.gif"), ("", "video.gif"), (".", "video.gif"),
     ("..", "../video.gif"), ("/", "/video.gif"), ("-", "video.gif"), ("a/--", "a/video.gif")],
)  # fmt: skip
def test_a_name_with_another_end_can_be_written(typed_name, better):
    assert replace_suffix(Path(typed_name), ".gif", "video") == Path(better)
