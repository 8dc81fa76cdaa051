"""Whether and how a run continues from one of its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rlflame.config import module_trust
from rlflame.config.recipe import Recipe
from rlflame.errors import CheckpointError, ConfigError, ReplayError, format_command
from rlflame.experiment.preflight import read_env_spec
from rlflame.learning.buffers.replay_buffer import make_emptied_state
from rlflame.learning.factory import make_algorithm, make_buffer
from rlflame.learning.policy_average import PolicyAverage
from rlflame.rollout.machine import find_fingerprint_differences, read_versions
from rlflame.rollout.task import EnvSpec
from rlflame.storage import checkpoint, replay_segments, run_reader
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_folder import list_step_files, load_newest_checkpoint
from rlflame.training.trainer import BUFFER_PREFIX, restore_components


def find_run(target: Path) -> Path:
    """The folder of a run, or of the run that a checkpoint lies in."""
    return target if target.is_dir() else replay_segments.find_run_folder(target)


def is_finished(source: Checkpoint) -> bool:
    """Whether training is over; the final evaluation may still be missing."""
    return source.progress.is_spent(source.recipe.stop_at_steps, source.recipe.stop_at_iterations)


def has_final_evaluation(folder: Path, source: Checkpoint) -> bool:
    """Whether the final evaluation is there, in the checkpoint and beside it."""
    try:
        result = run_reader.read_result(folder / "result.json")
    except CheckpointError:
        return False
    if source.evaluation is None or result is None:
        return False
    return bool(result["steps"] == source.progress.steps)


def load_source(
    target: Path,
    steps: int | None,
    *,
    fresh_replay: bool,
    show_note: Callable[[str], None],
) -> Checkpoint:
    """The newest checkpoint of a run, or the named one, with the end that the user asks for."""
    source = load_newest_checkpoint(target, show_note)
    if not source.resumable:
        raise CheckpointError(
            f"{target} holds a policy alone, without the state that training needs.",
            f"start a new run from it: {format_command('train', '--init-from', target)}",
        )
    policy = find_best_policy(find_run(target), target)
    extension = extend_budget(source, steps, policy)
    if fresh_replay:
        extension = _copy_with_fresh_replay(extension)
    command = format_train_command(source.recipe, policy, (steps or 0) - source.progress.steps)
    hint = f"train on from its policy, with a schedule of its own: {command}"
    check_can_learn(source, extension, hint)
    return extension


def extend_budget(source: Checkpoint, steps: int | None, policy: Path) -> Checkpoint:
    """The same run with another end; nothing else of the recipe changes.

    `policy` is the file that a new run can start from where this run cannot continue.
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
    """Refuse to extend a run whose learning rate has fallen to 0; `hint` says what to do."""
    if extension.recipe == source.recipe or not _is_annealed(source):
        return
    raise ConfigError(
        "This run's learning rate has fallen to 0, where its schedule ends, by step "
        f"{source.progress.steps:,}; more steps would change no weight.",
        hint,
    )


def format_continue_command(source: Checkpoint, run: Path, policy: Path) -> str:
    """The command that continues an ended run for as many steps again."""
    if source.progress.reached:
        return format_train_command(source.recipe, policy)
    if _is_annealed(source):
        return format_train_command(source.recipe, policy, source.progress.steps)
    return format_command("resume", run, "--steps", _compute_double_steps(source))


def _compute_double_steps(source: Checkpoint) -> int:
    """Twice the steps, or the end of what can be learned where that comes before."""
    learning, double_steps = source.recipe.learning, 2 * source.progress.steps
    end = learning.horizon_steps if learning.settings.anneal_learning_rate else None
    return double_steps if end is None else min(double_steps, end)


def _is_annealed(source: Checkpoint) -> bool:
    learning = source.recipe.learning
    return learning.settings.anneal_learning_rate and source.progress.is_spent(
        learning.horizon_steps, learning.horizon_iterations
    )


def find_best_policy(run: Path, fallback: Path) -> Path:
    """The best file of a run to start another run from, among those that can be read."""
    latest = run / "latest.safetensors"
    for path in (run / "best.safetensors", fallback, latest, *reversed(list_step_files(run))):
        if path.is_file():
            with contextlib.suppress(CheckpointError):
                checkpoint.load(path)
                return path
    return latest


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
    resets: list[str] = []
    if learning.init_policy is not None:
        resets += ["--set", "learning.init_policy=none"]
    if steps is None and recipe.evaluation.until_return is not None:
        resets += ["--set", "evaluation.until_return=none"]
    for name in ("horizon_iterations", "horizon_steps"):
        if steps is not None and getattr(learning, name) is not None:
            resets += ["--set", f"learning.{name}=none"]
    return format_command("train", "--config", config, "--init-from", policy, *end, *resets)


