"""Errors as commands print them, and what is left of a traceback."""

from __future__ import annotations

import sys
import traceback

from commands import rlflame

from rlflame.console import output
from rlflame.console.output import shorten_traceback
from rlflame.errors import RlflameError

ENVIRONMENT = """
import gymnasium
import numpy as np


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return self.reward()

    def reward(self):
        try:
            {}["moon"]
        except KeyError:
            raise ValueError("the moon\\nis wrong")


gymnasium.register("Moon-v0", Env)
"""


def test_of_an_environment_that_raises_its_own_last_frame_is_shown(tmp_path):
    (tmp_path / "moon.py").write_text(ENVIRONMENT)
    words = ("train", "--env-file", tmp_path / "moon.py", "--env", "Moon-v0", "--steps", "64")
    words = (*words, "--local", "--workers", "1", "--out")
    spoken = rlflame(*words, tmp_path / "a")
    assert spoken.code == 1
    lines = spoken.err.splitlines()
    assert "KeyError: 'moon'" in lines
    frame, code, sentence, hint = lines[-4:]
    assert frame == f'  File "{tmp_path / "moon.py"}", line 20, in reward'
    assert code.strip() == 'raise ValueError("the moon\\nis wrong")'
    assert "failed in step: ValueError: the moon is wrong (slot" in sentence
    assert hint.startswith("  hint: ")
    whole = rlflame(*words, tmp_path / "b", "--debug").err
    assert "Traceback (most recent call last):" in whole
    assert "KeyError: 'moon'" in whole


def test_what_was_printed_and_what_is_no_traceback_stays():
    try:
        exec(compile("def f():\n    1 / 0\nf()", "theirs.py", "exec"), {})
    except ZeroDivisionError:
        text = "Before.\n" + traceback.format_exc() + "\nIt had printed:\n  a word\nanother"
    raised = "ZeroDivisionError: division by zero"
    shown = ["Before.", '  File "theirs.py", line 2, in f', raised, "", "It had printed:"]
    assert shorten_traceback(text, "Lost.").splitlines() == [*shown, "  a word", "another"]
    shown.remove(raised)
    assert shorten_traceback(text, f"Lost: {raised}.").splitlines() == [
        *shown,
        "  a word",
        "another",
    ]
    for plain in ("", "no\ntraceback", "Traceback (most recent call last):", "x\n" + "y" * 3):
        assert shorten_traceback(plain, "Lost.") == plain
    assert sys.exc_info() == (None, None, None)


def test_an_error_is_a_sentence_and_the_next_command(capsys):
    error = RlflameError("Seven is not prime.", "rlflame --help", "the environment's own words\n")
    output.print_error(error)
    heard = capsys.readouterr()
    assert heard.out == ""
    assert heard.err == (
        "the environment's own words\nrlflame: Seven is not prime.\n  hint: rlflame --help\n"
    )
