"""Whether and how a run goes on from a checkpoint of it. Must not know: fleets, how it is shown."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from rlflame import build, checkpoint, decoded, segments
from rlflame.checkpoint import Checkpoint
from rlflame.config import Recipe
from rlflame.errors import CheckpointError, ConfigError, typed
from rlflame.rollout.child import versions
from rlflame.run_folder import step_files


def finished(found: Checkpoint) -> bool:
    """Whether training is over; the final evaluation may still be missing."""
    return found.progress.spent(found.recipe.stop_at_steps, found.recipe.stop_at_iterations)


def scored(folder: Path, found: Checkpoint) -> bool:
    """Whether the final evaluation is there, in the checkpoint and beside it."""
    try:
        result = decoded.result(folder / "result.json")
    except CheckpointError:
        return False
    if found.evaluation is None or result is None:
        return False
    return bool(result["steps"] == found.progress.steps)


def extended(found: Checkpoint, steps: int | None, policy: Path) -> Checkpoint:
    """The same run with another end; nothing else of the recipe changes.

    `policy` is the file that a new run can start from where this one does not go on.
    """
    recipe = found.recipe
    if steps is None or (steps == recipe.stop_at_steps and recipe.stop_at_iterations is None):
        return found
    if found.progress.reached:
        raise ConfigError(
            f"This run ended at step {found.progress.steps}, when an evaluation had reached "
            f"{found.recipe.evaluation.until_return:g}; it does not go on.",
            f"start a new run from its policy: {train_from(recipe, policy)}",
        )
    if steps <= found.progress.steps:
        raise ConfigError(
            f"--steps {steps} is not beyond the {found.progress.steps} steps already taken.",
            f"--steps {found.progress.steps * 2}",
        )
    changes = {"stop_at_steps": steps, "stop_at_iterations": None}
    return replace(found, recipe=found.recipe.model_copy(update=changes))


def train_from(recipe: Recipe, policy: Path) -> str:
    """The command that starts a new run from a policy of this recipe."""
    return typed("train", "--env", recipe.learning.environment.id, "--init-from", policy)


def machine_differences(found: Checkpoint) -> list[str]:
    """What differs between this machine and the one a file was made on that can change bits."""
    return checkpoint.fingerprint_differences(found.fingerprint, versions())


def check_environment(found: Checkpoint) -> None:
    """The environment as it is here must be the one the policy was made for."""
    here = build.environment(found.recipe.learning.environment)
    for name in ("observation_size", "action_kind", "action_size"):
        before, now = getattr(found.env, name), getattr(here, name)
        if before != now:
            raise CheckpointError(
                f"{found.env.id} has {name} {now} here, and {before} in the checkpoint.",
                "install the environment's version that the checkpoint was made with",
            )


def check_replay(found: Checkpoint, target: Path) -> None:
    """Every segment that the checkpoint needs is there and whole; before anything is written."""
    try:
        _read_segments(found)
    except CheckpointError as error:
        raise CheckpointError(error.message, without_replay(found, target)) from error


def without_replay(found: Checkpoint, target: Path) -> str:
    """What to type where the replay is not whole, what loses nothing first."""
    anew = typed("resume", target, "--fresh-replay")
    anew = f"{anew} goes on with its weights and an empty replay"
    earlier = _newest_whole(target, found.progress.steps)
    if earlier is None:
        return anew
    return f"{typed('resume', earlier)} goes on from before, to the same bits; {anew}"


def _newest_whole(target: Path, before: int) -> Path | None:
    """An earlier checkpoint of the run whose replay is all there."""
    run = target if target.is_dir() else segments.run_of(target)
    for path in reversed(step_files(run)):
        with contextlib.suppress(CheckpointError):
            found = checkpoint.load(path)
            if found.resumable and found.progress.steps < before:
                _read_segments(found)
                return path
    return None


def _read_segments(found: Checkpoint) -> None:
    for segment in found.snapshot.segments if found.snapshot is not None else ():
        segment.arrays()
