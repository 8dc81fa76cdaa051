"""Arrays between two processes that wait for each other thousands of times a second.

It uses the pipes of a `Channel` and reads into the arrays themselves. An end that waits polls for a
while before it sleeps, because to be woken takes as long as the work between two exchanges.
Exchanges are numbered, so that no array is taken for another one.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

from rlflame.rollout import wire
from rlflame.rollout.process.channel import Channel
from rlflame.rollout.task import Array

#: The number of an exchange or a message, and how many bytes follow.
_HEAD = struct.Struct("<QQ")
#: Longer than the halves of a small minibatch differ; beyond it one waits asleep.
_AWAKE_S = 0.002

#: The longest wait that `poll` can count, about 24 days.
_LONGEST_MS = 2.0**31 - 1.0
#: Should the other end be on this very processor.
_let_others_run: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class LostConnection(Exception):
    """The other process is gone, or sent something else than what was expected."""


class ConnectionTimeout(LostConnection):
    """The other process is there and does not answer."""


class PeerConnection:
    """One end. Raises `LostConnection`; with a deadline also where nothing moves for so long."""

    def __init__(self, channel: Channel, deadline_s: float | None = None) -> None:
        read_fd, write_fd = self._read_fd, self._write_fd = channel.pipes
        self.deadline_ms = None if deadline_s is None else min(1000.0 * deadline_s, _LONGEST_MS)
        self._sends = self._receipts = 0
        for pipe in (read_fd, write_fd):
            os.set_blocking(pipe, False)
        # Not select, which knows no descriptors from 1,024 on.
        self._input, self._both, self._output = select.poll(), select.poll(), select.poll()
        for poll in (self._input, self._both):
            poll.register(read_fd, select.POLLIN)
        for poll in (self._output, self._both):
            poll.register(write_fd, select.POLLOUT)

    def has_message(self, timeout_s: float = 0.0) -> bool:
        """Whether a message can be received, or the other end is closed."""
        return bool(self._input.poll(1000.0 * timeout_s))

    def send_message(self, value: Any) -> None:
        self._move(self._add_header(memoryview(wire.encode(value))), [])

    def receive_message(self) -> Any:
        """The next message, for which one waits asleep: it comes after a batch."""
        if not self._input.poll(self.deadline_ms):
            raise ConnectionTimeout
        head = bytearray(_HEAD.size)
        self._move([], [memoryview(head)])
        payload = bytearray(self._read_length(head))
        self._move([], [memoryview(payload)])
        try:
            return wire.decode(bytes(payload))
        except wire.WireError as error:
            raise LostConnection from error

    def exchange(self, outgoing: Array, incoming: Array) -> None:
        """Send one array and fill the other. The other end does the same at the same time."""
        head, numbers = bytearray(_HEAD.size), _as_bytes(incoming)
        self._move(self._add_header(_as_bytes(outgoing)), [memoryview(head), numbers])
        if self._read_length(head) != len(numbers):
            raise LostConnection

    def _add_header(self, payload: memoryview) -> list[memoryview]:
        self._sends += 1
        return [memoryview(_HEAD.pack(self._sends, len(payload))), payload]

    def _read_length(self, head: bytearray) -> int:
        self._receipts += 1
        number, length = _HEAD.unpack(head)
        if number != self._receipts:
            raise LostConnection
        return int(length)

    def _move(self, writes: list[memoryview], reads: list[memoryview]) -> None:
        """Write and read as the pipes allow, until both are done."""
        try:
            while writes or reads:
                size = self._write(writes) if writes else 0
                count = self._read(reads) if reads else 0
                writes, reads = _drop_bytes(writes, size), _drop_bytes(reads, count)
                if not count and (reads or not size):
                    self._wait(reads, writes)
        except OSError as error:
            raise LostConnection from error

    def _write(self, writes: list[memoryview]) -> int:
        try:
            return os.writev(self._write_fd, writes)
        except BlockingIOError:
            return 0

    def _read(self, reads: list[memoryview]) -> int:
        try:
            count = os.readv(self._read_fd, reads)
        except BlockingIOError:
            return 0
        if not count:
            raise LostConnection
        return count

    def _wait(self, reads: list[memoryview], writes: list[memoryview]) -> None:
        """Until something can be moved."""
        poll = (self._both if writes else self._input) if reads else self._output
        deadline = time.perf_counter() + _AWAKE_S
        while time.perf_counter() < deadline:
            if poll.poll(0):
                return
            _let_others_run()
        if not poll.poll(self.deadline_ms):
            raise ConnectionTimeout


def _as_bytes(array: Array) -> memoryview:
    """The memory of a contiguous array, which may be empty."""
    return array.data.cast("B") if array.size else memoryview(bytearray())


def _drop_bytes(views: list[memoryview], count: int) -> list[memoryview]:
    """The rest of the views behind the first `count` bytes."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views
