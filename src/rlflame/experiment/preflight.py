"""Checks that run before training, for train, resume, sweeps and dry runs.

They finish before the first log or checkpoint is written. numpy is imported only after the settings
have been checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlflame.config.flags import LearnerRank, read_rank
from rlflame.config.module_trust import pin_env_file
from rlflame.config.recipe import (
    LearningSettings,
    Recipe,
    count_units,
    count_useful_learners,
    find_shards,
)
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, format_command
from rlflame.storage.available_memory import measure_usable_bytes
from rlflame.terminal_text import format_count, format_size

if TYPE_CHECKING:
    from rlflame.rollout.task import EnvSpec, PolicyArrays
    from rlflame.training.trainer import StopRequest

#: Bytes per number stored for a step: the collected float32 and its copy in minibatch order.
_BYTES_PER_NUMBER = 8
#: Bytes per weight: the float32 weight, its gradient and the two moments of Adam.
_BYTES_PER_WEIGHT = 16


class Preflight(NamedTuple):
    """A checked recipe, its environment and the policy to start from."""

    recipe: Recipe
    env: EnvSpec
    start: PolicyArrays | None


def run_preflight(
    recipe: Recipe,
    runtime: RuntimeSettings,
    *,
    init_from: Path | None = None,
    is_resume: bool = False,
    dry_run: bool = False,
    stop: StopRequest | None = None,
    show_note: Callable[[str], None] = lambda note: None,
) -> Preflight:
    """Run all checks, the quick ones first, and show the warnings.

    A resumed run needs no `init_from`. A dry run always creates the environment to read its spec.
    If memory is too small, a dry run only shows a note, because the run may be meant for another
    machine.
    """
    recipe = pin_env_file(recipe, runtime.env_file)
    check_settings(recipe, runtime)
    from rlflame.experiment import components
    from rlflame.training.stop_signal import NullStop, abort_on_stop

    if recipe.learning.init_policy is not None and init_from is None and not is_resume:
        raise ConfigError(
            f"The recipe starts from the policy {recipe.learning.init_policy}, but no file was "
            "given.",
            "--init-from FILE, or --set learning.init_policy=none",
        )
    with abort_on_stop(stop or NullStop()):
        read_env = components.inspect_env if dry_run else components.make_env_spec
        env = read_env(recipe.learning.environment)
        if not is_resume:
            components.check_env_arguments(recipe.learning.environment)
    recipe = copy_with_ignore(recipe, env.ignore)
    components.make_policy_spec(recipe.learning, env)
    try:
        check_memory(recipe, env)
    except ConfigError as error:
        if not dry_run:
            raise
        show_note(f"This machine cannot train this recipe: {error.message} Hint: {error.hint}.")
    start = None
    if init_from is not None:
        learning, start = _load_start_policy(recipe.learning, env, init_from)
        recipe = recipe.model_copy(update={"learning": learning})
    for warning in list_warnings(recipe, env):
        show_note(warning)
    return Preflight(recipe, env, start)


def check_settings(recipe: Recipe, runtime: RuntimeSettings) -> None:
    """Run the checks that need neither an environment nor a fleet."""
    rank = read_rank()
    if rank is not None:
        _check_rank(rank, recipe.learning)
    if runtime.tensorboard:
        from rlflame.storage.tracking.tensorboard import check_available

        check_available()


def _check_rank(rank: LearnerRank, learning: LearningSettings) -> None:
    """Raise ConfigError if torchrun has started more learners than the recipe has work for."""
    units = count_units(learning)
    useful = count_useful_learners(units, rank.size)
    if rank.size > useful:
        hint, shards = f"start only {useful}", find_shards(learning, rank.size)
        networks = learning.traits.independent_networks
        if count_useful_learners(shards * networks, rank.size) == rank.size:
            hint += f", or add --set learning.gradient_shards={shards} in a new run"
        raise ConfigError(
            f"torchrun has started {rank.size} learners, but only {useful} can share the "
            f"{format_count(units, 'unit')} of work (networks x shards) of this recipe.",
            hint,
        )


def check_sweep(runtime: RuntimeSettings) -> None:
    """Raise ConfigError if a sweep has several learners or runs under torchrun."""
    if runtime.learners not in (1, "auto") or read_rank() is not None:
        raise ConfigError(
            "--seeds trains several seeds at once, each with one learner.",
            "omit --learners and torchrun, or use --seed N for one run",
        )


def copy_with_ignore(recipe: Recipe, ignore: tuple[str, ...]) -> Recipe:
    """Return a copy that names the parts of the observation that are left out."""
    if ignore == recipe.learning.environment.ignore:
        return recipe
    environment = recipe.learning.environment.model_copy(update={"ignore": ignore})
    learning = recipe.learning.model_copy(update={"environment": environment})
    return recipe.model_copy(update={"learning": learning})


def list_warnings(recipe: Recipe, env: EnvSpec) -> Iterator[str]:
    """Yield warnings about the recipe. They do not prevent the run."""
    from rlflame.learning.kernels.library import is_disabled, is_missing, load_kernels
    from rlflame.rollout.mujoco.known_spaces import find_unverified_version
    from rlflame.rollout.space_codec import format_path, is_image

    if recipe.budget_warning:
        yield recipe.budget_warning
    if recipe.learning.provider == "numpy" and is_missing():
        yield (
            "The compiled kernels are not installed, so updates are slower. The results are the "
            "same. To install them, install a C compiler, then reinstall rlflame."
        )
    elif recipe.learning.provider == "numpy" and not is_disabled() and load_kernels() is None:
        yield (
            "The compiled kernels cannot be used here, so updates are slower. The results are the "
            "same. If they do not fit this numpy, reinstall rlflame."
        )
    yield from _list_learning_warnings(recipe)
    version = find_unverified_version(recipe.learning.environment.id)
    if version is not None:
        yield f"Gymnasium {version} steps MuJoCo: rlflame's loop is not verified for this version."
    if env.ignore:
        yield f"The policy does not see {', '.join(env.ignore)} (environment.ignore)."
    for leaf in filter(is_image, env.observation_leaves):
        place = f" in {format_path(leaf.path)!r}" if leaf.path else ""
        shape = " x ".join(map(str, leaf.shape))
        yield (
            f"The image{place} ({shape}) is flattened, because rlflame has no network for images "
            "yet."
        )


def _list_learning_warnings(recipe: Recipe) -> Iterator[str]:
    """Yield warnings about settings with which a run learns little, nothing, or slowly."""
    learning, steps = recipe.learning, recipe.stop_at_steps
    name, replay, field = learning.algorithm, learning.replay, learning.traits.batch_field
    if replay is not None and steps is not None and steps <= replay.learning_starts:
        yield (
            f"This run learns nothing: it ends after {steps:,} steps, and {name} takes random "
            f"actions in the first {replay.learning_starts:,} (learning.{name}.learning_starts)."
        )
    if learning.device == "cuda" and not learning.stays_on_device:
        yield (
            f"With {learning.gradient_shards} gradient shards, the GPU computes only gradients. "
            "With whole updates, one GPU is faster: --set learning.gradient_shards=1"
        )
    batch, rollout = learning.rollout.steps_per_iteration, learning.rollout
    size = getattr(learning.settings, field) if field is not None and replay is None else 0
    if rollout.unit == "steps" and size > batch:
        yield (
            f"learning.{name}.{field} is {size:,}, but an iteration collects only {batch:,} "
            "samples: every minibatch is the whole batch."
        )
    if not learning.network.hidden:
        yield (
            "learning.network.hidden is empty: the policy is a linear function of the observation."
        )


def _load_start_policy(
    learning: LearningSettings, env: EnvSpec, file: Path
) -> tuple[LearningSettings, PolicyArrays]:
    """Load the initial policy; return settings with its ID, and its weights."""
    from rlflame.experiment.components import make_policy_spec
    from rlflame.fleet.base import make_policy_id
    from rlflame.rollout.policy import compute_array_shapes
    from rlflame.storage.run_folder import load_policy_file

    source = load_policy_file(file)
    spec = make_policy_spec(learning, env)
    layouts = [
        (compute_array_shapes(item), item.action_kind, item.action_counts, item.choice_spans)
        for item in (source.policy_spec, spec)
    ]
    if layouts[0] != layouts[1]:
        raise ConfigError(
            f"{file} does not fit this recipe: its tensors or its actions are different.",
            "set learning.network and the environment as in that file: "
            f"{format_command('inspect', file)}",
        )
    policy_id = make_policy_id(source.policy)
    if learning.init_policy not in (None, policy_id):
        raise ConfigError(
            f"The recipe starts from the policy {learning.init_policy}, but {file} holds "
            f"{policy_id}.",
            "use --init-from with the original file, or --set learning.init_policy=none",
        )
    return learning.model_copy(update={"init_policy": policy_id}), source.policy


def check_memory(recipe: Recipe, env: EnvSpec) -> None:
    """Raise ConfigError if training needs more memory than is available."""
    from rlflame.console.recipe_summary import RecipeSummary
    from rlflame.experiment.components import make_policy_spec
    from rlflame.rollout.policy import compute_array_shapes

    learning, rollout = recipe.learning, recipe.learning.rollout
    shapes = compute_array_shapes(make_policy_spec(learning, env)).values()
    weights = sum(map(math.prod, shapes)) * (1 + learning.traits.critics)
    networks = f"Training with hidden layers of {list(learning.network.hidden)} units"
    needs = [(networks, "network.hidden", _BYTES_PER_WEIGHT * weights)]
    replay = RecipeSummary(recipe, env, "").replay
    if replay is not None:
        transitions = format_count(replay.rows * replay.columns, "transition")
        setting = f"{learning.algorithm}.buffer_size"
        needs.append((f"A replay buffer of {transitions}", setting, replay.nbytes))
    elif rollout.unit == "steps":  # for "episodes", the size of a batch is not known
        action = 1 if env.action_kind == "discrete" else env.action_size
        batch = f"A batch of {format_count(rollout.steps_per_iteration, 'step')}"
        numbers = (env.row_size + action + 4) * rollout.steps_per_iteration
        needs.append((batch, "rollout.steps", _BYTES_PER_NUMBER * numbers))
    available = measure_usable_bytes()
    for subject, setting, nbytes in needs:
        if nbytes > available:
            raise ConfigError(
                f"{subject} takes {format_size(nbytes)} of memory, but only "
                f"{format_size(available)} is available.",
                f"use a smaller learning.{setting}, free memory or raise the memory limit",
            )
