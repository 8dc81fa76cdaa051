"""The two pipes between a process and a `WorkerProcess` that it started, as the latter sees them.

Messages are plain values in `wire`'s bytes, each with a word, `what`, that says what it is, in the
frames of `rollout.child`; the first is an `order`, and a `stop` is heard as a signal. When the
other end of the pipe closes, this process ends, whatever it does just then. Must not know: what is
trained or measured, what fleets do.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from .. import wire
from .worker_main import HEADER, FrameKind, kill_group_with_process, open_pipes, read_frame

Message = dict[str, Any]


class ParentChannel:
    """What the process that was started hears and says."""

    def __init__(self, requests: BinaryIO, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._lock = threading.Lock()

    @classmethod
    def open(cls) -> ParentChannel:
        """Of this process: requests on standard input, answers on the descriptor it was told."""
        requests, answers = open_pipes()
        kill_group_with_process()
        return cls(requests, answers)

    def send(self, message_type: str, **values: Any) -> None:
        payload = wire.encode({"what": message_type, **values})
        data = memoryview(HEADER.pack(FrameKind.RESULT, len(payload)) + payload)
        try:
            with self._lock:
                while data:
                    data = data[os.write(self._answers, data) :]
        except OSError:
            exit_with_group()

    def receive(self) -> Message | None:
        """The next message; None when there is nobody to send one."""
        frame = read_frame(self._requests)
        return None if frame is None else wire.decode(frame[1])

    def start_listening(self, handle: Callable[[Message], None]) -> None:
        """Hear all that comes, from now on, in a thread; a stop reaches the main one as a signal
        would from outside."""
        main_thread_id = threading.get_ident()

        def listen() -> None:
            while (message := self.receive()) is not None:
                if message["what"] == "stop":
                    signal.pthread_kill(main_thread_id, signal.SIGTERM)
                else:
                    handle(message)
            exit_with_group()

        threading.Thread(target=listen, name="rlflame-line", daemon=True).start()


def exit_with_group() -> None:
    """Nobody listens any more: go, with all that this process has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
