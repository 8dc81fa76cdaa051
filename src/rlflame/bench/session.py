"""What a measurement runs in: fleets of one runtime, its progress, and the user's signals.

Must not know: what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rlflame.bench.output import find_free_name
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.quiet import StatusLine
from rlflame.console.run_text import format_retry
from rlflame.errors import Interruption, format_shell, mark_documented
from rlflame.fleet import factory
from rlflame.fleet.base import EventCounter, Fleet, FleetEvent
from rlflame.training.stop_signal import SignalStop


@contextmanager
def open_session(runtime: RuntimeSettings, debug: bool) -> Iterator[BenchSession]:
    """Signals are wishes inside, and the line of progress is gone behind it."""
    with SignalStop() as stop, StatusLine() as tally:
        yield BenchSession(
            runtime.model_copy(update={"debug": debug or runtime.debug}), tally, stop
        )


def run_measurement(
    runtime: RuntimeSettings,
    debug: bool,
    measure: Callable[[BenchSession], bool],
    report: Callable[[bool], bool],
    out: Path | None,
) -> None:
    """What was measured is told however it ends; `show_status` hears whether that is all of it.

    `measure` returns whether it came to its end, and `show_status` whether there was anything;
    `out` is the folder where the user wants it, if anywhere.
    """
    complete = has_results = False
    with open_session(runtime, debug) as session:
        try:
            complete = measure(session)
        except BaseException as error:
            session.show_status("")
            if report(complete):
                mark_documented(error)
            raise
        session.show_status("")
        has_results = report(complete)
        if not complete:
            session.check_interrupted(has_results, out)


def _resolve_dots(folder: Path) -> Path:
    """Not by dots, at which a sentence ends."""
    return folder if folder.name.strip(".") else folder.resolve()


class BenchSession:
    """`stop` holds the user's wish to end; progress goes to standard error."""

    def __init__(self, runtime: RuntimeSettings, tally: StatusLine, stop: SignalStop) -> None:
        self._runtime = runtime
        self.show_status, self.note = tally.show_status, tally.show_note
        self.stop = stop
        self._events = EventCounter(self._show_event)

    def open(self, kind: str, workers: int) -> AbstractContextManager[Fleet]:
        if kind == "flame":
            from rlflame.fleet.flame import endpoint

            if endpoint.find_configuration() is None:
                raise endpoint.make_unconfigured_error(
                    "local in place of flame measures this machine."
                )
        runtime = self._runtime.model_copy(update={"fleet": kind, "workers": workers})
        return factory.make_fleet(runtime, None, self._events)

    def take_retried(self) -> int:
        """Tasks that went to a second worker since the last time, of all fleets."""
        return sum(self._events.take().values())

    def check_interrupted(self, has_results: bool, out: Path | None) -> None:
        """How it ended, if a signal did it."""
        if self.stop.signal_number is None:
            return
        if not has_results:
            saved_text = "nothing was measured to its end yet"
        else:
            saved_text = "what was measured is above" + (
                f", and in {_resolve_dots(out)}" if out else ""
            )
        hint = "the same command measures anew"
        if has_results and out:
            hint = f"{format_shell('-o', find_free_name(out))} measures anew"
        error = Interruption(f"Stopped; {saved_text}.", hint, self.stop.signal_number)
        if has_results:
            mark_documented(error)
        raise error

    def _show_event(self, event: FleetEvent) -> None:
        if event.kind == "note":
            self.note(event.text)
        elif event.kind == "phase":
            self.show_status(event.text)
        elif event.kind == "retried" and event.text:
            retry = format_retry(event.slot, event.text)
            self.note(f"{retry} A measurement that it falls into takes longer, and is marked.")
