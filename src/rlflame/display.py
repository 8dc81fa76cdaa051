"""The one mouth: how anything is said, and which of the three ways a run is shown.

live.py shows a run on a terminal, plain.py in lines, events.py as JSON. A report goes to standard
output; notes, warnings and errors go to standard error. Loads nothing heavy. Must not know: how
anything is computed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from rlflame import __version__
from rlflame.board import Board
from rlflame.errors import RlflameError, typed
from rlflame.facts import count, duration, interval

#: What is said beside a word needs so much room, or it stands below it.
_LEAST_BESIDE = 28

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.evaluate import EvaluationRecord
    from rlflame.fleet import FleetEvent
    from rlflame.show import RunResult, RunStart, Show
    from rlflame.trainer import Progress

    class Display(Show, Protocol):
        """Shows a run, and how it ended."""

        def ended(self, result: RunResult) -> None: ...


def choose(mode: str) -> Display:
    """The display for a mode; `auto` is live on a terminal that can, and lines otherwise."""
    if mode == "json":
        from rlflame.events import JsonDisplay

        return JsonDisplay()
    if mode == "quiet":
        return QuietDisplay()
    if mode == "live" or (mode == "auto" and draws(sys.stdout)):
        from rlflame.live import LiveDisplay

        return LiveDisplay()
    from rlflame.plain import PlainDisplay

    return PlainDisplay()


def draws(stream: IO[str] | None) -> bool:
    """Whether it is a terminal that can move its cursor."""
    terminal = os.environ.get("TERM", "dumb")
    return stream is not None and stream.isatty() and terminal not in ("", "dumb")


def say(text: str) -> None:
    """Part of the result."""
    if sys.stdout is not None:
        print(text, flush=True)


def say_aside(text: str) -> None:
    """Not part of the result; whether anybody hears it does not matter."""
    _say_if_heard(sys.stderr, text)


def say_failure(error: RlflameError, *, debug: bool = False, as_json: bool = False) -> None:
    """What ended a command, and what to type next."""
    if debug:
        say_aside("".join(traceback.format_exception(error)).rstrip())
    if error.detail:
        say_aside(error.detail.rstrip())
    say_aside(f"rlflame: {error.message}")
    if error.hint:
        say_aside(f"  hint: {error.hint}")
    if as_json:
        say_as_json(error)


def say_as_json(error: RlflameError) -> None:
    """The last line of what a program reads."""
    said = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    _say_if_heard(sys.stdout, as_json_text({"event": "error", **said}))


def _say_if_heard(stream: IO[str] | None, text: str) -> None:
    """A run goes on when whoever listened has gone."""
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        mute(stream)


def mute(stream: IO[str]) -> None:
    """Let go of a stream that nobody reads, so that Python does not try again when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def let_go_of_results() -> None:
    """What standard output has no room for is not tried again when Python ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        mute(sys.stdout)


def takes(text: str) -> bool:
    """Whether standard output has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def report(text: str) -> None:
    """A line of a run's report."""
    _say_if_heard(sys.stdout, text)


def as_json_text(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: NaN and infinity become null."""
    return json.dumps(_finite(value), indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def headline(run: RunStart) -> str:
    """The first line: what runs, and where, if that was for rlflame to choose."""
    chosen = " on this machine: no Flame cluster is configured" if run.no_cluster else ""
    if run.candidates:
        chosen = " on this machine and on Flame in turn, and then on the faster of them"
    return f"rlflame {__version__}{chosen}"


def banner(run: RunStart, board: Board) -> list[tuple[str, str]]:
    """What is about to run, as pairs of a word and what there is to say about it."""
    facts = board.facts
    assert facts is not None
    sides = run.candidates or ((run.fleet, run.workers),)
    workers = " and ".join(
        count(number, "Flame executor" if name == "flame" else "local worker")
        for name, number in sides
    )
    if run.fleet == "inline":
        workers = "in this process"
    elif max(number for _, number in sides) < facts.most_workers:
        workers += f"; at most {facts.most_workers} can help (learning.rollout.num_slots)"
    else:
        workers += ", the most that can help (learning.rollout.num_slots)"
    lines = [*facts.lines(), ("rollouts", workers), ("folder", str(run.folder))]
    if run.resumed:
        where = f"at step {board.steps:,}, after {count(board.iteration, 'iteration')}"
        lines.append(("resumed", where))
    return lines


def closing(result: RunResult, board: Board) -> list[tuple[str, str]]:
    """How it ended, the same way."""
    lines = []
    if result.began:
        seconds, mean = max(board.elapsed_s, 1e-9), board.final_return
        speed = (
            f"{count(board.own_steps, 'step')} ({board.own_steps / seconds:,.0f}/s), "
            f"{count(board.own_episodes, 'episode')} ({board.own_episodes / seconds:,.1f}/s)"
        )
        lines.append(("time", f"{duration(seconds)}, {speed}"))
        if mean is not None:
            lines.append(("reward", f"{mean:,.2f} (final mean, exploring)"))
    if result.complete and result.evaluation is not None:
        lines.append(("evaluation", interval(result.evaluation)))
    if result.best is not None and result.best != result.evaluation:
        lines.append(("best", interval(result.best)))
    lines.append(("files", str(result.folder)))
    if not result.began:
        lines.append(("to go on", result.onward))
    if result.complete and result.best is not None:
        lines.append(("next", typed("eval", result.folder / "best.safetensors")))
    return lines


def ending(result: RunResult) -> str:
    if not result.began:
        return f"This run was finished already, at step {result.progress.steps:,}"
    return "Finished" if result.complete else "Stopped"


def again(event: FleetEvent) -> str:
    return f"Slot {event.slot} is collected again; its worker: {event.text}."


def aligned(lines: Sequence[tuple[str, str]], columns: int | None = None) -> list[str]:
    """Words, and beside them what there is to say; below them where that has no room."""
    columns = columns or terminal_columns()
    width = max(len(word) for word, _ in lines)
    beside = columns is None or columns - width - 4 >= _LEAST_BESIDE
    indent = " " * (width + 4 if beside else 4)
    found = []
    for word, text in lines:
        # A command stays in one line, so that it can be copied.
        said = indent + text if text.startswith("rlflame ") else fitted(text, columns, indent)
        found += [f"  {word:{width}}  {said.lstrip()}"] if beside else [f"  {word}", said]
    return found


def fitted(text: str, columns: int | None = None, indent: str = "") -> str:
    """In lines no longer than a terminal is wide, all but the first further in."""
    columns = columns or terminal_columns()
    if columns is None or len(indent + text) <= columns:
        return indent + text
    further = indent or "  "
    return textwrap.fill(
        " ".join(text.split()),
        max(columns, len(further) + 1),
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def terminal_columns() -> int | None:
    """How wide the terminal is that standard output goes to; None where it goes elsewhere."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need to be, and each row a line, whatever folders are called."""
    rows = [tuple(cell.replace("\n", " ") for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


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
        report(str(result.folder))


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
        self._draw(f"{fanout.finished} of {count(fanout.submitted, 'group')} of episodes played")

    def drawing(self, made: int, of: int) -> None:
        self._draw(f"{made} of {count(of, 'episode')} drawn" if of > 1 else "drawing")

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
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(f"\r\x1b[K{text}")
                self._stream.flush()
