"""Reads and writes the file of a sweep, and reads the status of its seeds."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.config import toml_io
from rlflame.config.nested_dict import find_first_difference
from rlflame.config.recipe import RunConfig
from rlflame.config.resolve import format_config
from rlflame.config.validation import validate_config
from rlflame.errors import CheckpointError, ConfigError, format_command
from rlflame.experiment import resume
from rlflame.experiment.resume import Budget
from rlflame.statistics import summarise
from rlflame.storage import run_folder, safetensors_file, sweep_folder
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_folder import RunFolder
from rlflame.storage.sweep_folder import SWEEP_FILE, SeedOutcome, SeedResult, SweepSummary


@dataclass(frozen=True)
class Sweep:
    """A config and its seeds. `learning.seed` in the config is the first seed."""

    config: RunConfig
    seeds: tuple[int, ...]
    preset: str = ""
    #: The absolute path of the policy file that all seeds start from, if any.
    init_from: str | None = None

    def make_seed_config(self, seed: int, folder: Path) -> RunConfig:
        """Return the config of the run that trains this seed."""
        learning = self.config.learning.model_copy(update={"seed": seed})
        runtime = self.config.runtime.model_copy(
            update={"out": str(sweep_folder.get_seed_folder(folder, seed))}
        )
        return self.config.model_copy(update={"learning": learning, "runtime": runtime})

    def copy_with(self, **changes: Any) -> Sweep:
        """Return a copy of this sweep with changed settings."""
        return replace(self, config=self.config.model_copy(update=changes))


@dataclass(frozen=True)
class SeedStatus:
    """The status of one seed, read from its folder."""

    seed: int
    folder: Path
    is_started: bool = False
    is_finished: bool = False
    #: The latest checkpoint, or None if it is missing or unreadable.
    checkpoint: Checkpoint | None = None


def write_sweep(folder: Path, sweep: Sweep) -> None:
    lines = [
        format_config(sweep.config),
        "[job]",
        f"seeds = {toml_io.format_value(list(sweep.seeds))}",
        f"preset = {toml_io.format_value(sweep.preset)}",
    ]
    if sweep.init_from is not None:
        lines.append(f"init_from = {toml_io.format_value(sweep.init_from)}")
    with run_folder.report_disk_errors(folder, run_folder.RETRY_HINT):
        safetensors_file.write_atomically(folder / SWEEP_FILE, ("\n".join(lines) + "\n").encode())


def read_sweep(folder: Path) -> Sweep:
    file = folder / SWEEP_FILE
    try:
        tables = toml_io.read_file(file)
    except ConfigError as error:
        raise CheckpointError(error.message, sweep_folder.RESTORE_HINT) from error
    try:
        section = tables.pop("job")
        init_from = section.get("init_from")
        return Sweep(
            validate_config(tables),
            sweep_folder.parse_seeds(",".join(map(str, section["seeds"]))),
            str(section.get("preset") or ""),
            None if init_from is None else str(init_from),
        )
    except (ConfigError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a valid sweep file ({error}).", sweep_folder.RESTORE_HINT
        ) from error


def read_seed_statuses(folder: Path, sweep: Sweep) -> list[SeedStatus]:
    return [read_seed_status(folder, sweep, seed) for seed in sweep.seeds]


def read_seed_status(folder: Path, sweep: Sweep, seed: int) -> SeedStatus:
    """Return the status of a seed.

    If the folder of the seed has no checkpoint and no process uses it, it is removed. A damaged
    checkpoint is not an error here, because the process of the seed reports it.
    """
    path = sweep_folder.get_seed_folder(folder, seed)
    if not path.exists():
        return SeedStatus(seed, path)
    if not run_folder.has_checkpoint_files(path):
        if run_folder.is_locked(path):
            # Another process is training here and has not saved a checkpoint yet.
            return SeedStatus(seed, path, is_started=True)
        with run_folder.report_disk_errors(folder, format_command("resume", folder)):
            shutil.rmtree(path)
        return SeedStatus(seed, path)
    try:
        checkpoint = run_folder.load_newest_checkpoint(path, lambda _: None)
    except CheckpointError:
        return SeedStatus(seed, path, is_started=True)
    budget, progress = resume.find_budget(sweep.config), checkpoint.progress
    if budget and not progress.reached and budget.end > budget.read_count(progress):
        checkpoint = resume.copy_with_end(checkpoint, budget)
    is_finished = resume.is_finished(checkpoint) and resume.has_final_evaluation(path, checkpoint)
    return SeedStatus(seed, path, True, is_finished, checkpoint)


def check_seeds(folder: Path, sweep: Sweep, budget: Budget | None) -> None:
    """Raise ConfigError if one of the seeds cannot continue.

    A seed cannot continue if the recipe in its checkpoint differs from that in the sweep file, if
    the seed is already beyond the budget, or if its learning rate has been annealed to 0.
    """
    for status in read_seed_statuses(folder, sweep):
        checkpoint = status.checkpoint
        if checkpoint is None:
            continue
        recorded_recipe, current = (
            recipe.model_dump(include={"learning", "evaluation"})
            for recipe in (checkpoint.recipe, sweep.make_seed_config(status.seed, folder))
        )
        # A seed records its own choice.
        if "episodes" not in current["learning"]["environment"]:
            recorded_recipe["learning"]["environment"].pop("episodes", None)
        if difference := find_first_difference(recorded_recipe, current):
            name, saved_value, value = difference
            saved_text = toml_io.format_value(saved_value)
            raise ConfigError(
                f"Seed {status.seed} was started with {name} = {saved_text}, but "
                f"{folder / SWEEP_FILE} has {toml_io.format_value(value)}.",
                f"restore {saved_text} in that file, or start a new sweep: rlflame train --seeds",
            )
        if budget is not None and not checkpoint.progress.reached:
            try:
                resume.extend_budget(checkpoint, budget, status.folder / "latest.safetensors")
            except ConfigError as error:
                is_passed = budget.end <= budget.read_count(checkpoint.progress)
                longer_command = _format_longer_command(folder, sweep, status.folder, budget)
                hint = error.hint if is_passed else f"start again: {longer_command}"
                raise ConfigError(f"Seed {status.seed}: {error.message}", hint) from error


def _format_longer_command(folder: Path, sweep: Sweep, seed_folder: Path, budget: Budget) -> str:
    """Return the command that trains the same seeds again, up to this budget."""
    seeds = sweep_folder.format_seeds(sweep.seeds)
    options: list[object] = ["--config", seed_folder / "config.toml", "--seeds", seeds]
    options += ["--init-from", sweep.init_from] if sweep.init_from is not None else []
    options += ["--set", f"learning.horizon_{budget.unit}=none", *budget.format_options()]
    return format_command("train", *options, "--out", f"{folder}-longer")


def open_sweep_folder(folder: Path) -> RunFolder:
    """Open a sweep folder and lock it for this process."""
    if not sweep_folder.is_sweep(folder):
        raise CheckpointError(f"{folder} is not a sweep folder.", "rlflame runs lists them")
    run_folder.refuse_links(folder, (entry.name for entry in folder.glob("seed-*")))
    return RunFolder.open(folder)


def summarise_sweep(
    folder: Path, sweep: Sweep, outcomes: Mapping[int, SeedOutcome]
) -> SweepSummary:
    results = [
        _make_seed_result(status, outcomes.get(status.seed))
        for status in read_seed_statuses(folder, sweep)
    ]
    finals = {
        result.seed: float(result.evaluation["mean"])
        for result in results
        if result.evaluation is not None
    }
    learning = sweep.config.learning
    return SweepSummary(
        environment=learning.environment.id,
        algorithm=learning.algorithm,
        seeds=tuple(results),
        final=summarise(np.array([*finals.values()], np.float64)) if finals else None,
        worst_seed=min(finals, key=lambda seed: finals[seed]) if finals else None,
    )


def _make_seed_result(status: SeedStatus, outcome: SeedOutcome | None) -> SeedResult:
    error = outcome.error if outcome is not None else None
    state = "finished" if status.is_finished else "failed" if error is not None else "stopped"
    if not status.is_started and error is None:
        state = "waiting"
    result = SeedResult(status.seed, status.folder, state, error=error.message if error else "")
    checkpoint = status.checkpoint
    if checkpoint is None:
        return result
    final = checkpoint.evaluation if status.is_finished else None
    return replace(
        result,
        steps=checkpoint.progress.steps,
        iterations=checkpoint.progress.iteration,
        episodes=checkpoint.progress.episodes,
        evaluation=None if final is None else final.as_dict(),
        best_return=None if checkpoint.best is None else checkpoint.best.mean,
        state_digest=checkpoint.state_digest,
        digest=checkpoint.digest,
    )
