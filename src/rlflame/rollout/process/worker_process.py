"""A child process as seen by its parent: channel, output and exit code.

Only `terminate` waits for the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..search_path import make_child_path
from .channel import Channel, ProtocolError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")

_TAIL_BYTES = 4000
_OUTPUT_LIMIT_BYTES = 1 << 20
#: How long to wait for the end of the output, which a process in another session may keep open.
_RELAY_TIMEOUT_S = 1.0
#: How long a process may take to exit after its pipe is closed.
_EXIT_GRACE_S = 5.0


class WorkerProcess:
    """A child process that runs `module`, which opens a `ParentChannel`.

    The child leads a new session, and inherits `inherited_fds` with the same descriptor numbers.
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
        self._exit_code: int | None = None
        self._poll_lock = threading.Lock()
        if environment is None:
            from .. import blas  # its functions load numpy, which `PrestartPool` avoids

            environment = blas.make_child_environment()
        variables = {**os.environ, **environment, "PYTHONPATH": make_child_path()}
        relay_fd, output = os.pipe() if show_output else (-1, os.dup(self._output.fileno()))
        self._relay = threading.Thread(target=_copy_output, args=(relay_fd,), daemon=True)
        requests, write_fd = os.pipe()
        read_fd, answers = os.pipe()
        self.channel = Channel(read_fd, write_fd)
        try:
            self._process = run_in_lasting_thread(
                lambda: subprocess.Popen(
                    [sys.executable, "-P", "-u", "-m", module, str(answers), str(os.getpid())],
                    stdin=requests,
                    stdout=output,
                    stderr=output,
                    pass_fds=(answers, *inherited_fds),
                    env=variables,
                    start_new_session=True,
                )
            )
        except BaseException:
            self._output.close()
            self.channel.close()
            raise
        finally:
            os.close(requests)
            os.close(answers)
            os.close(output)
            if show_output:
                self._relay.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        # While another thread polls, `Popen.poll` reports a dead process as running.
        with self._poll_lock:
            return self._process.poll() is not None

    def trim_output(self) -> None:
        """If the output is too long, discard all but the end."""
        if os.fstat(self._output.fileno()).st_size > _OUTPUT_LIMIT_BYTES:
            self._output_tail = self._read_tail()
            os.ftruncate(self._output.fileno(), 0)

    def read_output(self) -> str:
        """Return the end of the output, even after `terminate`."""
        tail = self._output_tail if self._output.closed else self._read_tail()
        return tail.decode("utf-8", "replace")

    def _read_tail(self) -> bytes:
        size = os.fstat(self._output.fileno()).st_size
        start = max(0, size - _TAIL_BYTES)
        return (self._output_tail + os.pread(self._output.fileno(), _TAIL_BYTES, start))[
            -_TAIL_BYTES:
        ]

    def terminate(self, grace_s: float = 0.0) -> int:
        """End the process and its children; return the exit code. May be called twice."""
        if self._exit_code is not None:
            return self._exit_code
        self.channel.close_sending()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._exit_code = self._process.wait()
        if self._relay.ident is not None:
            self._relay.join(_RELAY_TIMEOUT_S)
        self._output_tail = self._read_tail()
        self._output.close()
        self.channel.close()
        return self._exit_code

    def explain_loss(self, error: EOFError | ProtocolError) -> str:
        """End the process, and return a description of the error that its channel raised."""
        if isinstance(error, EOFError):
            return describe_exit(self.terminate(_EXIT_GRACE_S))
        self.terminate()
        return f"sent {error}"


def _copy_output(pipe: int) -> None:
    """Copy a process's output to sys.stderr, which escapes control characters."""
    # An inherited descriptor would bypass the escaping.
    with open(pipe, encoding="utf-8", errors="backslashreplace", newline="\n") as lines:
        for line in lines:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(line)
                sys.stderr.flush()


def describe_exit(code: int) -> str:
    """Describe an exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def format_exit_clause(code: int) -> str:
    """Describe an exit code as the end of a sentence that begins with `it`."""
    description = describe_exit(code)
    return description if code >= 0 else f"was {description}"


_executor_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None


def run_in_lasting_thread(call: Callable[[], T]) -> T:
    """Call a function that starts a process, from a thread that outlives the process.

    Linux sends the parent-death signal when the *thread* that started the child ends. A worker that
    was started by a short-lived thread would be killed during its work.
    """
    if threading.current_thread() is threading.main_thread():
        return call()
    from concurrent.futures import ThreadPoolExecutor  # imports logging

    global _executor
    with _executor_lock:
        _executor = _executor or ThreadPoolExecutor(1, "rlflame-starter")
    return _executor.submit(call).result()


def _forget_executor() -> None:
    global _executor, _executor_lock
    _executor, _executor_lock = None, threading.Lock()


# A forked process inherits the executor, but not its thread.
os.register_at_fork(after_in_child=_forget_executor)
