"""Trains or resumes the seeds of a sweep, and summarises their results."""

from __future__ import annotations

import json
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflame.analysis.plots import matplotlib_backend
from rlflame.config.module_trust import list_allowed_modules
from rlflame.config.recipe import RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.base import NullView, RunStart, RunView, SweepResources, SweepResult
from rlflame.console.output import as_json_text
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.errors import RlflameError, format_command, make_error
from rlflame.experiment.components import create_folder
from rlflame.experiment.preflight import check_sweep, run_preflight
from rlflame.experiment.resume import check_unit, find_budget, make_budget
from rlflame.experiment.sweep import sweep as jobs
from rlflame.experiment.sweep.sweep import SeedStatus, Sweep
from rlflame.fleet import factory
from rlflame.fleet.base import Fleet
from rlflame.fleet.shared_fleet import FleetServer
from rlflame.learning.factory import count_blas_threads
from rlflame.rollout import blas, machine
from rlflame.rollout.process.channel import MessageKind, ProtocolError, WakePipe, wait
from rlflame.rollout.process.worker_process import WorkerProcess, format_exit_clause
from rlflame.storage import safetensors_file
from rlflame.storage.available_memory import PROCESS_BYTES, measure_available_bytes
from rlflame.storage.run_folder import RunFolder, is_locked, report_disk_errors
from rlflame.storage.sweep_folder import SeedOutcome, format_folder_name, get_seed_folder
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import StopRequest

#: How long `resume` waits for the seed processes of a killed sweep to end.
_WAIT_S = 20.0
_POLL_S = 0.2
_GRACE_S = 5.0
#: Each process takes a few file descriptors, and the usual limit is 1024.
_MAX_PROCESSES = 256


def train(
    config: RunConfig,
    seeds: Sequence[int],
    *,
    preset: str = "",
    init_from: Path | None = None,
    show: RunView | None = None,
    stop: StopRequest | None = None,
) -> SweepResult:
    """Train one policy per seed with this config, in a new sweep folder."""
    stop, show = stop or NullStop(), show or NullView()
    check_sweep(config.runtime)
    recipe = config.recipe.copy_with_horizon()
    recipe, env, _ = run_preflight(
        recipe, config.runtime, init_from=init_from, stop=stop, show_note=show.show_note
    )
    init_path = str(init_from.resolve()) if init_from is not None else None
    sweep = Sweep(RunConfig.from_recipe(recipe, config.runtime), tuple(seeds), preset, init_path)
    sweep = sweep.copy_with(learning=recipe.learning.model_copy(update={"seed": seeds[0]}))
    with _open_shared_fleet(sweep, show) as fleet:
        name = format_folder_name(sweep.seeds)
        folder = create_folder(config.runtime, recipe.learning, name, show.show_note)
        try:
            jobs.write_sweep(folder.path, sweep)
            return _run_seeds(folder, sweep, RecipeSummary(recipe, env, preset), fleet, show, stop)
        finally:
            folder.release()


def resume(
    folder: Path,
    runtime: RuntimeSettings,
    *,
    steps: int | None = None,
    iterations: int | None = None,
    show: RunView | None = None,
    stop: StopRequest | None = None,
) -> SweepResult:
    """Finish the unfinished seeds, or train all seeds up to `steps` or `iterations`."""
    stop, show = stop or NullStop(), show or NullView()
    check_sweep(runtime)
    budget = make_budget(steps, iterations)
    run_folder = jobs.open_sweep_folder(folder)
    try:
        sweep = jobs.read_sweep(folder).copy_with(runtime=runtime)
        check_unit(sweep.config.recipe, budget, sweep.config.stop_at_steps or 0)
        _await_processes(folder, sweep)
        jobs.check_seeds(folder, sweep, budget)
        if budget is not None:
            sweep = sweep.copy_with(stop_at_steps=steps, stop_at_iterations=iterations)
        if all(status.is_finished for status in jobs.read_seed_statuses(folder, sweep)):
            return _make_result(folder, sweep, {}, has_trained=False)
        _, env, _ = run_preflight(
            sweep.config.recipe, runtime, is_resume=True, stop=stop, show_note=show.show_note
        )
        jobs.write_sweep(folder, sweep)
        summary = RecipeSummary(sweep.config.recipe, env, sweep.preset)
        with _open_shared_fleet(sweep, show) as fleet:
            return _run_seeds(run_folder, sweep, summary, fleet, show, stop, is_resume=True)
    finally:
        run_folder.release()


