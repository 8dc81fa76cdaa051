"""`rlflame inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug, Json, print_pairs
from rlflame.console.output import as_json_text, print_note, print_result, print_result_lines
from rlflame.errors import ConfigError

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


#: By the place of another file, or by the folder of a seed.
Differences = list[str | None] | dict[str, str]
#: What the seeds of a job have in common.
_COMMON_LINES = ("environment", "budget", "batch", "policy", "learner", "made with")


def inspect(
    files: Files, recipe: PrintRecipe = False, as_json: Json = False, debug: Debug = False
) -> None:
    """Show what a file holds, or where files differ.

    Of several files, the first recipe field or tensor that differs; exit 1 if any does.
    """
    from rlflame.config import toml_io
    from rlflame.experiment import comparison, resume
    from rlflame.storage.sweep_folder import is_sweep

    if recipe and as_json:
        raise ConfigError(
            "--recipe and --json exclude each other.", "leave out --recipe: --json has the recipe"
        )
    differences: Differences
    if has_seeds := any(map(is_sweep, files)):
        sweeps = [_read_seeds(path, with_replay=not recipe) for path in files]
        entries = [entry for sweep in sweeps for entry in sweep.values()]
        differences = {} if recipe else _find_sweep_differences(files, sweeps)
    else:
        entries = [_read_entry(path, with_replay=not recipe) for path in files]
        differences = [
            comparison.find_first_difference(entries[0].checkpoint, other.checkpoint)
            for other in entries[1:]
        ]
    if recipe:
        for entry in entries[:1] if has_seeds else entries:
            print_result_lines(toml_io.to_toml(entry.checkpoint.recipe).rstrip())
    elif as_json:
        records = [comparison.as_dict(e.path, e.checkpoint, e.replay) for e in entries]
        document = {"files": records, "equal": not any(differences), "differences": differences}
        print_result_lines(as_json_text(document, indent=2))
    else:
        _print_entries(entries, differences, len(files))
    broken = [entry for entry in entries if entry.replay and entry.replay.problem]
    for entry in broken:
        print_note(f"{resume.format_replay_hint(entry.path)}.")
    if broken or any(differences):
        raise typer.Exit(1)


def _read_seeds(folder: Path, *, with_replay: bool) -> dict[str, _Entry]:
    """The newest checkpoint of each seed of a job."""
    from rlflame.storage.sweep_folder import is_sweep, list_seed_runs

    if not is_sweep(folder):
        raise ConfigError(
            f"{folder} is no folder of seeds, and others here are.",
            "folders of seeds with each other, or a seed's own folder with another run",
        )
    return {run.name: _read_entry(run, with_replay=with_replay) for run in list_seed_runs(folder)}


def _read_entry(path: Path, *, with_replay: bool) -> _Entry:
    """The newest checkpoint, and what there is of its replay."""
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


def _print_entries(entries: Sequence[_Entry], differences: Differences, count: int) -> None:
    """One file in detail; of several files or seeds a line each, and where they differ."""
    from rlflame.experiment import comparison

    has_seeds = isinstance(differences, dict)
    if count == 1 and entries:
        first = entries[0]
        lines = comparison.summarise_checkpoint(first.path, first.checkpoint, first.replay)
        print_pairs(line for line in lines if not has_seeds or line[0] in _COMMON_LINES)
    if count > 1 or has_seeds:
        for entry in entries:
            print_result(comparison.format_outline(entry.path, entry.checkpoint))
    if isinstance(differences, dict):
        for seed, difference in differences.items():
            print_result(f"{seed} differs first in {difference}.")
        if count > 1 and not differences:
            print_result(f"{len(entries) // count} seeds are equal to the last bit.")
    else:
        _print_differences(entries, differences)
    for entry in entries:
        if entry.replay is not None and entry.replay.problem is not None:
            print_result(entry.replay.problem)


def _print_differences(entries: Sequence[_Entry], differences: Sequence[str | None]) -> None:
    """Where each of the others differs from the first."""
    from rlflame.rollout.machine import find_fingerprint_differences

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
