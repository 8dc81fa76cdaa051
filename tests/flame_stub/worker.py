"""One worker process: its folder and variables, its socket, calls and end.

This module does not know sessions, tasks or scheduling. Its callers say what to send.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from flamepy.proto.shim_pb2_grpc import InstanceStub

START_TIMEOUT_S = 30.0
TERMINATE_TIMEOUT_S = 2.0
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class WorkerDied(Exception):
    """The process ended before it listened on its socket."""


class Worker:
    """The process of an application, which ends with its whole process group."""

    def __init__(self, folder: Path, socket: Path, name: str, directory: str | None) -> None:
        self._socket = socket
        self._name = name
        self._own_folder = not directory
        self._folder = Path(directory) if directory else folder
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._ended = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def listening(self) -> bool:
        return self._channel is not None

    def start(self, application: str, arguments: Sequence[str], variables: dict[str, str]) -> None:
        """Start the process in its folder, as an executor manager does."""
        scratch = self._folder / "work" / application / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        settings = {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
        settings |= variables | {"FLAME_INSTANCE_ENDPOINT": str(self._socket)}
        inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        with (
            open(self._folder / f"{self._name}.out", "wb") as out,
            open(self._folder / f"{self._name}.err", "wb") as err,
            self._lock,
        ):
            if self._ended:
                raise WorkerDied("ended before it was started")
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self._folder,
                env=inherited | settings,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_until_listening(self) -> None:
        """Poll for the socket's file every 20 ms, because nothing notifies of it."""
        assert self._process is not None
        for _ in range(int(START_TIMEOUT_S / 0.02)):
            if self._socket.exists():
                self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=UNLIMITED)
                return
            try:
                status = self._process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            raise WorkerDied(f"worker ended with status {status} before it listened")
        raise WorkerDied(f"worker does not listen after {START_TIMEOUT_S:.0f} s")

    def call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Call the process. As in Flame, there is no deadline unless one is given."""
        stub = InstanceStub(self._channel)
        call = getattr(stub, method).future(request, timeout=timeout_s)
        with self._lock:
            self._call = call
            if self._ended:
                call.cancel()
        return call.result()

    def kill(self, number: int) -> None:
        """Send a signal to the worker and its children."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                signal_group(self._process.pid, number)

    def end(self, first: int = signal.SIGTERM) -> None:
        """End the process group and the running call, and remove the folder."""
        with self._lock:
            already, self._ended = self._ended, True
            process, call = self._process, self._call
        if already:
            return
        if process is not None:
            signal_group(process.pid, first)
            with suppress(subprocess.TimeoutExpired):
                process.wait(TERMINATE_TIMEOUT_S)
            signal_group(process.pid, signal.SIGKILL)
            process.wait()
        if call is not None:
            call.cancel()
        if self._channel is not None:
            self._channel.close()
        self._socket.unlink(missing_ok=True)
        shutil.rmtree(self._folder if self._own_folder else self._folder / "work", True)

    def log(self) -> str:
        """The stderr of the process, or nothing if another thread has removed it."""
        try:
            return (self._folder / f"{self._name}.err").read_text(errors="replace")
        except FileNotFoundError:
            return ""


def signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
