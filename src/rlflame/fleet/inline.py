"""A fleet that runs tasks in this process, when their fragments are requested."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlflame.errors import FleetError, RlflameError
from rlflame.rollout import blas
from rlflame.rollout.machine import read_versions
from rlflame.rollout.task import Fragment, PolicyArrays, RolloutFailure, RolloutTask, TaskPosition
from rlflame.rollout.task_batching import merge_tasks, split_fragment
from rlflame.rollout.worker import RolloutWorker

from .base import (
    ContextManagerMixin,
    EventKind,
    FleetEvent,
    Observer,
    Traffic,
    check_fragment,
    ignore_event,
    make_environment_failure,
    make_policy_id,
)

_TAIL_CHARS = 4000
#: The name of the only worker, as in a local fleet.
_WORKER = "worker-1"


class InlineFleet(ContextManagerMixin):
    """Runs tasks in this process.

    All other fleets must return the same fragments.
    """

    name = "inline"
    capacity = 1
    ready = True

    def __init__(self, observer: Observer = ignore_event) -> None:
        self._observer = observer
        self._worker = RolloutWorker()
        self._policies: dict[str, PolicyArrays] = {}
        self._puts: Counter[str] = Counter()
        self._closed = False

    @property
    def current_position(self) -> TaskPosition | None:
        """The current slot, row, seed and step, or None if no task is running."""
        return self._worker.position

    def put(self, policy: PolicyArrays) -> str:
        name = make_policy_id(policy)
        if name not in self._policies:
            # Copy the arrays, because the caller may change them later.
            self._policies[name] = {key: np.array(array) for key, array in policy.items()}
        self._puts[name] += 1
        return name

    def release(self, policy_id: str) -> None:
        self._puts[policy_id] -= 1
        if self._puts[policy_id] <= 0:
            del self._puts[policy_id]
            self._policies.pop(policy_id, None)

    def submit(self, tasks: Sequence[RolloutTask]) -> _InlineSubmission:
        # Look up the weights now, so that a later `release` does not affect the submission.
        weights = {task.policy_id: self._policies[task.policy_id] for task in tasks}
        submission = _InlineSubmission(self, merge_tasks(tasks, self.capacity), weights)
        for task in submission.tasks:
            self.notify("submitted", task)
        return submission

    def notify(self, kind: EventKind, task: RolloutTask) -> None:
        for slot in task.slots:
            self._observer(FleetEvent(kind, task.purpose, slot))

    def notify_end(self, task: RolloutTask, fragments: Sequence[Fragment]) -> None:
        if task.purpose == "train":
            for fragment in fragments:
                self._observer(FleetEvent.of_episodes(_WORKER, fragment))
        self.notify("done", task)

    def run(self, task: RolloutTask, weights: PolicyArrays) -> Iterator[Fragment]:
        if self._closed:
            raise FleetError("The fleet was closed.")
        output = io.StringIO()
        with (
            contextlib.redirect_stdout(_ThreadOutput(sys.stdout, output)),
            contextlib.redirect_stderr(_ThreadOutput(sys.stderr, output)),
            blas.limit_to_one_thread(),
        ):
            result = self._worker.run(task, lambda: weights)
        if isinstance(result, RolloutFailure):
            result = replace(result, output=output.getvalue()[-_TAIL_CHARS:])
            raise make_environment_failure(task, result)
        return split_fragment(check_fragment(task, result))

    def probe(self) -> list[dict[str, Any]]:
        return [read_versions()]

    def read_traffic(self) -> Traffic:
        return Traffic()  # nothing leaves this process

    def close(self) -> None:
        self._closed = True
        self._worker.close()


class _ThreadOutput:
    """Captures the output of the thread that created it; passes on all other output."""

    def __init__(self, stream: Any, buffer: io.StringIO) -> None:
        self._stream = stream
        self._buffer = buffer
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        is_own_thread = threading.get_ident() == self._thread
        return (self._buffer if is_own_thread else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(eq=False)
class _InlineSubmission:
    fleet: InlineFleet
    tasks: list[RolloutTask]
    weights: dict[str, PolicyArrays]

    def __iter__(self) -> Iterator[Fragment]:
        while self.tasks:
            task = self.tasks.pop(0)
            self.fleet.notify("running", task)
            try:
                fragments = [*self.fleet.run(task, self.weights[task.policy_id])]
            except RlflameError:
                self.fleet.notify("lost", task)
                self.cancel()
                raise
            self.fleet.notify_end(task, fragments)
            yield from fragments

    def cancel(self) -> None:
        while self.tasks:
            self.fleet.notify("cancelled", self.tasks.pop(0))
