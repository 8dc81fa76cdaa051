"""Messages between a process and its child, which are sent through two pipes.

A message consists of its kind (one byte), the length of the payload (eight bytes), and the payload
in `wire`'s format. The parent uses a `Channel`, whose `send` never blocks, and the child uses a
`ParentChannel`.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

HEADER = struct.Struct("<BQ")
#: The maximum size of a read, and the size of a pipe if the system allows it.
PIPE_BYTES = 1 << 20
#: The longest timeout of `poll`, about 24 days.
_LONGEST_MS = 2.0**31 - 1.0
#: The maximum number of reads in one `receive_all`, so that no child can block the others.
_MOST_READS = 16
#: The maximum number of buffers in one `writev`; Linux allows 1,024.
_WRITE_BUFFERS = 64


class MessageKind(IntEnum):
    """The kinds of messages between a process and its child."""

    POLICY = 1  # {"id", "arrays"}: weights that tasks refer to
    FORGET = 2  # {"id"} of weights
    TASK = 3  # a RolloutTask, or other work
    HELLO = 4  # the child is ready; its description
    BEAT = 5  # the progress of the task
    RESULT = 6  # the answer to a task or an order
    BROKEN = 7  # {"traceback"} of a bug or of an unreadable message
    PREPARE = 8  # {"id"} of the environment that later tasks need
    ORDER = 9  # the work of a child that is not a rollout worker; its first message
    STOP = 10  # a request to end, like SIGTERM
    EVENT = 11  # an event during the work
    FAILURE = 12  # the fields of an RlflameError
    CANCEL = 13  # {"number"} of cancelled tasks
    PROBE = 14  # a request for a description of the fleet's workers


class ProtocolError(Exception):
    """Raised if bytes are not a message, because other code wrote to the pipe."""


class Message(NamedTuple):
    """A received message, whose value is decoded on access."""

    kind: MessageKind
    payload: bytes

    @property
    def value(self) -> Any:
        from .. import wire  # imports numpy, which the parent may not need yet

        try:
            return wire.decode(self.payload)
        except wire.WireError as error:
            raise ProtocolError(f"a damaged frame ({error})") from error


class Channel:
    """One end of a pair of pipes. Any thread may send, but only one may receive."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        #: The parts of the header or payload that is being read, and the number of missing bytes.
        self._parts: list[bytes] = []
        self._missing = HEADER.size
        #: The kind of the message whose payload is being read.
        self._kind: MessageKind | None = None
        self._messages: deque[Message] = deque()
        self._has_ended = False
        #: The error after which nothing more can be read; None if the other end was closed.
        self._error: ProtocolError | None = None
        self._lock = threading.Lock()
        self._unsent: list[memoryview] = []
        for pipe in (read_fd, write_fd):
            os.set_blocking(pipe, False)
            _enlarge_pipe(pipe)

    def fileno(self) -> int:
        return self._read_fd

    @property
    def pipes(self) -> tuple[int, int]:
        """The descriptors that this end reads from and writes to."""
        return self._read_fd, self._write_fd

    @property
    def has_backlog(self) -> bool:
        """Whether unsent messages are waiting for room in the pipe."""
        return bool(self._unsent)

    def send(self, kind: MessageKind, value: Any = None) -> int:
        """Queue a message, write what the pipe accepts, and return the payload's size."""
        from .. import wire

        payload = wire.encode(value)
        self.send_bytes(kind, payload)
        return len(payload)

    def send_bytes(self, kind: MessageKind, payload: bytes | memoryview) -> None:
        """Queue a message with an encoded payload, and write what the pipe accepts."""
        with self._lock:
            self._unsent += [memoryview(HEADER.pack(kind, len(payload))), memoryview(payload)]
            self._write()

    def flush(self) -> None:
        """Write as many unsent bytes as the pipe accepts."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        while self._unsent:
            try:
                count = os.writev(self._write_fd, self._unsent[:_WRITE_BUFFERS])
            except BlockingIOError:
                return
            except OSError:
                self._drop_unsent()
                return
            # Remove what was written.
            while self._unsent and count >= len(self._unsent[0]):
                count -= len(self._unsent.pop(0))
            if count:
                self._unsent[0] = self._unsent[0][count:]

    def _drop_unsent(self) -> None:
        """Discard unsent messages, because the other end of the pipe is closed."""
        self._unsent.clear()

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Wait until `receive` would not block; return False on a timeout."""
        while not self._messages and not self._has_ended:
            if not (self._read() or self._has_ended or wait((self,), timeout_s)):
                return False
        return True

    def receive(self, timeout_s: float | None = None) -> Message:
        """Return the next message; raise TimeoutError if none arrives in time.

        Raises EOFError if no more messages can arrive, and ProtocolError after invalid bytes.
        """
        if not self.poll(timeout_s):
            raise TimeoutError
        if not self._messages:
            raise self._take_error()
        return self._messages.popleft()

    def receive_all(self) -> list[Message]:
        """Return all messages that have arrived; raise EOFError if no more can arrive."""
        for _ in range(_MOST_READS):
            if not self._read():
                break
        if self._has_ended and not self._messages:
            raise self._take_error()
        messages = [*self._messages]
        self._messages.clear()
        return messages

    def _take_error(self) -> Exception:
        """Return the error to raise: a protocol error the first time, then EOFError."""
        error, self._error = self._error, None
        return error or EOFError()

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the other end is closed."""
        with contextlib.suppress(EOFError):
            while True:
                yield self.receive()

    def _read(self) -> bool:
        """Read available data; return False if there is none or the other end is closed."""
        if self._has_ended:
            return False
        try:
            data = os.read(self._read_fd, min(self._missing, PIPE_BYTES))
        except BlockingIOError:
            return False
        self._has_ended = not data
        self._parts.append(data)
        self._missing -= len(data)
        while not self._missing and not self._has_ended:
            # If there is only one part, `join` does not copy it.
            part = b"".join(self._parts)
            self._parts.clear()
            if self._kind is not None:
                self._messages.append(Message(self._kind, part))
                self._kind, self._missing = None, HEADER.size
                continue
            number, self._missing = HEADER.unpack(part)
            try:
                self._kind = MessageKind(number)
            except ValueError:
                # The earlier messages are complete and are received first.
                self._has_ended = True
                self._error = ProtocolError(f"a frame of unknown kind {number}")
        return not self._has_ended

    def close_sending(self) -> None:
        """Close the pipe to the other process, so that an idle child ends."""
        with self._lock:
            self._unsent.clear()
            if self._write_fd >= 0:
                os.close(self._write_fd)
            # A later write fails, and cannot reach another file with the same descriptor.
            self._write_fd = -1

    def close(self) -> None:
        """Close both pipes. May be called twice."""
        self.close_sending()
        if self._read_fd >= 0:
            os.close(self._read_fd)
        self._read_fd, self._has_ended = -1, True


class WakePipe:
    """Ends a `wait` in another thread. `wake` is thread-safe, even after `close`."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        # After `close`, the number of a descriptor may already belong to another file.
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._read_fd

    def wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe also wakes
            if not self._closed:
                os.write(self._write_fd, b".")

    def reset(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._read_fd)
            os.close(self._write_fd)


