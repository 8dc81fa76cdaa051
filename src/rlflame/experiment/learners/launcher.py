"""The other learners of a run: started here, watched, and taken along when it ends.

Or, where torchrun has started them all, only joined. Must not know: what is learned.
"""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from rlflame.config import torchrun
from rlflame.config.runtime import RuntimeSettings
from rlflame.config.torchrun import Place, place
from rlflame.errors import ConfigError, LearnersLost
from rlflame.experiment.learners.shared_file import SharedFile, make_shared_file
from rlflame.learning.parallel.process_group import Alone, Group
from rlflame.rollout import blas, wire
from rlflame.rollout.process.worker_main import Kind
from rlflame.rollout.process.worker_process import WorkerProcess, what_became_of_it
from rlflame.training.stop_signal import NeverStop
from rlflame.training.trainer import Stop, StopNow

if TYPE_CHECKING:
    from rlflame.experiment.learners.liveness import Learner, Meeting, RollCall

#: Python and torch have to be loaded before a learner answers.
JOINING_S = 180.0
#: The same where all have said that they are loaded.
_MEETING_S = 60.0
#: How a learner ends that has lost the others.
LOST = 70
_GRACE_S = 3.0
_LOOK_S = 1.0


@contextmanager
def learners(
    runtime: RuntimeSettings, threads: int, hint: Callable[[], str], stop: Stop
) -> Iterator[Group]:
    """The learners that the runtime asks for, this process among them as rank 0.

    `hint` says what to do when one was lost.
    """
    try:
        with _learners(runtime, threads, stop) as group:
            yield group
    except LearnersLost as error:
        error.hint = hint()
        raise


@contextmanager
def _learners(runtime: RuntimeSettings, threads: int, stop: Stop) -> Iterator[Group]:
    found = place()
    if found is not None:
        if runtime.learners != found.size:
            raise ConfigError(
                f"torchrun has started {found.size} processes for {runtime.learners} learners.",
                "leave out --learners: every process is one",
            )
        with _launched(runtime, found, stop) as group:
            yield group
    elif runtime.learners == 1:
        yield Alone()
    else:
        with _hired(runtime, threads) as group:
            yield group


def excuse() -> None:
    """Let those go that torchrun has started, where nothing is left to learn."""
    found = place()
    if found is not None:
        with _launched(RuntimeSettings(), found, NeverStop()):
            pass


@contextmanager
def _launched(runtime: RuntimeSettings, here: Place, stop: Stop) -> Iterator[Group]:
    _stop_without_parent()
    try:
        with stop.interruptible():
            from rlflame.experiment.learners.liveness import gather, of_torchrun  # loads torch

            if torchrun.hosts():
                gather(of_torchrun(), *here, JOINING_S)
    except StopNow:  # nothing has been learned
        raise KeyboardInterrupt from None
    with _joined(runtime, here, JOINING_S) as (group, roll_call):
        try:
            yield group
        except LearnersLost as error:
            late = roll_call.ask(_GRACE_S)
            learners = {rank: roll_call.who(rank) for rank in late}
            if error.hung:
                # Torchrun ends this process when it sees the others gone: it has said why by then.
                atexit.register(_end_those_here, [*learners.values()])
            pids = {rank: learner.pid for rank, learner in learners.items()}
            raise _worded(error, pids, here.size, runtime.learner_deadline_s) from error


def _stop_without_parent() -> None:
    """Where torchrun is killed nobody else would end this run: it saves.

    Linux would tell it by a signal, but once for every thread that torchrun has, and a second
    signal means not to save.
    """
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="rlflame-orphan", daemon=True).start()


def _end_those_here(learners: Iterable[Learner]) -> None:
    """Torchrun asks a process to end, which one that is stopped does not hear, and then waits."""
    from rlflame.experiment.learners.liveness import Learner

    for learner in learners:
        if learner.machine == Learner.here().machine:
            with suppress(OSError):
                os.kill(learner.pid, signal.SIGKILL)


