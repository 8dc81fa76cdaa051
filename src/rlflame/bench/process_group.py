"""Processes that step for so long whenever they are told to, all of them at once.

Each is told its order, says whether it is `ready`, and answers every `step` with the `steps` it
took and their `seconds`. Must not know: what is stepped, and how.
"""

from __future__ import annotations

import select
import signal
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from rlflame.errors import RlflameError
from rlflame.fleet.base import Closing
from rlflame.rollout import wire
from rlflame.rollout.process.parent_channel import Line, Message
from rlflame.rollout.process.worker_main import Kind
from rlflame.rollout.process.worker_process import (
    Garbled,
    WorkerProcess,
    how_it_ended,
    what_became_of_it,
)
from rlflame.training.trainer import Stop

#: With these, as a rule, somebody else ends a process, or the system does where memory runs out.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)

#: For a process whose pipe is closed to be seen to have ended by itself.
_GRACE_S = 1.0


class Children(Closing):
    """Alive until closed, each with an order of its own; StopNow where somebody asks to stop."""

    def __init__(
        self, module: str, orders: Sequence[Message], refusal: str, hint: str, stop: Stop
    ) -> None:
        self._refusal, self._hint, self._stop = refusal, hint, stop
        self._children: list[WorkerProcess] = []
        try:
            for order in orders:
                self._children.append(WorkerProcess(module=module))
                _tell(self._children[-1], "order", **order)
            # All of them are heard: each has an answer of its own.
            words = {answer["what"] for answer in self._heard()}
        except BaseException:
            self.close()
            raise
        self.possible = words == {"ready"}

    def step(self, seconds: float) -> list[dict[str, Any]]:
        """What each has done meanwhile."""
        for child in self._children:
            _tell(child, "step", seconds=seconds)
        return self._heard()

    def _heard(self) -> list[Message]:
        """A message of each, in their order."""
        found: dict[int, Message] = {}
        waiting = {child.answers: number for number, child in enumerate(self._children)}
        while waiting:
            with self._stop.interruptible():
                full = [child.requests for child in self._children if child.backlog]
                ready, _, _ = select.select([*waiting], full, [])
            for child in self._children:
                child.flush()
            for answers in ready:
                child = self._children[waiting[answers]]
                try:
                    frames = child.receive()
                except (EOFError, Garbled) as error:
                    raise self._lost(child, error) from error
                if frames:
                    found[waiting.pop(answers)] = wire.decode(frames[0][1])
        for child in self._children:
            child.trim_output()
        return [found[number] for number in range(len(self._children))]

    def _lost(self, child: WorkerProcess, error: Exception) -> RlflameError:
        code = child.retire(_GRACE_S)
        said = f"{self._refusal} Process {child.pid}: {str(error) or how_it_ended(code)}."
        if not str(error) and -code in _FROM_OUTSIDE:
            said = f"Process {child.pid}, which is measured, {what_became_of_it(code)}."
        return RlflameError(said, self._hint, child.printed().strip())

    def close(self) -> None:
        while self._children:
            self._children.pop().retire()


def together(heard: Sequence[dict[str, Any]]) -> float:
    """Steps a second of all of them."""
    return sum(float(one["steps"] / one["seconds"]) for one in heard)


def _tell(child: WorkerProcess, what: str, **values: Any) -> None:
    child.send(Kind.TASK, wire.encode({"what": what, **values}))


class Ordered:
    """The same, as one of these processes sees it."""

    def __init__(self) -> None:
        self._line = Line.opened()
        order = self._line.hear()
        assert order is not None
        self.order = order
        self._asked: SimpleQueue[Message] = SimpleQueue()
        self._line.attend(self._asked.put)

    def answer(self, step: Callable[[float], dict[str, Any]] | None) -> None:
        """For as long as the other side is there; without a way to step, it is told so."""
        self._line.tell("absent" if step is None else "ready")
        while step is not None:
            self._line.tell("stepped", **step(self._asked.get()["seconds"]))
