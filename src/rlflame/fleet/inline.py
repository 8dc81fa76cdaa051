"""A fleet inside this process: each task runs when its fragment is asked for.

Must not know: processes, algorithms, files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType

from rlflame.rollout.child import versions
from rlflame.rollout.spec import Fragment, PolicyArrays, RolloutFailure, RolloutTask
from rlflame.rollout.worker import RolloutWorker

from . import (
    FleetEvent,
    FleetReport,
    Observer,
    checked,
    environment_failure,
    ignore,
    policy_id,
)


class InlineFleet:
    """No parallelism and no isolation: the reference that the other fleets are compared with."""

    name = "inline"
    capacity = 1

    def __init__(self, observer: Observer = ignore) -> None:
        self._observer = observer
        self._worker = RolloutWorker()
        self._policies: dict[str, PolicyArrays] = {}
        self._puts: Counter[str] = Counter()

    def put(self, policy: PolicyArrays) -> str:
        name = policy_id(policy)
        self._policies[name] = policy
        self._puts[name] += 1
        return name

    def release(self, policy_id: str) -> None:
        self._puts[policy_id] -= 1
        if self._puts[policy_id] <= 0:
            del self._puts[policy_id]
            self._policies.pop(policy_id, None)

    def submit(self, tasks: Sequence[RolloutTask]) -> _InlineSubmission:
        for task in tasks:
            self._observer(FleetEvent("submitted", task.purpose, task.slot))
        # Weights are bound now: releasing a policy never pulls it from under a submission.
        weights = {task.policy_id: self._policies[task.policy_id] for task in tasks}
        return _InlineSubmission(self._worker, list(tasks), weights, self._observer)

    def probe(self) -> FleetReport:
        return FleetReport(self.name, self.capacity, (versions(),))

    def close(self) -> None:
        self._worker.close()

    def __enter__(self) -> InlineFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _InlineSubmission:
    def __init__(
        self,
        worker: RolloutWorker,
        tasks: list[RolloutTask],
        weights: dict[str, PolicyArrays],
        observer: Observer,
    ) -> None:
        self._worker = worker
        self._tasks = tasks
        self._weights = weights
        self._observer = observer

    def __iter__(self) -> Iterator[Fragment]:
        while self._tasks:
            task = self._tasks.pop(0)
            self._observer(FleetEvent("running", task.purpose, task.slot))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                result = self._worker.run(task, lambda task=task: self._weights[task.policy_id])  # type: ignore[misc]
            if isinstance(result, RolloutFailure):
                result = dataclasses.replace(result, output=printed.getvalue()[-4000:])
                raise environment_failure(task, result)
            self._observer(FleetEvent("done", task.purpose, task.slot))
            yield checked(task, result)

    def cancel(self) -> None:
        self._tasks.clear()
