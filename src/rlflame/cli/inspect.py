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
    from rlflame.console.formatting import format_pairs
    from rlflame.console.output import as_json_text, print_result, print_result_lines
    from rlflame.errors import ConfigError
    from rlflame.experiment import checkpoint_diff
    from rlflame.storage.sweep_dir import is_sweep

    if recipe and as_json:
        raise ConfigError(
            "--recipe and --json exclude each other.", "leave out --recipe: --json has the recipe"
        )
    if any(map(is_sweep, files)):
        _inspect_sweeps(files, recipe=recipe, as_json=as_json)
        return
    checkpoints, replays = zip(
        *(_read_checkpoint(path, with_replay=not recipe) for path in files), strict=True
    )
    differences = [
        checkpoint_diff.find_first_difference(checkpoints[0], other) for other in checkpoints[1:]
    ]
    if as_json:
        documents = [
            checkpoint_diff.as_dict(*entry)
            for entry in zip(files, checkpoints, replays, strict=True)
        ]
        equal = not any(differences)
        print_result_lines(
            as_json_text({"files": documents, "equal": equal, "differences": differences}, indent=2)
        )
    elif recipe:
        for entry in checkpoints:
            print_result_lines(toml_io.to_toml(entry.recipe).rstrip())
    elif len(files) == 1:
        for line in format_pairs(
            checkpoint_diff.summarise_checkpoint(files[0], checkpoints[0], replays[0])
        ):
            print_result(line)
    else:
        for path, entry in zip(files, checkpoints, strict=True):
            print_result(checkpoint_diff.format_outline(path, entry))
        for path, entry, difference in zip(files[1:], checkpoints[1:], differences, strict=True):
            if difference is None:
                print_result(f"{files[0]} and {path} are equal to the last bit.")
                if entry.digest != checkpoints[0].digest:
                    print_result(
                        "  Their digests differ: one is of a version that knew fewer settings."
                    )
                continue
            print_result(f"{files[0]} and {path} differ first in {difference}.")
            for machine in checkpoint_diff.find_machine_differences(checkpoints[0], entry):
                print_result(f"  They were made on machines that differ in {machine}.")
        _print_replay_problems(replays)
    broken = _print_replay_advice([*zip(files, checkpoints, strict=True)], replays)
    if any(differences) or broken:
        raise typer.Exit(1)


def _read_checkpoint(path: Path, *, with_replay: bool) -> tuple[Checkpoint, ReplayFiles | None]:
    """The newest checkpoint, and what there is of its replay."""
    from rlflame.console.output import print_note
    from rlflame.experiment import checkpoint_diff
    from rlflame.storage.run_dir import load_newest_checkpoint

    checkpoint, last_digest = load_newest_checkpoint(path, print_note), None
    while with_replay and checkpoint.digest != last_digest:
        replay, last_digest = checkpoint_diff.inspect_replay(path, checkpoint), checkpoint.digest
        if replay is None or replay.problem is None:
            return checkpoint, replay
        # A run that is being trained may have moved on, and removed what it needs no more.
        checkpoint = load_newest_checkpoint(path, print_note)
    return checkpoint, replay if with_replay else None


def _print_replay_problems(replays: Sequence[ReplayFiles | None]) -> None:
    from rlflame.console.output import print_result

    for replay in replays:
        if replay is not None and replay.problem is not None:
            print_result(replay.problem)


def _print_replay_advice(
    checkpoints: Sequence[tuple[Path, Checkpoint]], replays: Sequence[ReplayFiles | None]
) -> bool:
    """What to type for those whose replay is not whole; whether there are any."""
    from rlflame.console.output import print_note
    from rlflame.experiment import resume

    broken = [
        path_and_checkpoint
        for path_and_checkpoint, replay in zip(checkpoints, replays, strict=True)
        if replay and replay.problem
    ]
    for path, checkpoint in broken:
        print_note(f"{resume.format_replay_hint(checkpoint, path)}.")
    return bool(broken)


def _inspect_sweeps(folders: list[Path], *, recipe: bool, as_json: bool) -> None:
    """A line a seed; of several jobs, seed by seed where they differ first from the first."""
    from rlflame.config import toml_io
    from rlflame.console.formatting import format_pairs
    from rlflame.console.output import as_json_text, print_result, print_result_lines
    from rlflame.errors import ConfigError
    from rlflame.experiment import checkpoint_diff
    from rlflame.storage.sweep_dir import is_sweep, list_seed_runs

    other_folders = [folder for folder in folders if not is_sweep(folder)]
    if other_folders:
        raise ConfigError(
            f"{other_folders[0]} is no folder of seeds, and others here are.",
            "folders of seeds with each other, or a seed's own folder with another run",
        )
    sweep_entries = [
        {run.name: _read_checkpoint(run, with_replay=not recipe) for run in list_seed_runs(folder)}
        for folder in folders
    ]
    sweeps = [
        {name: checkpoint for name, (checkpoint, _) in sweep.items()} for sweep in sweep_entries
    ]
    named_checkpoints = [(folder / name, checkpoint) for folder,
    sweep in zip(folders, sweeps, strict=True)
             for name, checkpoint in sweep.items()]  # fmt: skip
    replays = [replay for sweep in sweep_entries for _, replay in sweep.values()]
    if recipe:
        for _, checkpoint in named_checkpoints[:1]:
            print_result_lines(toml_io.to_toml(checkpoint.recipe).rstrip())
        return
    differences = {}
    for folder, other in zip(folders[1:], sweeps[1:], strict=True):
        for name in dict.fromkeys([*sweeps[0], *other]):
            pair = sweeps[0].get(name), other.get(name)
            if pair[0] is None or pair[1] is None:
                only_folder = folders[0] if pair[1] is None else folder
                differences[str(folder / name)] = f"{name}, which is in {only_folder} alone"
            elif first_difference := checkpoint_diff.find_first_difference(pair[0], pair[1]):
                differences[str(folder / name)] = first_difference
    if as_json:
        files = [
            checkpoint_diff.as_dict(*named_checkpoint, replay)
            for named_checkpoint, replay in zip(named_checkpoints, replays, strict=True)
        ]
        document = {"files": files, "equal": not differences, "differences": differences}
        print_result_lines(as_json_text(document, indent=2))
    else:
        if len(folders) == 1 and named_checkpoints:
            summary = dict(checkpoint_diff.summarise_checkpoint(*named_checkpoints[0]))
            summary_words = ("environment", "budget", "batch", "policy", "learner", "made with")
            for line in format_pairs([(word, summary[word]) for word in summary_words]):
                print_result(line)
        for path, checkpoint in named_checkpoints:
            print_result(checkpoint_diff.format_outline(path, checkpoint))
        for seed, difference in differences.items():
            print_result(f"{seed} differs first in {difference}.")
        if len(folders) > 1 and not differences:
            print_result(f"{len(sweeps[0])} seeds are equal to the last bit.")
        _print_replay_problems(replays)
    if _print_replay_advice(named_checkpoints, replays) or differences:
        raise typer.Exit(1)
