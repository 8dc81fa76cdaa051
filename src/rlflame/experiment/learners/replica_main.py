"""A learner process under torchrun that takes part in rank 0's updates."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from rlflame.config.flags import LearnerRank, has_agent_store
from rlflame.errors import LearnerFailure, LearningError
from rlflame.experiment.learners.launcher import JOIN_TIMEOUT_S, LOST_EXIT_CODE
from rlflame.learning.parallel.process_group import ProcessGroup
from rlflame.rollout import blas

if TYPE_CHECKING:
    from rlflame.config.recipe import LearningSettings
    from rlflame.learning.base import Algorithm
    from rlflame.rollout.task import PolicyArrays, PolicySpec

_GRACE_S = 1.0


def run_replica(learner_rank: LearnerRank) -> None:
    """Join the other learners and learn until rank 0 releases this one."""
    from rlflame.experiment.learners.liveness import (
        await_learners,
        join_group,
        make_torchrun_rendezvous,
    )

    rendezvous = make_torchrun_rendezvous()
    if has_agent_store():
        # Signals are not ignored yet: until all learners have joined, Ctrl-C must end each of them.
        await_learners(rendezvous, *learner_rank, JOIN_TIMEOUT_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Rank 0 handles stop requests: it finishes the update and saves.
        signal.signal(number, signal.SIG_IGN)
    with join_group(learner_rank, rendezvous, JOIN_TIMEOUT_S, JOIN_TIMEOUT_S) as (group, monitor):
        monitor.start_answering(_exit_soon)
        try:
            learn(group)
        except BaseException as error:
            # A LearnerFailure means that another learner failed first.
            monitor.report_exit(healthy=isinstance(error, LearnerFailure))
            raise


def learn(group: ProcessGroup) -> None:
    """Learn with rank 0's recipe until rank 0 releases this learner."""
    from rlflame.config.recipe import LearningSettings
    from rlflame.learning.factory import count_blas_threads
    from rlflame.learning.parallel import process_group

    message = group.broadcast(None)
    if message:
        learning = LearningSettings.model_validate_json(message["learning"])
        blas.set_threads(count_blas_threads(learning))
        learner = make_learner(learning, message["policy"], group, message["compare_every"])
        process_group.run_replica(learner, group)


def make_learner(
    learning: LearningSettings,
    spec: PolicySpec,
    group: ProcessGroup,
    compare_every: int,
    start: PolicyArrays | None = None,
) -> Algorithm[Any]:
    """Make the algorithm for one learner in a group."""
    from rlflame.learning.factory import compute_fingerprint, make_algorithm, resolve_device
    from rlflame.learning.parallel.process_group import Shards, check_fingerprints

    check_fingerprints(group, compute_fingerprint(learning))
    group.use_device(resolve_device(learning, group.rank))
    shards = Shards(learning.gradient_shards, group)
    learner = make_algorithm(learning, spec, start, shards)
    if compare_every:
        shards.compare_every(compare_every, learner.get_state)
    return learner


def run_under_torchrun(learner_rank: LearnerRank) -> int:
    """Run this learner under torchrun; return its exit code."""
    try:
        run_replica(learner_rank)
    except LearnerFailure:
        return LOST_EXIT_CODE
    except LearningError:
        return 1  # rank 0 gets the same error and reports it
    return 0


def _exit_soon() -> None:
    """Exit after a short time, even if the main thread hangs.

    Otherwise, torchrun would wait for this process.
    """
    time.sleep(_GRACE_S)
    _exit(LOST_EXIT_CODE)


def _exit(code: int) -> None:
    """Exit immediately, without waiting for torch's threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
