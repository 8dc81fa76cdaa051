"""Starts the other learners of a run on this machine, or joins those that torchrun started."""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from rlflame.config.flags import LearnerRank, has_agent_store, read_rank
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, LearnerFailure
from rlflame.learning.parallel.process_group import ProcessGroup, SingleProcessGroup
from rlflame.rollout import blas
from rlflame.rollout.process.channel import MessageKind
from rlflame.rollout.process.worker_process import WorkerProcess, format_exit_clause
from rlflame.training.stop_signal import NullStop, abort_on_stop
from rlflame.training.trainer import StopRequest

if TYPE_CHECKING:
    from rlflame.experiment.learners.liveness import LearnerProcess, Rendezvous


#: Covers the start of Python, the import of torch and the rendezvous of all learners.
JOIN_TIMEOUT_S = 180.0
#: The exit code of a learner that has lost the others.
LOST_EXIT_CODE = 70
_GRACE_S = 3.0
_POLL_S = 0.2
#: Restricts learners on one machine to loopback, so that other machines cannot reach their
#: ports. A GLOO_SOCKET_IFNAME set by the user applies to torchrun only.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
#: Descriptor numbers that other files do not get, because the lowest free number is used first.
_numbers = itertools.cycle(range(512, 960))


@contextmanager
def start_learners(
    runtime: RuntimeSettings, threads: int, hint: Callable[[], str], stop: StopRequest
) -> Iterator[ProcessGroup]:
    """Start the learners of the runtime and yield their group; this process is rank 0.

    `hint` returns the hint of the error that is raised when a learner is lost.
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
    elif runtime.learners > 1:
        group_context = _start_replicas(runtime, threads)
    try:
        with group_context as group:
            yield group
    except LearnerFailure as error:
        error.hint = hint()
        raise


def release_learners() -> None:
    """Release the learners that torchrun started when the run is already complete."""
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
    """Save and stop when torchrun is killed.

    Uses polling: PR_SET_PDEATHSIG would send one signal for each thread of torchrun, and a second
    signal stops a run without saving.
    """
    parent = os.getppid()

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch_parent, name="rlflame-orphan", daemon=True).start()


def _kill_local_learners(learners: Iterable[LearnerProcess]) -> None:
    """Kill learners on this machine: torchrun would wait forever for a suspended process."""
    from rlflame.experiment.learners.liveness import LearnerProcess

    for learner in learners:
        if learner.machine == LearnerProcess.from_current_process().machine:
            with suppress(OSError):
                os.kill(learner.pid, signal.SIGKILL)


@contextmanager
def _start_replicas(runtime: RuntimeSettings, threads: int) -> Iterator[ProcessGroup]:
    size = runtime.learners
    with ExitStack() as stack:
        path, descriptors = stack.enter_context(make_shared_file())
        processes: dict[int, WorkerProcess] = {}
        for rank in range(1, size):
            processes[rank] = WorkerProcess(
                module="rlflame.experiment.learners.replica_main",
                show_output=runtime.debug,
                environment={**blas.make_child_environment(threads), **_LOOPBACK},
                inherited_fds=descriptors,
            )
            stack.callback(processes[rank].terminate)
            order = {"rank": rank, "size": size, "meeting": path}
            processes[rank].channel.send(MessageKind.ORDER, order)
        os.environ.update(_LOOPBACK)
        # Loads torch while the other learners load it, too.
        from rlflame.experiment.learners.liveness import FileRendezvous, await_learners

        rendezvous = FileRendezvous(path)
        try:
            await_learners(
                rendezvous,
                rank=0,
                size=size,
                timeout_s=JOIN_TIMEOUT_S,
                has_failed=lambda: any(process.has_exited for process in processes.values()),
            )
            with _join_group(runtime, LearnerRank(0, size), rendezvous, processes) as group:
                yield group
        except LearnerFailure as error:
            raise _explain_loss(error, processes) from error


@contextmanager
def _join_group(
    runtime: RuntimeSettings,
    learner_rank: LearnerRank,
    rendezvous: Rendezvous,
    processes: Mapping[int, WorkerProcess] | None = None,
) -> Iterator[ProcessGroup]:
    """Join the group of all learners; its failures name the first learner that is late.

    `processes` are the other learners by rank, None if torchrun started them.
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
            if error.is_hung and processes is None:
                # At exit: torchrun ends this process with the others, so show the error first.
                atexit.register(_kill_local_learners, learners)
            name = _format_learner(late_ranks[0], learners[0].pid, learner_rank.size)
            reason = format_timeout(deadline_s) if error.is_hung else "has ended."
            error.message = f"{name} {reason}"
            raise
        release_replicas(group)


def _explain_loss(error: LearnerFailure, processes: Mapping[int, WorkerProcess]) -> LearnerFailure:
    """Return an error with the lost learner, its exit code and its last output."""
    exit_codes = _find_exit_codes(processes)
    deadline = time.monotonic() + _GRACE_S
    while not (exit_codes or error.is_hung) and time.monotonic() < deadline:
        time.sleep(0.05)
        exit_codes = _find_exit_codes(processes)
    if not exit_codes:
        return error
    rank, code = min(exit_codes.items())
    name = _format_learner(rank, processes[rank].pid, len(processes) + 1)
    return LearnerFailure(
        f"{name} was lost: it {format_exit_clause(code)}.",
        detail=processes[rank].read_output().strip(),
    )


def _find_exit_codes(processes: Mapping[int, WorkerProcess]) -> dict[int, int]:
    """Return the exit codes by rank, without learners that ended because another was lost."""
    codes = {rank: process.terminate() for rank, process in processes.items() if process.has_exited}
    return {rank: code for rank, code in codes.items() if code != LOST_EXIT_CODE}


def _format_learner(rank: int, pid: int, size: int) -> str:
    return f"Learner {rank} of {size} (process {pid})"


def _move_up(descriptor: int) -> int:
    """Move an open file to a descriptor number that is not reused soon; return the number.

    torch's FileStore opens its path again when it is destroyed, possibly long after the file was
    closed. If the number were reused by then, it would open and lock the file of a later run.
    """
    try:
        duplicate = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, next(_numbers))
    except OSError:  # fewer descriptors are allowed
        return descriptor
    os.close(descriptor)
    return duplicate


@contextmanager
def make_shared_file() -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the path of the local learners' rendezvous file and the descriptors to inherit.

    Other users can reach a port of this machine, but not this file. On Linux the file is anonymous:
    the learners inherit its descriptor, and it disappears when the last learner ends.
    """
    if sys.platform == "linux":
        descriptor = _move_up(os.memfd_create("rlflame-learners"))
        try:
            os.fchmod(descriptor, 0o600)
            yield f"/proc/self/fd/{descriptor}", [descriptor]
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="rlflame-") as folder:  # mode 0700
            yield os.path.join(folder, "learners"), []
