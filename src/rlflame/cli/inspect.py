"""`rlflame inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug, Json

if TYPE_CHECKING:
    from rlflame.experiment.comparison import ReplayFiles
    from rlflame.storage.checkpoint import Checkpoint

Files = Annotated[
    list[Path],
    typer.Argument(metavar="CKPT...", help="Checkpoints, policies, run folders, folders of seeds."),
]
PrintRecipe = Annotated[
    bool, typer.Option("--recipe", help="The whole recipe as TOML, and nothing else.")
]


@dataclass(frozen=True)
class _Entry:
    """A checkpoint, the path it was named by, and what there is of its replay."""

    path: Path
    checkpoint: Checkpoint
    replay: ReplayFiles | None


def inspect(
    files: Files, recipe: PrintRecipe = False, as_json: Json = False, debug: Debug = False
) -> None:
    """Show what a file holds, or where files differ.

    Of several files, the first recipe field or tensor that differs; exit 1 if any does.
    """
    del debug
    from rlflame.errors import ConfigError
    from rlflame.experiment import comparison
    from rlflame.storage.sweep_folder import is_sweep

    if recipe and as_json:
        raise ConfigError(
            "--recipe and --json exclude each other.", "leave out --recipe: --json has the recipe"
        )
    if any(map(is_sweep, files)):
        _inspect_sweeps(files, recipe=recipe, as_json=as_json)
        return
    entries = [_read_entry(path, with_replay=not recipe) for path in files]
    if recipe:
        _print_recipes(entries)
    first, *others = entries
    differences = [
        comparison.find_first_difference(first.checkpoint, other.checkpoint) for other in others
    ]
    if as_json:
        _print_json(entries, differences)
    elif not recipe:
        if others:
            _print_outlines(entries, differences)
        else:
            _print_summary(first)
        _print_replay_problems(entries)
    if _print_replay_advice(entries) or any(differences):
        raise typer.Exit(1)


def _read_entry(path: Path, *, with_replay: bool) -> _Entry:
    """The newest checkpoint, and what there is of its replay."""
    from rlflame.console.output import print_note
    from rlflame.experiment import comparison
    from rlflame.storage.run_folder import load_newest_checkpoint

    checkpoint, replay, last_digest = load_newest_checkpoint(path, print_note), None, None
    while with_replay and checkpoint.digest != last_digest:
        replay, last_digest = comparison.inspect_replay(path, checkpoint), checkpoint.digest
        if replay is None or replay.problem is None:
            break
        # A run that is being trained may have moved on, and removed what it needs no more.
        checkpoint = load_newest_checkpoint(path, print_note)
    return _Entry(path, checkpoint, replay)


def _print_recipes(entries: Sequence[_Entry]) -> None:
    from rlflame.config import toml_io
    from rlflame.console.output import print_result_lines

    for entry in entries:
        print_result_lines(toml_io.to_toml(entry.checkpoint.recipe).rstrip())


def _print_json(
    entries: Sequence[_Entry], differences: Sequence[str | None] | Mapping[str, str]
) -> None:
    from rlflame.console.output import as_json_text, print_result_lines
    from rlflame.experiment import comparison

    files = [comparison.as_dict(e.path, e.checkpoint, e.replay) for e in entries]
    document = {"files": files, "equal": not any(differences), "differences": differences}
    print_result_lines(as_json_text(document, indent=2))


def _print_summary(entry: _Entry, names: Sequence[str] | None = None) -> None:
    """The lines of these names, or all."""
    from rlflame.console.output import format_pairs, print_result
    from rlflame.experiment import comparison

    lines = comparison.summarise_checkpoint(entry.path, entry.checkpoint, entry.replay)
    if names is not None:
        lines = [(name, dict(lines)[name]) for name in names]
    for line in format_pairs(lines):
        print_result(line)


def _print_outlines(entries: Sequence[_Entry], differences: Sequence[str | None]) -> None:
    """A line each, and where each of the others differs from the first."""
    from rlflame.console.output import print_result
    from rlflame.experiment import comparison
    from rlflame.storage.machine_log import find_fingerprint_differences

    for entry in entries:
        print_result(comparison.format_outline(entry.path, entry.checkpoint))
    first, *others = entries
    for other, difference in zip(others, differences, strict=True):
        if difference is None:
            print_result(f"{first.path} and {other.path} are equal to the last bit.")
            if other.checkpoint.digest != first.checkpoint.digest:
                print_result(
                    "  Their digests differ: one is of a version that knew fewer settings."
                )
            continue
        print_result(f"{first.path} and {other.path} differ first in {difference}.")
        for machine in find_fingerprint_differences(
            first.checkpoint.fingerprint, other.checkpoint.fingerprint
        ):
            print_result(f"  They were made on machines that differ in {machine}.")


def _print_replay_problems(entries: Sequence[_Entry]) -> None:
    from rlflame.console.output import print_result

    for entry in entries:
        if entry.replay is not None and entry.replay.problem is not None:
            print_result(entry.replay.problem)


def _print_replay_advice(entries: Sequence[_Entry]) -> bool:
    """What to type for those whose replay is not whole; whether there are any."""
    from rlflame.console.output import print_note
    from rlflame.experiment import resume

    broken = [entry for entry in entries if entry.replay and entry.replay.problem]
    for entry in broken:
        print_note(f"{resume.format_replay_hint(entry.checkpoint, entry.path)}.")
    return bool(broken)


def _inspect_sweeps(folders: list[Path], *, recipe: bool, as_json: bool) -> None:
    """A line a seed; of several jobs, seed by seed where they differ first from the first."""
    from rlflame.console.output import print_result
    from rlflame.errors import ConfigError
    from rlflame.experiment import comparison
    from rlflame.storage.sweep_folder import is_sweep, list_seed_runs

    other_folders = [folder for folder in folders if not is_sweep(folder)]
    if other_folders:
        raise ConfigError(
            f"{other_folders[0]} is no folder of seeds, and others here are.",
            "folders of seeds with each other, or a seed's own folder with another run",
        )
    sweeps = [
        {run.name: _read_entry(run, with_replay=not recipe) for run in list_seed_runs(folder)}
        for folder in folders
    ]
    entries = [entry for sweep in sweeps for entry in sweep.values()]
    if recipe:
        _print_recipes(entries[:1])
        return
    differences = _find_sweep_differences(folders, sweeps)
    if as_json:
        _print_json(entries, differences)
    else:
        if len(folders) == 1 and entries:
            names = ("environment", "budget", "batch", "policy", "learner", "made with")
            _print_summary(entries[0], names)
        for entry in entries:
            print_result(comparison.format_outline(entry.path, entry.checkpoint))
        for seed, difference in differences.items():
            print_result(f"{seed} differs first in {difference}.")
        if len(folders) > 1 and not differences:
            print_result(f"{len(sweeps[0])} seeds are equal to the last bit.")
        _print_replay_problems(entries)
    if _print_replay_advice(entries) or differences:
        raise typer.Exit(1)


def _find_sweep_differences(
    folders: Sequence[Path], sweeps: Sequence[Mapping[str, _Entry]]
) -> dict[str, str]:
    """By the folder of a seed, where it differs first from the seed of the first sweep."""
    from rlflame.experiment import comparison

    differences = {}
    for folder, sweep in zip(folders[1:], sweeps[1:], strict=True):
        for name in dict.fromkeys([*sweeps[0], *sweep]):
            first, other = sweeps[0].get(name), sweep.get(name)
            if first is None or other is None:
                only_folder = folders[0] if other is None else folder
                differences[str(folder / name)] = f"{name}, which is in {only_folder} alone"
            elif difference := comparison.find_first_difference(first.checkpoint, other.checkpoint):
                differences[str(folder / name)] = difference
    return differences
