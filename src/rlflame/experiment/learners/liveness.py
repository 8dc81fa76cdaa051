"""Connects the learners, and finds a hung learner after a failed exchange.

In each learner except rank 0, a thread waits on a separate connection for a query from rank 0. The
thread answers with the number of exchanges (such as gathers of gradients) that its learner has
begun, which shows whether the learner is behind the others.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    TCPStore,
)

from rlflame.config.flags import LearnerRank
from rlflame.errors import LearnerFailure
from rlflame.learning.parallel.torch_process_group import TorchProcessGroup

#: A timeout that is longer than any run.
_ENDLESS = timedelta(days=365)
_POLL_S = 0.05
_END = -1


class TcpRendezvous(NamedTuple):
    """The address of the TCP store that all learners use."""

    host: str
    port: int
    #: Distinguishes torchrun restarts that use the same host and port.
    attempt: str = "0"

    def open_store(self, timeout_s: float) -> Store:
        """Open another connection, because a waiting one cannot send requests."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s))


def make_torchrun_rendezvous(environment: Mapping[str, str] = os.environ) -> TcpRendezvous:
    return TcpRendezvous(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def await_learners(rendezvous: TcpRendezvous, rank: int, size: int, timeout_s: float) -> None:
    """Wait for all learners; raise LearnerFailure after `timeout_s` seconds."""
    # Later waits happen inside torch, which does not react to signals. It would also wait for a
    # learner that a signal has ended.
    try:
        store = PrefixStore(f"rlflame/{rendezvous.attempt}/there", rendezvous.open_store(timeout_s))
        store.set(str(rank), "")
        ranks = ["all"] if rank else [str(number) for number in range(1, size)]
        deadline = time.monotonic() + timeout_s
        while not store.check(ranks):
            if time.monotonic() > deadline:
                missing = [name for name in ranks if not store.check([name])]
                noun = "learner" if len(missing) == 1 else "learners"
                absent_learner = "the first learner" if rank else f"{noun} {', '.join(missing)}"
                raise LearnerFailure(
                    f"Timed out after {timeout_s:g} s waiting for {absent_learner} to join."
                )
            time.sleep(_POLL_S)
        if rank == 0:
            store.set("all", "")
    except RuntimeError as error:
        raise LearnerFailure(f"The {size} learners could not connect: {error}") from error


@contextlib.contextmanager
def join_group(
    learner_rank: LearnerRank, rendezvous: TcpRendezvous, deadline_s: float, timeout_s: float
) -> Iterator[tuple[TorchProcessGroup, LivenessMonitor]]:
    """Join the group of all learners; yield the group and a liveness monitor."""
    group = TorchProcessGroup(
        *learner_rank, deadline_s=deadline_s, join_timeout_s=timeout_s, clock=time.monotonic
    )
    try:
        yield (
            group,
            LivenessMonitor(rendezvous, *learner_rank, timeout_s, lambda: group.exchange_count),
        )
    finally:
        with contextlib.suppress(RuntimeError):
            group.close()


class LearnerProcess(NamedTuple):
    """A learner's process ID, and the machine or container where it is valid."""

    pid: int
    machine: str

    @classmethod
    def from_current_process(cls) -> LearnerProcess:
        numbers = ""
        with contextlib.suppress(OSError):  # containers may share a host name and process IDs
            numbers = os.readlink("/proc/self/ns/pid")
        return cls(os.getpid(), f"{platform.node()} {numbers}".strip())


class LivenessMonitor:
    """Sends or answers liveness queries.

    `exchanges` returns the number of exchanges that this learner has begun.
    """

    def __init__(
        self,
        rendezvous: TcpRendezvous,
        rank: int,
        size: int,
        timeout_s: float,
        exchanges: Callable[[], int],
    ) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._other_ranks = [number for number in range(size) if number != rank]
        self._exchanges = exchanges
        attempt, process = f"rlflame/{rendezvous.attempt}", LearnerProcess.from_current_process()
        try:
            self._store = PrefixStore(attempt, rendezvous.open_store(timeout_s))
            self._query_store = PrefixStore(attempt, rendezvous.open_store(timeout_s))
            self._store.set(f"who/{rank}", f"{process.pid} {process.machine}")
        except RuntimeError as error:
            raise LearnerFailure(f"The {size} learners could not connect: {error}") from error

    def start_answering(self, on_answer: Callable[[], None]) -> None:
        """Start a thread that answers one query and then calls `on_answer`."""

        def listen() -> None:
            try:
                self._query_store.wait(["asked"], _ENDLESS)
            except (OSError, RuntimeError):
                return  # the first learner is gone
            self._answer(self._exchanges())
            on_answer()

        threading.Thread(target=listen, name="rlflame-roll-call", daemon=True).start()

    def report_exit(self, *, healthy: bool) -> None:
        """Report that this learner is about to end.

        `healthy` is True if another learner failed first.
        """
        self._answer(self._exchanges() if healthy else _END)

    def _answer(self, exchanges: int) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"well/{self._rank}", str(exchanges))

    def find_late_ranks(self, timeout_s: float) -> Sequence[int]:
        """Return the ranks that did not answer in time, or those furthest behind."""
        answers: dict[int, int] = {}
        deadline = time.monotonic() + timeout_s
        try:
            self._store.set("asked", "")
            while len(answers) < len(self._other_ranks) and time.monotonic() < deadline:
                for rank in self._other_ranks:
                    if rank not in answers and self._store.check([f"well/{rank}"]):
                        answers[rank] = int(self._store.get(f"well/{rank}"))
                time.sleep(_POLL_S)
        except RuntimeError:
            return ()  # the store is gone
        silent = [rank for rank in self._other_ranks if rank not in answers]
        lowest, own_exchanges = min(answers.values(), default=0), self._exchanges()
        stragglers = [
            rank for rank, count in sorted(answers.items()) if count == lowest < own_exchanges
        ]
        return silent or stragglers

    def read_process(self, rank: int) -> LearnerProcess:
        pid, machine = self._store.get(f"who/{rank}").decode().split(" ", 1)
        return LearnerProcess(int(pid), machine)
