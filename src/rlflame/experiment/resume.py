"""Whether and how a run goes on from a checkpoint of it. Must not know: fleets, how it is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlflame.config import env_file
from rlflame.config.recipe import Recipe
from rlflame.errors import CheckpointError, ConfigError, NoSuchEnvironment, ReplayLost, typed
from rlflame.experiment import components
from rlflame.learning.base import Segment
from rlflame.rollout.process.worker_main import versions
from rlflame.storage import checkpoint, replay_segments, run_files
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_dir import newest_checkpoint, step_files


def finished(found: Checkpoint) -> bool:
    """Whether training is over; the final evaluation may still be missing."""
    return found.progress.spent(found.recipe.stop_at_steps, found.recipe.stop_at_iterations)


def scored(folder: Path, found: Checkpoint) -> bool:
    """Whether the final evaluation is there, in the checkpoint and beside it."""
    try:
        result = run_files.result(folder / "result.json")
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


def check_learns(found: Checkpoint, longer: Checkpoint, advice: str) -> None:
    """Refuse to take a run further whose learning rate has fallen to 0; what to do is `advice`."""
    if longer.recipe == found.recipe or not _has_learned(found):
        return
    raise ConfigError(
        "This run's learning rate has fallen to 0, where its schedule ends, by step "
        f"{found.progress.steps:,}; more steps would change no weight.",
        advice,
    )


def further(found: Checkpoint, run: Path, policy: Path) -> str:
    """The command that goes on from where a run has ended, as far again."""
    if found.progress.reached:
        return train_from(found.recipe, policy)
    if _has_learned(found):
        return train_from(found.recipe, policy, found.progress.steps)
    return typed("resume", run, "--steps", _twice(found))


def _twice(found: Checkpoint) -> int:
    """Twice the steps, or the end of what can be learned where that comes before."""
    learning, twice = found.recipe.learning, 2 * found.progress.steps
    end = learning.horizon_steps if learning.anneals else None
    return twice if end is None else min(twice, end)


def _has_learned(found: Checkpoint) -> bool:
    learning = found.recipe.learning
    return learning.anneals and found.progress.spent(
        learning.horizon_steps, learning.horizon_iterations
    )


def best_policy(run: Path, named: Path) -> Path:
    """The file in a run that another one is best begun from; its best, or what can be read."""
    best, latest = run / "best.safetensors", run / "latest.safetensors"
    found = (path for path in (best, named, latest, *reversed(step_files(run))) if path.is_file())
    return next((path for path in found if _can_be_read(path)), latest)


def _can_be_read(path: Path) -> bool:
    try:
        checkpoint.load(path)
    except CheckpointError:
        return False
    return True


def train_from(recipe: Recipe, policy: Path, steps: int | None = None) -> str:
    """The command that starts a new run from a policy of one that does not go on.

    With `steps` it has another end, and schedules that are made for it.
    """
    learning, folder = recipe.learning, policy.parent
    config = (folder.parent if folder.name == "checkpoints" else folder) / "config.toml"
    end = ("--steps", steps) if steps is not None else ()
    if not config.exists():
        made = ("--env", learning.environment.id, "--algo", learning.algorithm)
        return typed("train", *made, "--init-from", policy, *end)
    now: dict[str, object] = {"learning.init_policy": learning.init_policy}
    if steps is None:
        now["evaluation.until_return"] = recipe.evaluation.until_return
    else:
        now["learning.horizon_steps"] = learning.horizon_steps
        now["learning.horizon_iterations"] = learning.horizon_iterations
    absent = [("--set", f"{name}=none") for name in sorted(now) if now[name] is not None]
    sets = [word for pair in absent for word in pair]
    return typed("train", "--config", config, "--init-from", policy, *end, *sets)


def machine_differences(found: Checkpoint, here: Mapping[str, str] | None = None) -> list[str]:
    """What differs between this machine and the one a file was made on that can change bits."""
    differences = checkpoint.fingerprint_differences(found.fingerprint, here or versions())
    recorded = found.recipe.learning.environment.file_digest
    loaded = env_file.loaded_digest()
    if recorded is not None and loaded is not None and recorded != loaded:
        differences.append(f"environment file: {recorded:.12} -> {loaded:.12}")
    return differences


def check_environment(found: Checkpoint) -> Checkpoint:
    """The checkpoint, if the environment as it is here is the one the policy was made for.

    Its environment may then import the modules that were allowed.
    """
    try:
        here = components.environment(found.recipe.learning.environment)
    except NoSuchEnvironment as error:
        raise NoSuchEnvironment(
            error.message, "if it is one of yours, add the file that has it: --env-file FILE.py"
        ) from error
    for name in ("observation_size", "action_kind", "action_size", "action_start"):
        before, now = getattr(found.env, name), getattr(here, name)
        if before != now:
            raise CheckpointError(
                f"{found.env.id} has {name} {now} here, and {before} in the checkpoint.",
                "install the environment's version that the checkpoint was made with",
            )
    return replace(found, env=replace(found.env, modules=here.modules))


def check_state(found: Checkpoint, target: Path) -> None:
    """All that was saved is there and fits the recipe; before anything is written."""
    try:
        components.check_restores(found)
    except ReplayLost as error:
        raise ReplayLost(error.message, without_replay(found, target)) from error


def without_replay(found: Checkpoint, target: Path) -> str:
    """What to type where the replay is not whole, what loses nothing first."""
    anew = begun_anew(found, target)
    earlier = _newest_whole(target, found)
    if earlier is None:
        return anew
    path, held = earlier
    again = typed("resume", path, *_as_far(held, found.recipe))
    return f"{again} goes on from before, to the same bits; {anew}"


def begun_anew(found: Checkpoint, target: Path) -> str:
    """What to type to go on with the weights alone, as far as was asked for."""
    run = target if target.is_dir() else replay_segments.run_of(target)
    over = finished(found) and scored(run, found)
    if over and (found.progress.reached or _has_learned(found)):
        policy = best_policy(run, target)
        return f"{further(found, run, policy)} begins a new run with its weights"
    end: tuple[object, ...] = ("--steps", _twice(found)) if over else ()
    with contextlib.suppress(CheckpointError):
        held = newest_checkpoint(target, lambda note: None)
        end = end or _as_far(held.recipe, found.recipe)
    again = typed("resume", target, "--fresh-replay", *end)
    return f"{again} goes on with its weights and an empty replay"


def _as_far(held: Recipe, wanted: Recipe) -> tuple[object, ...]:
    """What to add to `resume` where the file ends elsewhere than it was asked to."""
    ends = [(one.stop_at_steps, one.stop_at_iterations) for one in (held, wanted)]
    return () if ends[0] == ends[1] else ("--steps", wanted.stop_at_steps)


def _newest_whole(target: Path, found: Checkpoint) -> tuple[Path, Recipe] | None:
    """An earlier checkpoint of the same run whose replay is all there."""
    run = target if target.is_dir() else replay_segments.run_of(target)
    looked_at: dict[str, bool] = {}
    for path in reversed(step_files(run)):
        with contextlib.suppress(CheckpointError):
            one = checkpoint.load(path)
            if (
                one.resumable
                and one.progress.steps < found.progress.steps
                and one.recipe.learning == found.recipe.learning
                and one.recipe.evaluation == found.recipe.evaluation
                and components.lineage(one) == components.lineage(found)
                and all(_is_whole(segment, looked_at) for segment in _segments(one))
            ):
                return path, one.recipe
    return None


def _segments(found: Checkpoint) -> Sequence[Segment]:
    return found.snapshot.segments if found.snapshot is not None else ()


def _is_whole(segment: Segment, looked_at: dict[str, bool]) -> bool:
    """Whether a segment is there as it should be; each is read once."""
    if segment.digest not in looked_at:
        try:
            segment.arrays()
            looked_at[segment.digest] = True
        except ReplayLost:
            looked_at[segment.digest] = False
    return looked_at[segment.digest]