@contextmanager
def _hired(runtime: RuntimeSettings, threads: int) -> Iterator[Group]:
    with ExitStack() as leave:
        shared = leave.enter_context(make_shared_file())
        crew: dict[int, WorkerProcess] = {}
        for rank in range(1, runtime.learners):
            crew[rank] = WorkerProcess(
                module="rlflame.experiment.learners.replica_main",
                show_output=runtime.debug,
                environment={**blas.child_environment(threads), **_loopback()},
                inherited=shared.descriptors,
            )
            leave.callback(crew[rank].retire)
            told = {"rank": rank, "size": runtime.learners, "meeting": shared.path}
            crew[rank].send(Kind.TASK, wire.encode(told))
        os.environ.update(_loopback())
        try:
            _await_loaded(crew)
            here = Place(0, runtime.learners)
            with _joined(runtime, here, _MEETING_S, shared) as (group, roll_call):
                try:
                    yield group
                except LearnersLost as error:
                    late = roll_call.ask(_GRACE_S, lambda: bool(_ended(crew)))
                    pids = {rank: crew[rank].pid for rank in late}
                    deadline_s = runtime.learner_deadline_s
                    raise _worded(error, pids, runtime.learners, deadline_s) from error
        except LearnersLost as error:
            raise _explained(error, crew) from error


def _await_loaded(crew: Mapping[int, WorkerProcess]) -> None:
    """Joining waits inside torch, where neither a signal nor the death of a learner is noticed: it
    begins when all are there, and all load torch at the same time."""
    import rlflame.learning.parallel.torch_process_group  # noqa: F401

    until = time.monotonic() + JOINING_S
    with selectors.DefaultSelector() as waiting:
        for rank, process in crew.items():
            waiting.register(process.answers, selectors.EVENT_READ, rank)
        while late := waiting.get_map():
            if time.monotonic() > until:
                first = min(key.data for key in late.values())
                raise LearnersLost(f"Learner {first} did not load within {JOINING_S:g} s.")
            for key, _ in waiting.select(0.2):
                try:
                    crew[key.data].receive()
                except EOFError as error:
                    raise LearnersLost("A learner has ended before it could join.") from error
                waiting.unregister(key.fileobj)


@contextmanager
def _joined(
    runtime: RuntimeSettings,
    here: Place,
    joining_s: float,
    shared: SharedFile | None = None,
) -> Iterator[tuple[Group, RollCall]]:
    from rlflame.experiment.learners.liveness import FileOfLearners, RollCall, of_torchrun
    from rlflame.learning.parallel.replicated import release
    from rlflame.learning.parallel.torch_process_group import TorchGroup

    meeting: Meeting = of_torchrun() if shared is None else FileOfLearners(shared.path)
    store = None if shared is None else meeting.store(joining_s)
    group = TorchGroup(
        *here,
        deadline_s=runtime.learner_deadline_s,
        joining_s=joining_s,
        clock=time.monotonic,
        store=store,
    )
    try:
        yield group, RollCall(meeting, *here, joining_s, lambda: group.exchanges)
        release(group)
    finally:
        with suppress(RuntimeError):
            group.close()


def _loopback() -> dict[str, str]:
    """Learners on one machine need no network, and no other machine may reach their ports.

    A GLOO_SOCKET_IFNAME that the user has set is for torchrun, and does not count here.
    """
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def _explained(error: LearnersLost, crew: Mapping[int, WorkerProcess]) -> LearnersLost:
    """Who it was, how it ended and what it said last; those it took along are not meant."""
    ended = _ended(crew)
    until = time.monotonic() + _GRACE_S
    while not (ended or error.hung) and time.monotonic() < until:
        time.sleep(0.05)
        ended = _ended(crew)
    if not ended:
        return error
    rank, code = min(ended.items())
    return LearnersLost(
        f"{_named({rank: crew[rank].pid}, len(crew) + 1)} was lost: it {what_became_of_it(code)}.",
        detail=crew[rank].printed().strip(),
    )


def _ended(crew: Mapping[int, WorkerProcess]) -> dict[int, int]:
    """The exit codes of those that ended by themselves."""
    gone = {rank: process.retire() for rank, process in crew.items() if process.exited}
    return {rank: code for rank, code in gone.items() if code != LOST}


def _worded(
    error: LearnersLost, pids: Mapping[int, int], size: int, deadline_s: float
) -> LearnersLost:
    """The same, with the names of those who are to blame."""
    from rlflame.learning.parallel.torch_process_group import silent

    if not pids:
        return error
    have = "has" if len(pids) == 1 else "have"
    said = silent(deadline_s) if error.hung else "has ended."
    found = LearnersLost(
        f"{_named(pids, size)} {said.replace('has', have, 1)}", detail=error.detail
    )
    found.hung = error.hung
    return found


def _named(pids: Mapping[int, int], size: int) -> str:
    """Learner 1 of 2 (process 4711), or several."""
    if len(pids) == 1:
        ((rank, pid),) = pids.items()
        return f"Learner {rank} of {size} (process {pid})"
    *most, last = map(str, sorted(pids))
    numbers = ", ".join(str(pids[rank]) for rank in sorted(pids))
    return f"Learners {', '.join(most)} and {last} of {size} (processes {numbers})"
