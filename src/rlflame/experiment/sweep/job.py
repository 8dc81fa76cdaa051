"""A job on disk: what its seeds run, and where each of them stands.

Must not know: processes, statistics, display.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflame.config import resolve, toml_io
from rlflame.config.nested import find_first_difference
from rlflame.config.recipe import RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import CheckpointError, ConfigError, format_command
from rlflame.experiment.resume import (
    check_can_learn,
    extend_budget,
    has_final_evaluation,
    is_finished,
)
from rlflame.storage import safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_dir import (
    RETRY_HINT,
    RunFolder,
    has_checkpoint_files,
    is_locked,
    load_newest_checkpoint,
    refuse_links,
    report_disk_errors,
)
from rlflame.storage.sweep_dir import (
    RESTORE_HINT,
    SWEEP_FILE,
    format_folder_name,
    format_seeds,
    get_seed_folder,
    is_sweep,
    parse_seeds,
)


@dataclass(frozen=True)
class Sweep:
    """A recipe and its seeds. The recipe's own seed is the first; its horizon is written out."""

    config: RunConfig
    seeds: tuple[int, ...]
    preset: str = ""
    #: The file that all seeds start from, as an absolute path.
    init_from: str | None = None

    def make_seed_config(self, seed: int, folder: Path) -> RunConfig:
        """What a lone run of this seed in this folder would be given."""
        learning = self.config.learning.model_copy(update={"seed": seed})
        runtime = self.config.runtime.model_copy(update={"out": str(get_seed_folder(folder, seed))})
        return self.config.model_copy(update={"learning": learning, "runtime": runtime})

    def copy_with_runtime(self, runtime: RuntimeSettings) -> Sweep:
        return replace(self, config=self.config.model_copy(update={"runtime": runtime}))

    def copy_with_steps(self, steps: int) -> Sweep:
        changes = {"stop_at_steps": steps, "stop_at_iterations": None}
        return replace(self, config=self.config.model_copy(update=changes))


@dataclass(frozen=True)
class SeedStatus:
    """Where one seed stands in its folder: not begun, over, or somewhere on the way."""

    seed: int
    folder: Path
    started: bool = False
    finished: bool = False
    #: Its newest checkpoint, with the job's own end; None where there is none that can be read.
    checkpoint: Checkpoint | None = None


def choose_sweep_path(config: RunConfig, seeds: tuple[int, ...]) -> Path:
    if config.runtime.out is not None:
        return Path(config.runtime.out)
    learning = config.learning
    name = f"{resolve.make_short_name(learning.environment.id)}-{learning.algorithm}"
    return Path("runs") / f"{name}-{format_folder_name(seeds)}"


def write_sweep(folder: Path, sweep: Sweep) -> None:
    lines = [
        toml_io.to_toml(sweep.config),
        "[job]",
        f"seeds = {toml_io.format_value(list(sweep.seeds))}",
        f"preset = {toml_io.format_value(sweep.preset)}",
        f"init_from = {toml_io.format_value(sweep.init_from)}",
    ]
    with report_disk_errors(folder, RETRY_HINT):
        safetensors_file.write_atomically(folder / SWEEP_FILE, ("\n".join(lines) + "\n").encode())


def read_tables(folder: Path) -> dict[str, Any]:
    """What job.toml says, as plain data."""
    if not is_sweep(folder):
        raise CheckpointError(f"{folder} is no folder of seeds.", "rlflame runs lists them")
    try:
        return toml_io.read_file(folder / SWEEP_FILE)
    except ConfigError as error:
        raise CheckpointError(error.message, RESTORE_HINT) from error


def read_sweep(folder: Path) -> Sweep:
    tables = read_tables(folder)
    section = tables.pop("job", None)
    try:
        seeds, preset, init_from = _parse_section(section)
        config = resolve.validate_config(tables)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / SWEEP_FILE} is not what a job of seeds is written as ({error}).",
            RESTORE_HINT,
        ) from error
    return Sweep(config, seeds, preset, init_from)


def _parse_section(section: Any) -> tuple[tuple[int, ...], str, str | None]:
    if not isinstance(section, Mapping):
        raise TypeError("no [job] in it")
    seeds, init_from = section["seeds"], section.get("init_from")
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise ValueError(f"seeds = {seeds!r}")
    return (
        parse_seeds(",".join(map(str, seeds))),
        str(section.get("preset") or ""),
        None if init_from is None else str(init_from),
    )


