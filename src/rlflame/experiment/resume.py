"""Prepares a run to continue from one of its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from rlflame.config import module_trust
from rlflame.config.batch_flags import make_unit_error
from rlflame.config.module_trust import format_module_options
from rlflame.config.recipe import Recipe
from rlflame.errors import CheckpointError, ConfigError, ReplayError, format_command, format_shell
from rlflame.experiment.components import make_env_spec
from rlflame.learning.buffers.replay_buffer import make_emptied_state
from rlflame.learning.factory import has_device, make_algorithm, make_buffer
from rlflame.learning.policy_average import PolicyAverage
from rlflame.rollout.machine import find_fingerprint_differences, read_versions
from rlflame.rollout.task import EnvSpec
from rlflame.storage import checkpoint, replay_segments, run_reader
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_folder import list_step_files, load_newest_checkpoint
from rlflame.training.trainer import BUFFER_PREFIX, Progress, restore_components


class Budget(NamedTuple):
    """The step or the iteration at which a run ends."""

    unit: Literal["steps", "iterations"]
    end: int

    def read_count(self, progress: Progress) -> int:
        return progress.steps if self.unit == "steps" else progress.iteration

    def format_options(self) -> tuple[str, int]:
        return f"--{self.unit}", self.end

    def compute_rest(self, progress: Progress) -> Budget:
        """Return the budget of a new run that continues a finished one."""
        count = self.read_count(progress)
        return self._replace(end=self.end - count if self.end > count else self.end)


def make_budget(steps: int | None, iterations: int | None) -> Budget | None:
    """Return the budget for the options of `resume`, or None if neither is set."""
    if steps is not None and iterations is not None:
        raise ConfigError("--steps and --iterations cannot be combined.", "remove one")
    budget = None if steps is None else Budget("steps", steps)
    if iterations is not None:
        budget = Budget("iterations", iterations)
    if budget is not None and budget.end < 1:
        raise ConfigError(
            f"--{budget.unit} is {budget.end}, but must be at least 1.", f"--{budget.unit} 1000"
        )
    return budget


def check_unit(recipe: Recipe, budget: Budget | None, steps: int) -> None:
    """Raise ConfigError for iterations if the algorithm counts steps, as `train` does.

    A recipe that is limited by iterations can be continued by iterations. `steps` is the number of
    steps so far.
    """
    if budget is None or budget.unit == "steps" or recipe.stop_at_iterations is not None:
        return
    if not recipe.learning.traits.counts_iterations:
        hint = f"--steps {2 * steps or 100_000}"
        raise make_unit_error("--iterations is", recipe.learning.algorithm, hint)


def find_budget(recipe: Recipe) -> Budget | None:
    """Return the limit of a recipe, or None if it limits both steps and iterations."""
    if recipe.stop_at_steps is not None and recipe.stop_at_iterations is not None:
        return None
    return make_budget(recipe.stop_at_steps, recipe.stop_at_iterations)


def find_run(target: Path) -> Path:
    """Return `target` if it is a folder, otherwise the checkpoint's run folder."""
    return target if target.is_dir() else replay_segments.find_run_folder(target)


def is_finished(source: Checkpoint) -> bool:
    """Return whether training is complete, with or without a final evaluation."""
    return source.progress.is_spent(source.recipe.stop_at_steps, source.recipe.stop_at_iterations)


def has_final_evaluation(folder: Path, source: Checkpoint) -> bool:
    """Return whether the checkpoint and result.json have the final evaluation."""
    try:
        result = run_reader.read_result(folder / "result.json")
    except CheckpointError:
        return False
    if source.evaluation is None or result is None:
        return False
    return bool(result["steps"] == source.progress.steps)


def load_source(
    target: Path, budget: Budget | None, *, fresh_replay: bool, show_note: Callable[[str], None]
) -> Checkpoint:
    """Load the checkpoint to continue from, and set its budget."""
    source = load_newest_checkpoint(target, show_note)
    if not source.resumable:
        raise CheckpointError(
            f"{target} holds only a policy, without the state that training needs.",
            f"start a new run from it: {format_train_command(source, target)}",
        )
    if fresh_replay:
        source = _copy_with_fresh_replay(source)
    return extend_budget(source, budget, find_best_policy(find_run(target), target))


