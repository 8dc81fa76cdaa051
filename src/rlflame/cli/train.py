"""`rlflame train` and `rlflame resume`. Must not know: how training or showing works."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import (
    AllowModules,
    Debug,
    Device,
    EnvFile,
    Fleet,
    JsonLines,
    Learners,
    Local,
    Plain,
    Quiet,
    RuntimeSets,
    ScaleBatch,
    ScaleLr,
    Sets,
    TensorBoard,
    VideoEvery,
    Workers,
)

if TYPE_CHECKING:
    from rlflame.config.recipe import RunConfig
    from rlflame.console.base import RunResult, RunView
    from rlflame.fleet.prestart import PrestartPool
    from rlflame.training.stop_signal import SignalStop


def train(
    context: typer.Context,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ENV",
            help="An alias of `rlflame envs`, a Gymnasium id, or module:Id. [default: cartpole]",
        ),
    ] = None,
    algo: Annotated[
        str | None, typer.Option(metavar="ALGO", help="ppo, reinforce or sac. [default: ppo]")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Stop after this many environment steps.")
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="REINFORCE: stop after this many iterations. [reinforce-classic: 100]"
        ),
    ] = None,
    episodes_per_iter: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="REINFORCE: episodes in an iteration. [reinforce-classic: 100]"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="All randomness follows from it. [default: 0]")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Several seeds as one job, such as 0-9 or 0,3,7."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A preset of `rlflame envs`, not the environment's own."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file of settings, over the preset.")
    ] = None,
    sets: Sets = None,
    env_kwargs: Annotated[
        list[str] | None,
        typer.Option(help="An argument of the environment; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Start from the policy in this file.", metavar="CKPT")
    ] = None,
    until_return: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Stop once an evaluation's 95% interval lies above this return."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run folder. [default: runs/ENV-ALGO-SEED]"),
    ] = None,
    workers: Workers = None,
    learners: Learners = None,
    device: Device = None,
    scale_batch: ScaleBatch = False,
    scale_lr: ScaleLr = False,
    fleet: Fleet = None,
    local: Local = False,
    env_file: EnvFile = None,
    allow_modules: AllowModules = None,
    video_every: VideoEvery = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the episodes' returns into the run folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config as TOML and stop.")
    ] = False,
    tensorboard: TensorBoard = False,
    json_lines: JsonLines = False,
    quiet: Quiet = False,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Train a policy in a new run folder.

    Settings come from, strongest first: these options, --set, --config, the preset.
    """
    _run_replica_if_launched(dry_run=dry_run)
    from rlflame.cli import sweep as cli_sweep
    from rlflame.experiment import run_settings

    seed_list = (
        cli_sweep.parse_seeds(seeds, seed=seed, sets=sets or (), plot=plot)
        if seeds is not None
        else ()
    )
    runtime = run_settings.collect_runtime_flags(
        workers=workers, fleet=fleet, local=local, env_file=env_file, out=out, debug=debug,
        allow_modules=allow_modules,
        json_lines=json_lines, quiet=quiet, plain=plain, tensorboard=tensorboard,
        video_every=video_every, learners=learners,
    )  # fmt: skip
    resolved, preset_name = run_settings.resolve(
        environment=env, algorithm=algo, preset=preset, config_file=config,
        sets=sets or (), env_kwargs=env_kwargs or (), steps=steps, iterations=iterations,
        episodes_per_iter=episodes_per_iter, seed=seed_list[0] if seed_list else seed,
        until_return=until_return, runtime=runtime, scale_batch=scale_batch, scale_lr=scale_lr,
        device=device,
    )  # fmt: skip
    if seed_list:
        cli_sweep.check_learners(resolved.runtime.learners)
    run_settings.limit_threads(resolved.learning.threads)
    if dry_run:
        _print_dry_run(resolved, preset_name, init_from, seed_list, as_json=json_lines)
        return
    if seed_list:
        cli_sweep.train(resolved, preset_name, seed_list, init_from)
        return
    from rlflame.console.display import make_display
    from rlflame.fleet import factory
    from rlflame.fleet.base import EventCounter

    display = make_display(resolved.runtime.progress)
    # Workers load their parts while this process loads its own.
    slots = resolved.learning.rollout.num_slots
    counts = EventCounter(display.show_fleet_event)
    env_id = resolved.learning.environment.id
    head_start: PrestartPool | None = context.obj
    with factory.make_training_fleet(
        resolved.runtime, slots, counts, env_id, head_start
    ) as open_fleet:
        if head_start is not None:
            head_start.close()
        from rlflame.experiment import run
        from rlflame.training.stop_signal import SignalStop

        with SignalStop() as stop:
            result = run.train(
                resolved, preset=preset_name, init_from=init_from, fleet=open_fleet, show=display,
                stop=stop,
                counts=counts,
            )  # fmt: skip
    if plot:
        _draw_returns(result, resolved, display)
    display.show_result(result)
    _check_complete(result, stop)


