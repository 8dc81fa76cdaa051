"""A run as lines that read well in a log. Must not know: what runs, where numbers come from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlflame.console.formatting import aligned, fitted
from rlflame.console.output import report, say_aside
from rlflame.console.progress import Board
from rlflame.console.recipe_summary import interval
from rlflame.console.run_text import again, banner, closing, ending, headline
from rlflame.text import format_duration

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.console.base import RunResult, RunStart
    from rlflame.fleet.base import FleetEvent
    from rlflame.training.evaluation import EvaluationRecord
    from rlflame.training.trainer import Progress

#: A line is due with every such part of the budget...
_PARTS = 20
#: ...or when nothing has been said for so long.
_SILENCE_S = 300.0
_REINFORCE_LINE_ITERATIONS = 10


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
        self._said_at, self._said_part, self._said_iteration = clock(), 0, 0

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        board = self.board
        board.learned(metrics, returns)
        assert board.facts is not None
        if board.facts.recipe.learning.algorithm == "reinforce":
            if board.iteration % _REINFORCE_LINE_ITERATIONS == 0 or board.share >= 1.0:
                self._say_progress(self._reinforce_line())
        elif (
            board.share >= 1.0
            or int(board.share * _PARTS) > self._said_part
            or self._clock() >= self._said_at + _SILENCE_S
        ):
            self._say_progress(self._line())

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        mark = ", the best so far" if best else ""
        self._out(fitted(f"Evaluation at step {steps:,}: {interval(record)}{mark}"))

    def saved(self, path: Path, progress: Progress) -> None: ...

    def fleet(self, event: FleetEvent) -> None:
        self.board.fleet(event)
        if event.kind == "retried" and event.text:
            self.note(again(event))
        elif event.kind in ("phase", "note") and event.text:
            self.note(event.text)

    def note(self, text: str) -> None:
        self._aside(text)

    @contextlib.contextmanager
    def begin(self, run: RunStart) -> Iterator[None]:
        self.board.begin(run)
        self._said_at, self._said_part = self._clock(), int(self.board.share * _PARTS)
        self._out(fitted(headline(run)))
        for line in aligned(banner(run, self.board)):
            self._out(line)
        yield

    def ended(self, result: RunResult) -> None:
        self._out(ending(result))
        for line in aligned(closing(result, self.board)):
            self._out(line)

    def _say_progress(self, line: str) -> None:
        if self.board.iteration != self._said_iteration:
            self._out(fitted(line))
        self._said_at, self._said_part = self._clock(), int(self.board.share * _PARTS)
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
        ending = f"  {format_duration(left)} left" if left is not None and board.share < 1.0 else ""
        return (
            f"{board.share:4.0%}  step {board.steps:>11,}  "
            f"return {_number(board.recent_return, '10,.2f')}  "
            f"{board.steps_per_s:>7,.0f} steps/s{ending}"
        )


def _number(value: float | None, form: str) -> str:
    width = form.split(",")[0].split(".")[0]
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"
