"""Several learners as threads of this process, synchronised by a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from tiny_runs import Run, run

from rlflame.experiment.learners import replica_main
from rlflame.learning.parallel.process_group import release_replicas
from rlflame.rollout import wire
from rlflame.training.trainer import Snapshot

T = TypeVar("T")


class Table:
    """The state that the learners share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.places: list[Any] = [None] * size
        self.shared = b""
        #: The number of gathers of each learner.
        self.gathers = [0] * size


class Seat:
    """A learner's place in the group. It implements ProcessGroup."""

    share_memory = None

    def __init__(self, table: Table, rank: int) -> None:
        self.rank = rank
        self.size = table.size
        self._table = table

    def gather(self, values: np.ndarray) -> np.ndarray:
        self._table.places[self.rank] = values.copy()
        self._table.gathers[self.rank] += 1
        self._table.barrier.wait()
        whole = np.stack(self._table.places)
        self._table.barrier.wait()
        return whole

    def use_device(self, device: str) -> None:
        assert device == "cpu"

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self._table.shared = wire.encode(value)
        self._table.barrier.wait()
        found = self._table.shared
        self._table.barrier.wait()
        return value if self.rank == 0 else wire.decode(found)


def together(size: int, work: Callable[[Seat], T]) -> list[T]:
    """Run `work` for each learner and return the results, or raise the first error."""
    table = Table(size)
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def sit(rank: int) -> None:
        try:
            found[rank] = work(Seat(table, rank))
        except BaseException as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=sit, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return [found[rank] for rank in range(size)]


def learned_by(learners: int, data: dict[str, Any], compare_every: int | None = None) -> Run:
    """Train a tiny run with `learners` learners, and return the run of rank 0."""

    return _turn(learners, data, compare_every)


def resumed_by(data: dict[str, Any], turns: list[tuple[int, int]]) -> Run:
    """Train one recipe with several groups in turn, given as (learners, iterations)."""
    saved, stood = None, 0
    for learners, iterations in turns:
        stood += iterations
        found = _turn(learners, {**data, "stop_at_iterations": stood}, None, saved)
        saved = found.last
    return found


def _turn(
    learners: int,
    data: dict[str, Any],
    compare_every: int | None = None,
    saved: Snapshot | None = None,
) -> Run:
    def work(seat: Seat) -> Run | None:
        if seat.rank:
            return replica_main.learn(seat)
        found = run(data, group=seat, compare_every=compare_every, saved=saved)
        release_replicas(seat)
        return found

    if learners == 1:
        return run(data, saved=saved)
    first = together(learners, work)[0]
    assert first is not None
    return first
