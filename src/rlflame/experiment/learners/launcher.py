"""Connects learners that torchrun started, possibly on several machines."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from rlflame.config.flags import LearnerRank, has_agent_store, read_rank
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, LearnerFailure
from rlflame.learning.parallel.process_group import ProcessGroup, SingleProcessGroup
from rlflame.training.stop_signal import NullStop, abort_on_stop
from rlflame.training.trainer import StopRequest

if TYPE_CHECKING:
    from rlflame.experiment.learners.liveness import LearnerProcess, TcpRendezvous


#: The time that all learners have to start Python, import torch and connect.
JOIN_TIMEOUT_S = 180.0
#: The exit code of a learner that has lost the others.
LOST_EXIT_CODE = 70
_GRACE_S = 3.0
_POLL_S = 0.2


@contextmanager
def start_learners(
    runtime: RuntimeSettings, hint: Callable[[], str], stop: StopRequest
) -> Iterator[ProcessGroup]:
    """Yield the group of learners that torchrun started, or a group of one.

    If a learner is lost, the error has the hint that `hint` returns.
    """
    learner_rank = read_rank()
    if learner_rank is not None and learner_rank.size != runtime.learners:
        raise ConfigError(
            f"torchrun started {learner_rank.size} processes, not {runtime.learners} learners.",
            "remove --learners: every torchrun process is a learner",
        )
    group_context: AbstractContextManager[ProcessGroup] = nullcontext(SingleProcessGroup())
    if learner_rank is not None:
        group_context = _join_torchrun(runtime, learner_rank, stop)
    try:
        with group_context as group:
            yield group
    except LearnerFailure as error:
        error.hint = hint()
        raise


def release_learners() -> None:
    """End the learners that torchrun started for a run that is complete."""
    learner_rank = read_rank()
    if learner_rank is not None:
        with _join_torchrun(RuntimeSettings(), learner_rank, NullStop()):
            pass


@contextmanager
def _join_torchrun(
    runtime: RuntimeSettings, learner_rank: LearnerRank, stop: StopRequest
) -> Iterator[ProcessGroup]:
    _stop_without_parent()
    with abort_on_stop(stop):  # there is nothing to save yet
        from rlflame.experiment.learners.liveness import (  # loads torch
            await_learners,
            make_torchrun_rendezvous,
        )

        rendezvous = make_torchrun_rendezvous()
        if has_agent_store():
            await_learners(rendezvous, *learner_rank, JOIN_TIMEOUT_S)
    with _join_group(runtime, learner_rank, rendezvous) as group:
        yield group


def _stop_without_parent() -> None:
    """Make this process save and stop if torchrun is killed.

    A thread polls the parent process. PR_SET_PDEATHSIG would not work: it can send a signal for
    each thread of torchrun, and a second signal ends a run without saving.
    """
    parent = os.getppid()

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch_parent, name="rlflame-orphan", daemon=True).start()


def _kill_local_learners(learners: Iterable[LearnerProcess]) -> None:
    """Kill those of the learners that run on this machine.

    Otherwise, torchrun would wait forever for a suspended process.
    """
    from rlflame.experiment.learners.liveness import LearnerProcess

    for learner in learners:
        if learner.machine == LearnerProcess.from_current_process().machine:
            with suppress(OSError):
                os.kill(learner.pid, signal.SIGKILL)


@contextmanager
def _join_group(
    runtime: RuntimeSettings, learner_rank: LearnerRank, rendezvous: TcpRendezvous
) -> Iterator[ProcessGroup]:
    """Join the group of all learners.

    If a learner fails, the error names the first one that is silent or behind the others.
    """
    from rlflame.experiment.learners.liveness import join_group
    from rlflame.learning.parallel.process_group import release_replicas
    from rlflame.learning.parallel.torch_process_group import format_timeout

    deadline_s = runtime.learner_deadline_s
    with join_group(learner_rank, rendezvous, deadline_s, JOIN_TIMEOUT_S) as (group, monitor):
        try:
            yield group
        except LearnerFailure as error:
            late_ranks = monitor.find_late_ranks(_GRACE_S)
            if not late_ranks:
                raise
            learners = [monitor.read_process(rank) for rank in late_ranks]
            if error.is_hung:
                # Kill them at exit, after the error is shown: torchrun then ends this process too.
                atexit.register(_kill_local_learners, learners)
            name = f"Learner {late_ranks[0]} of {learner_rank.size} (process {learners[0].pid})"
            reason = format_timeout(deadline_s) if error.is_hung else "has ended."
            error.message = f"{name} {reason}"
            raise
        release_replicas(group)
