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
from rlflame.config.torchrun import LearnerRank, read_rank
from rlflame.errors import ConfigError, LearnerFailure
from rlflame.experiment.learners.shared_file import SharedFile, make_shared_file
from rlflame.learning.parallel.process_group import ProcessGroup, SingleProcessGroup
from rlflame.rollout import blas, wire
from rlflame.rollout.process.worker_main import FrameKind
from rlflame.rollout.process.worker_process import WorkerProcess, format_exit_clause
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import StopInterrupt, StopRequest

if TYPE_CHECKING:
    from rlflame.experiment.learners.liveness import LearnerProcess, LivenessMonitor, Rendezvous

#: Python and torch have to be loaded before a learner answers.
JOIN_TIMEOUT_S = 180.0
#: The same where all have said that they are loaded.
_RENDEZVOUS_TIMEOUT_S = 60.0
#: How a learner ends that has lost the others.
LOST_EXIT_CODE = 70
_GRACE_S = 3.0
_POLL_S = 1.0


@contextmanager
def start_learners(
    runtime: RuntimeSettings, threads: int, hint: Callable[[], str], stop: StopRequest
) -> Iterator[ProcessGroup]:
    """The learners that the runtime asks for, this process among them as rank 0.

    `hint` says what to do when one was lost.
    """
    try:
        with _start_learners(runtime, threads, stop) as group:
            yield group
    except LearnerFailure as error:
        error.hint = hint()
        raise


@contextmanager
def _start_learners(
    runtime: RuntimeSettings, threads: int, stop: StopRequest
) -> Iterator[ProcessGroup]:
    learner_rank = read_rank()
    if learner_rank is not None:
        if runtime.learners != learner_rank.size:
            raise ConfigError(
                f"torchrun has started {learner_rank.size} processes for {runtime.learners} "
                "learners.",
                "leave out --learners: every process is one",
            )
        with _join_torchrun(runtime, learner_rank, stop) as group:
            yield group
    elif runtime.learners == 1:
        yield SingleProcessGroup()
    else:
        with _start_replicas(runtime, threads) as group:
            yield group


def release_learners() -> None:
    """Let those go that torchrun has started, where nothing is left to learn."""
    learner_rank = read_rank()
    if learner_rank is not None:
        with _join_torchrun(RuntimeSettings(), learner_rank, NullStop()):
            pass


@contextmanager
def _join_torchrun(
    runtime: RuntimeSettings, learner_rank: LearnerRank, stop: StopRequest
) -> Iterator[ProcessGroup]:
    _stop_without_parent()
    try:
        with stop.allow_interrupt():
            from rlflame.experiment.learners.liveness import (  # loads torch
                await_learners,
                make_torchrun_rendezvous,
            )

            if torchrun.has_agent_store():
                await_learners(make_torchrun_rendezvous(), *learner_rank, JOIN_TIMEOUT_S)
    except StopInterrupt:  # nothing has been learned
        raise KeyboardInterrupt from None
    with _join_group(runtime, learner_rank, JOIN_TIMEOUT_S) as (group, monitor):
        try:
            yield group
        except LearnerFailure as error:
            late_ranks = monitor.find_late_ranks(_GRACE_S)
            learners = {rank: monitor.read_process(rank) for rank in late_ranks}
            if error.hung:
                # Torchrun ends this process when it sees the others gone: it has said why by then.
                atexit.register(_kill_local_learners, [*learners.values()])
            pids = {rank: learner.pid for rank, learner in learners.items()}
            raise _add_learner_names(
                error, pids, learner_rank.size, runtime.learner_deadline_s
            ) from error


def _stop_without_parent() -> None:
    """Where torchrun is killed nobody else would end this run: it saves.

    Linux would tell it by a signal, but once for every thread that torchrun has, and a second
    signal means not to save.
    """
    parent = os.getppid()

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch_parent, name="rlflame-orphan", daemon=True).start()


def _kill_local_learners(learners: Iterable[LearnerProcess]) -> None:
    """Torchrun asks a process to end, which one that is stopped does not hear, and then waits."""
    from rlflame.experiment.learners.liveness import LearnerProcess

    for learner in learners:
        if learner.machine == LearnerProcess.from_current_process().machine:
            with suppress(OSError):
                os.kill(learner.pid, signal.SIGKILL)


@contextmanager
def _start_replicas(runtime: RuntimeSettings, threads: int) -> Iterator[ProcessGroup]:
    with ExitStack() as stack:
        shared = stack.enter_context(make_shared_file())
        processes: dict[int, WorkerProcess] = {}
        for rank in range(1, runtime.learners):
            processes[rank] = WorkerProcess(
                module="rlflame.experiment.learners.replica_main",
                show_output=runtime.debug,
                environment={**blas.make_child_environment(threads), **_make_loopback_env()},
                inherited_fds=shared.descriptors,
            )
            stack.callback(processes[rank].terminate)
            message = {"rank": rank, "size": runtime.learners, "meeting": shared.path}
            processes[rank].send(FrameKind.TASK, wire.encode(message))
        os.environ.update(_make_loopback_env())
        try:
            _await_loaded(processes)
            learner_rank = LearnerRank(0, runtime.learners)
            with _join_group(runtime, learner_rank, _RENDEZVOUS_TIMEOUT_S, shared) as (
                group,
                monitor,
            ):
                try:
                    yield group
                except LearnerFailure as error:
                    late_ranks = monitor.find_late_ranks(
                        _GRACE_S, lambda: bool(_find_exit_codes(processes))
                    )
                    pids = {rank: processes[rank].pid for rank in late_ranks}
                    deadline_s = runtime.learner_deadline_s
                    raise _add_learner_names(error, pids, runtime.learners, deadline_s) from error
        except LearnerFailure as error:
            raise _explain_loss(error, processes) from error


