"""A group of learner processes that exchange arrays through shared memory.

The memory has no name: the first learner creates it and the others inherit its descriptor, so
nothing is left behind if all learners are killed. At a barrier, each learner writes one byte into
the inbox pipe of every other learner. The system calls on the pipes also act as memory barriers on
every processor architecture.
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlflame.errors import LearnerFailure
from rlflame.rollout import wire
from rlflame.rollout.task import Float32

from .process_group import SharedMemory

#: The number of times that a waiting learner polls before it sleeps. Polling takes about two
#: milliseconds, which is longer than learners usually wait for each other on a small minibatch.
_SPIN_COUNT = 1500
#: The longest timeout that `poll` accepts, about 24 days.
_LONGEST_MS = 2.0**31 - 1.0
#: The longest sleep between two looks at shared memory.
_LONGEST_SLEEP_MS = 4.0
_MIN_REGION = 256
#: The bytes that announce an arrival. They alternate, because a fast learner may arrive at the next
#: barrier before a slow one has counted the arrivals at this one.
_TOKENS = (b"\0", b"\1")
_yield_processor: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class LostLearner(LearnerFailure):
    """Raised if another learner has ended or, with `is_hung`, missed the deadline."""


class GroupDescriptors(NamedTuple):
    """The file descriptors of a group's shared memory and of each rank's inbox pipe."""

    memory: int
    inboxes: tuple[int, ...]
    outboxes: tuple[int, ...]

    @classmethod
    def create(cls, size: int) -> GroupDescriptors:
        if sys.platform == "linux":
            memory = os.memfd_create("rlflame-learners")
        else:
            with tempfile.TemporaryFile() as file:
                memory = os.dup(file.fileno())
        pipes: list[tuple[int, int]] = []
        try:
            for _ in range(size):
                pipes.append(os.pipe())
        except OSError:
            for descriptor in (memory, *itertools.chain(*pipes)):
                os.close(descriptor)
            raise
        inboxes, outboxes = zip(*pipes, strict=True)
        return cls(memory, inboxes, outboxes)

    def list_all(self) -> list[int]:
        return [self.memory, *self.inboxes, *self.outboxes]

    def close_foreign(self, rank: int) -> None:
        """Close the unused pipe ends, so that writing to a dead learner fails."""
        for number, (inbox, outbox) in enumerate(zip(self.inboxes, self.outboxes, strict=True)):
            os.close(outbox if number == rank else inbox)

    def close_own(self, rank: int) -> None:
        """Close the memory and the pipe ends that this learner uses."""
        os.close(self.memory)
        for number, (inbox, outbox) in enumerate(zip(self.inboxes, self.outboxes, strict=True)):
            os.close(inbox if number == rank else outbox)


class _Region:
    """Shared memory for arrays of at most `capacity` bytes, with two rows per learner.

    Exchanges alternate between the rows: while a learner still reads the rows of one exchange, a
    faster learner may write the rows of the next.
    """

    def __init__(self, memory: int, offset: int, size: int, capacity: int) -> None:
        self.end = offset + -(-2 * size * capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        # All learners are at the same exchange, so none truncates memory that another one uses.
        if os.fstat(memory).st_size < self.end:
            os.ftruncate(memory, self.end)
        mapping = mmap.mmap(memory, self.end - offset, offset=offset)
        count = 2 * size * capacity
        rows = np.frombuffer(mapping, np.uint8, count).reshape(2, size, capacity)
        self.rows: NDArray[np.uint8] = rows
        self.turn = 0


class SharedMemoryGroup:
    """Connects this process to the other learners on one machine.

    A waiting learner polls for a moment and then sleeps. It stops waiting at the deadline, or when
    one of the `child_pipes` becomes readable, which happens when the learner at the other end dies.
    """

    def __init__(
        self,
        rank: int,
        descriptors: GroupDescriptors,
        *,
        deadline_s: float | None = None,
        child_pipes: Sequence[int] = (),
    ) -> None:
        self.rank, self.size = rank, len(descriptors.inboxes)
        self._descriptors = descriptors
        self._inbox = descriptors.inboxes[rank]
        self._outboxes = [fd for n, fd in enumerate(descriptors.outboxes) if n != rank]
        self._deadline_s = deadline_s
        self._regions: dict[int, _Region] = {}
        self._views: dict[tuple[int, ...], tuple[_Region, list[tuple[Float32, Float32]]]] = {}
        self._end = 0
        self._turn = 0
        #: The arrivals counted so far at this barrier and at the next one, indexed by `_turn`.
        self._arrivals = [0, 0]
        descriptors.close_foreign(rank)
        os.set_blocking(self._inbox, False)
        # `select.select` does not support descriptors above 1,023.
        self._spin_poll, self._sleep_poll = select.poll(), select.poll()
        for fd in (self._inbox, *child_pipes):
            self._sleep_poll.register(fd, select.POLLIN)
        self._spin_poll.register(self._inbox, select.POLLIN)

    def gather(self, values: Float32) -> Float32:
        region, views = self._views.get(values.shape) or self._make_views(values.shape)
        row, rows = views[region.turn]
        np.copyto(row, values)
        region.turn ^= 1
        self._wait_for_all()
        return rows

    def use_device(self, device: str) -> None:
        """Do nothing, because this group always exchanges arrays in main memory."""

    def broadcast(self, value: Any) -> Any:
        payload = wire.encode(value) if self.rank == 0 else b""
        sizes = self.gather(np.array([len(payload)], np.int64).view(np.float32))
        size = int(sizes[0].view(np.int64)[0])
        region = self._find_region(size)
        row = region.rows[region.turn, 0, :size]
        if self.rank == 0:
            row[:] = np.frombuffer(payload, np.uint8)
        region.turn ^= 1
        self._wait_for_all()
        return value if self.rank == 0 else wire.decode(row.tobytes())

    def share_memory(self, size: int) -> SharedMemory:
        region = _Region(self._descriptors.memory, self._end, self.size, size)
        self._end = region.end
        return SharedMemory(region.rows[0], self._wait_until)

    def close(self) -> None:
        """Release the memory and close the pipes."""
        self._regions.clear()
        self._views.clear()
        self._descriptors.close_own(self.rank)

    def _find_region(self, byte_count: int) -> _Region:
        """Return the region for arrays of this size; all learners create it together."""
        capacity = max(_MIN_REGION, 1 << (byte_count - 1).bit_length())
        region = self._regions.get(capacity)
        if region is None:
            region = _Region(self._descriptors.memory, self._end, self.size, capacity)
            self._regions[capacity] = region
            self._end = region.end
        return region

    def _make_views(self, shape: tuple[int, ...]) -> tuple[_Region, list[tuple[Float32, Float32]]]:
        """Return the region for this shape, and views of its rows.

        For each of the two alternating sets of rows, the views are this learner's array and the
        arrays of all learners.
        """
        byte_count = 4 * int(np.prod(shape))
        region = self._find_region(byte_count)
        arrays = [
            rows[:, :byte_count].view(np.float32).reshape(self.size, *shape) for rows in region.rows
        ]
        self._views[shape] = views = region, [(rows[self.rank], rows) for rows in arrays]
        return views

    def _wait_for_all(self) -> None:
        """Wait until every learner has reached this barrier."""
        self._turn = turn = self._turn ^ 1
        try:
            for outbox in self._outboxes:
                os.write(outbox, _TOKENS[turn])
        except OSError as error:
            raise LostLearner("Another learner has ended.") from error
        while self._arrivals[turn] < self.size - 1:
            self._wait_for_token()
            tokens = os.read(self._inbox, 4096)
            if not tokens:
                raise LostLearner("All other learners have ended.")
            late = tokens.count(1)
            self._arrivals[1] += late
            self._arrivals[0] += len(tokens) - late
        self._arrivals[turn] = 0

    def _wait_for_token(self) -> None:
        """Wait until the inbox has a byte."""
        for _ in range(_SPIN_COUNT):
            if self._spin_poll.poll(0):
                return
            _yield_processor()
        deadline_ms = None
        if self._deadline_s is not None:
            deadline_ms = min(1000.0 * self._deadline_s, _LONGEST_MS)
        ready = [fd for fd, _ in self._sleep_poll.poll(deadline_ms)]
        if self._inbox not in ready:
            failure = LostLearner("Another learner has ended.")
            failure.is_hung = not ready
            raise failure

    def _wait_until(self, is_ready: Callable[[], bool]) -> None:
        waited_ms, sleep_ms = 0.0, 1.0
        while not is_ready():
            is_late = self._deadline_s is not None and waited_ms > 1000.0 * self._deadline_s
            # If the inbox is readable, another learner has ended, or it has written what this
            # learner waits for and has gone on to the next barrier.
            if is_late or (self._sleep_poll.poll(sleep_ms) and not is_ready()):
                failure = LostLearner("Another learner has ended.")
                failure.is_hung = is_late
                raise failure
            waited_ms += sleep_ms
            sleep_ms = min(2.0 * sleep_ms, _LONGEST_SLEEP_MS)