def split_resources(
    seeds: int,
    *,
    cores: int,
    threads: int = 1,
    replay_bytes: int = 0,
    available_bytes: float = float("inf"),
    split: bool = True,
) -> SweepResources:
    """Choose how many seeds run at once and how many workers each seed gets.

    One seed per core is fastest, because seeds never wait for each other. If each seed has two or
    more cores, it also gets one worker per core, provided that `split` is True and `threads` is 1.
    """
    fitting = int(min(available_bytes / (replay_bytes + PROCESS_BYTES), seeds))
    limit = min(seeds, max(1, cores // threads))
    at_once = max(1, min(limit, fitting))
    cores_per_seed = cores // at_once
    workers = cores_per_seed if split and cores_per_seed >= 2 and threads == 1 else 0
    return SweepResources(at_once, workers, memory_bound=at_once < limit)


def _await_processes(folder: Path, sweep: Sweep) -> None:
    """Wait for a killed sweep's seed processes, which take a moment to exit."""
    deadline = time.monotonic() + _WAIT_S
    for seed in sweep.seeds:
        path = get_seed_folder(folder, seed)
        while path.exists() and is_locked(path) and time.monotonic() < deadline:
            time.sleep(0.1)


def _open_shared_fleet(sweep: Sweep, show: RunView) -> AbstractContextManager[Fleet | None]:
    """Open the remote fleet that all seeds share, if the sweep uses one."""
    runtime = sweep.config.runtime
    if not factory.is_remote(factory.resolve_fleet_kind(runtime)):
        return nullcontext()
    slots = sweep.config.learning.rollout.num_slots * len(sweep.seeds)
    return factory.make_fleet(runtime, slots, show.show_fleet_event)


def _run_seeds(
    folder: RunFolder,
    sweep: Sweep,
    summary: RecipeSummary,
    fleet: Fleet | None,
    show: RunView,
    stop: StopRequest,
    *,
    is_resume: bool = False,
) -> SweepResult:
    statuses = jobs.read_seed_statuses(folder.path, sweep)
    unfinished_seeds = [status for status in statuses if not status.is_finished]
    resources = _split_resources(sweep, len(unfinished_seeds), summary, fleet)
    start = RunStart(
        folder.path,
        summary,
        {status.seed: status.checkpoint for status in statuses},
        fleet.name if fleet is not None else "",
        fleet.capacity if fleet is not None else 0,
        is_resume,
        resources=resources,
        finished_seeds=frozenset(status.seed for status in statuses if status.is_finished),
    )
    if resources.memory_bound:
        show.show_note(
            f"There is memory for {resources.concurrent_seeds} seeds at a time; the others wait."
        )
    orders = {
        status.seed: _make_order(sweep, status, folder.path, resources, fleet)
        for status in unfinished_seeds
    }
    with show.open(start):
        processes = SeedProcesses(orders, sweep.config, folder, show, stop, fleet)
        outcomes = processes.run(resources.concurrent_seeds)
    folder.check()
    return _make_result(folder.path, sweep, outcomes)


def _split_resources(
    sweep: Sweep, seeds: int, summary: RecipeSummary, fleet: Fleet | None
) -> SweepResources:
    runtime, learning = sweep.config.runtime, sweep.config.learning
    # SAC's two numpy threads wait for each other without using a core, so one core is enough.
    is_numpy = learning.provider == "numpy"
    threads = count_blas_threads(learning) if is_numpy else learning.threads
    return split_resources(
        seeds,
        # Seeds that share a fleet mostly wait for it, so they may outnumber the cores.
        cores=seeds if fleet is not None else runtime.workers or machine.count_usable_cores(),
        threads=1 if fleet is not None else threads,
        replay_bytes=summary.replay.nbytes if summary.replay is not None else 0,
        available_bytes=measure_available_bytes(),
        split=fleet is None and factory.has_workers(runtime.fleet),
    )


def _make_order(
    sweep: Sweep, status: SeedStatus, folder: Path, resources: SweepResources, fleet: Fleet | None
) -> dict[str, Any]:
    """Make the ORDER message for the process of a seed."""
    recipe = status.checkpoint.recipe if status.checkpoint is not None else sweep.config
    return {
        "config": sweep.make_seed_config(status.seed, folder).model_dump(mode="json"),
        "preset": sweep.preset,
        "init_from": sweep.init_from,
        "modules": list_allowed_modules(),
        "folder": str(status.folder),
        "resume": status.is_started,
        "budget": [*(find_budget(recipe) or ())],
        "workers": resources.workers_per_seed,
        "fleet": {"name": fleet.name, "capacity": fleet.capacity} if fleet is not None else None,
    }


def _make_result(
    folder: Path, sweep: Sweep, outcomes: Mapping[int, SeedOutcome], *, has_trained: bool = True
) -> SweepResult:
    """Summarise the seeds, and write the summary into the sweep folder."""
    summary = jobs.summarise_sweep(folder, sweep, outcomes)
    with report_disk_errors(folder, format_command("resume", folder)):
        safetensors_file.write_atomically(folder / "seeds.csv", summary.as_csv().encode())
        text = as_json_text({"folder": str(folder), **summary.as_dict()}, indent=2) + "\n"
        safetensors_file.write_atomically(folder / "summary.json", text.encode())
    plot = None
    with suppress(RlflameError):  # no matplotlib, or no curves yet
        plot = matplotlib_backend.write_image(folder, "plot.png")
    return SweepResult(folder, summary, outcomes, has_trained, plot)


@dataclass(eq=False)
class _SeedProcess:
    seed: int
    process: WorkerProcess
    fleet_server: FleetServer | None
    outcome: SeedOutcome | None = None
    stop_sent: bool = False

    def close(self, grace_s: float = 0.0) -> int:
        """End the process and return its exit code."""
        if self.fleet_server is not None:
            self.fleet_server.close()
        return self.process.terminate(grace_s=grace_s)


@dataclass(eq=False)
class SeedProcesses:
    """Runs one process per seed. If `fleet` is given, all processes share it.

    Each process leads its own session, so Ctrl-C reaches only the sweep, which then asks the
    processes to save and stop. A process ends when its pipe from the sweep closes, no matter how
    the sweep ends.
    """

    orders: Mapping[int, dict[str, Any]]
    config: RunConfig
    folder: RunFolder
    view: RunView
    stop: StopRequest
    fleet: Fleet | None

    def __post_init__(self) -> None:
        self._waiting = deque(self.orders)
        self._processes: list[_SeedProcess] = []
        self._wake_pipe = WakePipe()

    def run(self, at_once: int) -> dict[int, SeedOutcome]:
        """Run all seeds, and return the outcomes of the seeds that have started."""
        outcomes: dict[int, SeedOutcome] = {}
        try:
            while self._processes or (self._waiting and not self.stop.is_requested):
                if self.stop.is_requested:
                    self._request_stop()
                elif self._waiting and len(self._processes) < min(at_once, _MAX_PROCESSES):
                    self._start(self._waiting.popleft())
                    continue
                by_channel = {item.process.channel: item for item in self._processes}
                for channel in wait(by_channel, _POLL_S, self._wake_pipe):
                    seed_process = by_channel[channel]
                    if not self._receive(seed_process):
                        self._processes.remove(seed_process)
                        assert seed_process.outcome is not None
                        outcomes[seed_process.seed] = seed_process.outcome
                        self.view.show_seed_end(seed_process.seed, seed_process.outcome)
        finally:
            for seed_process in self._processes:
                seed_process.close()
            self._wake_pipe.close()
        return outcomes

    def _start(self, seed: int) -> None:
        self.folder.check_lock()
        self.view.show_seed_start(seed)
        process = WorkerProcess(
            module="rlflame.experiment.sweep.seed_main",
            environment=blas.make_child_environment(count_blas_threads(self.config.learning)),
            show_output=self.config.runtime.debug,
        )
        server = None
        if self.fleet is not None:
            server = FleetServer(self.fleet, process.channel, self._wake_pipe)
        self._processes.append(_SeedProcess(seed, process, server))
        process.channel.send(MessageKind.ORDER, self.orders[seed])

    def _request_stop(self) -> None:
        for seed_process in self._processes:
            if not seed_process.stop_sent:
                seed_process.stop_sent = True
                seed_process.process.channel.send(MessageKind.STOP)

    def _receive(self, seed_process: _SeedProcess) -> bool:
        """Handle the messages of a process; return False once it has ended."""
        try:
            for message in seed_process.process.channel.receive_all():
                self._handle_message(seed_process, message.kind, message.value)
            return True
        except EOFError:
            code = seed_process.close(_GRACE_S)
            reason = format_exit_clause(code)
        except ProtocolError as error:
            code, reason = seed_process.close(), f"sent {error}"
        if seed_process.outcome is None:
            if seed_process.stop_sent and code in (-signal.SIGTERM, -signal.SIGINT):
                seed_process.outcome = SeedOutcome("stopped")
            else:
                output = seed_process.process.read_output()
                failure = RlflameError(f"Its process {reason}.", detail=output)
                seed_process.outcome = SeedOutcome("failed", failure)
        return False

    def _handle_message(self, seed_process: _SeedProcess, kind: MessageKind, value: Any) -> None:
        if kind is MessageKind.EVENT:
            self.view.show_seed_event(seed_process.seed, json.loads(value["text"]))
        elif kind is MessageKind.RESULT:
            seed_process.outcome = SeedOutcome("finished" if value["complete"] else "stopped")
        elif kind is MessageKind.FAILURE:
            # A process that was stopped before training began has not failed.
            is_stop = seed_process.stop_sent and value["exit_code"] > 128
            seed_process.outcome = (
                SeedOutcome("stopped") if is_stop else SeedOutcome("failed", make_error(value))
            )
        elif seed_process.fleet_server is not None:
            seed_process.fleet_server.receive(kind, value)
