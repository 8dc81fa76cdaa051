"""The interface of fleets, which run rollout tasks and return fragments.

A `Submission` yields the fragment of each task once, in the order in which the tasks finish. All
fleets return identical fragments for the same tasks. A policy's ID is a hash of its weights.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np

from rlflame.errors import EnvironmentFailure, FleetError
from rlflame.rollout.task import (
    STEP_FIELDS,
    Fragment,
    PolicyArrays,
    PolicySpec,
    RolloutFailure,
    RolloutTask,
)

TaskEventKind = Literal[
    "submitted", "running", "done", "retried", "speculated", "lost", "cancelled"
]
EventKind = Literal[TaskEventKind, "phase", "workers", "episodes", "note"]


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """An event that a fleet reports to its observer, such as the start of a task.

    After a task is submitted, any number of `running`, `retried` and `speculated` events may follow
    (a task is `speculated` if it is sent to a second worker because the first one is slow). The
    last event of a task is `done` if the task returned a fragment, `lost` if it ended with an
    error, or `cancelled`. A `retried` event with an empty text belongs to the same series of
    failures as the previous one. A `phase` event says why no task is running; an empty text ends
    the phase. If workers may join and leave, a `workers` event reports how many have answered. An
    `episodes` event reports how many training episodes a worker has finished in a task. A `note` is
    a message for the user. Observers may be called from any thread.
    """

    kind: EventKind
    purpose: Literal["train", "evaluate", ""]
    slot: int
    #: In an `episodes` event, the name of the worker.
    text: str = ""
    #: The number of workers in a `workers` event, or of episodes in an `episodes` event.
    count: int = 0

    @classmethod
    def of_workers(cls, count: int) -> FleetEvent:
        return cls("workers", "", 0, count=count)

    @classmethod
    def of_episodes(cls, worker: str, fragment: Fragment) -> FleetEvent:
        return cls("episodes", "", fragment.slot, worker, len(fragment.episodes))


Observer = Callable[[FleetEvent], None]


def ignore_event(event: FleetEvent) -> None:
    """Ignore the event. This is the default observer."""


class EventCounter:
    """Counts events of the given kinds, and passes all events to another observer.

    It also counts the training episodes of each worker.
    """

    def __init__(
        self,
        observer: Observer = ignore_event,
        kinds: Sequence[EventKind] = ("retried", "speculated"),
    ) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(kinds, 0)
        self._episodes: Counter[str] = Counter()

    def __call__(self, event: FleetEvent) -> None:
        if event.kind in self._counts:
            with self._lock:
                self._counts[event.kind] += 1
        elif event.kind == "episodes":
            with self._lock:
                self._episodes[event.text] += event.count
        self._observer(event)

    def read_episodes(self) -> dict[str, int]:
        """Return the number of training episodes by the name of the worker."""
        with self._lock:
            # Shorter names come first, so that worker-2 precedes worker-10.
            return dict(sorted(self._episodes.items(), key=lambda item: (len(item[0]), item[0])))

    def take(self) -> dict[str, int]:
        """Return the number of events of each kind since the previous call."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return counts


class Traffic(NamedTuple):
    """Payload bytes sent to workers and received from them since the fleet started."""

    bytes_out: int = 0
    bytes_in: int = 0


class TrafficMeter:
    """Counts the payload bytes of a fleet. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = Traffic()

    def count_sent(self, size: int) -> None:
        self._add(size, 0)

    def count_received(self, size: int) -> None:
        self._add(0, size)

    def _add(self, bytes_out: int, bytes_in: int) -> None:
        with self._lock:
            total = self._traffic
            self._traffic = Traffic(total.bytes_out + bytes_out, total.bytes_in + bytes_in)

    def read(self) -> Traffic:
        return self._traffic


class TrafficCounter:
    """Measures a fleet's traffic between calls to `take`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._previous = fleet.read_traffic()

    def take(self) -> dict[str, int]:
        previous, self._previous = self._previous, self._fleet.read_traffic()
        return {
            "bytes_out": self._previous.bytes_out - previous.bytes_out,
            "bytes_in": self._previous.bytes_in - previous.bytes_in,
        }


class Submission(Protocol):
    """A group of submitted tasks.

    Iteration yields the fragments of the tasks. If a task fails, iteration raises the task's error.
    """

    def __iter__(self) -> Iterator[Fragment]: ...

    def cancel(self) -> None:
        """Cancel the tasks that have not finished."""


