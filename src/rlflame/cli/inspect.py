"""The `rlflame inspect` command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug, Json, print_pairs
from rlflame.console.output import as_json_text, print_note, print_result, print_result_lines
from rlflame.errors import ConfigError

if TYPE_CHECKING:
    from rlflame.experiment.comparison import FileContent

Files = Annotated[
    list[Path],
    typer.Argument(metavar="CKPT...", help="Checkpoints, policies, run folders or sweep folders."),
]
PrintRecipe = Annotated[bool, typer.Option("--recipe", help="Print only the settings, as TOML.")]
#: The paths of two files and their first difference, or None if they are equal.
Difference = tuple[Path, Path, str | None]


def inspect(
    files: Files, recipe: PrintRecipe = False, as_json: Json = False, debug: Debug = False
) -> None:
    """Show the contents of a checkpoint, or compare several.

    With several files, print the first difference and exit with code 1 if there is one.
    """
    from rlflame.config.resolve import format_config
    from rlflame.experiment import resume
    from rlflame.storage.sweep_folder import is_sweep

    if recipe and as_json:
        raise ConfigError(
            "--recipe and --json cannot be combined.", "omit --recipe: --json includes the recipe"
        )
    jobs = [_read_contents(path, with_replay=not recipe) for path in files]
    contents = [content for job in jobs for content in job.values()]
    has_seeds = any(map(is_sweep, files))
    if recipe:
        for content in contents[:1] if has_seeds else contents:
            print_result_lines(format_config(content.checkpoint.recipe).rstrip())
        return
    differences = [*_find_differences(files, jobs)]
    if as_json:
        texts = {str(other): text for _, other, text in differences if text}
        document = {
            "files": [content.as_dict() for content in contents],
            "equal": not texts,
            "differences": texts if has_seeds else [text for *_, text in differences],
        }
        print_result_lines(as_json_text(document, indent=2))
    else:
        _print_lines(contents, differences)
    broken = [content for content in contents if content.replay and content.replay.problem]
    for content in broken:
        print_note(f"{resume.format_replay_hint(content.checkpoint, content.path)}.")
    if broken or any(text for *_, text in differences):
        raise typer.Exit(1)


def _read_contents(path: Path, *, with_replay: bool) -> dict[str, FileContent]:
    """Return the latest checkpoint of each seed by name; a single run is named ""."""
    from rlflame.experiment.comparison import read_content
    from rlflame.storage.sweep_folder import is_sweep, list_seed_runs

    runs = {run.name: run for run in list_seed_runs(path)} if is_sweep(path) else {"": path}
    return {
        name: read_content(run, print_note, with_replay=with_replay) for name, run in runs.items()
    }


def _find_differences(
    files: Sequence[Path], jobs: Sequence[Mapping[str, FileContent]]
) -> Iterator[Difference]:
    """Yield the first difference of each other file from the first file, by seed."""
    from rlflame.experiment.comparison import find_first_difference

    for path, job in zip(files[1:], jobs[1:], strict=True):
        for name in dict.fromkeys([*jobs[0], *job]):
            first, other = jobs[0].get(name), job.get(name)
            difference: str | None
            if first is None or other is None:
                difference = f"{name}, which exists only in {files[0] if other is None else path}"
            else:
                difference = find_first_difference(first.checkpoint, other.checkpoint)
            yield files[0] / name, path / name, difference


def _print_lines(contents: Sequence[FileContent], differences: Sequence[Difference]) -> None:
    """Print one file in detail, or one line for each file and then the differences."""
    from rlflame.rollout.machine import find_fingerprint_differences

    if len(contents) == 1:
        print_pairs(contents[0].format_lines())
    else:
        for content in contents:
            print_result(content.format_outline())
    fingerprints = {content.path: content.checkpoint.fingerprint for content in contents}
    for first, other, difference in differences:
        if difference is None:
            kinds = {content.kind for content in contents}
            subject = "The policies of " if len(kinds) > 1 else ""
            print_result(f"{subject}{first} and {other} are bit-identical.")
            continue
        print_result(f"{first} and {other} differ first in {difference}.")
        if first in fingerprints and other in fingerprints:
            machines = find_fingerprint_differences(fingerprints[first], fingerprints[other])
            for machine in machines:
                print_result(f"  They were made on machines that differ in {machine}.")
    for content in contents:
        if content.replay is not None and content.replay.problem is not None:
            print_result(content.replay.problem)
