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
from rlflame.config.torchrun import Place
from rlflame.errors import LearnersLost, LearningError
from rlflame.experiment.learners.launcher import JOINING_S, LOST
from rlflame.learning.parallel.process_group import Group
from rlflame.rollout import blas, wire
from rlflame.rollout.process.worker_main import (
    HEADER,
    Kind,
    die_with_parent,
    parent_named,
    read_frame,
)

if TYPE_CHECKING:
    from rlflame.experiment.learners.liveness import Meeting, RollCall

_GRACE_S = 1.0


def follow(
    here: Place, meeting: Meeting | None = None, answered: Callable[[], None] = lambda: None
) -> None:
    """Join the others, where torchrun says if not at a `meeting`; learn what is learned, and follow
    to the end. `answered` once the first learner has asked who is well: then the run is over."""
    from rlflame.experiment.learners.liveness import RollCall, gather, of_torchrun
    from rlflame.learning.parallel.torch_process_group import TorchGroup

    if meeting is None and torchrun.hosts():
        # Until all are there each can still be ended alone, as by the Ctrl-C that all hear.
        gather(of_torchrun(), *here, JOINING_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The first learner decides when it is over: it lets an update finish, and saves.
        signal.signal(number, signal.SIG_IGN)
    store = meeting.store(JOINING_S) if meeting is not None else None
    group = TorchGroup(
        *here, deadline_s=JOINING_S, joining_s=JOINING_S, clock=time.monotonic, store=store
    )
    try:
        roll_call = RollCall(meeting or of_torchrun(), *here, JOINING_S, lambda: group.exchanges)
        roll_call.attend(answered)
        with _leaving(roll_call):
            learn(group)
    finally:
        group.close()


@contextmanager
def _leaving(roll_call: RollCall) -> Iterator[None]:
    """Whoever ends says whether it was by itself, or because of another."""
    try:
        yield
    except LearnersLost:
        roll_call.leave(well=True)
        raise
    except BaseException:
        roll_call.leave(well=False)
        raise


def learn(group: Group) -> None:
    """A learner of the recipe that rank 0 names, until it lets go."""
    from rlflame.config.recipe import LearningSettings
    from rlflame.learning.factory import algorithm, blas_threads, device, fingerprint
    from rlflame.learning.parallel import replicated
    from rlflame.learning.parallel.gradient_shards import Shards

    told = group.share(None)
    if not told:
        return
    learning = LearningSettings.model_validate_json(told["learning"])
    replicated.check_alike(group, fingerprint(learning))
    group.meet_on(device(learning, group.rank))
    blas.set_threads(blas_threads(learning))
    shards = Shards(learning.gradient_shards, group)
    learner = algorithm(learning, told["policy"], None, shards)
    if told["compare_every"]:
        shards.compare_every(told["compare_every"], learner.state)
    replicated.follow(learner, group)


def launched(here: Place) -> int:
    """This process's part where torchrun started it; its exit code."""
    try:
        follow(here, answered=_leave_soon)
    except LearnersLost:
        return LOST
    except LearningError:
        return 1  # the first learner meets the same, and says it
    return 0


def _leave_soon() -> None:
    """Also where this learner's own thread hangs, which torchrun would wait for."""
    time.sleep(_GRACE_S)
    _leave(LOST)


def main() -> None:
    """`python -m rlflame.experiment.learners.replica_main ANSWERS`: one answer, that torch is
    loaded; and the end of the pipe that it hears is its own."""
    die_with_parent(parent_named())
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    requests = os.fdopen(os.dup(0), "rb")
    frame = read_frame(requests)
    if frame is None:
        return
    told = wire.decode(frame[1])
    threading.Thread(target=_attend, args=(requests,), daemon=True).start()
    try:
        import rlflame.learning.parallel.torch_process_group  # noqa: F401
        from rlflame.experiment.learners.liveness import FileOfLearners

        os.write(answers, HEADER.pack(Kind.HELLO, 0))
        follow(Place(told["rank"], told["size"]), FileOfLearners(told["meeting"]))
    except LearnersLost:
        _leave(LOST)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _attend(requests: BinaryIO) -> None:
    """This process is gone when the pipe of its parent closes, however that went."""
    while read_frame(requests) is not None:
        pass
    os._exit(LOST)


def _leave(code: int) -> None:
    """At once: threads of torch have nothing to put in order."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