class Fleet(Protocol):
    """Runs tasks until `close()`, which releases the fleet's resources."""

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int:
        """The number of tasks that can run at the same time."""

    @property
    def ready(self) -> bool:
        """Whether the fleet has started or has failed to start."""

    def put(self, policy: PolicyArrays) -> str:
        """Store weights; return their ID. Each call needs a matching `release` call."""

    def release(self, policy_id: str) -> None: ...

    def submit(self, tasks: Sequence[RolloutTask]) -> Submission: ...

    def probe(self) -> list[dict[str, Any]]:
        """Return each worker's description of its machine and packages."""

    def read_traffic(self) -> Traffic: ...

    def close(self) -> None: ...

    def __enter__(self) -> Fleet: ...

    def __exit__(self, *_: object) -> None: ...


class ContextManagerMixin:
    """Calls `close()` at the end of a `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_policy_id(policy: PolicyArrays) -> str:
    """Return an ID for the weights, derived from their content."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(policy):
        array = np.ascontiguousarray(policy[name])
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise FleetError(
                f"The policy's {name} contains NaN or infinity, so no worker can use the policy.",
                "rlflame resume continues from the latest checkpoint",
            )
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def make_environment_failure(
    task: RolloutTask, failure: RolloutFailure, hint: str = ""
) -> EnvironmentFailure:
    """Return the error that ends a run after an environment has failed."""
    location = f"slot {failure.slot}, row {failure.row}, seed {failure.seed}, step {failure.step}"
    detail = failure.traceback.rstrip()
    if failure.output.strip():
        detail += f"\nOutput of the worker:\n{failure.output.rstrip()}"
    return EnvironmentFailure(
        f"{failure.message} ({location}).",
        hint or f"to reproduce it, reset {task.env.id} with seed {failure.seed}",
        detail.strip(),
    )


def check_fragment(task: RolloutTask, fragment: object) -> Fragment:
    """Return the answer if it is a fragment of this task; otherwise raise FleetError."""
    if not isinstance(fragment, Fragment) or not _is_answer(task, fragment):
        raise FleetError(
            f"A worker's answer for slot {task.slot} of iteration {task.iteration} is not a "
            "fragment of this task.",
            "check that every worker runs the same version of rlflame",
        )
    return fragment


def _is_answer(task: RolloutTask, fragment: Fragment) -> bool:
    policy, by_episodes = task.policy, task.unit == "episodes"
    rows, size = task.columns, policy.row_size
    steps, boundary_count = len(fragment.rewards), len(fragment.boundary_index)
    is_discrete = policy.action_kind == "discrete"
    expected_shapes = {
        **dict.fromkeys(STEP_FIELDS, (steps, rows)),
        "observations": (steps, rows, size),
        "actions": (steps, rows) if is_discrete else (steps, rows, policy.action_size),
        "lengths": (rows,),
        "last_observations": (rows, size),
        "boundary_index": (boundary_count, 2),
        "boundary_observations": (boundary_count, size),
    }
    if any(getattr(fragment, name).shape != shape for name, shape in expected_shapes.items()):
        return False
    lengths, boundaries, episodes = fragment.lengths, fragment.boundary_index, fragment.episodes
    longest = int(lengths.max(initial=0))
    shortest = 1 if by_episodes else task.steps
    return bool(
        (fragment.iteration, fragment.slot) == (task.iteration, task.slot)
        and fragment.extra_slots == task.extra_slots
        and steps == (longest if task.record else 0)
        and ((lengths >= shortest) & (lengths <= task.steps)).all()
        and fragment.actions.dtype == (np.int64 if is_discrete else np.float32)
        and not (is_discrete and (fragment.actions // policy.action_size).any())
        and _has_valid_choices(policy, fragment)
        and ((boundaries >= 0) & (boundaries < (steps, rows))).all()
        and all(0 <= episode.row < rows for episode in episodes)
        and (not by_episodes or len(episodes) == rows)
        and [len(state.observation) for state in fragment.states]
        == ([] if by_episodes else [size] * rows)
    )


def _has_valid_choices(policy: PolicySpec, fragment: Fragment) -> bool:
    """Return whether the choices of composite actions are possible."""
    counts = np.array(policy.action_counts, np.float32)
    if not counts.size:
        return True
    choices = fragment.actions[..., counts > 0]
    is_valid = (choices >= 0) & (choices < counts[counts > 0]) & (choices == np.rint(choices))
    return bool(is_valid.all())
