"""Where learners meet, and how the first asks who of them is well once an exchange has failed.

Each has a thread that waits for the question, on a connection that is nobody's exchange: a learner
that waits for another answers, and one that hangs in its own arithmetic says by the number of
exchanges it has come to that it is behind. Must not know: who started the processes, what is
exchanged.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from rlflame.errors import LearnersLost

#: Longer than any run.
_ENDLESS = timedelta(days=365)
_LOOK_S = 0.05
_ENDED = -1


class Meeting(Protocol):
    """Where learners find each other, and one asks the others."""

    @property
    def attempt(self) -> str:
        """What tells those apart who begin again at one place."""

    def store(self, patience_s: float) -> Store:
        """A new connection: one that waits is of no use for anything else."""

    def wait_for(self, key: str, store: Store) -> None:
        """Return once the key is there; a RuntimeError where nobody can set it any more."""


class Port(NamedTuple):
    """A port that all learners know; `attempt` tells those apart who begin again at one port."""

    host: str
    port: int
    attempt: str = "0"

    def store(self, patience_s: float) -> Store:
        """A new connection: one that waits is of no use for anything else."""
        return TCPStore(
            self.host, self.port, is_master=False, timeout=timedelta(seconds=patience_s)
        )

    def wait_for(self, key: str, store: Store) -> None:
        store.wait([key], _ENDLESS)


class FileOfLearners(NamedTuple):
    """A file that all learners on one machine can open, and no other user."""

    path: str
    attempt: str = "0"

    def store(self, patience_s: float) -> Store:
        store = FileStore(self.path)
        store.set_timeout(timedelta(seconds=patience_s))
        return store

    def wait_for(self, key: str, store: Store) -> None:
        """Look only when the file has grown: a look locks it, and whoever is stopped in the middle
        of one keeps all others from writing."""
        size = -1
        while True:
            now = os.stat(self.path).st_size
            if now != size and store.check([key]):
                return
            size = now
            time.sleep(_LOOK_S)


def of_torchrun(environment: Mapping[str, str] = os.environ) -> Port:
    return Port(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def gather(meeting: Meeting, rank: int, size: int, patience_s: float) -> None:
    """Wait until all are there. What comes after waits inside torch, where no signal is heard; and
    whom a signal has ended is waited for there all the same."""
    try:
        store = PrefixStore(f"rlflame/{meeting.attempt}/there", meeting.store(patience_s))
        store.set(str(rank), "")
        awaited = ["all"] if rank else [str(number) for number in range(1, size)]
        until = time.monotonic() + patience_s
        while not store.check(awaited):
            if time.monotonic() > until:
                missing = ", ".join(name for name in awaited if not store.check([name]))
                who = "the first learner" if rank else f"learner {missing}"
                raise LearnersLost(f"{patience_s:g} s were not enough for {who} to join.")
            time.sleep(_LOOK_S)
        if rank == 0:
            store.set("all", "")
    except RuntimeError as error:
        raise LearnersLost(f"The {size} learners did not come together: {error}") from error


class Learner(NamedTuple):
    """A process that learns, and where its number means something."""

    pid: int
    machine: str

    @classmethod
    def here(cls) -> Learner:
        numbers = ""
        with contextlib.suppress(OSError):  # containers may share a name, and each counts from 1
            numbers = os.readlink("/proc/self/ns/pid")
        return cls(os.getpid(), f"{platform.node()} {numbers}".strip())


class RollCall:
    """One learner's part in it; `exchanges` says how many it has come to."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        size: int,
        patience_s: float,
        exchanges: Callable[[], int],
    ) -> None:
        self._meeting = meeting
        self._rank = rank
        self._others = [number for number in range(size) if number != rank]
        self._exchanges = exchanges
        attempt, here = f"rlflame/{meeting.attempt}", Learner.here()
        try:
            self._store = PrefixStore(attempt, meeting.store(patience_s))
            self._asked = PrefixStore(attempt, meeting.store(patience_s))
            self._store.set(f"who/{rank}", f"{here.pid} {here.machine}")
        except RuntimeError as error:
            raise LearnersLost(f"The {size} learners did not come together: {error}") from error

    def attend(self, answered: Callable[[], None]) -> None:
        """Answer from now on, when the first learner asks."""

        def listen() -> None:
            try:
                self._meeting.wait_for("asked", self._asked)
            except (OSError, RuntimeError):
                return  # whoever could ask is gone
            self._answer(self._exchanges())
            answered()

        threading.Thread(target=listen, name="rlflame-roll-call", daemon=True).start()

    def leave(self, *, well: bool) -> None:
        """Answer before anybody asks: this learner ends, because of another or by itself."""
        self._answer(self._exchanges() if well else _ENDED)

    def _answer(self, exchanges: int) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"well/{self._rank}", str(exchanges))

    def ask(self, patience_s: float, over: Callable[[], bool] = lambda: False) -> Sequence[int]:
        """Those who say nothing within the time; if there are none, those who are most behind."""
        said: dict[int, int] = {}
        until = time.monotonic() + patience_s
        try:
            self._store.set("asked", "")
            while len(said) < len(self._others) and time.monotonic() < until and not over():
                for rank in self._others:
                    if rank not in said and self._store.check([f"well/{rank}"]):
                        said[rank] = int(self._store.get(f"well/{rank}"))
                time.sleep(_LOOK_S)
        except RuntimeError:
            return ()  # the meeting is over, and nobody can be asked
        silent = [rank for rank in self._others if rank not in said]
        least, here = min(said.values(), default=0), self._exchanges()
        behind = [rank for rank, come in sorted(said.items()) if come == least < here]
        return silent or behind

    def who(self, rank: int) -> Learner:
        pid, machine = self._store.get(f"who/{rank}").decode().split(" ", 1)
        return Learner(int(pid), machine)
