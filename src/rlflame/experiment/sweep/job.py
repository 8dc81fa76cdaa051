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
from rlflame.config.nested import first_difference
from rlflame.config.recipe import RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import CheckpointError, ConfigError, typed
from rlflame.experiment.resume import check_learns, extended, finished, scored
from rlflame.storage import safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_dir import (
    AGAIN,
    RunFolder,
    holds_anything,
    is_locked,
    newest_checkpoint,
    refuse_links,
    writing,
)
from rlflame.storage.sweep_dir import (
    JOB_FILE,
    RESTORED,
    folder_name,
    is_job,
    parse,
    seed_folder,
    written,
)


@dataclass(frozen=True)
class Job:
    """A recipe and its seeds. The recipe's own seed is the first; its horizon is written out."""

    config: RunConfig
    seeds: tuple[int, ...]
    preset: str = ""
    #: The file that all seeds start from, as an absolute path.
    init_from: str | None = None

    def config_of(self, seed: int, folder: Path) -> RunConfig:
        """What a lone run of this seed in this folder would be given."""
        learning = self.config.learning.model_copy(update={"seed": seed})
        runtime = self.config.runtime.model_copy(update={"out": str(seed_folder(folder, seed))})
        return self.config.model_copy(update={"learning": learning, "runtime": runtime})

    def with_runtime(self, runtime: RuntimeSettings) -> Job:
        return replace(self, config=self.config.model_copy(update={"runtime": runtime}))

    def with_steps(self, steps: int) -> Job:
        changes = {"stop_at_steps": steps, "stop_at_iterations": None}
        return replace(self, config=self.config.model_copy(update=changes))


@dataclass(frozen=True)
class Standing:
    """Where one seed stands in its folder: not begun, over, or somewhere on the way."""

    seed: int
    folder: Path
    begun: bool = False
    over: bool = False
    #: Its newest checkpoint, with the job's own end; None where there is none that can be read.
    found: Checkpoint | None = None


def default_path(config: RunConfig, seeds: tuple[int, ...]) -> Path:
    if config.runtime.out is not None:
        return Path(config.runtime.out)
    learning = config.learning
    name = f"{resolve.short_name(learning.environment.id)}-{learning.algorithm}"
    return Path("runs") / f"{name}-{folder_name(seeds)}"


def write(folder: Path, job: Job) -> None:
    lines = [
        toml_io.to_toml(job.config),
        "[job]",
        f"seeds = {toml_io.written(list(job.seeds))}",
        f"preset = {toml_io.written(job.preset)}",
        f"init_from = {toml_io.written(job.init_from)}",
    ]
    with writing(folder, AGAIN):
        safetensors_file.write_atomically(folder / JOB_FILE, ("\n".join(lines) + "\n").encode())


def read_tables(folder: Path) -> dict[str, Any]:
    """What job.toml says, as plain data."""
    if not is_job(folder):
        raise CheckpointError(f"{folder} is no folder of seeds.", "rlflame runs lists them")
    try:
        return toml_io.read_file(folder / JOB_FILE)
    except ConfigError as error:
        raise CheckpointError(error.message, RESTORED) from error


def read(folder: Path) -> Job:
    tables = read_tables(folder)
    about = tables.pop("job", None)
    try:
        seeds, preset, init_from = _about(about)
        config = resolve.validated(tables)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / JOB_FILE} is not what a job of seeds is written as ({error}).",
            RESTORED,
        ) from error
    return Job(config, seeds, preset, init_from)


def _about(about: Any) -> tuple[tuple[int, ...], str, str | None]:
    if not isinstance(about, Mapping):
        raise TypeError("no [job] in it")
    seeds, init_from = about["seeds"], about.get("init_from")
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise ValueError(f"seeds = {seeds!r}")
    return (
        parse(",".join(map(str, seeds))),
        str(about.get("preset") or ""),
        None if init_from is None else str(init_from),
    )


def standing(folder: Path, job: Job, seed: int) -> Standing:
    """Where a seed stands. What a process has left that died before its first checkpoint is no
    beginning, and is cleared away.

    A checkpoint that is damaged is the seed's own trouble, which its process will meet and tell.
    """
    path = seed_folder(folder, seed)
    if not path.exists():
        return Standing(seed, path)
    if not holds_anything(path):
        if is_locked(path):
            # Somebody is at it who has not come to a checkpoint; nothing there is anybody else's.
            return Standing(seed, path, begun=True)
        with writing(folder, typed("resume", folder)):
            shutil.rmtree(path)
        return Standing(seed, path)
    try:
        found = newest_checkpoint(path, lambda _: None)
    except CheckpointError:
        return Standing(seed, path, begun=True)
    if not found.progress.reached and job.config.stop_at_steps is not None:
        wanted = job.config.stop_at_steps
        if wanted > found.progress.steps or wanted == found.recipe.stop_at_steps:
            found = extended(found, wanted, path)
    return Standing(seed, path, True, finished(found) and scored(path, found), found)


def check_recipe(folder: Path, job: Job) -> None:
    """Refuse a job whose file names another recipe than its seeds were begun with: what has not
    begun would be of another kind, and counted with the others."""
    for seed in job.seeds:
        found = standing(folder, job, seed).found
        if found is None:
            continue
        config = job.config_of(seed, folder)
        parts = ("learning", "evaluation")
        had, named = (
            {part: getattr(recipe, part).model_dump() for part in parts}
            for recipe in (found.recipe, config)
        )
        differing = first_difference(had, named)
        if differing is not None:
            path, before, now = differing
            raise ConfigError(
                f"Seed {seed} was begun with {path} = {toml_io.written(before)}, and "
                f"{folder / JOB_FILE} has {toml_io.written(now)}.",
                f"write {toml_io.written(before)} there again; another recipe is another job: "
                "rlflame train --seeds",
            )


def check_goal(folder: Path, job: Job, steps: int) -> None:
    """Refuse an end that a seed has passed, or cannot learn until, before any other goes on."""
    for seed in job.seeds:
        one = standing(folder, job, seed)
        found = one.found
        if found is None or found.progress.reached:
            continue
        taken, goal = found.progress.steps, found.recipe.stop_at_steps
        if steps <= taken and not (steps == goal and finished(found)):
            raise ConfigError(
                f"--steps {steps} is not beyond the {taken} steps that seed {seed} has taken.",
                f"--steps {2 * taken}",
            )
        longer = extended(found, steps, one.folder)
        check_learns(found, longer, _longer(folder, job, one.folder, steps))


def _longer(folder: Path, job: Job, seed: Path, steps: int) -> str:
    """The command that trains all seeds for so long, with schedules that are made for it."""
    learning = job.config.learning
    words: list[object] = ["--config", seed / "config.toml", "--seeds", written(job.seeds)]
    if job.init_from is not None:
        words += ["--init-from", job.init_from]
    for name in ("horizon_steps", "horizon_iterations"):
        if getattr(learning, name) is not None:
            words += ["--set", f"learning.{name}=none"]
    again = typed("train", *words, "--steps", steps, "--out", f"{folder}-longer")
    return f"train longer from the beginning: {again}"


def opened(folder: Path) -> RunFolder:
    """The job's folder, locked for this process."""
    if not is_job(folder):
        raise CheckpointError(f"{folder} is no folder of seeds.", "rlflame runs lists them")
    refuse_links(folder, (entry.name for entry in folder.glob("seed-*")))
    return RunFolder.open(folder)
