"""Runs a benchmark: results are kept as they come, and reported however the benchmark ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from rlflame.analysis.plots.matplotlib_backend import PlotUnavailableError
from rlflame.bench.case import Clock
from rlflame.bench.machine_load import LoadMonitor
from rlflame.bench.result import BenchResult, ResultFolder, find_free_name
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.display import StatusLine
from rlflame.console.output import print_note, print_result_lines
from rlflame.console.run_text import format_retry
from rlflame.errors import (
    Interruption,
    RlflameError,
    format_shell,
    mark_documented,
    mark_errors_documented,
)
from rlflame.fleet import factory
from rlflame.fleet.base import EventCounter, Fleet, FleetEvent
from rlflame.terminal_text import format_count
from rlflame.training.stop_signal import SignalStop
from rlflame.training.trainer import Progress, StopInterrupt, StopRequest

#: Seconds between two looks of a repetition at the status line.
_STATUS_INTERVAL_S = 0.5


SideT = TypeVar("SideT")


class OpenFleet(NamedTuple):
    kind: str
    workers: int
    fleet: Fleet
    #: From opening the fleet to the end of its first iteration.
    start_s: float


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
        if kind == "flame":
            from rlflame.fleet.flame import cluster_config

            if cluster_config.find_configuration() is None:
                hint = "local in place of flame measures this machine."
                raise cluster_config.make_unconfigured_error(hint)
        self.show_status(f"{kind} with {workers}: starting")
        runtime = self.runtime.model_copy(update={"fleet": kind, "workers": workers})
        return factory.make_fleet(runtime, None, self._events)

    @contextmanager
    def open_fleets(
        self, kinds: Sequence[str], workers: int, fewest: int, warm_up: Callable[[Fleet], None]
    ) -> Iterator[list[OpenFleet]]:
        """Fleets of several kinds, all open and warm at the same time."""
        with ExitStack() as stack:
            opened = []
            for kind in kinds:
                # This process is one worker, whatever number is asked for.
                if kind != "inline" or workers == fewest:
                    start_s = self.clock()
                    fleet = stack.enter_context(self.open_fleet(kind, workers))
                    warm_up(fleet)
                    count = 1 if kind == "inline" else workers
                    opened.append(OpenFleet(kind, count, fleet, self.clock() - start_s))
            yield opened

    def take_turns(self, sides: Mapping[str, SideT], repeat: int) -> Iterator[SideT]:
        """Every side in turn, so that a machine that drifts does so for all of them."""
        for number in range(repeat):
            for name, side in sides.items():
                self.turn = f"{name}: {number + 1} of {repeat}"
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


class Benchmark(Protocol[SideT]):
    """A measurement of several sides, which keep their repetitions however it ends."""

    @property
    def name(self) -> str: ...

    @property
    def fleets(self) -> Sequence[str]: ...

    @property
    def sides(self) -> Sequence[SideT]: ...

    def measure(self, session: BenchSession) -> Generator[None, None, None]:
        """Measure everything; yield whenever a part is complete.

        Raises StopInterrupt where the user asks to stop.
        """

    def make_result(self, sides: Sequence[SideT]) -> BenchResult:
        """The result of the sides that have been measured."""


class BenchRunner:
    """One run of a benchmark, for the terminal and, where `out` is a folder, for files."""

    def __init__(
        self,
        benchmark: Benchmark[Any],
        runtime: RuntimeSettings,
        out: Path | None,
        *,
        as_json: bool = False,
        debug: bool = False,
    ) -> None:
        self._benchmark, self._out, self._as_json = benchmark, out, as_json
        self._runtime = runtime.model_copy(update={"debug": debug or runtime.debug})
        self._folder = None if out is None else ResultFolder(out, benchmark.name)
        self._monitor = LoadMonitor(benchmark.fleets)

    def run(self) -> None:
        with SignalStop() as stop, StatusLine() as line:
            session = BenchSession(self._runtime, line, stop)
            try:
                complete = self._measure(session)
            except BaseException as error:
                session.show_status("")
                if self._report(complete=False):
                    mark_documented(error)
                raise
            session.show_status("")
            has_results = self._report(complete)
            if stop.signal_number is not None and not complete:
                raise self._make_interruption(has_results, stop.signal_number)

    def _measure(self, session: BenchSession) -> bool:
        """Whether the benchmark came to its end."""
        try:
            with closing(self._benchmark.measure(session)) as parts:
                for _ in parts:
                    self._save_partial(session)
        except StopInterrupt:
            session.show_note(f"{session.turn or 'The start'} was stopped before its end.")
            return False
        return True

    def _save_partial(self, session: BenchSession) -> None:
        """Write what there is so far. If that fails, the end of the benchmark tries again."""
        result = self._make_result(complete=False)
        if self._folder is None or result is None:
            return
        try:
            self._folder.write(result)
        except (OSError, RlflameError) as error:
            session.show_note(f"Nothing is kept yet: {error}")

    def _make_result(self, complete: bool) -> BenchResult | None:
        """The result so far; None where nothing has been measured."""
        sides = [side for side in self._benchmark.sides if side.repetitions]
        if not sides:
            return None
        result, conditions = self._benchmark.make_result(sides), self._monitor.finish()
        return replace(result, conditions=conditions, complete=complete)

    def _report(self, complete: bool) -> bool:
        """Print and write the result, each also where the other fails."""
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
        """Pictures come last, so that nothing is lost where they cannot be drawn."""
        for file in folder.write(result):
            print_note(f"written: {file}")
        if not result.table:
            return
        try:
            for file in folder.draw(result):
                print_note(f"written: {file}")
        except PlotUnavailableError as error:
            print_note(f"no picture: {error.message} {error.hint}")

    def _make_interruption(self, has_results: bool, signal_number: int) -> Interruption:
        hint = "the same command measures anew"
        message = "Stopped; nothing was measured to its end yet."
        if has_results:
            message = "Stopped; what was measured is above."
        if has_results and self._out is not None:
            # A name of dots would read as the end of the sentence.
            folder = self._out if self._out.name.strip(".") else self._out.resolve()
            message = f"Stopped; what was measured is above, and in {folder}."
            hint = f"{format_shell('-o', find_free_name(self._out))} measures anew"
        error = Interruption(message, hint, signal_number)
        if has_results:
            mark_documented(error)
        return error