def extend_budget(source: Checkpoint, budget: Budget | None, policy: Path) -> Checkpoint:
    """Return `source` with this budget, or unchanged if `budget` is None.

    Raises ConfigError if the run cannot continue with this budget. The hint of the error then
    suggests a new run that starts from the file `policy`.
    """
    recipe, progress = source.recipe, source.progress
    check_unit(recipe, budget, progress.steps)
    if budget is None or budget == find_budget(recipe):
        return source
    if progress.reached:
        raise ConfigError(
            f"This run ended at step {progress.steps}, when an evaluation reached "
            f"{recipe.evaluation.until_return:g}; it cannot continue.",
            f"start a new run from its policy: {format_train_command(source, policy)}",
        )
    if is_annealed(source):
        environment = recipe.learning.environment
        options = format_shell(
            *format_module_options(environment.id, environment.kwargs, environment.wrapper_names)
        )
        command = _format_schedule_command(source, policy, budget)
        raise ConfigError(
            "The learning rate of this run reached 0 by step "
            f"{progress.steps:,}; more steps would not change the weights.",
            f"start a new run from its policy: {command} {options}".rstrip(),
        )
    count = budget.read_count(progress)
    if budget.end <= count:
        raise ConfigError(
            f"--{budget.unit} {budget.end} is not beyond the {count} {budget.unit} already taken.",
            f"--{budget.unit} {count * 2}",
        )
    return copy_with_end(source, budget)


def copy_with_end(source: Checkpoint, budget: Budget) -> Checkpoint:
    changes = {
        "stop_at_steps": None,
        "stop_at_iterations": None,
        f"stop_at_{budget.unit}": budget.end,
    }
    return replace(source, recipe=source.recipe.model_copy(update=changes))


def format_continue_command(source: Checkpoint, run: Path, policy: Path) -> str:
    """Return the command that continues a run for twice its steps or iterations.

    If the run cannot continue, the command starts a new run from its policy.
    """
    if source.progress.reached:
        return format_train_command(source, policy)
    budget = find_budget(source.recipe) or Budget("steps", 0)
    budget = budget._replace(end=2 * budget.read_count(source.progress))
    if is_annealed(source):
        return _format_schedule_command(source, policy, budget)
    return format_command("resume", run, *budget.format_options())


def _format_schedule_command(source: Checkpoint, policy: Path, budget: Budget) -> str:
    """Return the command that starts a new run up to this budget with a new schedule."""
    run = find_config(policy).parent
    if not (run / "config.toml").is_file():
        return format_train_command(source, policy, budget.compute_rest(source.progress))
    return format_command("resume", run, *budget.format_options(), "--new-schedule")


def is_annealed(source: Checkpoint) -> bool:
    learning = source.recipe.learning
    return learning.settings.anneal_learning_rate and source.progress.is_spent(
        learning.horizon_steps, learning.horizon_iterations
    )


def find_best_policy(run: Path, fallback: Path) -> Path:
    """Return the file of a run's best policy.

    If it is missing or damaged, return `fallback` or the latest readable checkpoint.
    """
    latest = run / "latest.safetensors"
    paths = run / "best.safetensors", fallback, *reversed(list_step_files(run))
    return _find_readable(paths, latest)


def _find_readable(paths: Iterable[Path], default: Path) -> Path:
    """Return the first checkpoint file that can be read, or `default`."""
    for path in paths:
        if path.is_file():
            with contextlib.suppress(CheckpointError):
                checkpoint.load(path)
                return path
    return default


def format_train_command(source: Checkpoint, policy: Path, budget: Budget | None = None) -> str:
    """Return the command that starts a new run from a policy of another run.

    If `budget` is given, the new run and its schedules end there.
    """
    learning, config = source.recipe.learning, find_config(policy)
    options: list[object] = ["--init-from", policy]
    options += budget.format_options() if budget is not None else []
    if not config.exists():
        names = ("--env", learning.environment.id, "--algo", learning.algorithm)
        return format_command("train", *names, *options)
    resets = list_resets(source, is_rescheduled=budget is not None)
    sets = [word for text in resets for word in ("--set", text)]
    return format_command("train", "--config", config, *options, *sets)


def find_config(policy: Path) -> Path:
    """Return the path of the config of the run that wrote a policy."""
    folder = policy.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "config.toml"


def list_resets(source: Checkpoint, *, is_rescheduled: bool) -> list[str]:
    """List the settings of a run that a new run from its policy must unset, as NAME=none."""
    learning = source.recipe.learning
    names = ["learning.init_policy"] if learning.init_policy is not None else []
    names += ["evaluation.until_return"] if source.progress.reached else []
    if is_rescheduled:
        horizons = ("horizon_iterations", "horizon_steps")
        names += [f"learning.{name}" for name in horizons if getattr(learning, name) is not None]
    return [f"{name}=none" for name in names]


