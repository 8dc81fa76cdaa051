"""Whether and how a run goes on from a checkpoint of it. Must not know: fleets, how it is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlflame.config import user_env_file
from rlflame.config.recipe import Recipe
from rlflame.errors import (
    CheckpointError,
    ConfigError,
    ReplayError,
    UnknownEnvironmentError,
    format_command,
)
from rlflame.experiment import components
from rlflame.learning.base import Segment
from rlflame.rollout.machine import read_versions
from rlflame.storage import checkpoint, replay_segments, run_files
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.machine_info import find_fingerprint_differences
from rlflame.storage.run_dir import list_step_files, load_newest_checkpoint


def is_finished(source: Checkpoint) -> bool:
    """Whether training is over; the final evaluation may still be missing."""
    return source.progress.is_spent(source.recipe.stop_at_steps, source.recipe.stop_at_iterations)


def has_final_evaluation(folder: Path, source: Checkpoint) -> bool:
    """Whether the final evaluation is there, in the checkpoint and beside it."""
    try:
        result = run_files.read_result(folder / "result.json")
    except CheckpointError:
        return False
    if source.evaluation is None or result is None:
        return False
    return bool(result["steps"] == source.progress.steps)


def extend_budget(source: Checkpoint, steps: int | None, policy: Path) -> Checkpoint:
    """The same run with another end; nothing else of the recipe changes.

    `get_policy` is the file that a new run can start from where this one does not go on.
    """
    recipe = source.recipe
    if steps is None or (steps == recipe.stop_at_steps and recipe.stop_at_iterations is None):
        return source
    if source.progress.reached:
        raise ConfigError(
            f"This run ended at step {source.progress.steps}, when an evaluation had reached "
            f"{source.recipe.evaluation.until_return:g}; it does not go on.",
            f"start a new run from its policy: {format_train_command(recipe, policy)}",
        )
    if steps <= source.progress.steps:
        raise ConfigError(
            f"--steps {steps} is not beyond the {source.progress.steps} steps already taken.",
            f"--steps {source.progress.steps * 2}",
        )
    changes = {"stop_at_steps": steps, "stop_at_iterations": None}
    return replace(source, recipe=source.recipe.model_copy(update=changes))


def check_can_learn(source: Checkpoint, extension: Checkpoint, hint: str) -> None:
    """Refuse to take a run further whose learning rate has fallen to 0; what to do is `advice`."""
    if extension.recipe == source.recipe or not _is_annealed(source):
        return
    raise ConfigError(
        "This run's learning rate has fallen to 0, where its schedule ends, by step "
        f"{source.progress.steps:,}; more steps would change no weight.",
        hint,
    )


def format_continue_command(source: Checkpoint, run: Path, policy: Path) -> str:
    """The command that goes on from where a run has ended, as far again."""
    if source.progress.reached:
        return format_train_command(source.recipe, policy)
    if _is_annealed(source):
        return format_train_command(source.recipe, policy, source.progress.steps)
    return format_command("resume", run, "--steps", _compute_double_steps(source))


def _compute_double_steps(source: Checkpoint) -> int:
    """Twice the steps, or the end of what can be learned where that comes before."""
    learning, double_steps = source.recipe.learning, 2 * source.progress.steps
    end = learning.horizon_steps if learning.anneals else None
    return double_steps if end is None else min(double_steps, end)


def _is_annealed(source: Checkpoint) -> bool:
    learning = source.recipe.learning
    return learning.anneals and source.progress.is_spent(
        learning.horizon_steps, learning.horizon_iterations
    )


def find_best_policy(run: Path, fallback: Path) -> Path:
    """The file in a run that another one is best begun from; its best, or what can be read."""
    best, latest = run / "best.safetensors", run / "latest.safetensors"
    paths = (
        path for path in (best, fallback, latest, *reversed(list_step_files(run))) if path.is_file()
    )
    return next((path for path in paths if _can_load(path)), latest)


def _can_load(path: Path) -> bool:
    try:
        checkpoint.load(path)
    except CheckpointError:
        return False
    return True


def format_train_command(recipe: Recipe, policy: Path, steps: int | None = None) -> str:
    """The command that starts a new run from a policy of one that does not go on.

    With `steps` it has another end, and schedules that are made for it.
    """
    learning, folder = recipe.learning, policy.parent
    config = (folder.parent if folder.name == "checkpoints" else folder) / "config.toml"
    end = ("--steps", steps) if steps is not None else ()
    if not config.exists():
        recipe_options = ("--env", learning.environment.id, "--algo", learning.algorithm)
        return format_command("train", *recipe_options, "--init-from", policy, *end)
    settings: dict[str, object] = {"learning.init_policy": learning.init_policy}
    if steps is None:
        settings["evaluation.until_return"] = recipe.evaluation.until_return
    else:
        settings["learning.horizon_steps"] = learning.horizon_steps
        settings["learning.horizon_iterations"] = learning.horizon_iterations
    resets = [("--set", f"{name}=none") for name in sorted(settings) if settings[name] is not None]
    reset_options = [word for pair in resets for word in pair]
    return format_command("train", "--config", config, "--init-from", policy, *end, *reset_options)


def find_machine_differences(
    source: Checkpoint, fingerprint: Mapping[str, str] | None = None
) -> list[str]:
    """What differs between this machine and the one a file was made on that can change bits."""
    differences = find_fingerprint_differences(source.fingerprint, fingerprint or read_versions())
    expected = source.recipe.learning.environment.file_digest
    loaded = user_env_file.get_loaded_digest()
    if expected is not None and loaded is not None and expected != loaded:
        differences.append(f"environment file: {expected:.12} -> {loaded:.12}")
    return differences


def check_environment(source: Checkpoint) -> Checkpoint:
    """The checkpoint, if the environment as it is here is the one the policy was made for.

    Its environment may then import the modules that were allowed.
    """
    try:
        env_spec = components.make_env_spec(source.recipe.learning.environment)
    except UnknownEnvironmentError as error:
        raise UnknownEnvironmentError(
            error.message, "if it is one of yours, add the file that has it: --env-file FILE.py"
        ) from error
    for name in ("observation_size", "action_kind", "action_size", "action_start"):
        expected, actual = getattr(source.env, name), getattr(env_spec, name)
        if expected != actual:
            raise CheckpointError(
                f"{source.env.id} has {name} {actual} here, and {expected} in the checkpoint.",
                "install the environment's version that the checkpoint was made with",
            )
    return replace(source, env=replace(source.env, modules=env_spec.modules))


def check_state(source: Checkpoint, target: Path) -> None:
    """All that was saved is there and fits the recipe; before anything is written."""
    try:
        components.check_restorable(source)
    except ReplayError as error:
        raise ReplayError(error.message, format_replay_hint(source, target)) from error


def format_replay_hint(source: Checkpoint, target: Path) -> str:
    """What to type where the replay is not whole, what loses nothing first."""
    fresh_command = format_fresh_replay_command(source, target)
    complete_replay = _find_complete_replay(target, source)
    if complete_replay is None:
        return fresh_command
    path, recipe = complete_replay
    command = format_command("resume", path, *_format_end_options(recipe, source.recipe))
    return f"{command} goes on from before, to the same bits; {fresh_command}"


def format_fresh_replay_command(source: Checkpoint, target: Path) -> str:
    """What to type to go on with the weights alone, as far as was asked for."""
    run = target if target.is_dir() else replay_segments.find_run_folder(target)
    is_over = is_finished(source) and has_final_evaluation(run, source)
    if is_over and (source.progress.reached or _is_annealed(source)):
        policy = find_best_policy(run, target)
        return f"{format_continue_command(source, run, policy)} begins a new run with its weights"
    end: tuple[object, ...] = ("--steps", _compute_double_steps(source)) if is_over else ()
    with contextlib.suppress(CheckpointError):
        newest = load_newest_checkpoint(target, lambda note: None)
        end = end or _format_end_options(newest.recipe, source.recipe)
    command = format_command("resume", target, "--fresh-replay", *end)
    return f"{command} goes on with its weights and an empty replay"


def _format_end_options(current: Recipe, target: Recipe) -> tuple[object, ...]:
    """What to add to `resume` where the file ends elsewhere than it was asked to."""
    ends = [(recipe.stop_at_steps, recipe.stop_at_iterations) for recipe in (current, target)]
    return () if ends[0] == ends[1] else ("--steps", target.stop_at_steps)


def _find_complete_replay(target: Path, source: Checkpoint) -> tuple[Path, Recipe] | None:
    """An earlier checkpoint of the same run whose replay is all there."""
    run = target if target.is_dir() else replay_segments.find_run_folder(target)
    intact_by_digest: dict[str, bool] = {}
    for path in reversed(list_step_files(run)):
        with contextlib.suppress(CheckpointError):
            candidate = checkpoint.load(path)
            if (
                candidate.resumable
                and candidate.progress.steps < source.progress.steps
                and candidate.recipe.learning == source.recipe.learning
                and candidate.recipe.evaluation == source.recipe.evaluation
                and components.read_lineage(candidate) == components.read_lineage(source)
                and all(
                    _is_intact(segment, intact_by_digest) for segment in _list_segments(candidate)
                )
            ):
                return path, candidate.recipe
    return None


def _list_segments(source: Checkpoint) -> Sequence[Segment]:
    return source.snapshot.segments if source.snapshot is not None else ()


def _is_intact(segment: Segment, intact_by_digest: dict[str, bool]) -> bool:
    """Whether a segment is there as it should be; each is read once."""
    if segment.digest not in intact_by_digest:
        try:
            segment.arrays()
            intact_by_digest[segment.digest] = True
        except ReplayError:
            intact_by_digest[segment.digest] = False
    return intact_by_digest[segment.digest]
