"""What a measurement runs in: fleets of one runtime, its progress, and the user's signals.

Must not know: what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rlflame.bench.output import another
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.quiet import Tally
from rlflame.console.run_text import again
from rlflame.errors import Interrupted, document, shell
from rlflame.fleet import factory
from rlflame.fleet.base import EventCount, Fleet, FleetEvent
from rlflame.training.stop_signal import SignalStop


@contextmanager
def session(runtime: RuntimeSettings, debug: bool) -> Iterator[Session]:
    """Signals are wishes inside, and the line of progress is gone behind it."""
    with SignalStop() as stop, Tally() as tally:
        yield Session(runtime.model_copy(update={"debug": debug or runtime.debug}), tally, stop)


def measured(
    runtime: RuntimeSettings,
    debug: bool,
    measure: Callable[[Session], bool],
    tell: Callable[[bool], bool],
    out: Path | None,
) -> None:
    """What was measured is told however it ends; `tell` hears whether that is all of it.

    `measure` returns whether it came to its end, and `tell` whether there was anything; `out` is
    the folder where the user wants it, if anywhere.
    """
    complete = found = False
    with session(runtime, debug) as here:
        try:
            complete = measure(here)
        except BaseException as error:
            here.tell("")
            if tell(complete):
                document(error)
            raise
        here.tell("")
        found = tell(complete)
        if not complete:
            here.check(found, out)


def _plainly(folder: Path) -> Path:
    """Not by dots, at which a sentence ends."""
    return folder if folder.name.strip(".") else folder.resolve()


class Session:
    """`stop` holds the user's wish to end; progress goes to standard error."""

    def __init__(self, runtime: RuntimeSettings, tally: Tally, stop: SignalStop) -> None:
        self._runtime = runtime
        self.tell, self.note = tally.status, tally.note
        self.stop = stop
        self._events = EventCount(self._watch)

    def open(self, kind: str, workers: int) -> AbstractContextManager[Fleet]:
        if kind == "flame":
            from rlflame.fleet.flame import endpoint

            if endpoint.configured() is None:
                raise endpoint.unconfigured("local in place of flame measures this machine.")
        wanted = self._runtime.model_copy(update={"fleet": kind, "workers": workers})
        return factory.fleet(wanted, None, self._events)

    def retried(self) -> int:
        """Tasks that went to a second worker since the last time, of all fleets."""
        return sum(self._events.take().values())

    def check(self, measured: bool, out: Path | None) -> None:
        """How it ended, if a signal did it."""
        if self.stop.signal_number is None:
            return
        if not measured:
            kept = "nothing was measured to its end yet"
        else:
            kept = "what was measured is above" + (f", and in {_plainly(out)}" if out else "")
        anew = "the same command measures anew"
        if measured and out:
            anew = f"{shell('-o', another(out))} measures anew"
        error = Interrupted(f"Stopped; {kept}.", anew, self.stop.signal_number)
        if measured:
            document(error)
        raise error

    def _watch(self, event: FleetEvent) -> None:
        if event.kind == "note":
            self.note(event.text)
        elif event.kind == "phase":
            self.tell(event.text)
        elif event.kind == "retried" and event.text:
            self.note(
                f"{again(event)} A measurement that it falls into takes longer, and is marked."
            )
