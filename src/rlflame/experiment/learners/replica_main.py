"""A learner that is not the first: joins, does as rank 0 does, and ends with it.

The first learner starts this module; under torchrun every other process of `rlflame train` runs it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlflame.config.flags import LearnerRank, has_agent_store
from rlflame.errors import LearnerFailure, LearningError
from rlflame.experiment.learners.launcher import JOIN_TIMEOUT_S, LOST_EXIT_CODE
from rlflame.learning.parallel.process_group import ProcessGroup
from rlflame.rollout import blas
from rlflame.rollout.process.channel import MessageKind
from rlflame.rollout.process.parent_channel import ParentChannel

if TYPE_CHECKING:
    from rlflame.experiment.learners.liveness import Rendezvous

_GRACE_S = 1.0


def run_replica(
    learner_rank: LearnerRank,
    rendezvous: Rendezvous | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Join the other learners, at torchrun's place by default, and learn until the first lets go.

    `on_answer` is called once this learner has answered that it is alive: then the run is over.
    """
    from rlflame.experiment.learners.liveness import (
        await_learners,
        join_group,
        make_torchrun_rendezvous,
    )

    if rendezvous is None and has_agent_store():
        # Until all are there each can still be ended alone, as by the Ctrl-C that all hear.
        await_learners(make_torchrun_rendezvous(), *learner_rank, JOIN_TIMEOUT_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The first learner decides when it is over: it lets an update finish, and saves.
        signal.signal(number, signal.SIG_IGN)
    timeout_s = JOIN_TIMEOUT_S
    with join_group(learner_rank, rendezvous, timeout_s, timeout_s) as (group, monitor):
        monitor.start_answering(on_answer)
        try:
            learn(group)
        except BaseException as error:
            # This learner ends because of another one, or by itself.
            monitor.report_exit(healthy=isinstance(error, LearnerFailure))
            raise


def learn(group: ProcessGroup) -> None:
    """A learner of the recipe that rank 0 names, until it lets go."""
    from rlflame.config.recipe import LearningSettings
    from rlflame.learning.factory import (
        compute_fingerprint,
        count_blas_threads,
        make_algorithm,
        resolve_device,
    )
    from rlflame.learning.parallel import process_group

    message = group.broadcast(None)
    if not message:
        return
    learning = LearningSettings.model_validate_json(message["learning"])
    process_group.check_fingerprints(group, compute_fingerprint(learning))
    group.use_device(resolve_device(learning, group.rank))
    blas.set_threads(count_blas_threads(learning))
    shards = process_group.Shards(learning.gradient_shards, group)
    learner = make_algorithm(learning, message["policy"], None, shards)
    if message["compare_every"]:
        shards.compare_every(message["compare_every"], learner.get_state)
    process_group.run_replica(learner, group)


def run_under_torchrun(learner_rank: LearnerRank) -> int:
    """This process's part where torchrun started it; its exit code."""
    try:
        run_replica(learner_rank, on_answer=_exit_soon)
    except LearnerFailure:
        return LOST_EXIT_CODE
    except LearningError:
        return 1  # the first learner meets the same, and says it
    return 0


def _exit_soon() -> None:
    """End even where this learner's own thread hangs, which torchrun would wait for."""
    time.sleep(_GRACE_S)
    _exit(LOST_EXIT_CODE)


def main() -> None:
    """`python -m rlflame.experiment.learners.replica_main ANSWERS PARENT`.

    One answer, that torch is loaded; and the end of the parent's pipe is the end of this process.
    """
    channel = ParentChannel.open()
    order = channel.receive_order()
    channel.start_listening()
    try:
        import rlflame.learning.parallel.torch_process_group  # noqa: F401
        from rlflame.experiment.learners.liveness import FileRendezvous

        channel.send(MessageKind.HELLO)
        run_replica(LearnerRank(order["rank"], order["size"]), FileRendezvous(order["meeting"]))
    except LearnerFailure:
        _exit(LOST_EXIT_CODE)
    except BaseException:
        traceback.print_exc()
        _exit(1)
    _exit(0)


def _exit(code: int) -> None:
    """End at once, without waiting for torch's threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
