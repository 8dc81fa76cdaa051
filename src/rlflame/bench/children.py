"""Processes that step for so long whenever they are told to, all of them at once.

Each says a word when it is ready, and answers every line on its standard input with one of JSON:
`steps` and the `seconds` they took. Must not know: what is stepped, and how.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rlflame.errors import RlflameError
from rlflame.fleet import Closing
from rlflame.rollout import blas


class Children(Closing):
    """Alive until closed; a command is a module of Python and its arguments."""

    def __init__(self, commands: Sequence[Sequence[str]], refusal: str, hint: str) -> None:
        self._refusal, self._hint = refusal, hint
        self._children: list[subprocess.Popen[str]] = []
        environment = {**os.environ, **blas.child_environment()}
        try:
            for command in commands:
                # The current folder is on a module's path, as it is on a worker's.
                child = subprocess.Popen(
                    [sys.executable, "-m", *command], env=environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for its parent, which ends it
                )  # fmt: skip
                self._children.append(child)
            # All of them are heard: each has an answer of its own.
            said = [self._hear(child) for child in self._children]
            self.possible = all(word == "ready" for word in said)
        except BaseException:
            self.close()
            raise

    def step(self) -> list[dict[str, Any]]:
        """What each has done meanwhile."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        return [json.loads(self._hear(child)) for child in self._children]

    def rate(self) -> float:
        return together(self.step())

    def _hear(self, child: subprocess.Popen[str]) -> str:
        assert child.stdout is not None
        assert child.stderr is not None
        line = child.stdout.readline().strip()
        if not line:
            raise RlflameError(self._refusal, self._hint, child.stderr.read())
        return line

    def close(self) -> None:
        while self._children:
            child = self._children.pop()
            child.kill()
            child.communicate()


def together(heard: Sequence[dict[str, Any]]) -> float:
    """Steps a second of all of them."""
    return sum(float(one["steps"] / one["seconds"]) for one in heard)
