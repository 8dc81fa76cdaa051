"""What an answer of a worker means for its job: an end, or another attempt.

Must not know: the cluster, threads, how an attempt is made.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rlflame.errors import FleetError, RlflameError
from rlflame.fleet.base import check_fragment, make_environment_failure
from rlflame.fleet.jobs import FleetJob, make_broken_worker_error, make_death_error, make_hang_error
from rlflame.rollout import wire
from rlflame.rollout.spec import Fragment, RolloutFailure

#: Enough for a minute of trouble, with the pauses between.
MAX_STRAYS = 30
_STRAY_REASONS = {
    "no_policy": "its weights were gone from the cache",
    "cancelled": "its executor had heard no sign of life of this run",
}


@dataclass(frozen=True, slots=True)
class Retry:
    """The job has to be tried once more."""

    reason: str
    weights_lost: bool = False
    pause_s: float = 0.0


def classify_answer(
    job: FleetJob, answer: dict[str, Any], max_retries: int, step_deadline_s: float
) -> Fragment | RlflameError | Retry:
    """Counts deaths and hangs on the job, and ends it when there were too many."""
    kind, printed = answer["kind"], str(answer.get("printed", ""))
    raw_position = answer.get("position")  # nothing of a child that died before its first word
    position = (
        (raw_position[0], raw_position[1], raw_position[2], raw_position[3])
        if raw_position
        else None
    )
    if kind == "result":
        return _decode_fragment(job, answer, printed)
    if kind == "broken":
        return make_broken_worker_error(job.task, answer["traceback"], printed)
    if kind == "hung":
        job.hangs += 1
        # Once may be the machine's fault; a hang repeats itself.
        if job.hangs > 1:
            return make_hang_error(job.task, position, step_deadline_s, printed)
        return Retry("did not answer in time")
    if kind == "died":
        job.deaths += 1
        if job.deaths > max_retries:
            return make_death_error(job, position, str(answer["how"]), printed)
        return Retry(str(answer["how"]))
    job.strays += 1
    reason = _STRAY_REASONS.get(kind, f"its worker answered {kind!r}")
    if job.strays > MAX_STRAYS:
        return FleetError(
            f"Slot {job.task.slot} of iteration {job.task.iteration} came back {job.strays} times "
            f"without having run: {reason}.",
            "rlflame cluster-check; an object cache without a storage folder forgets what it holds",
        )
    return Retry(reason, weights_lost=kind == "no_policy", pause_s=min(2.0, 0.05 * 2**job.strays))


def count_delay(job: FleetJob, max_retries: int, task_deadline_s: float) -> RlflameError | None:
    """Counts an attempt that took too long, and ends the job when there were too many."""
    job.delays += 1
    if job.delays <= max_retries:
        return None
    return FleetError(
        f"Slot {job.task.slot} of iteration {job.task.iteration} took {job.delays} executors "
        f"longer than {task_deadline_s:g} s.",
        "if fragments really take that long: "
        f"--set runtime.flame.task_deadline_s={10 * task_deadline_s:g}",
    )


def _decode_fragment(
    job: FleetJob, answer: dict[str, Any], printed: str
) -> Fragment | RlflameError:
    try:
        result = wire.decode(answer["body"])
        if isinstance(result, RolloutFailure):
            return make_environment_failure(job.task, dataclasses.replace(result, output=printed))
        return check_fragment(job.task, result)
    except wire.WireError as error:
        return FleetError(f"A worker sent a damaged answer ({error}).", "run it again")
    except FleetError as error:
        return error