def find_machine_differences(
    source: Checkpoint, fingerprint: Mapping[str, str] | None = None
) -> list[str]:
    """The differences between this machine and that of a checkpoint which can change bits."""
    differences = find_fingerprint_differences(source.fingerprint, fingerprint or read_versions())
    expected = source.recipe.learning.environment.file_digest
    loaded = module_trust.get_loaded_digest()
    if expected is not None and loaded is not None and expected != loaded:
        differences.append(f"environment file: {expected:.12} -> {loaded:.12}")
    return differences


def check_environment(source: Checkpoint, env_spec: EnvSpec | None = None) -> Checkpoint:
    """The checkpoint, if the environment here is the one that its policy was made for.

    Its environment may then import the modules that were allowed.
    """
    env_spec = env_spec or read_env_spec(source.recipe, resumed=True)
    for name in ("observation_size", "action_kind", "action_size", "action_start"):
        expected, actual = getattr(source.env, name), getattr(env_spec, name)
        if expected != actual:
            raise CheckpointError(
                f"{source.env.id} has {name} {actual} here, and {expected} in the checkpoint.",
                "install the environment's version that the checkpoint was made with",
            )
    return replace(source, env=replace(source.env, modules=env_spec.modules))


def check_state(source: Checkpoint, target: Path) -> None:
    """Check that the saved state is complete and fits the recipe, before anything is written."""
    if source.snapshot is None:
        return
    learning = source.recipe.learning.model_copy(update={"threads": 1})
    learner = make_algorithm(learning, source.policy_spec)
    try:
        restore_components(
            source.snapshot,
            learning.rollout.staleness,
            learner,
            make_buffer(learning, source.env),
            PolicyAverage(learning.policy_average, learner.get_policy()),
        )
    except ReplayError as error:
        raise ReplayError(error.message, format_replay_hint(source, target)) from error


def _read_lineage(source: Checkpoint) -> int:
    """How often the replay of a run was emptied."""
    state = {} if source.snapshot is None else source.snapshot.learner
    return int(state.get(f"{BUFFER_PREFIX}lineage", 0))


def _copy_with_fresh_replay(source: Checkpoint) -> Checkpoint:
    """The same state with an empty replay, of a new lineage."""
    snapshot = source.snapshot
    learner_state = {} if snapshot is None else dict(snapshot.learner)
    replay_state = {
        name: learner_state.pop(name)
        for name in tuple(learner_state)
        if name.startswith(BUFFER_PREFIX)
    }
    if snapshot is None or not replay_state:
        raise ConfigError(
            f"--fresh-replay is for a replay, and {source.recipe.learning.algorithm} keeps none.",
            "leave it out",
        )
    fresh = make_emptied_state(
        {name.removeprefix(BUFFER_PREFIX): array for name, array in replay_state.items()}
    )
    learner = {**learner_state, **{BUFFER_PREFIX + name: array for name, array in fresh.items()}}
    return replace(source, snapshot=replace(snapshot, learner=learner, segments=()))


def format_replay_hint(source: Checkpoint, target: Path) -> str:
    """What to type where the replay is incomplete; the command that loses nothing comes first."""
    fresh_command = format_fresh_replay_command(source, target)
    verified: set[str] = set()
    for path in reversed(list_step_files(find_run(target))):
        with contextlib.suppress(CheckpointError):
            earlier = checkpoint.load(path)
            if (
                earlier.snapshot is None
                or earlier.progress.steps >= source.progress.steps
                or earlier.recipe.learning != source.recipe.learning
                or _read_lineage(earlier) != _read_lineage(source)
            ):
                continue
            for segment in earlier.snapshot.segments:
                if segment.digest not in verified:
                    segment.arrays()
                    verified.add(segment.digest)
            end = _format_end_options(earlier.recipe, source.recipe)
            command = format_command("resume", path, *end)
            return f"{command} goes on from before, to the same bits; {fresh_command}"
    return fresh_command


def format_fresh_replay_command(source: Checkpoint, target: Path) -> str:
    """What to type to continue with the weights alone, to the end that was asked for."""
    run = find_run(target)
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
