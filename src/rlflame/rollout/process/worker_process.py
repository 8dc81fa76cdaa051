"""One worker process as its parent sees it: frames out, frames in, what it printed, how it ended.

Nothing here waits for the process except `terminate`. Must not know: tasks, retries, deadlines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from ..search_path import make_child_path
from .lasting_thread import run_in_lasting_thread
from .worker_main import HEADER, FrameKind

_PIPE_BYTES = 1 << 20
_TAIL_BYTES = 4000
_OUTPUT_LIMIT_BYTES = 1 << 20
#: For the last of the output, which a process in another session may hold open.
_RELAY_TIMEOUT_S = 1.0


class ProtocolError(Exception):
    """Bytes arrived that are no frame: something else in that process writes to its pipe."""


class WorkerProcess:
    """A running `rlflame.rollout.process.worker_main`, or another module that speaks as it does.

    Leader of a session of its own. `inherited` are descriptors that it has under the same numbers.
    """

    def __init__(
        self,
        *,
        show_output: bool = False,
        environment: Mapping[str, str] | None = None,
        module: str = "rlflame.rollout.process.worker_main",
        inherited_fds: Sequence[int] = (),
    ) -> None:
        self._output = tempfile.TemporaryFile("ab+", buffering=0)  # noqa: SIM115
        self._output_tail = b""
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._exit_code: int | None = None
        self.answers, write = os.pipe()
        self._relay = OutputRelay() if show_output else None
        output = self._relay.descriptor if self._relay is not None else self._output
        if environment is None:
            from .. import blas  # loads numpy, which whoever begins early does without

            environment = blas.make_child_environment()
        try:
            variables = {**os.environ, **environment, "PYTHONPATH": make_child_path()}
            self._process = run_in_lasting_thread(
                lambda: subprocess.Popen(
                    [sys.executable, "-P", "-u", "-m", module, str(write), str(os.getpid())],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write, *inherited_fds),
                    env=variables,
                    start_new_session=True,
                )
            )
        except BaseException:
            self._output.close()
            os.close(self.answers)
            raise
        finally:
            os.close(write)
            if self._relay is not None:
                self._relay.start()
        assert self._process.stdin is not None
        self.requests = self._process.stdin.fileno()
        for pipe in (self.answers, self.requests):
            os.set_blocking(pipe, False)
            _enlarge_pipe(pipe)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    @property
    def has_backlog(self) -> bool:
        """Whether something is waiting for room in the pipe."""
        return bool(self._unsent)

    def send(self, kind: FrameKind, payload: bytes) -> None:
        """Queue a frame and write what the pipe takes now; a dead process is noticed elsewhere."""
        self._unsent.append(memoryview(HEADER.pack(kind, len(payload))))
        self._unsent.append(memoryview(payload))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                count = os.write(self.requests, self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            rest = self._unsent[0][count:]
            if rest:
                self._unsent[0] = rest
            else:
                self._unsent.popleft()

    def receive(self) -> list[tuple[FrameKind, bytes]]:
        """Frames that have arrived whole.

        Raises BlockingIOError when nothing has come, EOFError when nothing can come any more.
        """
        data = os.read(self.answers, _PIPE_BYTES)
        if not data:
            raise EOFError
        self._received += data
        frames = []
        while len(self._received) >= HEADER.size:
            number, length = HEADER.unpack_from(self._received)
            try:
                kind = FrameKind(number)
            except ValueError as error:
                raise ProtocolError(f"a frame of unknown kind {number}") from error
            end = HEADER.size + length
            if len(self._received) < end:
                break
            frames.append((kind, bytes(memoryview(self._received)[HEADER.size : end])))
            del self._received[:end]
        return frames

    def trim_output(self) -> None:
        """Keep the end of what a talkative environment prints, not all of it."""
        if os.fstat(self._output.fileno()).st_size > _OUTPUT_LIMIT_BYTES:
            self._output_tail = self._read_tail()
            os.ftruncate(self._output.fileno(), 0)

    def read_output(self) -> str:
        """The end of what the process has printed so far; also after it was retired."""
        tail = self._output_tail if self._output.closed else self._read_tail()
        return tail.decode("utf-8", "replace")

    def _read_tail(self) -> bytes:
        size = os.fstat(self._output.fileno()).st_size
        start = max(0, size - _TAIL_BYTES)
        return (self._output_tail + os.pread(self._output.fileno(), _TAIL_BYTES, start))[
            -_TAIL_BYTES:
        ]

    def close_pipe(self) -> None:
        """Close the pipe that the process reads: an idle one ends by itself."""
        self._unsent.clear()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def terminate(self, grace_s: float = 0.0) -> int:
        """Reap the process and all that it started; its exit code. May be called twice."""
        if self._exit_code is not None:
            return self._exit_code
        self.close_pipe()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._exit_code = self._process.wait()
        if self._relay is not None:
            self._relay.join(_RELAY_TIMEOUT_S)
        self._output_tail = self._read_tail()
        self._output.close()
        os.close(self.answers)
        return self._exit_code


class OutputRelay(threading.Thread):
    """Lines that a process prints, written to this process's sys.stderr.

    A process that inherited the descriptor itself would reach the terminal past sys.stderr, which
    escapes control characters.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._read, self.descriptor = os.pipe()

    def start(self) -> None:
        """Begin; the descriptor is the other process's from here on."""
        os.close(self.descriptor)
        super().start()

    def run(self) -> None:
        with open(self._read, encoding="utf-8", errors="backslashreplace", newline="\n") as lines:
            for line in lines:
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(line)
                    sys.stderr.flush()


def _enlarge_pipe(pipe: int) -> None:
    """Room for a whole fragment where the system allows it, so that nobody need wait."""
    import fcntl

    command = getattr(fcntl, "F_SETPIPE_SZ", None)
    if command is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, command, _PIPE_BYTES)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def format_exit_clause(code: int) -> str:
    """The same as the end of a sentence that begins with `it`."""
    description = describe_exit(code)
    return description if code >= 0 else f"was {description}"
