"""A rollout worker in a process of its own, spoken to over two pipes; its death is an answer too.

Frames are one byte of kind, eight of length, and a payload in `wire`'s bytes. Tasks come in on
standard input, answers leave on the descriptor named on the command line, and whatever the
environment prints goes to the process's ordinary output, which the parent keeps apart. The
process ends when its parent's pipe closes. Must not know: fleets, retries, deadlines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
from enum import IntEnum
from typing import Any, BinaryIO

HEADER = struct.Struct("<BQ")
BEAT_S = 0.5
#: Of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


class FrameKind(IntEnum):
    """Frames that travel between a parent and its worker."""

    POLICY = 1  # parent: {"id", "arrays"}
    FORGET = 2  # parent: {"id"}
    TASK = 3  # parent: RolloutTask
    HELLO = 4  # child: what this process runs on
    BEAT = 5  # child: where the task stands, twice a second
    RESULT = 6  # child: Fragment or RolloutFailure
    BROKEN = 7  # child: a bug or a message it could not read
    PREPARE = 8  # parent: {"id"} of an environment that tasks will be about


def open_pipes() -> tuple[BinaryIO, int]:
    """What this process hears on standard input, kept from whatever it starts and runs, and where
    it answers. From here on this process does not outlive its parent."""
    die_with_parent(read_parent_pid())
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    requests = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return requests, answers


def read_parent_pid() -> int:
    """The process id that the parent wrote behind ANSWERS; without it, the parent of this moment.

    A parent that is gone before this process can ask for its own parent has already been replaced.
    """
    return int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid()


def die_with_parent(parent: int) -> None:
    """End this process with its parent, even while it is stopped or holds the interpreter lock.

    A process in that state does not see a pipe close, so the kernel has to end it. It does so when
    the parent's *thread* ends that started this process: see `rollout.lasting_thread`. Only Linux
    has such a signal; elsewhere the pipes are all there is.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call, which then does nothing
            _exit_with_group()


#: The shell that waits is no child of the worker: an environment may wait for all of its children.
_KILL_GROUP = "exec 3<&0; (trap '' HUP INT TERM; read nothing <&3; kill -KILL 0) &"


def kill_group_with_process() -> None:
    """End the programs that environments start here when this process is killed.

    A killed process cannot end them itself. So once there is a first one, a shell in the same
    process group waits for the end of a pipe that only this process holds. A program that is
    less than half a second old is not seen yet.
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
        # A forked program would hold the pipe open after this process.
        os.register_at_fork(after_in_child=shell.stdin.close)
        shell.wait()


def _has_children() -> bool:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            if file.read().strip():
                return True
    return False


def read_frame(stream: BinaryIO) -> tuple[FrameKind, bytes] | None:
    """The next frame, or None at the end of the stream."""
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    kind, length = HEADER.unpack(head)
    payload = stream.read(length)
    return (FrameKind(kind), payload) if len(payload) == length else None


class WorkerServer:
    """The worker's side of the conversation."""

    def __init__(self, requests: BinaryIO, answers: int) -> None:
        from ..worker import RolloutWorker

        self._requests = requests
        self._answers = answers
        self._lock = threading.Lock()
        self._worker = RolloutWorker()
        self._policies: dict[str, Any] = {}
        self._parent = os.getppid()

    def serve(self) -> None:
        """Answer until the parent is gone."""
        from .. import wire
        from ..envs.vector_env import preload_env
        from ..machine import read_versions

        self._send(FrameKind.HELLO, wire.encode(read_versions()))
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        while (frame := read_frame(self._requests)) is not None:
            kind, payload = frame
            if kind is FrameKind.POLICY:
                message = wire.decode(payload)
                self._policies[message["id"]] = message["arrays"]
            elif kind is FrameKind.FORGET:
                self._policies.pop(wire.decode(payload)["id"], None)
            elif kind is FrameKind.PREPARE:
                preload_env(wire.decode(payload)["id"])
            else:
                self._answer(payload)
        self._worker.close()

    def _answer(self, payload: bytes) -> None:
        import traceback

        from .. import wire

        try:
            task = wire.decode(payload)
            result = wire.encode(self._worker.run(task, lambda: self._policies[task.policy_id]))
        except BaseException:  # a bug, but an answer all the same
            self._send(FrameKind.BROKEN, wire.encode({"traceback": traceback.format_exc()}))
        else:
            self._send(FrameKind.RESULT, result)

    def _send_heartbeats(self) -> None:
        """Say where the task stands; a parent that no longer listens ends this process."""
        from .. import wire

        pause = threading.Event()
        while True:
            pause.wait(BEAT_S)
            position = self._worker.position
            if position is not None:
                fields = dict(zip(("slot", "row", "seed", "step"), position, strict=True))
                self._send(FrameKind.BEAT, wire.encode(fields))
            elif os.getppid() != self._parent:
                _exit_with_group()

    def _send(self, kind: FrameKind, payload: bytes) -> None:
        try:
            with self._lock:
                _write_all(self._answers, HEADER.pack(kind, len(payload)))
                _write_all(self._answers, payload)
        except OSError:
            _exit_with_group()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _exit_with_group() -> None:
    """Nobody listens any more: go, with whatever the environments have started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """`python -m rlflame.rollout.process.worker_main ANSWERS PARENT`: an open descriptor and a
    process id."""
    from ..envs import user_code

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = open_pipes()
    kill_group_with_process()
    server = WorkerServer(requests, answers)
    user_code.load_from_environment()
    server.serve()


if __name__ == "__main__":
    main()
