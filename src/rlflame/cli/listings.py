"""`rlflame runs`, `envs` and `config`. Must not know: where what they list comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflame.cli.options import Debug, Json

if TYPE_CHECKING:
    from rlflame.experiment.run_list import Run


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
    del debug
    from rlflame.console.formatting import table
    from rlflame.console.output import as_json_text, say, say_aside, say_lines
    from rlflame.errors import CheckpointError
    from rlflame.experiment.run_list import list_runs

    if not folder.exists() and folder != Path("runs"):
        raise CheckpointError(f"{folder} does not exist.", "rlflame runs lists those in ./runs")
    found = list_runs(folder) if folder.exists() else []
    if as_json:
        say_lines(as_json_text([run.as_dict() for run in found], indent=2))
        return
    if not found:
        say_aside(f"There are no runs in {folder}. rlflame train begins one.")
        return
    header = ("run", "state", "environment", "algorithm", "progress", "best")
    for line in table([header, *(_row(run) for run in found)]):
        say(line)
    for run in found:
        if run.problem:
            say_aside(f"{run.folder}: {run.problem}")


def _row(run: Run) -> tuple[str, ...]:
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


def envs(as_json: Json = False, debug: Debug = False) -> None:
    """List environments, their sizes and presets."""
    del debug
    from rlflame.cli.catalog import environments
    from rlflame.config import resolve
    from rlflame.console.formatting import table
    from rlflame.console.output import as_json_text, say, say_lines

    found = environments()
    if as_json:
        say_lines(as_json_text([env.as_dict() for env in found], indent=2))
        return
    rows = [("alias", "id", "observations", "actions", "presets")]
    for env in found:
        kind = "continuous" if env.continuous else "discrete"
        sizes = (str(env.observations), f"{env.actions} {kind}")
        shown = sizes if env.problem is None else ("-", "-")
        rows.append((env.alias, env.id, *shown, " ".join(env.presets)))
    for line in table(rows):
        say(line)
    for env in found:
        if env.problem is not None:
            say(f"{env.alias}: {env.problem}")
    say("")
    say("Any other Gymnasium id works too, and module:Id for one that a module registers.")
    say(f"Presets (--preset): {', '.join(resolve.preset_names())}")


def config(
    schema: Annotated[bool, typer.Option("--schema", help="The JSON schema.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List all settings: meaning, default, range."""
    del debug
    from rlflame.cli.catalog import settings
    from rlflame.console.output import as_json_text, say, say_lines

    if schema:
        from rlflame.config.recipe import RunConfig

        say_lines(as_json_text(RunConfig.model_json_schema(), indent=2))
        return
    found = settings()
    if as_json:
        say_lines(as_json_text([setting.as_dict() for setting in found], indent=2))
        return
    for setting in found:
        say(f"{setting.name} = {_shown(setting.default)}  ({setting.range})")
        say(f"    {setting.description}")


def _shown(value: Any) -> str:
    from rlflame.config import toml_io

    # A choice of that name is shown as it is typed, not with the backslash of a text.
    return toml_io.written(None if value == toml_io.NONE else value)
