"""What a measurement runs in: fleets of one runtime, its progress, and the user's signals.

Must not know: what is measured.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from rlflame import fleets
from rlflame.display import Tally
from rlflame.errors import Interrupted
from rlflame.fleet import Fleet, FleetEvent
from rlflame.runtime import RuntimeSettings
from rlflame.stop import SignalStop


class Session:
    """`stop` holds the user's wish to end; progress goes to standard error."""

    def __init__(self, runtime: RuntimeSettings, debug: bool) -> None:
        self._runtime = runtime.model_copy(update={"debug": debug or runtime.debug})
        self._tally = Tally()
        self.tell, self.note = self._tally.status, self._tally.note
        self.stop = SignalStop()

    def open(self, kind: str, workers: int) -> AbstractContextManager[Fleet]:
        wanted = self._runtime.model_copy(update={"fleet": kind, "workers": workers})
        return fleets.fleet(wanted, None, self._watch)

    def check(self, measured: bool) -> None:
        """How it ended, if a signal did it."""
        if self.stop.signal_number is not None:
            kept = "what was measured is kept" if measured else "nothing was measured yet"
            raise Interrupted(
                f"Stopped; {kept}.", "the same command measures anew", self.stop.signal_number
            )

    def _watch(self, event: FleetEvent) -> None:
        if event.kind == "note":
            self.note(event.text)
        elif event.kind == "phase":
            self.tell(event.text)

    def __enter__(self) -> Session:
        self.stop.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tally.__exit__()
        self.stop.__exit__(kind, error, trace)
