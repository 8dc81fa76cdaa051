"""The other learners of a run: started here, watched, and taken along when it ends.

Or, where torchrun has started them all, only joined. Must not know: what is learned.
"""

from __future__ import annotations

import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rlflame.errors import ConfigError, LearnersLost
from rlflame.learner.group import Alone, Group
from rlflame.rollout import blas, wire
from rlflame.rollout.child import Kind
from rlflame.rollout.process import WorkerProcess, how_it_ended
from rlflame.runtime import RuntimeSettings
from rlflame.torchrun import Place, place

#: Python and torch have to be loaded before a learner answers.
JOINING_S = 180.0
#: The same where all have said that they are loaded.
_MEETING_S = 60.0
#: How a learner ends that has lost the others.
LOST = 70
_GRACE_S = 3.0


@contextmanager
def learners(runtime: RuntimeSettings, threads: int, hint: Callable[[], str]) -> Iterator[Group]:
    """The learners that the runtime asks for, this process among them as rank 0.

    `hint` says what to do when one was lost.
    """
    try:
        with _learners(runtime, threads) as group:
            yield group
    except LearnersLost as error:
        error.hint = hint()
        raise


@contextmanager
def _learners(runtime: RuntimeSettings, threads: int) -> Iterator[Group]:
    found = place()
    if found is not None:
        if runtime.learners != found.size:
            raise ConfigError(
                f"torchrun has started {found.size} processes for {runtime.learners} learners.",
                "leave out --learners: every process is one",
            )
        with _joined(runtime, found, JOINING_S) as group:
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
        with _joined(RuntimeSettings(), found, JOINING_S):
            pass


@contextmanager
def _hired(runtime: RuntimeSettings, threads: int) -> Iterator[Group]:
    with tempfile.TemporaryDirectory(prefix="rlflame-learners-") as folder, ExitStack() as leave:
        meeting, arrivals = str(Path(folder) / "meeting"), Path(folder) / "arrivals"
        arrivals.write_bytes(bytes(8 * runtime.learners))
        crew: dict[int, WorkerProcess] = {}
        for rank in range(1, runtime.learners):
            crew[rank] = WorkerProcess(
                module="rlflame.follower",
                show_output=runtime.debug,
                environment={**blas.child_environment(threads), **_loopback()},
            )
            leave.callback(crew[rank].retire)
            told = {"rank": rank, "size": runtime.learners, "meeting": meeting}
            told["arrivals"] = str(arrivals)
            crew[rank].send(Kind.TASK, wire.encode(told))
        os.environ.update(_loopback())
        try:
            _await_loaded(crew)
            here = Place(0, runtime.learners)
            with _joined(runtime, here, _MEETING_S, meeting, str(arrivals)) as group:
                yield group
        except LearnersLost as error:
            raise _explained(error, crew, runtime.learner_deadline_s) from error


def _await_loaded(crew: Mapping[int, WorkerProcess]) -> None:
    """Joining waits inside torch, where neither a signal nor the death of a learner is noticed: it
    begins when all are there, and all load torch at the same time."""
    import rlflame.learner.torch_group  # noqa: F401

    waiting = {process.answers: rank for rank, process in crew.items()}
    until = time.monotonic() + JOINING_S
    while waiting:
        if time.monotonic() > until:
            first = min(waiting.values())
            raise LearnersLost(f"Learner {first} did not load within {JOINING_S:g} s.")
        ready, _, _ = select.select([*waiting], [], [], 0.2)
        for answers in ready:
            try:
                crew[waiting[answers]].receive()
            except EOFError as error:
                raise LearnersLost("A learner has ended before it could join.") from error
            del waiting[answers]


@contextmanager
def _joined(
    runtime: RuntimeSettings,
    here: Place,
    joining_s: float,
    meeting: str | None = None,
    arrivals: str | None = None,
) -> Iterator[Group]:
    from rlflame.learner.leading import release
    from rlflame.learner.torch_group import TorchGroup

    group = TorchGroup(
        *here,
        deadline_s=runtime.learner_deadline_s,
        joining_s=joining_s,
        file=meeting,
        arrivals=arrivals,
    )
    try:
        yield group
        release(group)
    finally:
        with suppress(RuntimeError):
            group.close()


def _loopback() -> dict[str, str]:
    """Learners on one machine need no network, and no name of it that resolves."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", name)}


def _explained(
    error: LearnersLost, crew: Mapping[int, WorkerProcess], deadline_s: float
) -> LearnersLost:
    """Who it was, how it ended and what it said last; those it took along are not meant.

    Of those that are left, whoever is well answers, also while it waits for another.
    """
    for process in crew.values():
        process.send(Kind.BEAT, b"")
    silent = set(crew)
    until = time.monotonic() + _GRACE_S
    ended: dict[int, int] = {}
    while not ended and time.monotonic() < until:
        time.sleep(0.05)
        silent = {rank for rank in silent if not _has_answered(crew[rank])}
        gone = {rank: process.retire() for rank, process in crew.items() if process.exited}
        ended = {rank: code for rank, code in gone.items() if code != LOST}
    if ended:
        rank, code = min(ended.items())
        return LearnersLost(
            f"{_named([rank], crew)} was lost: it {_worded(how_it_ended(code))}.",
            detail=crew[rank].printed().strip(),
        )
    hanging = sorted(silent or error.late or ())
    if error.late is None or not hanging:
        return error
    return LearnersLost(
        f"{_named(hanging, crew)} {'has' if len(hanging) == 1 else 'have'} not answered for "
        f"{deadline_s:g} s (runtime.learner_deadline_s).",
        detail=error.detail,
    )


def _has_answered(process: WorkerProcess) -> bool:
    try:
        return process.exited or bool(process.receive())
    except BlockingIOError:
        return False
    except EOFError:
        return True


def _named(ranks: Sequence[int], crew: Mapping[int, WorkerProcess]) -> str:
    """Learner 1 of 2 (process 4711), or several."""
    size, *pids = len(crew) + 1, *(str(crew[rank].pid) for rank in ranks)
    if len(ranks) == 1:
        return f"Learner {ranks[0]} of {size} (process {pids[0]})"
    *most, last = map(str, ranks)
    return f"Learners {', '.join(most)} and {last} of {size} (processes {', '.join(pids)})"


def _worded(how: str) -> str:
    return how if how.startswith("ended") else f"was {how}"
