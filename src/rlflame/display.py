"""The one mouth: every sentence that a command says, as a live view, lines, or JSON.

A run's report goes to standard output; notes, warnings and errors go to standard error. Loads
nothing heavy. Must not know: how anything is computed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from rlflame import __version__
from rlflame.board import Board
from rlflame.errors import RlflameError

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.api import RunResult, RunStart, Show
    from rlflame.evaluate import EvaluationRecord
    from rlflame.fleet import FleetEvent
    from rlflame.trainer import Progress

    class Display(Show, Protocol):
        def ended(self, result: RunResult) -> None: ...


def choose(mode: str) -> Display:
    """The display for a mode; `auto` is live on a terminal that can, and lines otherwise."""
    if mode == "json":
        return JsonDisplay(say)
    if mode == "quiet":
        return QuietDisplay()
    live = mode == "live" or (
        mode == "auto"
        and sys.stdout is not None
        and sys.stdout.isatty()
        and os.environ.get("TERM", "") not in ("", "dumb")
    )
    if live:
        from rlflame.live import LiveDisplay

        return LiveDisplay()
    return PlainDisplay(say)


def say(text: str) -> None:
    """A line of a report; nobody to hear it is no reason to stop."""
    _write(sys.stdout, text)


def say_aside(text: str) -> None:
    """A line that is not part of the result."""
    _write(sys.stderr, text)


def _write(stream: IO[str] | None, text: str) -> None:
    if stream is None:
        return
    with contextlib.suppress(BrokenPipeError, ValueError):
        stream.write(text + "\n")
        stream.flush()


def say_failure(error: RlflameError, *, debug: bool, as_json: bool) -> None:
    """What ended a command, and what to type next."""
    if debug:
        _write(sys.stderr, "".join(traceback.format_exception(error)).rstrip())
    if error.detail:
        say_aside(error.detail.rstrip())
    say_aside(f"rlflame: {error.message}")
    if error.hint:
        say_aside(f"  next: {error.hint}")
    if as_json:
        say(
            json.dumps(
                {
                    "event": "error",
                    "message": error.message,
                    "hint": error.hint,
                    "exit_code": error.exit_code,
                }
            )
        )


class QuietDisplay:
    """The run folder at the end, for scripts; and what went wrong."""

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
        say(str(result.folder))


class JsonDisplay:
    """One JSON object a line on standard output; the names are stable."""

    def __init__(self, out: Callable[[str], None]) -> None:
        self._out = out

    def _event(self, name: str, **values: Any) -> None:
        self._out(json.dumps({"event": name, **values}))

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        del returns
        self._event("iteration", **metrics)

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        self._event("evaluation", steps=steps, best=best, **record.as_dict())

    def saved(self, path: Path, progress: Progress) -> None:
        self._event("checkpoint", path=str(path), steps=progress.steps)

    def fleet(self, event: FleetEvent) -> None:
        if event.kind == "retried":
            self._event("retried", slot=event.slot, purpose=event.purpose, reason=event.text)

    def note(self, text: str) -> None:
        self._event("note", text=text)

    @contextlib.contextmanager
    def begin(self, run: RunStart) -> Iterator[None]:
        self._event("start", folder=str(run.folder))
        yield

    def ended(self, result: RunResult) -> None:
        self._event(
            "end",
            folder=str(result.folder),
            complete=result.complete,
            steps=result.progress.steps,
            state_digest=result.state_digest,
            digest=result.digest,
            evaluation=result.evaluation and result.evaluation.as_dict(),
        )


class PlainDisplay:
    """Lines that read well in a log: a banner, one now and then, and an end block."""

    def __init__(
        self, out: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self.board = Board(clock)
        self._said_share = 0.0

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        self.board.iteration(metrics, returns)
        board = self.board
        share = board.share
        if share >= self._said_share + 0.05 or share >= 1.0:
            self._said_share = share
            mean = board.recent_return
            self._out(
                f"{share:4.0%}  {metrics['steps']:,} steps"
                f"  return {'-' if mean is None else f'{mean:.1f}'}"
                f"  {board.steps_per_s:,.0f} steps/s"
            )

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        self._out(
            f"      evaluation at {steps:,}: {record.mean:.1f} "
            f"[{record.low:.1f}, {record.high:.1f}]{' best so far' if best else ''}"
        )

    def saved(self, path: Path, progress: Progress) -> None: ...

    def fleet(self, event: FleetEvent) -> None:
        if event.kind == "retried":
            self.note(f"slot {event.slot} is tried again: its worker was {event.text}")

    def note(self, text: str) -> None:
        say_aside(text)

    @contextlib.contextmanager
    def begin(self, run: RunStart) -> Iterator[None]:
        self.board.begin(run)
        self._out(f"rlflame {__version__}: {run.checkpoint.env.id}, {run.folder}")
        yield

    def ended(self, result: RunResult) -> None:
        if result.evaluation is not None:
            record = result.evaluation
            self._out(
                f"Final evaluation {record.mean:.1f}, 95% interval "
                f"[{record.low:.1f}, {record.high:.1f}] over {record.episodes} episodes"
            )
        self._out(f"Files in {result.folder}")
        if result.complete:
            self._out(f"Next: rlflame eval {result.folder}/best.safetensors")
