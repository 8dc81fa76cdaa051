"""The `rlflame runs`, `envs`, `config` and `trust` commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflame.cli.options import Debug, Json, add_flag_options
from rlflame.config.flags import TrainFlags
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
        Path, typer.Argument(metavar="DIR", help="Folder that contains the run folders.")
    ] = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List run folders with their progress and best mean return.

    The state of a run is training, finished, stopped or damaged.
    """
    from rlflame.experiment.listings import list_runs

    if not folder.exists() and folder != Path("runs"):
        raise CheckpointError(f"{folder} does not exist.", "rlflame runs lists the runs in ./runs")
    entries = list_runs(folder) if folder.exists() else []
    if as_json:
        _print_json(entries)
    elif not entries:
        print_note(f"There are no runs in {folder}. rlflame train starts one.")
    else:
        header = ("run", "state", "environment", "algorithm", "progress", "best")
        _print_table([header, *map(_format_row, entries)])
    for run in entries:
        if run.problem and not as_json:
            print_note(f"{run.folder}: {run.problem}")


def _format_row(run: RunOverview) -> tuple[str, ...]:
    progress = "-"
    if run.steps is not None:
        limit = f" of {run.stop_at_steps:,}" if run.stop_at_steps else ""
        progress = f"{run.steps:,}{limit} steps"
        if run.stop_at_iterations:
            progress = f"{run.iterations:,} of {run.stop_at_iterations:,} iterations"
    if run.seeds is not None:
        progress = f"{run.seeds_finished} of {run.seeds} seeds, {progress}"
    best = "-" if run.best_return is None else f"{run.best_return:,.1f}"
    return (run.folder, run.state, run.environment or "-", run.algorithm or "-", progress, best)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    for line in format_table(rows):
        print_result(line)


def _print_json(value: Any) -> None:
    print_result_lines(as_json_text(value, indent=2))


def envs(as_json: Json = False, debug: Debug = False) -> None:
    """List environments with their aliases, sizes and presets."""
    from rlflame.config import preset_catalog
    from rlflame.experiment.listings import list_environments

    entries = list_environments()
    if as_json:
        _print_json(entries)
        return
    rows = [("alias", "id", "observations", "actions", "presets")]
    for env in entries:
        kind = "continuous" if env["continuous"] else "discrete"
        sizes = (str(env["observations"]), f"{env['actions']} {kind}")
        cells = ("-", "-") if env["problem"] else sizes
        rows.append((env["alias"], env["id"], *cells, " ".join(env["presets"])))
    _print_table(rows)
    for env in entries:
        if env["problem"]:
            print_result(f"{env['alias']}: {env['problem']}")
    print_result("")
    print_result("Any other Gymnasium id also works. Use module:Id if a module registers it.")
    print_result(f"Presets (--preset): {', '.join(preset_catalog.list_presets())}")


@add_flag_options("env", "algo", "preset")
def config(
    flags: TrainFlags,
    name: Annotated[
        str | None, typer.Argument(metavar="FILTER", help="List only settings with this text.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List settings with descriptions, ranges and defaults, or the values of a preset.

    With --env, --algo or --preset, the values are those with which `train` would start.
    """
    from rlflame.config import toml_io
    from rlflame.config.recipe import RunConfig
    from rlflame.experiment.listings import list_settings, select_settings

    if schema:
        _print_json(RunConfig.model_json_schema())
        return
    settings = list_settings()
    if flags != TrainFlags():
        from rlflame.config.resolve import resolve
        from rlflame.experiment.components import has_continuous_actions

        settings = select_settings(settings, *resolve(flags, has_continuous_actions))
    if name is not None:
        settings = find_settings(settings, name)
    if as_json:
        _print_json(settings)
        return
    for setting in settings:
        # A default "none" would be printed with an escaping backslash, which users do not type.
        value = setting.get("value", setting["default"])
        text = toml_io.format_value(None if value == toml_io.NONE else value)
        source = f", from {setting['preset']}" if setting.get("preset") else ""
        print_result(f"{setting['name']} = {text}  ({setting['range']}{source})")
        print_result(f"    {setting['description']}")


def find_settings(settings: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the settings whose names contain a text or the meaning of a synonym."""
    from rlflame.config.synonyms import find_synonyms
    from rlflame.config.validation import make_unknown_error

    texts = (name.lower(), *find_synonyms(name))
    selection = [item for item in settings if any(text in item["name"] for text in texts)]
    if not selection:
        raise make_unknown_error(name)
    return selection


Modules = Annotated[list[str], typer.Argument(metavar="MODULE...", help="Names of Python modules.")]


def add(modules: Modules) -> None:
    """Trust modules. If a file names one, rlflame imports it, which runs its code."""
    from rlflame.config import module_trust

    module_trust.add_trusted(modules)


def remove(modules: Modules) -> None:
    """Stop trusting modules."""
    from rlflame.config import module_trust

    module_trust.remove_trusted(modules)


def show() -> None:
    """List the trusted modules, one per line."""
    from rlflame.config import module_trust

    for module in module_trust.read_trusted_modules():
        print_result(module)
