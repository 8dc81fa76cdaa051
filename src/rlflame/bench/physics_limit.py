"""How fast this machine steps an environment when nothing else is asked of it.

As many processes at once as there are workers, each with the recorded steps. Must not know: what
is compared with it.
"""

from __future__ import annotations

from pathlib import Path

from rlflame.bench.process_group import Children, together
from rlflame.training.trainer import Stop

WAYS = ("gymnasium", "mj_step")


class Bare(Children):
    """Processes that repeat a script in one way."""

    def __init__(self, script: Path, way: str, workers: int, seconds: float, stop: Stop) -> None:
        self._seconds = seconds
        super().__init__(
            "rlflame.bench.raw_stepping",
            [{"script": str(script), "way": way}] * workers,
            "The environment could not be stepped on its own.",
            "the same command with --no-limit leaves that out",
            stop,
        )

    def rate(self) -> float:
        return together(self.step(self._seconds))
