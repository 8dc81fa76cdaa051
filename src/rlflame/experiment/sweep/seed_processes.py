"""The processes of a job's seeds: begun side by side, heard, asked to stop, and never left behind.

Each leads a session of its own, so that Ctrl-C reaches the job alone, which asks them to save; and
each ends when the job's pipe closes, however the job ends. Must not know: what a seed trains,
files, display.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflame.console.base import RunView
from rlflame.errors import RlflameError
from rlflame.fleet.base import Fleet
from rlflame.fleet.fleet_server import FleetServer
from rlflame.fleet.remote import make_error
from rlflame.rollout import blas, wire
from rlflame.rollout.process.parent_channel import Message
from rlflame.rollout.process.worker_main import FrameKind
from rlflame.rollout.process.worker_process import ProtocolError, WorkerProcess, describe_exit
from rlflame.storage.run_dir import RunFolder
from rlflame.storage.sweep_result import SeedOutcome
from rlflame.training.trainer import StopRequest

MODULE = "rlflame.experiment.sweep.seed_main"
_POLL_S = 0.2
_GRACE_S = 5.0
#: More than one descriptor each, and `select` takes a thousand.
MAX_PROCESSES = 256


@dataclass(eq=False)
class _SeedProcess:
    seed: int
    process: WorkerProcess
    fleet_server: FleetServer | None = None
    outcome: SeedOutcome | None = None
    stop_sent: bool = False


class _WakePipe:
    """Threads leave something for the loop, and the loop comes round for it."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._messages: deque[tuple[_SeedProcess, bytes]] = deque()
        # A number that was closed may be another file's already.
        self._lock = threading.Lock()
        self._closed = False

    def put(self, seed_process: _SeedProcess, payload: bytes) -> None:
        self._messages.append((seed_process, payload))
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it will come round anyway
            if not self._closed:
                os.write(self._writer, b"!")

    def take(self) -> list[tuple[_SeedProcess, bytes]]:
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.reader)
            os.close(self._writer)


class SeedProcesses:
    """`orders` are what each seed's process is told first; `lend` is a fleet for all of them."""

    def __init__(
        self,
        orders: Mapping[int, Message],
        folder: RunFolder,
        view: RunView,
        stop: StopRequest,
        *,
        at_once: int,
        threads: int = 1,
        fleet: Fleet | None = None,
        show_output: bool = False,
    ) -> None:
        self._orders = orders
        self._waiting = deque(orders)
        self._folder = folder
        self._view = view
        self._stop = stop
        self._max_processes = min(at_once, MAX_PROCESSES)
        self._environment = blas.make_child_environment(threads)
        self._fleet = fleet
        self._show_output = show_output
        self._processes: list[_SeedProcess] = []
        self._wake_pipe = _WakePipe()

    def run(self) -> dict[int, SeedOutcome]:
        """Until all have ended; those that a stop kept from beginning are absent."""
        outcomes: dict[int, SeedOutcome] = {}
        try:
            while self._processes or (self._waiting and not self._stop.requested):
                if self._stop.requested:
                    self._request_stop()
                elif len(self._processes) < self._max_processes and self._waiting:
                    self._start(self._waiting.popleft())
                    continue
                for seed_process in self._collect_ended():
                    assert seed_process.outcome is not None
                    outcomes[seed_process.seed] = seed_process.outcome
                    self._view.show_seed_end(seed_process.seed, seed_process.outcome)
        finally:
            for seed_process in self._processes:
                seed_process.process.terminate()
                if seed_process.fleet_server is not None:
                    seed_process.fleet_server.close()
            self._wake_pipe.close()
        return outcomes

    def list_pids(self) -> dict[int, int]:
        """The processes alive now, by seed."""
        return {seed_process.seed: seed_process.process.pid for seed_process in self._processes}

    def _start(self, seed: int) -> None:
        self._folder.check_held()
        process = WorkerProcess(
            module=MODULE, environment=self._environment, show_output=self._show_output
        )
        seed_process = _SeedProcess(seed, process)
        if self._fleet is not None:
            seed_process.fleet_server = FleetServer(
                self._fleet, lambda payload: self._wake_pipe.put(seed_process, payload)
            )
        self._processes.append(seed_process)
        process.send(FrameKind.TASK, wire.encode(self._orders[seed]))

    def _request_stop(self) -> None:
        for seed_process in self._processes:
            if not seed_process.stop_sent:
                seed_process.stop_sent = True
                seed_process.process.send(FrameKind.TASK, wire.encode({"what": "stop"}))

    def _collect_ended(self) -> Sequence[_SeedProcess]:
        """Wait a moment for whatever comes; those that have ended meanwhile."""
        processes = self._processes
        answers = {seed_process.process.answers: seed_process for seed_process in processes}
        full = [
            seed_process.process.requests
            for seed_process in processes
            if seed_process.process.has_backlog
        ]
        ready, _, _ = select.select([*answers, self._wake_pipe.reader], full, [], _POLL_S)
        for seed_process, payload in self._wake_pipe.take():
            if seed_process in processes:
                seed_process.process.send(FrameKind.TASK, payload)
        ended = []
        for seed_process in processes:
            seed_process.process.flush()
            if seed_process.process.answers in ready and not self._receive(seed_process):
                ended.append(seed_process)
        self._processes = [seed_process for seed_process in processes if seed_process not in ended]
        return ended

    def _receive(self, seed_process: _SeedProcess) -> bool:
        """False once the process has ended."""
        try:
            for _, payload in seed_process.process.receive():
                self._handle_message(seed_process, wire.decode(payload))
        except BlockingIOError:
            pass
        except (EOFError, ProtocolError, wire.WireError) as error:
            self._record_exit(seed_process, error)
            return False
        return True

    def _handle_message(self, seed_process: _SeedProcess, message: Message) -> None:
        kind = message["what"]
        if kind == "event":
            self._view.show_seed_event(seed_process.seed, json.loads(message["text"]))
        elif kind == "ended":
            seed_process.outcome = SeedOutcome("finished" if message["complete"] else "stopped")
        elif kind == "failed":
            seed_process.outcome = self._make_failure(seed_process, message)
        elif kind == "broken":
            error = RlflameError(
                "Something went wrong inside rlflame.", "this is a bug", message["traceback"]
            )
            seed_process.outcome = SeedOutcome("failed", error)
        elif seed_process.fleet_server is not None:
            seed_process.fleet_server.receive(message)

    def _make_failure(self, seed_process: _SeedProcess, message: Message) -> SeedOutcome:
        """An end that was asked for before anything had begun is no failure."""
        if seed_process.stop_sent and message["exit_code"] > 128:
            return SeedOutcome("stopped")
        return SeedOutcome("failed", make_error({"kind": "RlflameError", **message}))

    def _record_exit(self, seed_process: _SeedProcess, error: Exception) -> None:
        if seed_process.fleet_server is not None:
            seed_process.fleet_server.close()
        code = seed_process.process.terminate(
            grace_s=_GRACE_S if isinstance(error, EOFError) else 0.0
        )
        if seed_process.outcome is not None:
            return
        if seed_process.stop_sent and code in (-signal.SIGTERM, -signal.SIGINT):
            seed_process.outcome = SeedOutcome("stopped")
            return
        reason = describe_exit(code) if isinstance(error, EOFError) else f"said {error}"
        reason = f"was {reason}" if reason.startswith("killed") else reason
        seed_process.outcome = SeedOutcome(
            "failed",
            RlflameError(f"Its process {reason}.", detail=seed_process.process.read_output()),
        )
