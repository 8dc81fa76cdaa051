"""A learner that is not the first: joins, does as rank 0 does, and ends with it.

`python -m rlflame.follower N` is what the first learner starts here, spoken to as a worker is;
under torchrun each process but one of `rlflame train` comes here. Must not know: fleets, files,
environments, who watches.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from typing import BinaryIO

from rlflame.crew import JOINING_S, LOST
from rlflame.errors import LearnersLost, LearningError
from rlflame.learner.group import Group
from rlflame.rollout import blas, wire
from rlflame.rollout.child import HEADER, Kind, read_frame
from rlflame.torchrun import Place

#: Of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def follow(here: Place, meeting: str | None = None, arrivals: str | None = None) -> None:
    """Join the others, learn what is learned, and follow to the end."""
    from rlflame.learner.torch_group import TorchGroup

    group = TorchGroup(
        *here, deadline_s=JOINING_S, joining_s=JOINING_S, file=meeting, arrivals=arrivals
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        # The first learner decides when it is over: it lets an update finish, and saves.
        signal.signal(number, signal.SIG_IGN)
    try:
        learn(group)
    finally:
        group.close()


def learn(group: Group) -> None:
    """A learner of the recipe that rank 0 names, until it lets go."""
    from rlflame.config import LearningSettings
    from rlflame.learner import leading
    from rlflame.learner.shards import Shards
    from rlflame.learners import algorithm, blas_threads, device, fingerprint

    told = group.share(None)
    if not told:
        return
    learning = LearningSettings.model_validate_json(told["learning"])
    leading.check_alike(group, fingerprint(learning))
    group.meet_on(device(learning, group.rank))
    blas.set_threads(blas_threads(learning))
    shards = Shards(learning.gradient_shards, group)
    learner = algorithm(learning, told["policy"], None, shards)
    if told["compare_every"]:
        shards.compare_every(told["compare_every"], learner.state)
    leading.follow(learner, group)


def launched(here: Place) -> int:
    """This process's part where torchrun started it; its exit code."""
    try:
        follow(here)
    except LearnersLost:
        return LOST
    except LearningError:
        return 1  # the first learner meets the same, and says it
    return 0


def main() -> None:
    """`python -m rlflame.follower ANSWERS`: one answer, that torch is loaded; and the end of the
    pipe that it hears is its own."""
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    requests = os.fdopen(os.dup(0), "rb")
    frame = read_frame(requests)
    if frame is None:
        return
    told = wire.decode(frame[1])
    _die_with_parent()
    threading.Thread(target=_attend, args=(requests, answers), daemon=True).start()
    try:
        import rlflame.learner.torch_group  # noqa: F401

        os.write(answers, HEADER.pack(Kind.HELLO, 0))
        follow(Place(told["rank"], told["size"]), told["meeting"], told["arrivals"])
    except LearnersLost:
        _leave(LOST)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _attend(requests: BinaryIO, answers: int) -> None:
    """Say that this process is alive, whenever the first learner asks, also while the others are
    waited for. It is gone when its pipe closes, however it went."""
    while read_frame(requests) is not None:
        os.write(answers, HEADER.pack(Kind.BEAT, 0))
    os._exit(LOST)


def _die_with_parent() -> None:
    """Where the system knows of it: a process that is stopped does not see a pipe close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(code: int) -> None:
    """At once: threads of torch have nothing to put in order."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
