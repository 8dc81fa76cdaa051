"""A run shown by its folder alone, and the one line of commands that train nothing.

Must not know: what runs, where numbers come from.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from rlflame.console.output import draws, overwrite_line, report, say_aside
from rlflame.console.progress import Board
from rlflame.text import escape_line, format_count

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.console.base import RunResult, RunStart
    from rlflame.fleet.base import FleetEvent
    from rlflame.training.evaluation import EvaluationRecord
    from rlflame.training.trainer import Progress


class QuietDisplay:
    """The run folder at the end, for scripts."""

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None: ...

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None: ...

    def saved(self, path: Path, progress: Progress) -> None: ...

    def fleet(self, event: FleetEvent) -> None: ...

    def note(self, text: str) -> None: ...

    @contextlib.contextmanager
    def begin(self, run: RunStart) -> Iterator[None]:
        del run
        yield

    def ended(self, result: RunResult) -> None:
        report(escape_line(str(result.folder)))


class Tally(QuietDisplay):
    """How many groups of an evaluation have been played, on one line that goes away again.

    Only where standard error is a terminal: it is no part of the result.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        stream = stream or sys.stderr
        self._stream = stream if draws(stream) else None
        self._board = Board()

    def fleet(self, event: FleetEvent) -> None:
        self._board.fleet(event)
        if event.kind == "note":
            self.note(event.text)
        if self._board.phase:
            self._draw(self._board.phase)
            return
        fanout = self._board.fanout
        self._draw(
            f"{fanout.finished} of {format_count(fanout.submitted, 'group')} of episodes played"
        )

    def drawing(self, made: int, of: int) -> None:
        self._draw(f"{made} of {format_count(of, 'episode')} drawn" if of > 1 else "drawing")

    def status(self, text: str) -> None:
        """What is going on now, for commands that play no episodes."""
        self._draw(text)

    def note(self, text: str) -> None:
        self._draw("")
        say_aside(text)

    def __enter__(self) -> Tally:
        return self

    def __exit__(self, *_: object) -> None:
        self._draw("")

    def _draw(self, text: str) -> None:
        if self._stream is not None:
            overwrite_line(self._stream, text)
