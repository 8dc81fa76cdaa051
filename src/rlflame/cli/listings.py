"""`rlflame runs`, `envs`, `config` and `trust`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug, Json
from rlflame.console.output import (
    as_json_text,
    format_table,
    print_note,
    print_result,
    print_result_lines,
)
from rlflame.errors import CheckpointError

if TYPE_CHECKING:
    from rlflame.experiment.listings import RunOverview


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where the run folders are.")
    ] = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List run folders, how far and how good.

    A run is training, finished, stopped, or damaged.
    """
    from rlflame.experiment.listings import list_runs

    if not folder.exists() and folder != Path("runs"):
        raise CheckpointError(f"{folder} does not exist.", "rlflame runs lists those in ./runs")
    entries = list_runs(folder) if folder.exists() else []
    if as_json:
        print_result_lines(as_json_text(entries, indent=2))
        return
    if not entries:
        print_note(f"There are no runs in {folder}. rlflame train begins one.")
        return
    header = ("run", "state", "environment", "algorithm", "progress", "best")
    _print_table([header, *map(_format_row, entries)])
    for run in entries:
        if run.problem:
            print_note(f"{run.folder}: {run.problem}")


def _format_row(run: RunOverview) -> tuple[str, ...]:
    progress = "-"
    if run.steps is not None:
        progress = f"{run.steps:,}"
        if run.stop_at_steps:
            progress += f" of {run.stop_at_steps:,}"
        progress += " steps"
        if run.stop_at_iterations:
            progress = f"{run.iterations:,} of {run.stop_at_iterations:,} iterations"
    if run.seeds is not None:
        progress = f"{run.seeds_finished} of {run.seeds} seeds, {progress}"
    best = "-" if run.best_return is None else f"{run.best_return:,.1f}"
    return (run.folder, run.state, run.environment or "-", run.algorithm or "-", progress, best)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    for line in format_table(rows):
        print_result(line)


def envs(as_json: Json = False, debug: Debug = False) -> None:
    """List environments, their sizes and presets."""
    from rlflame.config import resolve
    from rlflame.experiment.listings import list_environments

    entries = list_environments()
    if as_json:
        print_result_lines(as_json_text(entries, indent=2))
        return
    rows = [("alias", "id", "observations", "actions", "presets")]
    for env in entries:
        kind = "continuous" if env.continuous else "discrete"
        sizes = ("-", "-") if env.problem else (str(env.observations), f"{env.actions} {kind}")
        rows.append((env.alias, env.id, *sizes, " ".join(env.presets)))
    _print_table(rows)
    for env in entries:
        if env.problem is not None:
            print_result(f"{env.alias}: {env.problem}")
    print_result("")
    print_result("Any other Gymnasium id works too, and module:Id for one that a module registers.")
    print_result(f"Presets (--preset): {', '.join(resolve.list_presets())}")


def config(
    schema: Annotated[bool, typer.Option("--schema", help="The JSON schema.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List all settings: meaning, default, range."""
    from rlflame.config import toml_io
    from rlflame.experiment.listings import list_settings

    if schema:
        from rlflame.config.recipe import RunConfig

        print_result_lines(as_json_text(RunConfig.model_json_schema(), indent=2))
        return
    entries = list_settings()
    if as_json:
        print_result_lines(as_json_text(entries, indent=2))
        return
    for setting in entries:
        # The choice "none" is shown as it is typed, not with the backslash of a text.
        default = None if setting.default == toml_io.NONE else setting.default
        print_result(f"{setting.name} = {toml_io.format_value(default)}  ({setting.range})")
        print_result(f"    {setting.description}")


Modules = Annotated[list[str], typer.Argument(metavar="MODULE...", help="Names of modules.")]


def add(modules: Modules) -> None:
    """Trust modules in every command: importing them runs their code."""
    from rlflame.config import module_trust

    module_trust.add_trusted(modules)


def remove(modules: Modules) -> None:
    """Stop trusting modules."""
    from rlflame.config import module_trust

    module_trust.remove_trusted(modules)


def show() -> None:
    """List the trusted modules, one a line."""
    from rlflame.config import module_trust

    for module in module_trust.read_trusted_modules():
        print_result(module)
