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
from rlflame.bench.timing import Clock, answered, run_once, warm
from rlflame.fleet.base import Fleet
from rlflame.text import format_count
from rlflame.training.trainer import Progress, Stop

#: Seconds between two words of progress.
_EACH_S = 0.5
Open = Callable[[str, int], AbstractContextManager[Fleet]]


class _Told:
    """How far a repetition is, told at most so often that nobody could measure it."""

    def __init__(
        self, case: Case, cell: Cell, which: str, tell: Callable[[str], None], clock: Clock
    ) -> None:
        self._name = f"{case.name}, {cell.fleet} with {cell.workers}: {which}"
        self._of, self._tell, self._clock = case.iterations, tell, clock
        self._began = self._last = clock()
        self.finished = self._episodes = 0
        tell(self._name)

    def __call__(self, progress: Progress) -> None:
        self.finished, self._episodes = progress.iteration, progress.episodes
        if (now := self._clock()) - self._last >= _EACH_S:
            self._last = now
            self._tell(f"{self._name}, iteration {self.finished} of {self._of}")

    def broken_off(self) -> str:
        spent = self._clock() - self._began
        return (
            f"{self._name}: stopped after {self.finished} of "
            f"{format_count(self._of, 'iteration')}, "
            f"{format_count(self._episodes, 'episode')} and {spent:.1f} s"
        )


@dataclass
class Scaling:
    """`cells` grows while it runs, and holds what was measured however it ends."""

    cases: Sequence[Case]
    kinds: Sequence[str]
    workers: Sequence[int]
    repeat: int
    open: Open
    stop: Stop
    #: What is going on now, and what stays to be read.
    tell: Callable[[str], None] = lambda text: None
    note: Callable[[str], None] = lambda text: None
    kept: Callable[[], None] = lambda: None
    #: Tasks that went to a second worker since the last time.
    retried: Callable[[], int] = lambda: 0
    clock: Clock = time.perf_counter
    cells: list[Cell] = field(default_factory=list)

    def run(self) -> bool:
        """False where somebody asked to stop before the end."""
        return all(self._with(count) for count in self.workers)

    def _with(self, count: int) -> bool:
        with ExitStack() as stack:
            fleets: dict[str, Fleet] = {}
            starts: dict[str, float] = {}
            for kind in self._kinds(count):
                self.tell(f"{kind} with {count}: starting")
                began = self.clock()
                fleets[kind] = stack.enter_context(self.open(kind, count))
                first = self.cases[0]
                if not warm(first, fleets[kind], self.stop, self.clock, wait_for_all=True):
                    return False
                starts[kind] = self.clock() - began
            return all(self._case(case, count, fleets, starts) for case in self.cases)

    def _kinds(self, count: int) -> list[str]:
        """This process is one worker, whatever it is asked for."""
        return [kind for kind in self.kinds if kind != "inline" or count == min(self.workers)]

    def _case(
        self, case: Case, count: int, fleets: dict[str, Fleet], starts: dict[str, float]
    ) -> bool:
        first = case is self.cases[0]
        cells = []
        for kind, fleet in fleets.items():
            if not first and not warm(case, fleet, self.stop, self.clock):
                return False
            workers = 1 if kind == "inline" else count
            start_s = starts[kind] if first else None
            cell = Cell(case.name, kind, workers, fleet.capacity, answered(fleet), start_s)
            cells.append(cell)
        for number in range(self.repeat):
            for cell in cells:
                told = _Told(case, cell, f"{number + 1} of {self.repeat}", self.tell, self.clock)
                self.retried()
                found = run_once(case, fleets[cell.fleet], self.stop, self.clock, told)
                if found is None:
                    if told.finished:
                        self.note(told.broken_off())
                    return False
                cell.repetitions.append(replace(found, retried=self.retried()))
                if number == 0:
                    self.cells.append(cell)
        for cell in cells:
            self.note(
                f"{case.name}, {cell.fleet} with {cell.workers}: "
                f"{median(cell.seconds):.3f} s (median of {len(cell.repetitions)})"
            )
        self.kept()
        return True
