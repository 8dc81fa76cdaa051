"""The contract of a fleet: where rollout tasks run. Every fleet gives the same fragments.

Nouns: a fleet takes tasks as a Submission; iterating it yields each task's fragment once, in the
order they finish. Policies are put by content and released. Must not know: algorithms, files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

import numpy as np

from rlflame.errors import EnvironmentFailure, FleetError
from rlflame.rollout.spec import Fragment, PolicyArrays, RolloutFailure, RolloutTask

EventKind = Literal["submitted", "running", "done", "retried", "lost", "cancelled"]


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """Something that happened to one task, for whoever draws the fan-out and fan-in."""

    kind: EventKind
    purpose: str
    slot: int
    text: str = ""


Observer = Callable[[FleetEvent], None]


def ignore(event: FleetEvent) -> None:
    """The observer of those who do not watch."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What a fleet's workers run on, as they said it themselves."""

    fleet: str
    capacity: int
    workers: tuple[dict[str, str], ...]


class Submission(Protocol):
    """Tasks under way together. Iterating raises what ended a task for good."""

    def __iter__(self) -> Iterator[Fragment]: ...

    def cancel(self) -> None:
        """Forget the tasks that have not finished."""


class Fleet(Protocol):
    """Somewhere to run tasks. `close()` may be called twice and leaves nothing behind."""

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int:
        """How many tasks can run at one moment."""

    def put(self, policy: PolicyArrays) -> str:
        """Make a version of the weights known; its name is its content. Release it once."""

    def release(self, policy_id: str) -> None: ...

    def submit(self, tasks: Sequence[RolloutTask]) -> Submission: ...

    def probe(self) -> FleetReport: ...

    def close(self) -> None: ...

    def __enter__(self) -> Fleet: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def policy_id(policy: PolicyArrays) -> str:
    """A name for weights that equal content shares."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(policy):
        array = np.ascontiguousarray(policy[name])
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def environment_failure(task: RolloutTask, failure: RolloutFailure) -> EnvironmentFailure:
    """A worker's report as the error that ends the run."""
    where = f"slot {failure.slot}, row {failure.row}, seed {failure.seed}, step {failure.step}"
    detail = failure.traceback.rstrip()
    if failure.output.strip():
        detail += f"\nIt had printed:\n{failure.output.rstrip()}"
    return EnvironmentFailure(
        f"{failure.message} ({where}).",
        f"reset {task.env.id} with seed {failure.seed} and step it {failure.step} times "
        "to meet it again",
        detail.strip(),
    )


def checked(task: RolloutTask, fragment: Fragment) -> Fragment:
    """The fragment, if it can be the answer to the task; a worker's word is not trusted."""
    steps, rows = fragment.rewards.shape if fragment.rewards.ndim == 2 else (-1, -1)
    policy = task.policy
    action = (policy.action_size,) if policy.action_kind == "continuous" else ()
    expected = {
        "observations": (steps, rows, policy.observation_size),
        "actions": (steps, rows, *action),
        "log_probs": (steps, rows),
        "terminated": (steps, rows),
        "truncated": (steps, rows),
        "lengths": (rows,),
        "last_observations": (rows, policy.observation_size),
        "boundary_index": (len(fragment.boundary_index), 2),
        "boundary_observations": (len(fragment.boundary_index), policy.observation_size),
    }
    wrong = [name for name, shape in expected.items() if getattr(fragment, name).shape != shape]
    fits = (
        not wrong
        and rows == task.rows
        and (fragment.iteration, fragment.slot) == (task.iteration, task.slot)
        and steps <= task.steps
        and (not task.record or task.unit == "episodes" or steps == task.steps)
        and len(fragment.states) == (task.rows if task.unit == "steps" else 0)
        and bool((fragment.lengths <= task.steps).all())
    )
    if not fits:
        raise FleetError(
            f"A worker answered slot {task.slot} of iteration {task.iteration} with something "
            f"that is not its fragment (wrong: {', '.join(wrong) or 'identity or length'}).",
            "check that every worker runs the same version of rlflame",
        )
    return fragment
