"""Runs a benchmark, saves partial results, and reports them after a failure."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rlflame.analysis.plots.matplotlib_backend import PlotUnavailableError
from rlflame.bench.case import Case, Clock
from rlflame.bench.machine_load import LoadMonitor
from rlflame.bench.result import BenchResult, ResultFolder, Side
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.display import StatusLine
from rlflame.console.output import print_note, print_result_lines
from rlflame.errors import Interruption, RlflameError, mark_documented, mark_errors_documented
from rlflame.fleet import factory
from rlflame.fleet.base import EventCounter, Fleet, FleetEvent
from rlflame.training.stop_signal import SignalStop
from rlflame.training.trainer import StopInterrupt, StopRequest


class BenchSession:
    """The resources of a benchmark: its fleets, the status line and the stop request."""

    def __init__(
        self,
        runtime: RuntimeSettings,
        line: StatusLine,
        stop: StopRequest,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.runtime, self.stop, self.clock = runtime, stop, clock
        self.show_status, self.show_note = line.show_status, line.show_note
        self._events = EventCounter(self._show_event)
        self.turn = ""

    def open_fleet(self, kind: str, workers: int) -> AbstractContextManager[Fleet]:
        if not factory.FLEETS[kind].is_configured():
            from rlflame.fleet.flame.cluster_config import make_unconfigured_error

            raise make_unconfigured_error("use local instead of flame to measure this machine.")
        self.show_status(f"{kind} with {workers}: starting")
        runtime = self.runtime.model_copy(update={"fleet": kind, "workers": workers})
        return factory.make_fleet(runtime, None, self._events)

    def take_turns(self, sides: Sequence[Any], repeat: int) -> Iterator[Any]:
        """Yield the sides in turn, so that changes in machine speed affect all equally."""
        for number in range(repeat):
            for side in sides:
                self.turn = f"{side.name}: {number + 1} of {repeat}"
                self.show_status(self.turn)
                self.take_retried()
                yield side

    def take_retried(self) -> int:
        """Return how many tasks have been sent to another worker since the last call."""
        return sum(self._events.take().values())

    def _show_event(self, event: FleetEvent) -> None:
        if event.kind == "note":
            self.show_note(event.text)
        elif event.kind == "phase":
            self.show_status(event.text)


@dataclass
class Benchmark:
    """Measures cases on several fleets, for each number of workers.

    If the benchmark fails, `sides` keeps the repetitions so far.
    """

    name: ClassVar[str]
    cases: Sequence[Case]
    fleets: Sequence[str]
    workers: Sequence[int]
    repeat: int
    sides: list[Side] = field(default_factory=list)

    @property
    def case(self) -> Case:
        """The first case; some benchmarks have only one."""
        return self.cases[0]

    def measure(self, session: BenchSession) -> Generator[None, None, None]:
        """Take all measurements; yield whenever there are new results to save.

        A fleet without workers is one process, so it is measured only once, together with the
        smallest number of workers.
        """
        clock = session.clock
        for count in self.workers:
            with ExitStack() as stack:
                fleets, starts_s = dict[str, Fleet](), dict[str, float]()
                for kind in self.fleets:
                    if factory.has_workers(kind) or count == min(self.workers):
                        start_s = clock()
                        fleets[kind] = stack.enter_context(session.open_fleet(kind, count))
                        self.warm_up(session, self.case, fleets[kind])
                        starts_s[kind] = clock() - start_s
                for case in self.cases:
                    if case is not self.case:
                        for fleet in fleets.values():
                            self.warm_up(session, case, fleet)
                    sides = [
                        _make_side(case, kind, count, fleets[kind], starts_s.pop(kind, None))
                        for kind in fleets
                    ]
                    self.sides += sides
                    for side in session.take_turns(sides, self.repeat):
                        facts = self.run_once(session, case, fleets[side.labels["fleet"]])
                        side.repetitions.append({**facts, "retried": session.take_retried()})
                    yield

    def warm_up(self, session: BenchSession, case: Case, fleet: Fleet) -> None:
        """Run untimed work until the fleet has reached its full speed."""
        raise NotImplementedError

    def run_once(self, session: BenchSession, case: Case, fleet: Fleet) -> dict[str, Any]:
        """Run one repetition and return its measured values."""
        raise NotImplementedError

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        """Make the result of the sides measured so far."""
        raise NotImplementedError


def _make_side(case: Case, kind: str, count: int, fleet: Fleet, start_s: float | None) -> Side:
    count = count if factory.has_workers(kind) else 1
    labels = {
        "case": case.name,
        "fleet": kind,
        "workers": count,
        # The tasks that the fleet can run at once, and the workers that have answered.
        "capacity": fleet.capacity,
        "answered": len(fleet.probe()),
        # The time from opening the fleet to the end of its first warm-up.
        "start_s": start_s,
    }
    return Side(f"{case.name}, {kind} with {count}", labels)


class BenchRunner:
    """Runs a benchmark, prints the result and, if `out` is given, writes it there."""

    def __init__(
        self,
        benchmark: Benchmark,
        runtime: RuntimeSettings,
        out: Path | None,
        *,
        as_json: bool = False,
        debug: bool = False,
    ) -> None:
        self._benchmark, self._as_json = benchmark, as_json
        self._runtime = runtime.model_copy(update={"debug": debug or runtime.debug})
        self._folder = None if out is None else ResultFolder(out, benchmark.name)
        self._monitor = LoadMonitor(benchmark.fleets)

    def run(self) -> None:
        with SignalStop() as stop, StatusLine() as line:
            session = BenchSession(self._runtime, line, stop)
            try:
                with closing(self._benchmark.measure(session)) as parts:
                    for _ in parts:
                        self._save_partial(session)
            except BaseException as error:
                session.show_status("")
                if isinstance(error, StopInterrupt) and stop.signal_number is not None:
                    message = f"Stopped during {session.turn or 'start-up'}."
                    hint = "run the same command again"
                    error = Interruption(message, hint, stop.signal_number)
                if self._report(complete=False):
                    mark_documented(error)
                raise error
            session.show_status("")
            self._report(complete=True)

    def _save_partial(self, session: BenchSession) -> None:
        """Write the result so far. If that fails, show a note: `_report` will try again."""
        result = self._make_result(complete=False)
        if self._folder is not None and result is not None:
            try:
                self._folder.write(result)
            except (OSError, RlflameError) as error:
                session.show_note(f"Partial results are not saved yet: {error}")

    def _make_result(self, complete: bool) -> BenchResult | None:
        """Return the result so far; None if nothing has been measured."""
        sides = [side for side in self._benchmark.sides if side.repetitions]
        if not sides:
            return None
        result, conditions = self._benchmark.make_result(sides), self._monitor.describe()
        return replace(result, conditions=conditions, complete=complete)

    def _report(self, complete: bool) -> bool:
        """Print the result, and write it even if printing fails.

        Return False if there is no result.
        """
        result = self._make_result(complete)
        if result is None:
            return False
        try:
            print_result_lines(result.to_json() if self._as_json else result.to_markdown().rstrip())
        finally:
            with mark_errors_documented():
                if self._folder is not None:
                    self._write(result, self._folder)
        return True

    def _write(self, result: BenchResult, folder: ResultFolder) -> None:
        """Write the files; write the image last, because drawing it may fail."""
        for file in folder.write(result):
            print_note(f"written: {file}")
        if result.table:
            try:
                print_note(f"written: {folder.draw()}")
            except PlotUnavailableError as error:
                print_note(f"no image: {error.message} {error.hint}")
