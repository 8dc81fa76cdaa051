"""The child's end of a `Channel`. The child exits when its parent exits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from .channel import Channel, Message, MessageKind

BEAT_S = 0.5
#: From linux/prctl.h.
_PR_SET_PDEATHSIG = 1


class ParentChannel(Channel):
    """The child's channel, which blocks if the pipe is full; any thread may send."""

    @classmethod
    def open(cls) -> ParentChannel:
        """Open this process's channel. From now on, the process exits with its parent.

        The channel reads from standard input and writes to the descriptor on the command line.
        """
        die_with_parent(read_parent_pid())
        answers = int(sys.argv[1])
        os.set_inheritable(answers, False)
        # Programs that this process starts must not read the parent's messages.
        requests = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        kill_group_with_process()
        return cls(requests, answers)

    def __init__(self, read_fd: int, write_fd: int) -> None:
        super().__init__(read_fd, write_fd)
        os.set_blocking(write_fd, True)

    def _drop_unsent(self) -> None:
        exit_with_group()

    def receive_order(self) -> Any:
        """Return the value of the first message; end this process if the parent is gone."""
        try:
            return self.receive().value
        except EOFError:
            exit_with_group()

    def start_listening(self, handle: Callable[[Message], None] = lambda message: None) -> None:
        """Start a thread that receives messages and passes them to `handle`.

        For a STOP message, it sends SIGTERM to the main thread instead. When the parent closes its
        pipe, this process ends.
        """
        main_thread_id = threading.get_ident()

        def listen() -> None:
            for message in self:
                if message.kind is MessageKind.STOP:
                    signal.pthread_kill(main_thread_id, signal.SIGTERM)
                else:
                    handle(message)
            exit_with_group()

        threading.Thread(target=listen, name="rlflame-parent", daemon=True).start()


def exit_with_group() -> NoReturn:
    """End this process and all programs that it started, after its parent has ended."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def read_parent_pid() -> int:
    """Return the ID of the parent process, from the command line if possible.

    If the parent has already ended, `os.getppid` returns the ID of another process.
    """
    return int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid()


def die_with_parent(parent: int) -> None:
    """Make the kernel end this process when the process `parent` ends.

    A process that is stopped or holds the GIL would not notice a closed pipe. The kernel sends the
    signal when the *thread* that started this process ends (see `run_in_lasting_thread`). Only
    Linux supports this; on other systems, a closed pipe is the only sign.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call, which then has no effect
            exit_with_group()


#: The inner shell, which waits, is not a child of the worker, because an environment may wait for
#: all children of the worker.
_KILL_GROUP = "exec 3<&0; (trap '' HUP INT TERM; read nothing <&3; kill -KILL 0) &"


def kill_group_with_process() -> None:
    """Ensure that programs started by environments end if this process is killed.

    When the first program has started, a thread starts a shell in the same process group. The shell
    waits for EOF on a pipe that only this process holds open, and then kills the group. The first
    program is not covered during its first half second.
    """
    if sys.platform == "linux" and os.getpgrp() == os.getpid():
        threading.Thread(target=_watch_for_programs, name="rlflame-programs", daemon=True).start()


def _watch_for_programs() -> None:
    import subprocess

    pause = threading.Event()
    while not _has_children():
        pause.wait(BEAT_S)
    with contextlib.suppress(OSError):
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _KILL_GROUP],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert shell.stdin is not None
        # A forked process would keep the pipe open.
        os.register_at_fork(after_in_child=shell.stdin.close)
        shell.wait()


def _has_children() -> bool:
    """Return whether this process has a child, and leave a child that has ended to its parent."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
