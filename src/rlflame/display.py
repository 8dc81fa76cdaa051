"""The one mouth: every sentence that a command says, as lines or as JSON (live.py adds the view).

A run's report goes to standard output; notes, warnings and errors go to standard error. Loads
nothing heavy. Must not know: how anything is computed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from rlflame import __version__
from rlflame.board import Board
from rlflame.facts import count, duration, interval

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.api import RunResult, RunStart, Show
    from rlflame.errors import RlflameError
    from rlflame.evaluate import EvaluationRecord
    from rlflame.fleet import FleetEvent
    from rlflame.trainer import Progress

    class Display(Show, Protocol):
        """Shows a run, and how it ended."""

        def ended(self, result: RunResult) -> None: ...


#: A line is due when this share of the budget has been spent since the last one...
_LINE_SHARE = 0.05
#: ...or when nothing has been said for so long.
_SILENCE_S = 300.0
_REINFORCE_LINE_ITERATIONS = 10


def choose(mode: str) -> Display:
    """The display for a mode; `auto` is live on a terminal that can, and lines otherwise."""
    if mode == "json":
        return JsonDisplay()
    if mode == "quiet":
        return QuietDisplay()
    if mode == "live" or (mode == "auto" and _can_draw()):
        from rlflame.live import LiveDisplay

        return LiveDisplay()
    return PlainDisplay()


def _can_draw() -> bool:
    terminal = os.environ.get("TERM", "dumb")
    return sys.stdout is not None and sys.stdout.isatty() and terminal not in ("", "dumb")


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
        said = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        _say_if_heard(sys.stdout, as_json_text({"event": "error", **said}))


def _say_if_heard(stream: IO[str] | None, text: str) -> None:
    """A run goes on when whoever listened has gone."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=stream, flush=True)


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


def banner(run: RunStart, board: Board) -> list[tuple[str, str]]:
    """What is about to run, as pairs of a word and what there is to say about it."""
    facts = board.facts
    assert facts is not None
    workers = count(run.workers, f"{run.fleet} worker")
    if run.fleet == "inline":
        workers = "in this process"
    elif run.workers < facts.most_workers:
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
    seconds = max(board.elapsed_s, 1e-9)
    mean = board.final_return
    lines = [
        (
            "time",
            f"{duration(seconds)}, {count(board.own_steps, 'step')} "
            f"({board.own_steps / seconds:,.0f}/s), {count(board.own_episodes, 'episode')} "
            f"({board.own_episodes / seconds:,.1f}/s)",
        )
    ]
    if mean is not None:
        lines.append(("reward", f"{mean:,.2f} (final mean, with exploration)"))
    if result.complete and result.evaluation is not None:
        lines.append(("evaluation", f"{interval(result.evaluation)}, without exploration"))
    if result.best is not None and result.best != result.evaluation:
        lines.append(("best", interval(result.best)))
    lines.append(("files", str(result.folder)))
    if result.complete and result.best is not None:
        lines.append(("next", f"rlflame eval {result.folder / 'best.safetensors'}"))
    return lines


def aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(word) for word, _ in lines)
    return [f"  {word:{width}}  {text}" for word, text in lines]


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need to be."""
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


class JsonDisplay:
    """One JSON object a line. Events and names are stable; a reader skips what it does not know.

    start       what runs: environment, sizes, algorithm, budget, slots, workers, folder
    iteration   the metrics of metrics.jsonl, after each iteration
    evaluation  steps, whether it is the best so far, the record as `eval --json` prints it
    checkpoint  path and steps, after each save
    retried     slot, purpose and reason, when a lost worker's task is given to another
    note        a sentence
    end         complete or not, time, speed, digests, the final and the best evaluation
    error       message, hint, exit code
    """

    def __init__(
        self,
        out: Callable[[str], None] = report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._board = Board(clock)

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        self._board.learned(metrics, returns)
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
        board = self._board
        board.begin(run)
        assert board.facts is not None
        self._event(
            "start",
            version=__version__,
            folder=str(run.folder),
            resumed=run.resumed,
            steps=board.steps,
            fleet=run.fleet,
            workers=run.workers,
            **board.facts.as_dict(),
        )
        yield

    def ended(self, result: RunResult) -> None:
        board = self._board
        seconds = max(board.elapsed_s, 1e-9)
        self._event(
            "end",
            folder=str(result.folder),
            complete=result.complete,
            steps=result.progress.steps,
            iterations=result.progress.iteration,
            episodes=result.progress.episodes,
            seconds=round(seconds, 3),
            steps_per_s=round(board.own_steps / seconds, 1),
            episodes_per_s=round(board.own_episodes / seconds, 2),
            final_mean_reward=board.final_return,
            state_digest=result.state_digest,
            digest=result.digest,
            evaluation=result.evaluation and result.evaluation.as_dict(),
            best=result.best and result.best.as_dict(),
        )

    def _event(self, name: str, **values: Any) -> None:
        self._out(as_json_text({"event": name, **values}))


class PlainDisplay:
    """Lines that read well in a log: a banner, one now and then, and an end block."""

    def __init__(
        self,
        out: Callable[[str], None] = report,
        aside: Callable[[str], None] = say_aside,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._aside = aside
        self._clock = clock
        self.board = Board(clock)
        self._said_at, self._said_share, self._said_iteration = clock(), 0.0, 0

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        board = self.board
        board.learned(metrics, returns)
        assert board.facts is not None
        if board.facts.recipe.learning.algorithm == "reinforce":
            if board.iteration % _REINFORCE_LINE_ITERATIONS == 0 or board.share >= 1.0:
                self._say_progress(self._reinforce_line())
        elif (
            board.share >= 1.0
            or board.share >= self._said_share + _LINE_SHARE
            or self._clock() >= self._said_at + _SILENCE_S
        ):
            self._say_progress(self._line())

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        mark = ", the best so far" if best else ""
        self._out(f"Evaluation at step {steps:,}: {interval(record)}{mark}")

    def saved(self, path: Path, progress: Progress) -> None: ...

    def fleet(self, event: FleetEvent) -> None:
        self.board.fleet(event)
        if event.kind == "retried":
            self.note(f"Slot {event.slot} is collected again: its worker {event.text}.")

    def note(self, text: str) -> None:
        self._aside(text)

    @contextlib.contextmanager
    def begin(self, run: RunStart) -> Iterator[None]:
        self.board.begin(run)
        self._said_at, self._said_share = self._clock(), self.board.share
        self._out(f"rlflame {__version__}")
        for line in aligned(banner(run, self.board)):
            self._out(line)
        yield

    def ended(self, result: RunResult) -> None:
        self._out("Finished" if result.complete else "Stopped")
        for line in aligned(closing(result, self.board)):
            self._out(line)

    def _say_progress(self, line: str) -> None:
        if self.board.iteration != self._said_iteration:
            self._out(line)
        self._said_at, self._said_share = self._clock(), self.board.share
        self._said_iteration = self.board.iteration

    def _reinforce_line(self) -> str:
        board = self.board
        assert board.facts is not None
        total = board.facts.iterations
        place = f"{board.iteration}/{total}" if total else str(board.iteration)
        mean, loss = board.metrics.get("episode_return_mean"), board.metrics.get("loss")
        return (
            f"Iteration {place:>7}  mean reward {_number(mean, '10,.2f')}  "
            f"loss {_number(loss, '10.4f')}  {board.steps_per_s:,.0f} steps/s"
        )

    def _line(self) -> str:
        board = self.board
        left = board.remaining_s
        ending = f"  {duration(left)} left" if left is not None and board.share < 1.0 else ""
        return (
            f"{board.share:4.0%}  step {board.steps:>11,}  "
            f"return {_number(board.recent_return, '10,.2f')}  "
            f"{board.steps_per_s:>7,.0f} steps/s{ending}"
        )


def _number(value: float | None, form: str) -> str:
    width = form.split(",")[0].split(".")[0]
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"
