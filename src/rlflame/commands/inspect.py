"""`rlflame inspect`. Must not know: how files are read or compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlflame.commands.options import Debug, Json


def inspect(
    files: Annotated[
        list[Path], typer.Argument(metavar="CKPT...", help="Checkpoints, policies, run folders.")
    ],
    recipe: Annotated[
        bool, typer.Option("--recipe", help="The whole recipe as TOML, and nothing else.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a file holds, or where files differ.

    Of several files, the first recipe field or tensor that differs; exit 1 if any does.
    """
    del debug
    from rlflame import inspection, toml
    from rlflame.display import aligned, as_json_text, say, say_aside
    from rlflame.errors import ConfigError
    from rlflame.run_folder import newest_checkpoint

    if recipe and as_json:
        raise ConfigError(
            "--recipe and --json exclude each other.", "leave out --recipe: --json has the recipe"
        )
    found = [newest_checkpoint(path, say_aside) for path in files]
    differences = [inspection.first_difference(found[0], other) for other in found[1:]]
    looked = [inspection.replay_files(*one) for one in zip(files, found, strict=True) if not recipe]
    if as_json:
        shown = [inspection.as_dict(*one) for one in zip(files, found, looked, strict=True)]
        equal = not any(differences)
        say(as_json_text({"files": shown, "equal": equal, "differences": differences}, indent=2))
    elif recipe:
        for one in found:
            say(toml.to_toml(one.recipe).rstrip())
    elif len(files) == 1:
        for line in aligned(inspection.summary(files[0], found[0], looked[0])):
            say(line)
    else:
        for path, one in zip(files, found, strict=True):
            say(inspection.outline(path, one))
        for path, one, difference in zip(files[1:], found[1:], differences, strict=True):
            if difference is None:
                say(f"{files[0]} and {path} are equal to the last bit.")
                continue
            say(f"{files[0]} and {path} differ first in {difference}.")
            for machine in inspection.machines_differ(found[0], one):
                say(f"  They were made on machines that differ in {machine}.")
        for replay in looked:
            if replay is not None and replay.problem is not None:
                say(replay.problem)
    broken = [path for path, one in zip(files, looked, strict=False) if one and one.problem]
    for path in broken:
        say_aside(f"rlflame resume {path} --fresh-replay goes on with an empty replay.")
    if any(differences) or broken:
        raise typer.Exit(1)
