"""What is advised can be typed as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path

from rlflame.errors import shell, typed


def test_advice_is_what_a_shell_reads_back():
    words = ["resume", "a run", "it's", "--set", "a=[1, 2]", "$HOME"]
    assert shlex.split(typed(*words)) == ["rlflame", *words]


def test_a_path_is_no_option():
    assert typed("eval", Path("-odd/best")) == "rlflame eval ./-odd/best"
    assert shell("rm", "-r", Path("plain")) == "rm -r plain"
