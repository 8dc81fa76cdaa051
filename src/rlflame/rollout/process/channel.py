"""Messages between a process and a child that it started: one protocol over two pipes.

A message is one byte of kind, eight bytes of length, and a payload in `wire`'s bytes. The parent's
end is a `Channel`, which never waits when it sends; the child's end is a `ParentChannel`.
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
#: What one read takes, and the size that a pipe is given where the system allows it.
PIPE_BYTES = 1 << 20
#: The longest wait that `poll` can count, about 24 days.
_LONGEST_MS = 2.0**31 - 1.0
#: Reads of one `receive_all`, so that a child that never stops writing holds up no other one.
_MOST_READS = 16
#: Buffers that one `writev` takes; Linux allows 1,024.
_WRITE_BUFFERS = 64


class MessageKind(IntEnum):
    """What a message is about. A child hears its order first, and tasks if it is a worker."""

    POLICY = 1  # {"id", "arrays"}: weights that tasks will name
    FORGET = 2  # {"id"} of weights
    TASK = 3  # work: a RolloutTask, or what else the child was started for
    HELLO = 4  # the child is ready; what it runs on
    BEAT = 5  # how far the task is
    RESULT = 6  # the answer to a task or an order
    BROKEN = 7  # {"traceback"} of a bug, or of a message that the child could not read
    PREPARE = 8  # {"id"} of an environment that tasks will be about
    ORDER = 9  # what this child is for
    STOP = 10  # end as after SIGTERM
    EVENT = 11  # something that happened meanwhile
    FAILURE = 12  # an RlflameError as values
    CANCEL = 13  # {"number"} of tasks that are not wanted any more
    PROBE = 14  # what does the other end run on?


class ProtocolError(Exception):
    """Bytes arrived that are no message: something else in that process writes to its pipe."""


class Message(NamedTuple):
    """A message as it arrived. Its value is decoded when it is read."""

    kind: MessageKind
    payload: bytes

    @property
    def value(self) -> Any:
        from .. import wire  # loads numpy, which the parent may not need yet

        try:
            return wire.decode(self.payload)
        except wire.WireError as error:
            raise ProtocolError(f"a damaged frame ({error})") from error


class Channel:
    """One end of two pipes. One thread receives; any thread may send."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        #: Of the header or payload that is being read: its parts, and how many bytes are missing.
        self._parts: list[bytes] = []
        self._missing = HEADER.size
        #: The kind of the message whose payload is being read.
        self._kind: MessageKind | None = None
        self._messages: deque[Message] = deque()
        self._has_ended = False
        #: Why nothing can be read any more, if not because the other end is closed.
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
        """Whether something waits for room in the pipe."""
        return bool(self._unsent)

    def send(self, kind: MessageKind, value: Any = None) -> int:
        """Queue a message and write what the pipe takes now; the size of its payload."""
        from .. import wire

        payload = wire.encode(value)
        self.send_bytes(kind, payload)
        return len(payload)

    def send_bytes(self, kind: MessageKind, payload: bytes | memoryview) -> None:
        """Queue a message whose payload is encoded. Without a reader, `receive` raises."""
        with self._lock:
            self._unsent += [memoryview(HEADER.pack(kind, len(payload))), memoryview(payload)]
            self._write()

    def flush(self) -> None:
        """Write what the pipe takes now."""
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
        """Nobody reads any more, so that `receive` raises."""
        self._unsent.clear()

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Whether `receive` does not have to wait, after at most so long without any movement."""
        while not self._messages and not self._has_ended:
            if not (self._read() or self._has_ended or wait((self,), timeout_s)):
                return False
        return True

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message; TimeoutError without one, EOFError where nothing can come any more."""
        if not self.poll(timeout_s):
            raise TimeoutError
        if not self._messages:
            raise self._take_error()
        return self._messages.popleft()

    def receive_all(self) -> list[Message]:
        """What has arrived by now, without waiting. EOFError where nothing can come any more."""
        for _ in range(_MOST_READS):
            if not self._read():
                break
        if self._has_ended and not self._messages:
            raise self._take_error()
        messages = [*self._messages]
        self._messages.clear()
        return messages

    def _take_error(self) -> Exception:
        """Why nothing can come any more: once that bytes were no message, then the end."""
        error, self._error = self._error, None
        return error or EOFError()

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end is closed."""
        with contextlib.suppress(EOFError):
            while True:
                yield self.receive()

    def _read(self) -> bool:
        """Take in what has arrived; False where there was nothing, or the other end is closed."""
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
            # Of one part it is that part itself, and no copy.
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
                # The messages before it are whole, and are received first.
                self._has_ended = True
                self._error = ProtocolError(f"a frame of unknown kind {number}")
        return not self._has_ended

    def close_sending(self) -> None:
        """Close the pipe that the other process reads: an idle child ends by itself."""
        with self._lock:
            self._unsent.clear()
            if self._write_fd >= 0:
                os.close(self._write_fd)
            self._write_fd = -1  # a write fails, and never reaches another file of this number

    def close(self) -> None:
        """May be called twice."""
        self.close_sending()
        if self._read_fd >= 0:
            os.close(self._read_fd)
        self._read_fd, self._has_ended = -1, True


class WakePipe:
    """Ends a `wait` of another thread. May be woken from any thread, also after it was closed."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        # A number that was closed may be another file's already.
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._read_fd

    def wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes just as well
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
    """Channels on which something moved; none after a time-out or a wake.

    What waits for room in their pipes is written. `poll` takes descriptors from 1,024 on, which
    `select` does not.
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
    """Room for a whole fragment where the system allows it, so that no end has to wait."""
    import fcntl

    command = getattr(fcntl, "F_SETPIPE_SZ", None)
    if command is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, command, PIPE_BYTES)
