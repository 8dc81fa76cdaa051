"""Learner processes that exchange arrays through shared memory."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from forked_learners import collect, fork_learners

from rlflame.learning.parallel.shared_memory_group import (
    LostLearner,
    SharedMemoryGroup,
)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_arrays_of_changing_shapes_arrive_by_rank(size):
    shapes = [(3,), (2, 5), (3,), (1000,), (1, 1), (40, 40), (2, 5)] * 20

    def exchange(group: SharedMemoryGroup) -> int:
        pause = np.random.default_rng(group.rank)
        for number, shape in enumerate(shapes):
            if pause.random() < 0.1:
                time.sleep(0.001)  # a fast learner is one exchange ahead
            rows = group.gather(np.full(shape, 1000.0 * number + group.rank, np.float32))
            for rank in range(size):
                if not (rows[rank] == 1000.0 * number + rank).all() or rows[rank].shape != shape:
                    return 1
        return 0

    group, pids = fork_learners(size, exchange)
    assert exchange(group) == 0
    assert collect(pids) == [0] * (size - 1)
    group.close()


def test_values_of_any_size_are_broadcast():
    values = [{"a": np.arange(count, dtype=np.float32), "b": count} for count in (0, 3, 90000)]

    def receive(group: SharedMemoryGroup) -> int:
        for value in values:
            message = group.broadcast(value if group.rank == 0 else None)
            if message["b"] != value["b"] or (message["a"] != value["a"]).any():
                return 1
        return 0

    group, pids = fork_learners(3, receive)
    assert receive(group) == 0
    assert collect(pids) == [0, 0]
    group.close()


@pytest.mark.parametrize("size", [2, 4])
def test_a_learner_that_has_ended_is_noticed_at_once(size):
    read, write = os.pipe()  # as a child's pipe, which closes when the child ends

    def end(group: SharedMemoryGroup) -> int:
        group.gather(np.zeros(2, np.float32))
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        return 0

    group, pids = fork_learners(size, end, child_pipes=[read])
    os.close(write)  # the other processes hold the write end
    group.gather(np.zeros(2, np.float32))
    os.waitpid(pids[0], 0)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with pytest.raises(LostLearner) as failure:
        group.gather(np.zeros(2, np.float32))
    assert not failure.value.is_hung
    group.close()
    os.close(read)


def test_a_learner_that_does_not_answer_is_hung():
    group, pids = fork_learners(2, lambda group: signal.pause())
    group._deadline_s = 0.05
    with pytest.raises(LostLearner) as failure:
        group.gather(np.zeros(2, np.float32))
    assert failure.value.is_hung
    os.kill(pids[0], signal.SIGKILL)
    collect(pids)
    group.close()


def test_nothing_of_a_group_stays_open():
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    group, pids = fork_learners(3, lambda group: group.gather(np.ones(3, np.float32)) is None)
    group.gather(np.ones(3, np.float32))
    collect(pids)
    group.close()
    after = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    assert after <= before
    assert threading.active_count() >= 1


def test_a_learner_that_goes_on_to_the_next_barrier_has_not_ended():
    def send(group: SharedMemoryGroup) -> None:
        memory = group.share_memory(192)
        time.sleep(0.1)
        memory.rows[1][0] = 1
        group.gather(np.zeros(4, np.float32))

    group, pids = fork_learners(2, send)
    memory = group.share_memory(192)

    def is_ready() -> bool:
        was_ready = memory.rows[1][0] == 1
        if not was_ready:
            time.sleep(0.3)  # the other learner arrives at the barrier
        return bool(was_ready)

    memory.wait_until(is_ready)
    group.gather(np.zeros(4, np.float32))
    assert collect(pids) == [0]
    group.close()


def test_a_learner_that_is_late_again_and_again_is_not_lost():
    def send(group: SharedMemoryGroup) -> None:
        memory = group.share_memory(192)
        for number in range(1, 9):
            time.sleep(0.02)
            memory.rows[1][0] = number
        time.sleep(0.1)

    group, pids = fork_learners(2, send, deadline_s=0.1)
    memory = group.share_memory(192)
    for number in range(1, 9):
        memory.wait_until(lambda number=number: memory.rows[1][0] >= number)
    with pytest.raises(LostLearner):
        memory.wait_until(lambda: memory.rows[1][0] > 8)
    assert collect(pids) == [0]
    group.close()
