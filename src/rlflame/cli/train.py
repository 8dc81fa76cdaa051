"""The `rlflame train` and `rlflame resume` commands."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlflame.cli.options import (
    DryRun,
    ExistingRun,
    FreshReplay,
    InitFrom,
    NewSchedule,
    PlotReturns,
    Seeds,
    TotalIterations,
    TotalSteps,
    add_flag_options,
)
from rlflame.config.flags import RuntimeFlags, TrainFlags, read_rank
from rlflame.console.output import (
    as_json_text,
    format_pairs,
    is_interactive,
    print_note,
    print_result,
    print_result_lines,
)
from rlflame.errors import ConfigError, Interruption, RlflameError, format_command
from rlflame.rollout.blas import limit_threads

if TYPE_CHECKING:
    from rlflame.config.recipe import RunConfig
    from rlflame.console.base import RunResult, RunView
    from rlflame.experiment.resume import Budget
    from rlflame.fleet.prestart import PrestartPool
    from rlflame.training.stop_signal import SignalStop


@add_flag_options()
def train(
    context: typer.Context,
    flags: TrainFlags,
    seeds: Seeds = None,
    init_from: InitFrom = None,
    plot: PlotReturns = False,
    dry_run: DryRun = False,
) -> None:
    """Train a policy and save it in a new run folder.

    Options such as --steps override --set, which overrides --config, which overrides the preset.
    """
    _run_replica_if_launched(dry_run=dry_run)
    from rlflame.cli import sweep
    from rlflame.config.resolve import resolve

    seed_list: tuple[int, ...] = ()
    if seeds is not None:
        seed_list = sweep.parse_seeds(seeds, seed=flags.seed, sets=flags.sets or (), plot=plot)
        flags = replace(flags, seed=seed_list[0])
    flags = replace(flags, device=_choose_device(flags.device))
    config, preset = resolve(flags, _has_continuous_actions)
    limit_threads(config.learning.threads)
    if dry_run:
        _print_dry_run(config, preset, init_from, seed_list, as_json=flags.json_lines)
    elif seed_list:
        sweep.train(config, preset, seed_list, init_from)
    else:
        _train_run(config, preset, init_from, context.obj, plot=plot)


@add_flag_options()
def resume(
    run: ExistingRun,
    flags: RuntimeFlags,
    steps: TotalSteps = None,
    iterations: TotalIterations = None,
    fresh_replay: FreshReplay = False,
    new_schedule: NewSchedule = False,
) -> None:
    """Continue a run from its latest checkpoint.

    The result is bit-for-bit identical to that of an uninterrupted run, on any number of workers.
    """
    _run_replica_if_launched()
    from rlflame.cli import sweep
    from rlflame.experiment.recorded_config import (
        read_recorded_config,
        read_recorded_threads,
        resolve_resumed_runtime,
    )
    from rlflame.storage.sweep_folder import is_sweep

    config_layer = read_recorded_config(run)
    runtime = resolve_resumed_runtime(run, config_layer, flags)
    limit_threads(read_recorded_threads(config_layer))
    from rlflame.experiment.resume import make_budget

    budget = make_budget(steps, iterations)
    if new_schedule:
        _train_with_new_schedule(run, flags, budget, fresh_replay=fresh_replay)
        return
    if is_sweep(run):
        sweep.resume(run, runtime, steps, iterations, fresh_replay=fresh_replay)
        return
    from rlflame.console.display import make_display
    from rlflame.experiment.run import RunHost, resume_run
    from rlflame.training.stop_signal import SignalStop

    display = make_display(runtime.progress)
    with SignalStop() as stop:
        host = RunHost(view=display, stop=stop)
        result = resume_run(run, runtime, host, budget=budget, fresh_replay=fresh_replay)
    display.show_result(result)
    _check_complete(result, stop)


def _train_with_new_schedule(
    run: Path, flags: RuntimeFlags, budget: Budget | None, *, fresh_replay: bool
) -> None:
    """Start a new run from the best policy of a run, with new schedules."""
    if budget is None or fresh_replay:
        raise ConfigError(
            "--new-schedule needs --steps or --iterations, and cannot be combined with "
            "--fresh-replay.",
            format_command("resume", run, "--steps", "1M", "--new-schedule"),
        )
    from rlflame.config.resolve import resolve
    from rlflame.experiment import resume as continuation
    from rlflame.storage.run_folder import load_newest_checkpoint

    latest = load_newest_checkpoint(run, print_note)
    continuation.check_unit(latest.recipe, budget, latest.progress.steps)
    file = continuation.find_best_policy(run, run) if run.is_dir() else run
    print_note(f"A new run starts from the policy {file}.")
    config_file = continuation.find_config(file)
    # The new folder is beside that of the run, which may have been moved since it was written.
    out = None if config_file.parent.resolve() == Path.cwd() else config_file.parent
    values = {item.name: getattr(flags, item.name) for item in fields(flags)}
    rest = budget.compute_rest(latest.progress)
    values["sets"] = [
        *(flags.sets or ()),
        *continuation.list_resets(latest, is_rescheduled=True),
        f"stop_at_{rest.unit}={rest.end}",  # PPO has no --iterations, but has this setting
    ]
    config, preset = resolve(
        TrainFlags(**values, config=config_file, out=out), _has_continuous_actions
    )
    _train_run(config, preset, file, None, plot=False)


def _run_replica_if_launched(*, dry_run: bool = False) -> None:
    """Run as a learner and exit if torchrun gave this process a rank above 0."""
    place = read_rank()
    if place is not None and place.rank > 0:
        if dry_run:
            raise typer.Exit
        try:
            from rlflame.experiment.learners import replica_main

            code = replica_main.run_under_torchrun(place)
        except KeyboardInterrupt:
            code = 130  # rank 0 receives the signal too, and reports it
        raise typer.Exit(code)


def _choose_device(name: str | None) -> str | None:
    """Return the device; `auto` is CUDA if torch can use it, and the CPU otherwise."""
    if name not in (None, "cpu", "cuda", "auto"):
        raise ConfigError(f"--device {name} is not a device.", "--device cpu, cuda or auto")
    if name != "auto":
        return name
    limit_threads(1)
    from rlflame.learning import torch_gradients

    return "cuda" if torch_gradients.is_cuda_available() else "cpu"


def _has_continuous_actions(config: RunConfig) -> bool:
    limit_threads(config.learning.threads)
    from rlflame.experiment import components
    from rlflame.training.stop_signal import SignalStop, abort_on_stop

    with SignalStop() as stop, abort_on_stop(stop):
        return components.has_continuous_actions(config)


def _train_run(
    config: RunConfig,
    preset: str,
    init_from: Path | None,
    head_start: PrestartPool | None,
    *,
    plot: bool,
) -> None:
    from rlflame.console.display import make_display
    from rlflame.experiment.preflight import check_settings
    from rlflame.fleet import factory
    from rlflame.fleet.base import EventCounter

    check_settings(config.recipe, config.runtime)
    display = make_display(config.runtime.progress)
    counts = EventCounter(display.show_fleet_event)
    learning = config.learning
    # Workers import their modules while this process imports its own.
    with factory.make_fleet(
        config.runtime,
        learning.rollout.num_slots,
        counts,
        learning.environment.id,
        head_start,
        is_training=True,
    ) as fleet:
        if head_start is not None:
            head_start.close()
        from rlflame.experiment.run import RunHost, train_run
        from rlflame.training.stop_signal import SignalStop

        with SignalStop() as stop:
            host = RunHost(view=display, stop=stop, fleet=fleet, counts=counts)
            result = train_run(config, host, preset, init_from)
    if plot:
        _draw_returns(result, display, config.runtime.progress)
    display.show_result(result)
    _check_complete(result, stop)


def _print_dry_run(
    config: RunConfig, preset: str, init_from: Path | None, seeds: tuple[int, ...], *, as_json: bool
) -> None:
    from rlflame.config.recipe import RunConfig
    from rlflame.config.resolve import format_config
    from rlflame.console.recipe_summary import RecipeSummary
    from rlflame.experiment.preflight import check_sweep, run_preflight
    from rlflame.rollout.envs.vector_env import describe_stepping
    from rlflame.storage.sweep_folder import format_seeds

    if seeds:
        check_sweep(config.runtime)
    preflight = run_preflight(
        config.recipe, config.runtime, init_from=init_from, dry_run=True, show_note=print_note
    )
    config = RunConfig.from_recipe(preflight.recipe, config.runtime)
    summary = RecipeSummary(config.recipe, preflight.env, preset)
    stepping = describe_stepping(preflight.env)
    if as_json:
        fields = {
            "stepped_by": stepping,
            "reset_seeds": summary.compute_reset_seeds(),
            "config": config.model_dump(mode="json"),
            **({"seeds": seeds} if seeds else {}),
        }
        print_result_lines(as_json_text({**summary.as_dict(), **fields}, indent=2))
        return
    if seeds:
        print_result(f"# --seeds {format_seeds(seeds)}: this recipe with each of these seeds.")
    workers = f"at most {summary.max_workers:,} can help (learning.rollout.num_slots)"
    lines = [*summary.format_lines(), ("rollouts", stepping), ("workers", workers)]
    for line in format_pairs(lines):
        print_result(f"# {line.strip()}")
    print_result("")
    print_result_lines(format_config(config).rstrip())


def _draw_returns(result: RunResult, display: RunView, progress: str) -> None:
    from rlflame.analysis.curves import EPISODE_RETURN
    from rlflame.analysis.plots.matplotlib_backend import write_image
    from rlflame.rendering.image_window import open_image

    try:
        out = write_image(result.folder, "returns.png", EPISODE_RETURN)
    except RlflameError as error:
        display.show_note(f"{error.message} {error.hint}")
    else:
        display.show_note(f"The episode returns are plotted in {out}.")
        if progress not in ("json", "quiet") and is_interactive(sys.stdout):
            open_image(out)


def _check_complete(result: RunResult, stop: SignalStop) -> None:
    if not result.complete and stop.signal_number is not None:
        raise Interruption(
            f"Stopped at step {result.progress.steps:,}; everything is saved.",
            format_command("resume", result.folder),
            stop.signal_number,
        )