def _await_loaded(processes: Mapping[int, WorkerProcess]) -> None:
    """Joining waits inside torch, where neither a signal nor the death of a learner is noticed: it
    begins when all are there, and all load torch at the same time."""
    import rlflame.learning.parallel.torch_process_group  # noqa: F401

    deadline = time.monotonic() + JOIN_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for rank, process in processes.items():
            selector.register(process.answers, selectors.EVENT_READ, rank)
        while pending := selector.get_map():
            if time.monotonic() > deadline:
                first = min(key.data for key in pending.values())
                raise LearnerFailure(f"Learner {first} did not load within {JOIN_TIMEOUT_S:g} s.")
            for key, _ in selector.select(0.2):
                try:
                    processes[key.data].receive()
                except EOFError as error:
                    raise LearnerFailure("A learner has ended before it could join.") from error
                selector.unregister(key.fileobj)


@contextmanager
def _join_group(
    runtime: RuntimeSettings,
    learner_rank: LearnerRank,
    join_timeout_s: float,
    shared: SharedFile | None = None,
) -> Iterator[tuple[ProcessGroup, LivenessMonitor]]:
    from rlflame.experiment.learners.liveness import (
        FileRendezvous,
        LivenessMonitor,
        make_torchrun_rendezvous,
    )
    from rlflame.learning.parallel.process_group import release_replicas
    from rlflame.learning.parallel.torch_process_group import TorchProcessGroup

    rendezvous: Rendezvous = (
        make_torchrun_rendezvous() if shared is None else FileRendezvous(shared.path)
    )
    store = None if shared is None else rendezvous.open_store(join_timeout_s)
    group = TorchProcessGroup(
        *learner_rank,
        deadline_s=runtime.learner_deadline_s,
        join_timeout_s=join_timeout_s,
        clock=time.monotonic,
        store=store,
    )
    try:
        yield (
            group,
            LivenessMonitor(
                rendezvous, *learner_rank, join_timeout_s, lambda: group.exchange_count
            ),
        )
        release_replicas(group)
    finally:
        with suppress(RuntimeError):
            group.close()


def _make_loopback_env() -> dict[str, str]:
    """Learners on one machine need no network, and no other machine may reach their ports.

    A GLOO_SOCKET_IFNAME that the user has set is for torchrun, and does not count here.
    """
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def _explain_loss(error: LearnerFailure, processes: Mapping[int, WorkerProcess]) -> LearnerFailure:
    """Who it was, how it ended and what it said last; those it took along are not meant."""
    exit_codes = _find_exit_codes(processes)
    deadline = time.monotonic() + _GRACE_S
    while not (exit_codes or error.hung) and time.monotonic() < deadline:
        time.sleep(0.05)
        exit_codes = _find_exit_codes(processes)
    if not exit_codes:
        return error
    rank, code = min(exit_codes.items())
    return LearnerFailure(
        f"{_format_learners({rank: processes[rank].pid}, len(processes) + 1)} was lost: it "
        f"{format_exit_clause(code)}.",
        detail=processes[rank].read_output().strip(),
    )


def _find_exit_codes(processes: Mapping[int, WorkerProcess]) -> dict[int, int]:
    """The exit codes of those that ended by themselves."""
    codes = {rank: process.terminate() for rank, process in processes.items() if process.has_exited}
    return {rank: code for rank, code in codes.items() if code != LOST_EXIT_CODE}


def _add_learner_names(
    error: LearnerFailure, pids: Mapping[int, int], size: int, deadline_s: float
) -> LearnerFailure:
    """The same, with the names of those who are to blame."""
    from rlflame.learning.parallel.torch_process_group import format_timeout

    if not pids:
        return error
    have = "has" if len(pids) == 1 else "have"
    reason = format_timeout(deadline_s) if error.hung else "has ended."
    failure = LearnerFailure(
        f"{_format_learners(pids, size)} {reason.replace('has', have, 1)}", detail=error.detail
    )
    failure.hung = error.hung
    return failure


def _format_learners(pids: Mapping[int, int], size: int) -> str:
    """Learner 1 of 2 (process 4711), or several."""
    if len(pids) == 1:
        ((rank, pid),) = pids.items()
        return f"Learner {rank} of {size} (process {pid})"
    *head_ranks, last = map(str, sorted(pids))
    numbers = ", ".join(str(pids[rank]) for rank in sorted(pids))
    return f"Learners {', '.join(head_ranks)} and {last} of {size} (processes {numbers})"
