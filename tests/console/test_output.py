"""Errors as commands print them, and shortened tracebacks."""

from __future__ import annotations

import sys
import traceback

from commands import rlflame

from rlflame.console import output
from rlflame.console.output import shorten_tracebacks
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
    frames = [line for line in lines if line.startswith("  File ")]
    assert all(str(tmp_path / "moon.py") in frame for frame in frames)
    code, error, rest, sentence, hint = lines[-5:]
    assert (error, rest) == ("ValueError: the moon", "is wrong")
    assert code.strip() == 'raise ValueError("the moon\\nis wrong")'
    assert "failed in step: ValueError: the moon is wrong (slot" in sentence
    assert hint.startswith("  hint: ")
    whole = rlflame(*words, tmp_path / "b", "--debug").err
    assert "Traceback (most recent call last):" in whole
    assert "KeyError: 'moon'" in whole


def test_what_was_printed_and_foreign_frames_stay():
    code = "def f():\n    1 / 0\nf()"
    try:
        exec(compile(code, f"{output.__file__}", "exec"), {})
    except ZeroDivisionError:
        own = traceback.format_exc()
    try:
        exec(compile(code, "theirs.py", "exec"), {})
    except ZeroDivisionError:
        text = f"Before.\n{own}\n{traceback.format_exc()}\nOutput of the worker:\n  a word\nanother"
    error = "ZeroDivisionError: division by zero"
    lines = [line for line in shorten_tracebacks(text).splitlines() if "test_output.py" not in line]
    assert [line for line in lines if not line.startswith("    ")] == [
        *("Before.", error, ""),
        *('  File "theirs.py", line 3, in <module>', '  File "theirs.py", line 2, in f', error),
        *("", "Output of the worker:", "  a word", "another"),
    ]
    for plain in ("", "no\ntraceback", "x\n" + "y" * 3):
        assert shorten_tracebacks(plain) == plain
    assert sys.exc_info() == (None, None, None)


def test_an_error_is_a_sentence_and_the_next_command(capsys):
    error = RlflameError("Seven is not prime.", "rlflame --help", "the environment's own words\n")
    output.print_error(error)
    heard = capsys.readouterr()
    assert heard.out == ""
    assert heard.err == (
        "the environment's own words\nrlflame: Seven is not prime.\n  hint: rlflame --help\n"
    )
