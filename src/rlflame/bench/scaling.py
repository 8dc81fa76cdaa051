"""The same work on several fleets with several numbers of workers, in turn.

With one number of workers all fleets are open at once and take turns, so that a machine that
drifts does so for all of them. Must not know: what fleets there are, what is made of the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from statistics import median

from rlflame.bench.base import Case, Cell
from rlflame.bench.timed_run import Clock, count_answered_workers, run_once, warm
from rlflame.fleet.base import Fleet
from rlflame.terminal_text import format_count
from rlflame.training.trainer import Progress, StopRequest

#: Seconds between two words of progress.
_STATUS_INTERVAL_S = 0.5
OpenFleet = Callable[[str, int], AbstractContextManager[Fleet]]


class _StatusReporter:
    """How far a repetition is, told at most so often that nobody could measure it."""

    def __init__(
        self, case: Case, cell: Cell, which: str, show_status: Callable[[str], None], clock: Clock
    ) -> None:
        self._name = f"{case.name}, {cell.fleet} with {cell.workers}: {which}"
        self._total, self._show_status, self._clock = case.iterations, show_status, clock
        self._start_s = self._last = clock()
        self.finished = self._episodes = 0
        show_status(self._name)

    def __call__(self, progress: Progress) -> None:
        self.finished, self._episodes = progress.iteration, progress.episodes
        if (now := self._clock()) - self._last >= _STATUS_INTERVAL_S:
            self._last = now
            self._show_status(f"{self._name}, iteration {self.finished} of {self._total}")

    def format_interrupted(self) -> str:
        spent = self._clock() - self._start_s
        return (
            f"{self._name}: stopped after {self.finished} of "
            f"{format_count(self._total, 'iteration')}, "
            f"{format_count(self._episodes, 'episode')} and {spent:.1f} s"
        )


@dataclass
class ScalingBenchmark:
    """`cells` grows while it runs, and holds what was measured however it ends."""

    cases: Sequence[Case]
    kinds: Sequence[str]
    workers: Sequence[int]
    repeat: int
    open: OpenFleet
    stop: StopRequest
    #: What is going on now, and what stays to be read.
    show_status: Callable[[str], None] = lambda text: None
    note: Callable[[str], None] = lambda text: None
    save_partial: Callable[[], None] = lambda: None
    #: Tasks that went to a second worker since the last time.
    take_retried: Callable[[], int] = lambda: 0
    clock: Clock = time.perf_counter
    cells: list[Cell] = field(default_factory=list)

    def run(self) -> bool:
        """False where somebody asked to stop before the end."""
        return all(self._run_count(count) for count in self.workers)

    def _run_count(self, count: int) -> bool:
        with ExitStack() as stack:
            fleets: dict[str, Fleet] = {}
            starts: dict[str, float] = {}
            for kind in self._select_kinds(count):
                self.show_status(f"{kind} with {count}: starting")
                start_s = self.clock()
                fleets[kind] = stack.enter_context(self.open(kind, count))
                first = self.cases[0]
                if not warm(first, fleets[kind], self.stop, self.clock, wait_for_all=True):
                    return False
                starts[kind] = self.clock() - start_s
            return all(self._run_case(case, count, fleets, starts) for case in self.cases)

    def _select_kinds(self, count: int) -> list[str]:
        """This process is one worker, whatever it is asked for."""
        return [kind for kind in self.kinds if kind != "inline" or count == min(self.workers)]

    def _run_case(
        self, case: Case, count: int, fleets: dict[str, Fleet], starts: dict[str, float]
    ) -> bool:
        first = case is self.cases[0]
        cells = []
        for kind, fleet in fleets.items():
            if not first and not warm(case, fleet, self.stop, self.clock):
                return False
            workers = 1 if kind == "inline" else count
            start_s = starts[kind] if first else None
            cell = Cell(
                case.name, kind, workers, fleet.capacity, count_answered_workers(fleet), start_s
            )
            cells.append(cell)
        for number in range(self.repeat):
            for cell in cells:
                reporter = _StatusReporter(
                    case, cell, f"{number + 1} of {self.repeat}", self.show_status, self.clock
                )
                self.take_retried()
                repetition = run_once(case, fleets[cell.fleet], self.stop, self.clock, reporter)
                if repetition is None:
                    if reporter.finished:
                        self.note(reporter.format_interrupted())
                    return False
                cell.repetitions.append(replace(repetition, retried=self.take_retried()))
                if number == 0:
                    self.cells.append(cell)
        for cell in cells:
            self.note(
                f"{case.name}, {cell.fleet} with {cell.workers}: "
                f"{median(cell.seconds):.3f} s (median of {len(cell.repetitions)})"
            )
        self.save_partial()
        return True
