"""Several seeds of one recipe, from a config or a folder to what they say together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlflame.analysis import curves
from rlflame.analysis.plots import matplotlib_backend
from rlflame.config.module_trust import list_allowed_modules
from rlflame.config.recipe import RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.base import NullView, RunStart, RunView, SweepResources, SweepResult
from rlflame.console.output import as_json_text
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.errors import RlflameError, format_command
from rlflame.experiment.preflight import list_warnings, run_preflight
from rlflame.experiment.sweep import sweep as jobs
from rlflame.experiment.sweep.seed_processes import SeedProcesses
from rlflame.experiment.sweep.sweep import SeedStatus, Sweep
from rlflame.fleet import factory
from rlflame.fleet.base import Fleet
from rlflame.learning.factory import count_blas_threads
from rlflame.rollout import machine
from rlflame.storage import run_reader, safetensors_file
from rlflame.storage.available_memory import PROCESS_BYTES, measure_available_bytes
from rlflame.storage.run_folder import RunFolder, is_locked, report_disk_errors
from rlflame.storage.sweep_folder import SeedOutcome, get_seed_folder
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import StopRequest

_WAIT_S = 20.0


def train(
    config: RunConfig,
    seeds: Sequence[int],
    *,
    preset: str = "",
    init_from: Path | None = None,
    show: RunView | None = None,
    stop: StopRequest | None = None,
) -> SweepResult:
    """Train a config with each of the seeds, in a new folder of run folders."""
    stop, show = stop or NullStop(), show or NullView()
    recipe = config.recipe.copy_with_horizon()
    preflight = run_preflight(recipe, config.runtime, init_from=init_from, stop=stop)
    recipe, env = preflight.recipe, preflight.env
    learning = recipe.learning.model_copy(update={"seed": seeds[0]})
    sweep_config = RunConfig.from_recipe(recipe, config.runtime).model_copy(
        update={"learning": learning}
    )
    init_path = str(init_from.resolve()) if init_from is not None else None
    sweep = Sweep(sweep_config, tuple(seeds), preset, init_path)
    for warning in list_warnings(recipe):
        show.show_note(warning)
    with _open_shared_fleet(sweep, show) as fleet:
        folder = RunFolder.create(jobs.choose_sweep_path(config, sweep.seeds))
        if note := folder.format_relocation_note(config.runtime.out):
            show.show_note(note)
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
    show: RunView | None = None,
    stop: StopRequest | None = None,
) -> SweepResult:
    """Finish the seeds that are unfinished, or take all of them to so many steps."""
    stop, show = stop or NullStop(), show or NullView()
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
        if all(status.finished for status in jobs.read_seed_statuses(folder, sweep)):
            return _make_result(folder, sweep, {}, has_trained=False)
        preflight = run_preflight(
            sweep.config.recipe,
            runtime,
            resumed=True,
            stop=stop,
            read_recorded_env_file=lambda: recorded_env_file,
        )
        for warning in list_warnings(preflight.recipe):
            show.show_note(warning)
        jobs.write_sweep(folder, sweep)
        summary = RecipeSummary(sweep.config.recipe, preflight.env, sweep.preset)
        with _open_shared_fleet(sweep, show) as fleet:
            return _run_seeds(run_folder, sweep, summary, fleet, show, stop, resumed=True)
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
    """How many seeds run at once, and on how many workers each.

    One process for each core uses a machine best: nothing waits for anything. Where there are
    fewer seeds than cores, each gets workers from the cores that are left, if `split` allows.
    """
    fitting = int(min(available_bytes / (replay_bytes + PROCESS_BYTES), seeds))
    requested = min(seeds, max(1, cores // threads))
    at_once = max(1, min(requested, fitting))
    cores_per_seed = cores // at_once
    workers = cores_per_seed if split and cores_per_seed >= 2 and threads == 1 else 0
    return SweepResources(at_once, workers, memory_bound=at_once < requested)


def _await_processes(folder: Path, sweep: Sweep, show: RunView) -> None:
    """The seeds of a sweep that was killed notice it a moment later."""
    deadline = time.monotonic() + _WAIT_S
    for seed in sweep.seeds:
        path = get_seed_folder(folder, seed)
        note = f"Another process is still training in {path}: waiting up to {_WAIT_S:g} s for it."
        while path.exists() and is_locked(path) and time.monotonic() < deadline:
            if note:
                show.show_note(note)
            note = ""
            time.sleep(0.1)


@contextmanager
def _open_shared_fleet(sweep: Sweep, show: RunView) -> Iterator[Fleet | None]:
    """The cluster, which all seeds use; None where each seed has its own processes."""
    runtime = sweep.config.runtime
    if not factory.is_remote(factory.resolve_fleet_kind(runtime)):
        yield None
        return
    slots = sweep.config.learning.rollout.num_slots * len(sweep.seeds)
    with factory.make_fleet(runtime, slots, show.show_fleet_event) as fleet:
        yield fleet


def _run_seeds(
    folder: RunFolder,
    sweep: Sweep,
    summary: RecipeSummary,
    fleet: Fleet | None,
    show: RunView,
    stop: StopRequest,
    *,
    resumed: bool = False,
) -> SweepResult:
    runtime, statuses = sweep.config.runtime, jobs.read_seed_statuses(folder.path, sweep)
    unfinished = [status for status in statuses if not status.finished]
    resources = _split_resources(sweep, len(unfinished), summary, fleet)
    orders = {
        status.seed: _make_order(sweep, status, folder.path, resources, fleet)
        for status in unfinished
    }
    start = RunStart(
        folder.path,
        summary,
        {status.seed: status.checkpoint for status in statuses},
        fleet.name if fleet is not None else "inline",
        fleet.capacity if fleet is not None else 0,
        resumed,
        resources=resources,
        finished=frozenset(sweep.seeds) - orders.keys(),
    )
    if resources.memory_bound:
        show.show_note(
            f"Memory is enough for {resources.concurrent_seeds} seeds at a time; the others wait."
        )
    with show.open(start):
        outcomes = SeedProcesses(
            orders,
            folder,
            show,
            stop,
            at_once=resources.concurrent_seeds,
            threads=count_blas_threads(sweep.config.learning),
            fleet=fleet,
            show_output=runtime.debug,
        ).run()
    folder.check_held()
    return _make_result(folder.path, sweep, outcomes)


def _split_resources(
    sweep: Sweep, seeds: int, summary: RecipeSummary, fleet: Fleet | None
) -> SweepResources:
    runtime, learning = sweep.config.runtime, sweep.config.learning
    # The two lanes of a numpy update wait for each other without spinning: one core will do.
    is_numpy = learning.provider == "numpy"
    threads = count_blas_threads(learning) if is_numpy else learning.threads
    return split_resources(
        seeds,
        # Seeds that share a fleet mostly wait for it, so there may be more of them than cores.
        cores=seeds if fleet is not None else runtime.workers or machine.count_usable_cores(),
        threads=1 if fleet is not None else threads,
        replay_bytes=summary.replay.nbytes if summary.replay is not None else 0,
        available_bytes=measure_available_bytes(),
        split=runtime.fleet != "inline" and fleet is None,
    )


def _make_order(
    sweep: Sweep, status: SeedStatus, folder: Path, resources: SweepResources, fleet: Fleet | None
) -> dict[str, Any]:
    """The first message to the process of a seed."""
    workers = resources.workers_per_seed
    place: dict[str, Any] = {"kind": "local" if workers else "inline", "workers": workers}
    if fleet is not None:
        place = {"kind": "lent", "name": fleet.name, "capacity": fleet.capacity}
    recipe = status.checkpoint.recipe if status.checkpoint is not None else sweep.config
    return {
        "config": sweep.make_seed_config(status.seed, folder).model_dump(mode="json"),
        "preset": sweep.preset,
        "init_from": sweep.init_from,
        "modules": list_allowed_modules(),
        "folder": str(status.folder),
        "resume": status.started,
        "steps": recipe.stop_at_steps if recipe.stop_at_iterations is None else None,
        "fleet": place,
    }


def _make_result(
    folder: Path, sweep: Sweep, outcomes: Mapping[int, SeedOutcome], *, has_trained: bool = True
) -> SweepResult:
    """The summary of the seeds, which is also written beside them."""
    summary = jobs.summarise_sweep(folder, sweep, outcomes)
    with report_disk_errors(folder, format_command("resume", folder)):
        safetensors_file.write_atomically(folder / "seeds.csv", summary.as_csv().encode())
        text = as_json_text({"folder": str(folder), **summary.as_dict()}, indent=2) + "\n"
        safetensors_file.write_atomically(folder / "summary.json", text.encode())
    return SweepResult(folder, summary, outcomes, has_trained, _draw_plot(folder))


def _draw_plot(folder: Path) -> Path | None:
    """The picture of all seeds; None without matplotlib or curves."""
    out = folder / "plot.png"
    try:
        matplotlib_backend.check_available()
        runs, _ = run_reader.read_runs([folder])
        figure = matplotlib_backend.render_image(curves.make_figure(runs), out)
        safetensors_file.write_atomically(out, figure)
    except RlflameError:
        return None
    return out
