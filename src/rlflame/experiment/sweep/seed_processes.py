"""The processes of a sweep's seeds: started side by side, watched, stopped, and never left behind.

Each leads its own session, so that Ctrl-C reaches the sweep alone, which asks them to save. Each
ends when the sweep's pipe closes, however the sweep ends.
"""

from __future__ import annotations

import json
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.console.base import RunView
from rlflame.errors import RlflameError, make_error
from rlflame.fleet.base import Fleet
from rlflame.fleet.shared_fleet import FleetServer
from rlflame.rollout import blas
from rlflame.rollout.process.channel import MessageKind, ProtocolError, WakePipe, wait
from rlflame.rollout.process.worker_process import WorkerProcess, format_exit_clause
from rlflame.storage.run_folder import RunFolder
from rlflame.storage.sweep_result import SeedOutcome
from rlflame.training.trainer import StopRequest

MODULE = "rlflame.experiment.sweep.seed_main"
_POLL_S = 0.2
_GRACE_S = 5.0
#: Each has a few descriptors, and a process often may have a thousand.
MAX_PROCESSES = 256


@dataclass(eq=False)
class _SeedProcess:
    seed: int
    process: WorkerProcess
    fleet_server: FleetServer | None = None
    outcome: SeedOutcome | None = None
    stop_sent: bool = False


class SeedProcesses:
    """Runs a process for each seed, which gets its order first; `fleet` is shared by all."""

    def __init__(
        self,
        orders: Mapping[int, dict[str, Any]],
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
        self._wake_pipe = WakePipe()

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
            seed_process.fleet_server = FleetServer(self._fleet, process.channel, self._wake_pipe)
        self._processes.append(seed_process)
        process.channel.send(MessageKind.ORDER, self._orders[seed])

    def _request_stop(self) -> None:
        for seed_process in self._processes:
            if not seed_process.stop_sent:
                seed_process.stop_sent = True
                seed_process.process.channel.send(MessageKind.STOP)

    def _collect_ended(self) -> Sequence[_SeedProcess]:
        """Wait a moment for messages; the processes that have ended meanwhile."""
        by_channel = {item.process.channel: item for item in self._processes}
        ready = [by_channel[channel] for channel in wait(by_channel, _POLL_S, self._wake_pipe)]
        ended = [seed_process for seed_process in ready if not self._receive(seed_process)]
        self._processes = [item for item in self._processes if item not in ended]
        return ended

    def _receive(self, seed_process: _SeedProcess) -> bool:
        """False once the process has ended."""
        try:
            for message in seed_process.process.channel.receive_all():
                self._handle_message(seed_process, message.kind, message.value)
        except (EOFError, ProtocolError) as error:
            self._record_exit(seed_process, error)
            return False
        return True

    def _handle_message(self, seed_process: _SeedProcess, kind: MessageKind, value: Any) -> None:
        if kind is MessageKind.EVENT:
            self._view.show_seed_event(seed_process.seed, json.loads(value["text"]))
        elif kind is MessageKind.RESULT:
            seed_process.outcome = SeedOutcome("finished" if value["complete"] else "stopped")
        elif kind is MessageKind.FAILED:
            # An end that was asked for before anything had begun is no failure.
            is_stop = seed_process.stop_sent and value["exit_code"] > 128
            seed_process.outcome = (
                SeedOutcome("stopped") if is_stop else SeedOutcome("failed", make_error(value))
            )
        elif kind is MessageKind.BROKEN:
            error = RlflameError(
                "Something went wrong inside rlflame.", "this is a bug", value["traceback"]
            )
            seed_process.outcome = SeedOutcome("failed", error)
        elif seed_process.fleet_server is not None:
            seed_process.fleet_server.receive(kind, value)

    def _record_exit(self, seed_process: _SeedProcess, error: Exception) -> None:
        if seed_process.fleet_server is not None:
            seed_process.fleet_server.close()
        is_end = isinstance(error, EOFError)
        code = seed_process.process.terminate(grace_s=_GRACE_S if is_end else 0.0)
        if seed_process.outcome is not None:
            return
        if seed_process.stop_sent and code in (-signal.SIGTERM, -signal.SIGINT):
            seed_process.outcome = SeedOutcome("stopped")
            return
        reason = format_exit_clause(code) if is_end else f"sent {error}"
        seed_process.outcome = SeedOutcome(
            "failed",
            RlflameError(f"Its process {reason}.", detail=seed_process.process.read_output()),
        )
