"""`rlflame inspect`. Must not know: how files are read or compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug, Json

if TYPE_CHECKING:
    from rlflame.experiment.checkpoint_diff import ReplayFiles
    from rlflame.storage.checkpoint import Checkpoint


def inspect(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="CKPT...", help="Checkpoints, policies, run folders, folders of seeds."
        ),
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
    from rlflame.config import toml_io
    from rlflame.console.formatting import aligned
    from rlflame.console.output import as_json_text, say, say_lines
    from rlflame.errors import ConfigError
    from rlflame.experiment import checkpoint_diff
    from rlflame.storage.sweep_dir import is_job

    if recipe and as_json:
        raise ConfigError(
            "--recipe and --json exclude each other.", "leave out --recipe: --json has the recipe"
        )
    if any(map(is_job, files)):
        _inspect_jobs(files, recipe=recipe, as_json=as_json)
        return
    found, looked = zip(*(_look(path, replays=not recipe) for path in files), strict=True)
    differences = [checkpoint_diff.first_difference(found[0], other) for other in found[1:]]
    if as_json:
        shown = [checkpoint_diff.as_dict(*one) for one in zip(files, found, looked, strict=True)]
        equal = not any(differences)
        say_lines(
            as_json_text({"files": shown, "equal": equal, "differences": differences}, indent=2)
        )
    elif recipe:
        for one in found:
            say_lines(toml_io.to_toml(one.recipe).rstrip())
    elif len(files) == 1:
        for line in aligned(checkpoint_diff.summary(files[0], found[0], looked[0])):
            say(line)
    else:
        for path, one in zip(files, found, strict=True):
            say(checkpoint_diff.outline(path, one))
        for path, one, difference in zip(files[1:], found[1:], differences, strict=True):
            if difference is None:
                say(f"{files[0]} and {path} are equal to the last bit.")
                if one.digest != found[0].digest:
                    say("  Their digests differ: one is of a version that knew fewer settings.")
                continue
            say(f"{files[0]} and {path} differ first in {difference}.")
            for machine in checkpoint_diff.machines_differ(found[0], one):
                say(f"  They were made on machines that differ in {machine}.")
        _say_problems(looked)
    broken = _advise([*zip(files, found, strict=True)], looked)
    if any(differences) or broken:
        raise typer.Exit(1)


def _look(path: Path, *, replays: bool) -> tuple[Checkpoint, ReplayFiles | None]:
    """The newest checkpoint, and what there is of its replay."""
    from rlflame.console.output import say_aside
    from rlflame.experiment import checkpoint_diff
    from rlflame.storage.run_dir import newest_checkpoint

    found, seen = newest_checkpoint(path, say_aside), None
    while replays and found.digest != seen:
        replay, seen = checkpoint_diff.replay_files(path, found), found.digest
        if replay is None or replay.problem is None:
            return found, replay
        # A run that is being trained may have moved on, and removed what it needs no more.
        found = newest_checkpoint(path, say_aside)
    return found, replay if replays else None


def _say_problems(looked: Sequence[ReplayFiles | None]) -> None:
    from rlflame.console.output import say

    for replay in looked:
        if replay is not None and replay.problem is not None:
            say(replay.problem)


def _advise(named: Sequence[tuple[Path, Checkpoint]], looked: Sequence[ReplayFiles | None]) -> bool:
    """What to type for those whose replay is not whole; whether there are any."""
    from rlflame.console.output import say_aside
    from rlflame.experiment import resume

    broken = [one for one, replay in zip(named, looked, strict=True) if replay and replay.problem]
    for path, found in broken:
        say_aside(f"{resume.without_replay(found, path)}.")
    return bool(broken)


def _inspect_jobs(folders: list[Path], *, recipe: bool, as_json: bool) -> None:
    """A line a seed; of several jobs, seed by seed where they differ first from the first."""
    from rlflame.config import toml_io
    from rlflame.console.formatting import aligned
    from rlflame.console.output import as_json_text, say, say_lines
    from rlflame.errors import ConfigError
    from rlflame.experiment import checkpoint_diff
    from rlflame.storage.sweep_dir import is_job, runs_in

    strange = [folder for folder in folders if not is_job(folder)]
    if strange:
        raise ConfigError(
            f"{strange[0]} is no folder of seeds, and others here are.",
            "folders of seeds with each other, or a seed's own folder with another run",
        )
    seen = [
        {run.name: _look(run, replays=not recipe) for run in runs_in(folder)} for folder in folders
    ]
    jobs = [{name: found for name, (found, _) in job.items()} for job in seen]
    named = [(folder / name, found) for folder, job in zip(folders, jobs, strict=True)
             for name, found in job.items()]  # fmt: skip
    looked = [replay for job in seen for _, replay in job.values()]
    if recipe:
        for _, found in named[:1]:
            say_lines(toml_io.to_toml(found.recipe).rstrip())
        return
    differences = {}
    for folder, other in zip(folders[1:], jobs[1:], strict=True):
        for name in dict.fromkeys([*jobs[0], *other]):
            pair = jobs[0].get(name), other.get(name)
            if pair[0] is None or pair[1] is None:
                found_in = folders[0] if pair[1] is None else folder
                differences[str(folder / name)] = f"{name}, which is in {found_in} alone"
            elif said := checkpoint_diff.first_difference(pair[0], pair[1]):
                differences[str(folder / name)] = said
    if as_json:
        files = [
            checkpoint_diff.as_dict(*one, held) for one, held in zip(named, looked, strict=True)
        ]
        shown = {"files": files, "equal": not differences, "differences": differences}
        say_lines(as_json_text(shown, indent=2))
    else:
        if len(folders) == 1 and named:
            first = dict(checkpoint_diff.summary(*named[0]))
            kept = ("environment", "budget", "batch", "policy", "learner", "made with")
            for line in aligned([(word, first[word]) for word in kept]):
                say(line)
        for path, found in named:
            say(checkpoint_diff.outline(path, found))
        for seed, difference in differences.items():
            say(f"{seed} differs first in {difference}.")
        if len(folders) > 1 and not differences:
            say(f"{len(jobs[0])} seeds are equal to the last bit.")
        _say_problems(looked)
    if _advise(named, looked) or differences:
        raise typer.Exit(1)