def read_seed_status(folder: Path, sweep: Sweep, seed: int) -> SeedStatus:
    """Where a seed stands. What a process has left that died before its first checkpoint is no
    beginning, and is cleared away.

    A checkpoint that is damaged is the seed's own trouble, which its process will meet and tell.
    """
    path = get_seed_folder(folder, seed)
    if not path.exists():
        return SeedStatus(seed, path)
    if not has_checkpoint_files(path):
        if is_locked(path):
            # Somebody is at it who has not come to a checkpoint; nothing there is anybody else's.
            return SeedStatus(seed, path, started=True)
        with report_disk_errors(folder, format_command("resume", folder)):
            shutil.rmtree(path)
        return SeedStatus(seed, path)
    try:
        checkpoint = load_newest_checkpoint(path, lambda _: None)
    except CheckpointError:
        return SeedStatus(seed, path, started=True)
    if not checkpoint.progress.reached and sweep.config.stop_at_steps is not None:
        target_steps = sweep.config.stop_at_steps
        if (
            target_steps > checkpoint.progress.steps
            or target_steps == checkpoint.recipe.stop_at_steps
        ):
            checkpoint = extend_budget(checkpoint, target_steps, path)
    return SeedStatus(
        seed,
        path,
        True,
        is_finished(checkpoint) and has_final_evaluation(path, checkpoint),
        checkpoint,
    )


def check_recipe(folder: Path, sweep: Sweep) -> None:
    """Refuse a job whose file names another recipe than its seeds were begun with: what has not
    begun would be of another kind, and counted with the others."""
    for seed in sweep.seeds:
        checkpoint = read_seed_status(folder, sweep, seed).checkpoint
        if checkpoint is None:
            continue
        config = sweep.make_seed_config(seed, folder)
        parts = ("learning", "evaluation")
        saved, current = (
            {part: getattr(recipe, part).model_dump() for part in parts}
            for recipe in (checkpoint.recipe, config)
        )
        difference = find_first_difference(saved, current)
        if difference is not None:
            path, saved_value, current_value = difference
            raise ConfigError(
                f"Seed {seed} was begun with {path} = {toml_io.format_value(saved_value)}, and "
                f"{folder / SWEEP_FILE} has {toml_io.format_value(current_value)}.",
                f"write {toml_io.format_value(saved_value)} there again; another recipe is "
                "another job: "
                "rlflame train --seeds",
            )


def check_goal(folder: Path, sweep: Sweep, steps: int) -> None:
    """Refuse an end that a seed has passed, or cannot learn until, before any other goes on."""
    for seed in sweep.seeds:
        status = read_seed_status(folder, sweep, seed)
        checkpoint = status.checkpoint
        if checkpoint is None or checkpoint.progress.reached:
            continue
        steps_done, goal = checkpoint.progress.steps, checkpoint.recipe.stop_at_steps
        if steps <= steps_done and not (steps == goal and is_finished(checkpoint)):
            raise ConfigError(
                f"--steps {steps} is not beyond the {steps_done} steps that seed {seed} has taken.",
                f"--steps {2 * steps_done}",
            )
        extension = extend_budget(checkpoint, steps, status.folder)
        check_can_learn(
            checkpoint, extension, _format_longer_command(folder, sweep, status.folder, steps)
        )


def _format_longer_command(folder: Path, sweep: Sweep, seed_path: Path, steps: int) -> str:
    """The command that trains all seeds for so long, with schedules that are made for it."""
    learning = sweep.config.learning
    options: list[object] = [
        "--config",
        seed_path / "config.toml",
        "--seeds",
        format_seeds(sweep.seeds),
    ]
    if sweep.init_from is not None:
        options += ["--init-from", sweep.init_from]
    for name in ("horizon_steps", "horizon_iterations"):
        if getattr(learning, name) is not None:
            options += ["--set", f"learning.{name}=none"]
    command = format_command("train", *options, "--steps", steps, "--out", f"{folder}-longer")
    return f"train longer from the beginning: {command}"


def open_sweep_folder(folder: Path) -> RunFolder:
    """The job's folder, locked for this process."""
    if not is_sweep(folder):
        raise CheckpointError(f"{folder} is no folder of seeds.", "rlflame runs lists them")
    refuse_links(folder, (entry.name for entry in folder.glob("seed-*")))
    return RunFolder.open(folder)
