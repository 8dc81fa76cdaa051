"""Many seeds of one recipe, from a config or a folder of them to what they say together.

Must not know: the command line, terminals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflame.analysis import curves
from rlflame.analysis.plots import matplotlib_backend
from rlflame.config import user_env_file
from rlflame.config.module_trust import list_allowed_modules
from rlflame.config.recipe import RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.output import as_json_text
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.console.sweep_base import (
    NullSweepView,
    SweepResources,
    SweepResult,
    SweepStart,
    SweepView,
)
from rlflame.console.sweep_progress import SweepProgress
from rlflame.errors import RlflameError, format_command
from rlflame.experiment import components, run
from rlflame.experiment.sweep import job as jobs
from rlflame.experiment.sweep.job import SeedStatus, Sweep
from rlflame.experiment.sweep.resources import split_resources
from rlflame.experiment.sweep.seed_processes import SeedProcesses
from rlflame.experiment.sweep.summary import summarise_sweep
from rlflame.fleet import factory
from rlflame.fleet.base import Fleet, FleetEvent
from rlflame.learning.factory import count_blas_threads
from rlflame.rollout import blas
from rlflame.storage import run_reader, safetensors_file
from rlflame.storage.machine_memory import PROCESS_BYTES, measure_available_bytes
from rlflame.storage.run_dir import RunFolder, is_locked, report_disk_errors
from rlflame.storage.sweep_dir import get_seed_folder
from rlflame.storage.sweep_result import SeedOutcome
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import StopRequest

_WAIT_S = 20.0


def train(
    config: RunConfig,
    seeds: Sequence[int],
    *,
    preset: str = "",
    init_from: Path | None = None,
    show: SweepView | None = None,
    stop: StopRequest | None = None,
) -> SweepResult:
    """Train a config with each of the seeds, in a new folder of run folders."""
    stop, show = stop or NullStop(), show or NullSweepView()
    runtime = config.runtime
    recipe = user_env_file.pin_env_file(config.recipe.copy_with_horizon(), runtime.env_file)
    # All that can be refused is refused once, before there is a folder.
    run.check_start(recipe.learning, init_from)
    env = run.await_env_spec(recipe, stop)
    components.check_memory(recipe, env, resumed=False)
    if init_from is not None:
        learning, _ = run.apply_init_policy(recipe.learning, env, init_from)
        recipe = recipe.model_copy(update={"learning": learning})
    components.make_policy_spec(recipe.learning, env)
    learning = recipe.learning.model_copy(update={"seed": seeds[0]})
    sweep_config = RunConfig(
        **{name: getattr(recipe, name) for name in type(recipe).model_fields}, runtime=runtime
    ).model_copy(update={"learning": learning})
    init_path = str(init_from.resolve()) if init_from is not None else None
    sweep = Sweep(sweep_config, tuple(seeds), preset, init_path)
    with _SweepRunner(sweep, show, stop) as runner:
        folder = RunFolder.create(jobs.choose_sweep_path(config, sweep.seeds))
        if note := folder.format_relocation_note(config.runtime.out):
            show.show_note(note)
        try:
            jobs.write_sweep(folder.path, sweep)
            return runner.run(folder, RecipeSummary(recipe, env, preset), resumed=False)
        finally:
            folder.release()


def resume(
    folder: Path,
    runtime: RuntimeSettings,
    *,
    steps: int | None = None,
    show: SweepView | None = None,
    stop: StopRequest | None = None,
) -> SweepResult:
    """Finish what of a job is unfinished, or take all seeds to so many steps."""
    stop, show = stop or NullStop(), show or NullSweepView()
    run_folder = jobs.open_sweep_folder(folder)
    try:
        sweep = jobs.read_sweep(folder)
        recorded_env_file = sweep.config.runtime.env_file
        sweep = sweep.copy_with_runtime(runtime)
        _await_processes(folder, sweep, show)
        jobs.check_recipe(folder, sweep)
        if steps is not None:
            jobs.check_goal(folder, sweep, steps)
            sweep = sweep.copy_with_steps(steps)
        if all(jobs.read_seed_status(folder, sweep, seed).finished for seed in sweep.seeds):
            return _make_result(folder, sweep, {}, has_trained=False)
        user_env_file.pin_env_file(sweep.config.recipe, runtime.env_file, lambda: recorded_env_file)
        env = run.await_env_spec(sweep.config.recipe, stop)
        jobs.write_sweep(folder, sweep)
        with _SweepRunner(sweep, show, stop) as runner:
            facts = RecipeSummary(sweep.config.recipe, env, sweep.preset)
            return runner.run(run_folder, facts, resumed=True)
    finally:
        run_folder.release()


def _await_processes(folder: Path, sweep: Sweep, show: SweepView) -> None:
    """A job that was killed has seeds that notice it a moment later."""
    deadline = time.monotonic() + _WAIT_S
    for seed in sweep.seeds:
        path = get_seed_folder(folder, seed)
        if path.exists() and is_locked(path) and time.monotonic() < deadline:
            show.show_note(
                f"Another process is still training in {path}: waiting up to {_WAIT_S:g} s "
                "for its end."
            )
        while path.exists() and is_locked(path) and time.monotonic() < deadline:
            time.sleep(0.1)


class _SweepRunner:
    """A fleet for all seeds, where one is shared, and the crew that uses it."""

    def __init__(self, sweep: Sweep, show: SweepView, stop: StopRequest) -> None:
        self._sweep = sweep
        self._show = show
        self._stop = stop
        self._board = SweepProgress(
            sweep.seeds,
            stop_at_steps=sweep.config.stop_at_steps,
            stop_at_iterations=sweep.config.stop_at_iterations,
        )
        self._fleet: Fleet | None = None
        self._check_folder: Callable[[], None] = lambda: None

    def __enter__(self) -> _SweepRunner:
        runtime = self._sweep.config.runtime
        if factory.resolve_fleet_kind(runtime) == "flame":
            slots = self._sweep.config.learning.rollout.num_slots * len(self._sweep.seeds)
            self._fleet = factory.make_fleet(runtime, slots, self._handle_fleet_event)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def run(self, sweep_folder: RunFolder, facts: RecipeSummary, *, resumed: bool) -> SweepResult:
        sweep, board, folder = self._sweep, self._board, sweep_folder.path
        self._check_folder = sweep_folder.check_held
        statuses = [jobs.read_seed_status(folder, sweep, seed) for seed in sweep.seeds]
        for status in statuses:
            progress = status.checkpoint.progress if status.checkpoint is not None else None
            record = (
                status.checkpoint.evaluation or status.checkpoint.best
                if status.checkpoint is not None
                else None
            )
            board.restore_seed(
                status.seed, progress.steps if progress else 0,
                "finished" if status.finished else "waiting", record.mean if record else None,
            )  # fmt: skip
        unfinished = [status for status in statuses if not status.finished]
        resources = self._split_resources(len(unfinished), facts)
        name = "here" if self._fleet is None else self._fleet.name
        capacity = resources.concurrent_seeds if self._fleet is None else self._fleet.capacity
        start = SweepStart(folder, facts, sweep.seeds, name, capacity, resources, resumed)
        if resources.memory_bound:
            self._show.show_note(
                f"{resources.concurrent_seeds} side by side, for memory's sake; the others wait "
                "for them."
            )
        with self._show.open(start, board):
            outcomes = SeedProcesses(
                {status.seed: self._make_order(status, folder, resources) for status in unfinished},
                self, self._stop, at_once=resources.concurrent_seeds,
                threads=count_blas_threads(sweep.config.learning),
                fleet=self._fleet, show_output=sweep.config.runtime.debug,
            ).run()  # fmt: skip
        sweep_folder.check_held()
        return _make_result(folder, sweep, outcomes, has_trained=True, seconds=board.elapsed_s)

    def _split_resources(self, seeds: int, facts: RecipeSummary) -> SweepResources:
        runtime, learning = self._sweep.config.runtime, self._sweep.config.learning
        replay = facts.replay.nbytes if facts.replay is not None else 0
        memory = measure_available_bytes()
        if self._fleet is not None:
            # They mostly wait for executors, so there may be more of them than cores.
            fitting = int(memory / (replay + PROCESS_BYTES))
            return SweepResources(max(1, min(seeds, fitting)), 0, memory_bound=fitting < seeds)
        return split_resources(
            seeds,
            cores=runtime.workers or blas.count_usable_cores(),
            # Lanes change no bit and wait for each other without spinning: one core will do.
            threads=count_blas_threads(learning)
            if learning.provider == "numpy"
            else learning.threads,
            replay_bytes=replay,
            available_bytes=memory,
            split=runtime.fleet != "inline",
        )

    def _make_order(
        self, status: SeedStatus, folder: Path, resources: SweepResources
    ) -> dict[str, Any]:
        """What the process of a seed is told."""
        fleet: dict[str, Any] = {
            "kind": "local" if resources.workers_per_seed else "inline",
            "workers": resources.workers_per_seed,
        }
        if self._fleet is not None:
            fleet = {
                "kind": "lent", "name": self._fleet.name, "capacity": self._fleet.capacity
            }  # fmt: skip
        recipe = status.checkpoint.recipe if status.checkpoint is not None else self._sweep.config
        return {
            "config": self._sweep.make_seed_config(status.seed, folder).model_dump(mode="json"),
            "preset": self._sweep.preset,
            "init_from": self._sweep.init_from,
            "modules": list_allowed_modules(),
            "folder": str(status.folder),
            "resume": status.started,
            "steps": recipe.stop_at_steps if recipe.stop_at_iterations is None else None,
            "fleet": fleet,
        }

    # What the crew tells, and the fleet.

    def handle_start(self, seed: int) -> None:
        self._check_folder()
        self._board.mark_running(seed)

    def handle_event(self, seed: int, event: Mapping[str, Any]) -> None:
        self._board.add_event(seed, event)
        if event.get("event") == "note":
            self._show.show_note(f"seed {seed}: {event['text']}")
        elif event.get("event") == "retried" and event.get("reason"):
            self._show.show_note(f"seed {seed}: slot {event['slot']} again; {event['reason']}.")
        self._show.show_event(seed, event)

    def handle_end(self, seed: int, outcome: SeedOutcome) -> None:
        self._board.add_outcome(seed, outcome)
        self._show.show_outcome(seed, outcome)

    def _handle_fleet_event(self, event: FleetEvent) -> None:
        if event.kind == "phase":
            self._board.phase = event.text
        elif event.kind == "workers":
            self._board.workers = int(event.text)
        elif event.kind in ("note", "retried") and event.text:
            self._show.show_note(event.text)


def _make_result(
    folder: Path,
    sweep: Sweep,
    outcomes: Mapping[int, SeedOutcome],
    *,
    has_trained: bool,
    seconds: float = 0.0,
) -> SweepResult:
    """What the seeds come to, written down beside them."""
    sweep_summary = summarise_sweep(folder, sweep, outcomes)
    with report_disk_errors(folder, format_command("resume", folder)):
        safetensors_file.write_atomically(folder / "seeds.csv", sweep_summary.as_csv().encode())
        text = as_json_text({"folder": str(folder), **sweep_summary.as_dict()}, indent=2) + "\n"
        safetensors_file.write_atomically(folder / "summary.json", text.encode())
    return SweepResult(folder, sweep_summary, outcomes, has_trained, _draw_plot(folder), seconds)


def _draw_plot(folder: Path) -> Path | None:
    """The picture of all seeds, where matplotlib is there to draw it and there are curves."""
    out = folder / "plot.png"
    try:
        matplotlib_backend.check_available()
        runs, _ = run_reader.read_runs([folder])
        safetensors_file.write_atomically(
            out, matplotlib_backend.render_image(curves.make_figure(runs), out)
        )
    except RlflameError:
        return None
    return out
