"""Decides whether an answer or a failed attempt ends a job or leads to a retry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlflame.errors import FleetError, RlflameError
from rlflame.rollout import wire
from rlflame.rollout.task import Fragment, RolloutFailure, RolloutTask, TaskPosition
from rlflame.terminal_text import format_count

from .base import check_fragment, make_environment_failure
from .job_queue import FleetJob

#: The maximum number of stray answers (see `FailureKind`) to a job. With the pauses between them,
#: the retries last about a minute.
MAX_STRAYS = 30
_STRAY_REASONS = {
    "no_policy": "its weights were missing from the cache",
    "cancelled": "its executor received no heartbeat from this run",
}
HANG_REASON = "its worker did not answer in time"


@dataclass(frozen=True, slots=True)
class Retry:
    """A decision to run a job again."""

    reason: str
    weights_lost: bool = False
    pause_s: float = 0.0


def classify_answer(
    job: FleetJob, answer: dict[str, Any], max_retries: int, step_deadline_s: float
) -> Fragment | RlflameError | Retry:
    """Return the job's outcome or a retry, and count the failure, if any."""
    kind, output = answer["kind"], str(answer.get("printed", ""))
    position = answer.get("position") or None  # None if the child died before its first heartbeat
    if kind == "result":
        return decode_result(job.task, answer["body"], lambda: output)
    if kind == "broken":
        return make_broken_worker_error(job.task, answer["traceback"], output)
    if kind == "hung":
        return count_hang(job, position, step_deadline_s, output) or Retry(HANG_REASON)
    if kind == "died":
        cause = str(answer["how"])
        return count_death(job, position, cause, output, max_retries) or Retry(cause)
    strays = job.failures["stray"] = job.failures["stray"] + 1
    reason = _STRAY_REASONS.get(kind, f"its worker answered {kind!r}")
    if strays > MAX_STRAYS:
        return FleetError(
            f"Slot {job.task.slot} of iteration {job.task.iteration} came back {strays} times "
            f"without being run: {reason}.",
            "rlflame cluster-check; an object cache without a storage folder can lose objects",
        )
    return Retry(reason, weights_lost=kind == "no_policy", pause_s=min(2.0, 0.05 * 2**strays))


def decode_result(
    task: RolloutTask, payload: Any, read_output: Callable[[], str]
) -> Fragment | RlflameError:
    """Return the fragment that a worker's answer contains, or an error."""
    try:
        result = wire.decode(payload)
        if isinstance(result, RolloutFailure):
            return make_environment_failure(task, dataclasses.replace(result, output=read_output()))
        return check_fragment(task, result)
    except wire.WireError as error:
        return FleetError(f"A worker sent a damaged answer ({error}).", "run it again")
    except FleetError as error:
        return error


def count_hang(
    job: FleetJob, position: TaskPosition | None, deadline_s: float, output: str
) -> RlflameError | None:
    """Count a hang; return an error unless it is the job's first.

    A first hang may only mean that the computer was asleep.
    """
    job.failures["hang"] += 1
    if job.failures["hang"] == 1:
        return None
    task = job.task
    slot, row, seed, step = position or (task.slot, 0, 0, 0)
    message = f"Environment {task.env.id} did not answer within {deadline_s:g} s"
    failure = RolloutFailure(task.iteration, slot, row, seed, step, message, "", output)
    hint = "if its steps really take that long: --set runtime.step_deadline_s=600"
    return make_environment_failure(task, failure, hint)


def count_death(
    job: FleetJob, position: TaskPosition | None, cause: str, output: str, max_retries: int
) -> RlflameError | None:
    """Count a worker's death; return an error if there are more than `max_retries`."""
    deaths = job.failures["death"] = job.failures["death"] + 1
    if deaths <= max_retries:
        return None
    location = " (near slot {}, row {}, seed {}, step {})".format(*position) if position else ""
    times = format_count(deaths, "time")
    return FleetError(
        f"Worker processes died {times} while running {_format_slots(job.task)} of iteration "
        f"{job.task.iteration}; the last time: {cause}{location}.",
        "signal 9 often means that memory ran out: try fewer --workers"
        if "signal 9" in cause
        else "run it with --fleet inline to reproduce the failure in this process",
        output,
    )


def count_delay(job: FleetJob, max_retries: int, task_deadline_s: float) -> RlflameError | None:
    """Count a missed deadline; return an error if there are more than `max_retries`."""
    delays = job.failures["delay"] = job.failures["delay"] + 1
    if delays <= max_retries:
        return None
    return FleetError(
        f"Slot {job.task.slot} of iteration {job.task.iteration} missed its deadline on {delays} "
        f"executors ({task_deadline_s:g} s).",
        "if fragments really take that long: "
        f"--set runtime.flame.task_deadline_s={10 * task_deadline_s:g}",
    )


def make_broken_worker_error(task: RolloutTask, trace: str, output: str) -> RlflameError:
    """Return the error for a worker that failed outside of an environment's code."""
    return FleetError(
        f"A worker could not run {_format_slots(task)}: {trace.strip().splitlines()[-1]}.",
        "this is a bug in rlflame, not in the environment",
        trace + output,
    )


def _format_slots(task: RolloutTask) -> str:
    return f"slot{'s' * (len(task.slots) > 1)} {', '.join(map(str, task.slots))}"
