"""Runs a benchmark: results are kept as they come, and reported however the benchmark ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlflame.analysis.plots.matplotlib_backend import PlotUnavailableError
from rlflame.bench.case import Clock
from rlflame.bench.machine_load import LoadMonitor
from rlflame.bench.result import BenchResult, ResultFolder, Side
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.display import StatusLine
from rlflame.console.output import print_note, print_result_lines
from rlflame.console.run_text import format_retry
from rlflame.errors import Interruption, RlflameError, mark_documented, mark_errors_documented
from rlflame.fleet import factory
from rlflame.fleet.base import EventCounter, Fleet, FleetEvent
from rlflame.terminal_text import format_count
from rlflame.training.stop_signal import SignalStop
from rlflame.training.trainer import Progress, StopInterrupt, StopRequest

#: Seconds between two looks of a repetition at the status line.
_STATUS_INTERVAL_S = 0.5


class OpenFleet(NamedTuple):
    kind: str
    workers: int
    fleet: Fleet
    #: From opening the fleet to the end of its first iteration.
    start_s: float

    def make_side(self, case: str, **labels: Any) -> Side:
        names = {"case": case, "fleet": self.kind, "workers": self.workers}
        return Side(f"{case}, {self.kind} with {self.workers}", {**names, **labels})


class BenchSession:
    """What a benchmark works with: fleets of one runtime, a status line, and the stop request."""

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
        self.turn, self._shown_s = "", 0.0

    def open_fleet(self, kind: str, workers: int) -> AbstractContextManager[Fleet]:
        if not factory.FLEETS[kind].is_configured():
            from rlflame.fleet.flame.cluster_config import make_unconfigured_error

            raise make_unconfigured_error("local in place of flame measures this machine.")
        self.show_status(f"{kind} with {workers}: starting")
        runtime = self.runtime.model_copy(update={"fleet": kind, "workers": workers})
        return factory.make_fleet(runtime, None, self._events)

    @contextmanager
    def open_fleets(
        self, kinds: Sequence[str], workers: int, fewest: int, warm_up: Callable[[Fleet], object]
    ) -> Iterator[dict[str, OpenFleet]]:
        """Fleets by kind, all open and warm at the same time.

        A fleet without workers is one process, and open only beside the `fewest` workers.
        """
        with ExitStack() as stack:
            opened = {}
            for kind in kinds:
                count = workers if factory.has_workers(kind) else 1
                if count == workers or workers == fewest:
                    start_s = self.clock()
                    fleet = stack.enter_context(self.open_fleet(kind, workers))
                    warm_up(fleet)
                    opened[kind] = OpenFleet(kind, count, fleet, self.clock() - start_s)
            yield opened

    def take_turns(self, sides: Sequence[Any], repeat: int) -> Iterator[Any]:
        """Every side in turn, so that a machine that drifts does so for all of them."""
        for number in range(repeat):
            for side in sides:
                self.turn = f"{side.name}: {number + 1} of {repeat}"
                self.show_status(self.turn)
                self.take_retried()
                yield side

    def show_progress(self, progress: Progress) -> None:
        """Show how far a turn is, so seldom that it takes no time from what is measured."""
        if (now := self.clock()) - self._shown_s >= _STATUS_INTERVAL_S:
            self._shown_s = now
            self.show_status(f"{self.turn}, {format_count(progress.iteration, 'iteration')}")

    def take_retried(self) -> int:
        """How many tasks went to a second worker since the last call, on all fleets."""
        return sum(self._events.take().values())

    def _show_event(self, event: FleetEvent) -> None:
        if event.kind == "note":
            self.show_note(event.text)
        elif event.kind == "phase":
            self.show_status(event.text)
        elif event.kind == "retried" and event.text:
            retry = format_retry(event.slot, event.text)
            self.show_note(f"{retry} A measurement that it falls into takes longer, and is marked.")


class Benchmark(Protocol):
    """A measurement of several sides, which keep their repetitions however it ends.

    A side has a `name` and `repetitions`.
    """

    @property
    def name(self) -> str: ...

    @property
    def fleets(self) -> Sequence[str]: ...

    @property
    def sides(self) -> Sequence[Any]: ...

    def measure(self, session: BenchSession) -> Generator[None, None, None]:
        """Measure everything; yield whenever a part is complete.

        Raises StopInterrupt where the user asks to stop.
        """

    def make_result(self, sides: Sequence[Any]) -> BenchResult:
        """The result of the sides that have been measured."""


class BenchRunner:
    """One run of a benchmark, for the terminal and, where `out` is a folder, for files."""

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
                    message = f"Stopped before the end of {session.turn or 'the start'}."
                    hint = "the same command measures anew"
                    error = Interruption(message, hint, stop.signal_number)
                if self._report(complete=False):
                    mark_documented(error)
                raise error
            session.show_status("")
            self._report(complete=True)

    def _save_partial(self, session: BenchSession) -> None:
        """Write what there is so far. If that fails, the end of the benchmark tries again."""
        result = self._make_result(complete=False)
        if self._folder is not None and result is not None:
            try:
                self._folder.write(result)
            except (OSError, RlflameError) as error:
                session.show_note(f"Nothing is kept yet: {error}")

    def _make_result(self, complete: bool) -> BenchResult | None:
        """The result so far; None where nothing has been measured."""
        sides = [side for side in self._benchmark.sides if side.repetitions]
        if not sides:
            return None
        result, conditions = self._benchmark.make_result(sides), self._monitor.describe()
        return replace(result, conditions=conditions, complete=complete)

    def _report(self, complete: bool) -> bool:
        """Print and write the result, each also where the other fails; False without one."""
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
        """The picture comes last, so that nothing is lost where it cannot be drawn."""
        for file in folder.write(result):
            print_note(f"written: {file}")
        if result.table:
            try:
                print_note(f"written: {folder.draw()}")
            except PlotUnavailableError as error:
                print_note(f"no picture: {error.message} {error.hint}")