def wait(
    channels: Iterable[Channel], timeout_s: float | None = None, wake_pipe: WakePipe | None = None
) -> list[Channel]:
    """Wait until channels can be read or written, and return these channels.

    The list is empty after a timeout or a call of `wake`. Unsent messages are written to pipes that
    have room. `poll` is used because `select` rejects descriptors of 1,024 and above.
    """
    poll = select.poll()
    channel_by_fd: dict[int, Channel] = {}
    for channel in channels:
        channel_by_fd[channel.fileno()] = channel
        poll.register(channel.fileno(), select.POLLIN)
        if channel.has_backlog:
            channel_by_fd[channel._write_fd] = channel
            poll.register(channel._write_fd, select.POLLOUT)
    if wake_pipe is not None:
        poll.register(wake_pipe.fileno(), select.POLLIN)
    timeout_ms = None if timeout_s is None else min(1000.0 * timeout_s, _LONGEST_MS)
    ready_fds = [fd for fd, _ in poll.poll(timeout_ms)]
    if wake_pipe is not None and wake_pipe.fileno() in ready_fds:
        wake_pipe.reset()
    ready = dict.fromkeys(channel_by_fd[fd] for fd in ready_fds if fd in channel_by_fd)
    for channel in ready:
        channel.flush()
    return [*ready]


def _enlarge_pipe(pipe: int) -> None:
    """If possible, enlarge a pipe so that it can hold a whole fragment."""
    import fcntl

    command = getattr(fcntl, "F_SETPIPE_SZ", None)
    if command is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, command, PIPE_BYTES)
