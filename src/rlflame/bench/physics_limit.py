"""How fast this machine steps an environment when nothing else is asked of it.

As many processes at once as there are workers, each with the recorded steps. Must not know: what
is compared with it.
"""

from __future__ import annotations

from pathlib import Path

from rlflame.bench.stepping_processes import SteppingProcesses, sum_rates
from rlflame.training.trainer import StopRequest

WAYS = ("gymnasium", "mj_step")


class RawSteppingProcesses(SteppingProcesses):
    """Processes that repeat a script in one way."""

    def __init__(
        self, trace_path: Path, way: str, workers: int, seconds: float, stop: StopRequest
    ) -> None:
        self._seconds = seconds
        super().__init__(
            "rlflame.bench.raw_stepping",
            [{"script": str(trace_path), "way": way}] * workers,
            "The environment could not be stepped on its own.",
            "the same command with --no-limit leaves that out",
            stop,
        )

    def measure_rate(self) -> float:
        return sum_rates(self.step(self._seconds))