def find_machine_differences(
    source: Checkpoint, fingerprint: Mapping[str, str] | None = None
) -> list[str]:
    """List how this machine differs from the one that made the checkpoint.

    Only differences that can change results are listed.
    """
    differences = find_fingerprint_differences(source.fingerprint, fingerprint or read_versions())
    expected = source.recipe.learning.environment.file_digest
    digest = module_trust.get_loaded_digest()
    if expected is not None and digest is not None and expected != digest:
        differences.append(f"environment file: {expected:.12} -> {digest:.12}")
    return differences


def check_device(source: Checkpoint, target: Path) -> None:
    """Raise ConfigError if the run learns on a GPU and this machine has none."""
    if has_device(source.recipe.learning):
        return
    run = find_run(target)
    newest = target if target.is_file() else run / "latest.safetensors"
    policy = _find_readable([newest, *reversed(list_step_files(run))], newest)
    steps, iterations = source.recipe.stop_at_steps, source.recipe.stop_at_iterations
    budget = Budget("steps", steps) if steps else Budget("iterations", iterations or 1)
    command = format_train_command(source, policy, budget.compute_rest(source.progress))
    raise ConfigError(
        "This run learns on a GPU, but torch finds none here. On a CPU, its results would differ.",
        f"start a new run from its weights: {command} --device cpu",
    )


def check_environment(source: Checkpoint, env_spec: EnvSpec | None = None) -> Checkpoint:
    """Return the checkpoint with the modules that its environment may import.

    Raises CheckpointError if the environment on this machine does not fit the policy.
    """
    env_spec = env_spec or make_env_spec(source.recipe.learning.environment)
    sizes = ("observation_size", "action_kind", "action_size", "action_start", "action_counts")
    for name in (*sizes, "mask_source"):
        expected, actual = getattr(source.env, name), getattr(env_spec, name)
        if expected != actual:
            raise CheckpointError(
                f"{source.env.id} has {name} {actual} here, but {expected} in the checkpoint.",
                "install the version of the environment that the policy was trained in",
            )
    for name in ("observation_leaves", "action_leaves"):
        expected = getattr(source.env, name)
        if expected and expected != getattr(env_spec, name):
            raise CheckpointError(
                f"The {name.partition('_')[0]} space of {source.env.id} differs from that in the "
                "checkpoint.",
                "install the version of the environment that the policy was trained in",
            )
    return replace(source, env=replace(source.env, modules=env_spec.modules))


def check_state(source: Checkpoint, target: Path) -> None:
    """Raise an error unless the saved state is complete and fits the recipe."""
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


def _copy_with_fresh_replay(source: Checkpoint) -> Checkpoint:
    """Return the checkpoint with an empty replay buffer in a new lineage."""
    snapshot = source.snapshot
    learner = {} if snapshot is None else dict(snapshot.learner)
    replay = {
        name.removeprefix(BUFFER_PREFIX): array
        for name, array in learner.items()
        if name.startswith(BUFFER_PREFIX)
    }
    if snapshot is None or not replay:
        raise ConfigError(
            f"--fresh-replay needs a replay, but {source.recipe.learning.algorithm} has none.",
            "omit it",
        )
    fresh = make_emptied_state(replay)
    learner |= {BUFFER_PREFIX + name: array for name, array in fresh.items()}
    return replace(source, snapshot=replace(snapshot, learner=learner, segments=()))


def format_replay_hint(source: Checkpoint, target: Path) -> str:
    """Return a hint with commands that continue without the lost replay files.

    If an earlier checkpoint is intact, the command that resumes it comes first.
    """
    goal, steps = source.recipe.stop_at_steps, source.progress.steps
    end = ("--steps", goal if steps < goal else 2 * steps) if goal else ()
    fresh_command = format_command("resume", target, "--fresh-replay", *end)
    hint = f"{fresh_command} continues with the saved weights and an empty replay"
    for path in reversed(list_step_files(find_run(target))):
        with contextlib.suppress(CheckpointError):
            older = checkpoint.load(path)
            is_before = older.progress.steps < source.progress.steps
            if older.snapshot is None or not is_before or not _has_same_lineage(older, source):
                continue
            for segment in older.snapshot.segments:
                segment.arrays()
            command = format_command("resume", path, *end)
            return f"{command} continues from an earlier checkpoint, bit-identically; {hint}"
    return hint


def _has_same_lineage(a: Checkpoint, b: Checkpoint) -> bool:
    first, second = (
        source.snapshot.learner.get(f"{BUFFER_PREFIX}lineage", 0) if source.snapshot else 0
        for source in (a, b)
    )
    return int(first) == int(second)
