"""How fast this machine steps an environment when nothing else is asked of it.

As many processes at once as there are workers, each with the recorded steps. Must not know: what
is compared with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rlflame.errors import RlflameError
from rlflame.fleet import Closing
from rlflame.rollout import blas

WAYS = ("gymnasium", "mj_step")


class Bare(Closing):
    """Processes that repeat a script in one way, alive until closed."""

    def __init__(self, script: Path, way: str, workers: int, seconds: float) -> None:
        self._children: list[subprocess.Popen[str]] = []
        # The current folder is on a module's path, as it is on a worker's.
        command = [sys.executable, "-m", "rlflame.bench.bare", str(script), way, f"{seconds:g}"]
        environment = {**os.environ, **blas.child_environment()}
        try:
            for _ in range(workers):
                child = subprocess.Popen(
                    command, env=environment, text=True,
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

    def rate(self) -> float:
        """Steps a second of all of them together."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        said = [json.loads(self._hear(child)) for child in self._children]
        return sum(float(one["steps"] / one["seconds"]) for one in said)

    def _hear(self, child: subprocess.Popen[str]) -> str:
        assert child.stdout is not None
        assert child.stderr is not None
        line = child.stdout.readline().strip()
        if not line:
            raise RlflameError(
                "The environment could not be stepped on its own.",
                "rlflame bench rollouts --no-limit leaves that out",
                child.stderr.read(),
            )
        return line

    def close(self) -> None:
        while self._children:
            child = self._children.pop()
            child.kill()
            child.communicate()