def resume(
    run: Annotated[
        Path, typer.Argument(help="A run folder, a checkpoint in one, or a folder of --seeds.")
    ],
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Train on to this many steps in all.")
    ] = None,
    fresh_replay: Annotated[
        bool,
        typer.Option(
            "--fresh-replay",
            help="Keep the weights and begin with an empty replay; where its files are lost.",
        ),
    ] = False,
    sets: RuntimeSets = None,
    workers: Workers = None,
    learners: Learners = None,
    fleet: Fleet = None,
    local: Local = False,
    env_file: EnvFile = None,
    allow_modules: AllowModules = None,
    tensorboard: TensorBoard = False,
    video_every: VideoEvery = None,
    json_lines: JsonLines = False,
    quiet: Quiet = False,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Continue a run exactly where it stands.

    Workers, fleet and other runtime settings (--set runtime...) may differ from before.
    """
    _run_replica_if_launched()
    from rlflame.cli import sweep as cli_sweep
    from rlflame.experiment import run_settings

    flags = run_settings.collect_runtime_flags(
        workers=workers, fleet=fleet, local=local, env_file=env_file, debug=debug,
        allow_modules=allow_modules, json_lines=json_lines, quiet=quiet, plain=plain,
        tensorboard=tensorboard, video_every=video_every, learners=learners,
    )  # fmt: skip
    from rlflame.storage.sweep_dir import is_sweep

    stored_config = run_settings.read_recorded_config(run)
    runtime = run_settings.make_resumed_runtime(run, stored_config, flags, sets or ())
    run_settings.limit_threads(run_settings.read_recorded_threads(stored_config))
    if is_sweep(run):
        cli_sweep.resume(run, runtime, steps, fresh_replay=fresh_replay)
        return
    from rlflame.console.display import make_display
    from rlflame.experiment import run as experiment_run
    from rlflame.training.stop_signal import SignalStop

    display = make_display(runtime.progress)
    with SignalStop() as stop:
        result = experiment_run.resume(
            run, runtime, steps=steps, fresh_replay=fresh_replay, show=display, stop=stop
        )
    display.show_result(result)
    _check_complete(result, stop)


def _run_replica_if_launched(*, dry_run: bool = False) -> None:
    """Of the processes that torchrun starts, the first one trains and the others learn with it."""
    from rlflame.config import torchrun

    place = torchrun.read_rank()
    if place is not None and place.rank > 0:
        if dry_run:
            raise typer.Exit
        try:
            from rlflame.experiment.learners import replica_main

            code = replica_main.run_under_torchrun(place)
        except KeyboardInterrupt:
            code = 130  # the first one hears it too, and says it
        raise typer.Exit(code)


def _print_dry_run(
    config: RunConfig,
    preset: str,
    init_from: Path | None,
    seeds: tuple[int, ...],
    *,
    as_json: bool,
) -> None:
    from rlflame.config import toml_io, user_env_file
    from rlflame.console.formatting import format_pairs
    from rlflame.console.output import as_json_text, print_note, print_result, print_result_lines
    from rlflame.console.recipe_summary import RecipeSummary
    from rlflame.errors import ConfigError
    from rlflame.experiment import components, run
    from rlflame.experiment.env_spec import inspect_env
    from rlflame.learning import factory
    from rlflame.rollout.envs.vector_env import describe_stepping

    recipe = user_env_file.pin_env_file(config.recipe, config.runtime.env_file)
    config = config.model_copy(update={"learning": recipe.learning})
    env = inspect_env(config.learning.environment)
    run.check_start(config.learning, init_from)
    if init_from is not None:
        learning, _ = run.apply_init_policy(config.learning, env, init_from)
        config = config.model_copy(update={"learning": learning})
    components.make_policy_spec(config.learning, env)  # refuses what would not be trained
    for check in (
        lambda: components.check_memory(config.recipe, env, resumed=False),
        lambda: factory.resolve_device(config.learning, 0),
    ):
        try:
            check()
        except ConfigError as error:  # it may be meant for another machine
            print_note(f"Not on this machine: {error.message} {error.hint}")
    summary = RecipeSummary(config.recipe, env, preset)
    if as_json:
        run_fields = {
            "stepped_by": describe_stepping(env),
            "reset_seeds": summary.compute_reset_seeds(),
            "config": config.model_dump(mode="json"),
            **({"seeds": seeds} if seeds else {}),
        }
        print_result_lines(as_json_text({**summary.as_dict(), **run_fields}, indent=2))
        return
    if seeds:
        from rlflame.storage.sweep_dir import format_seeds

        print_result(f"# --seeds {format_seeds(seeds)}: this recipe, and so on with each of them.")
    workers = f"at most {summary.max_workers:,} can help (learning.rollout.num_slots)"
    for line in format_pairs(
        [*summary.format_lines(), ("rollouts", describe_stepping(env)), ("workers", workers)]
    ):
        print_result(f"# {line.strip()}")
    print_result("")
    print_result_lines(toml_io.to_toml(config).rstrip())


def _draw_returns(result: RunResult, config: RunConfig, display: RunView) -> None:
    from dataclasses import replace

    from rlflame.analysis import curves
    from rlflame.analysis.plots import matplotlib_backend
    from rlflame.console.recipe_summary import format_title
    from rlflame.errors import RlflameError
    from rlflame.storage import run_reader, safetensors_file

    out = result.folder / "returns.png"
    try:
        matplotlib_backend.check_available()
        chart = curves.make_chart(
            [run_reader.read_run(result.folder)], metric=curves.EPISODE_RETURN
        )
        chart = replace(chart, title=format_title(config.recipe))
        safetensors_file.write_atomically(out, matplotlib_backend.render_image(chart, out))
    except RlflameError as error:
        display.show_note(f"{error.message} {error.hint}")
    else:
        display.show_note(f"The episodes' returns are drawn in {out}.")


def _check_complete(result: RunResult, stop: SignalStop) -> None:
    from rlflame.errors import Interruption, format_command

    if not result.complete and stop.signal_number is not None:
        raise Interruption(
            f"Stopped at step {result.progress.steps:,}; everything is saved.",
            format_command("resume", result.folder),
            stop.signal_number,
        )
