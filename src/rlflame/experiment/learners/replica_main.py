"""A learner that is not the first: joins, does as rank 0 does, and ends with it.

`python -m rlflame.experiment.learners.replica_main N` is what the first learner starts here, spoken
to as a worker is; under torchrun each process but one of `rlflame train` comes here. Must not know:
fleets, files, environments, who watches.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from rlflame.config import torchrun
from rlflame.config.torchrun import LearnerRank
from rlflame.errors import LearnerFailure, LearningError
from rlflame.experiment.learners.launcher import JOIN_TIMEOUT_S, LOST_EXIT_CODE
from rlflame.learning.parallel.process_group import ProcessGroup
from rlflame.rollout import blas, wire
from rlflame.rollout.process.worker_main import (
    HEADER,
    FrameKind,
    die_with_parent,
    read_frame,
    read_parent_pid,
)

if TYPE_CHECKING:
    from rlflame.experiment.learners.liveness import LivenessMonitor, Rendezvous

_GRACE_S = 1.0


def run_replica(
    learner_rank: LearnerRank,
    rendezvous: Rendezvous | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Join the others, where torchrun says if not at a `meeting`; learn what is learned, and follow
    to the end. `answered` once the first learner has asked who is well: then the run is over."""
    from rlflame.experiment.learners.liveness import (
        LivenessMonitor,
        await_learners,
        make_torchrun_rendezvous,
    )
    from rlflame.learning.parallel.torch_process_group import TorchProcessGroup

    if rendezvous is None and torchrun.has_agent_store():
        # Until all are there each can still be ended alone, as by the Ctrl-C that all hear.
        await_learners(make_torchrun_rendezvous(), *learner_rank, JOIN_TIMEOUT_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The first learner decides when it is over: it lets an update finish, and saves.
        signal.signal(number, signal.SIG_IGN)
    store = rendezvous.open_store(JOIN_TIMEOUT_S) if rendezvous is not None else None
    group = TorchProcessGroup(
        *learner_rank,
        deadline_s=JOIN_TIMEOUT_S,
        join_timeout_s=JOIN_TIMEOUT_S,
        clock=time.monotonic,
        store=store,
    )
    try:
        monitor = LivenessMonitor(
            rendezvous or make_torchrun_rendezvous(),
            *learner_rank,
            JOIN_TIMEOUT_S,
            lambda: group.exchange_count,
        )
        monitor.start_answering(on_answer)
        with _report_exit(monitor):
            learn(group)
    finally:
        group.close()


@contextmanager
def _report_exit(monitor: LivenessMonitor) -> Iterator[None]:
    """Whoever ends says whether it was by itself, or because of another."""
    try:
        yield
    except LearnerFailure:
        monitor.report_exit(healthy=True)
        raise
    except BaseException:
        monitor.report_exit(healthy=False)
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
    from rlflame.learning.parallel.gradient_shards import Shards

    message = group.broadcast(None)
    if not message:
        return
    learning = LearningSettings.model_validate_json(message["learning"])
    process_group.check_fingerprints(group, compute_fingerprint(learning))
    group.use_device(resolve_device(learning, group.rank))
    blas.set_threads(count_blas_threads(learning))
    shards = Shards(learning.gradient_shards, group)
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
    """Also where this learner's own thread hangs, which torchrun would wait for."""
    time.sleep(_GRACE_S)
    _exit(LOST_EXIT_CODE)


def main() -> None:
    """`python -m rlflame.experiment.learners.replica_main ANSWERS`: one answer, that torch is
    loaded; and the end of the pipe that it hears is its own."""
    die_with_parent(read_parent_pid())
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    requests = os.fdopen(os.dup(0), "rb")
    frame = read_frame(requests)
    if frame is None:
        return
    message = wire.decode(frame[1])
    threading.Thread(target=_watch_parent, args=(requests,), daemon=True).start()
    try:
        import rlflame.learning.parallel.torch_process_group  # noqa: F401
        from rlflame.experiment.learners.liveness import FileRendezvous

        os.write(answers, HEADER.pack(FrameKind.HELLO, 0))
        run_replica(
            LearnerRank(message["rank"], message["size"]), FileRendezvous(message["meeting"])
        )
    except LearnerFailure:
        _exit(LOST_EXIT_CODE)
    except BaseException:
        traceback.print_exc()
        _exit(1)
    _exit(0)


def _watch_parent(requests: BinaryIO) -> None:
    """This process is gone when the pipe of its parent closes, however that went."""
    while read_frame(requests) is not None:
        pass
    os._exit(LOST_EXIT_CODE)


def _exit(code: int) -> None:
    """At once: threads of torch have nothing to put in order."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
