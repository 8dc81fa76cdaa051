"""The checks before a run, which train, resume, sweeps and dry runs share.

Nothing is written before all of them have passed. Loads numpy only where the settings are good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlflame.config.batch_scaling import check_learners
from rlflame.config.recipe import LearningSettings, Recipe
from rlflame.config.runtime import RuntimeSettings
from rlflame.config.user_env_file import pin_env_file
from rlflame.errors import ConfigError, UnknownEnvironmentError, format_command
from rlflame.training.critic_helper.conditions import check_critic_helper

if TYPE_CHECKING:
    from rlflame.rollout.task import EnvSpec, PolicyArrays
    from rlflame.training.trainer import StopRequest


@dataclass(frozen=True)
class Preflight:
    """A recipe that has passed the checks, with its environment and the policy it starts from."""

    recipe: Recipe
    env: EnvSpec
    start: PolicyArrays | None = None


def run_preflight(
    recipe: Recipe,
    runtime: RuntimeSettings,
    *,
    init_from: Path | None = None,
    resumed: bool = False,
    dry_run: bool = False,
    stop: StopRequest | None = None,
    read_recorded_env_file: Callable[[], str | None] = lambda: None,
) -> Preflight:
    """Check all that can refuse a run, the quick checks first.

    A resumed run has its policy already. A dry run reads the environment from an instance of it,
    and may be meant for a machine with more memory.
    """
    recipe = pin_env_file(recipe, runtime.env_file, read_recorded_env_file)
    check_settings(recipe, runtime)
    from rlflame.experiment import components
    from rlflame.experiment.memory_check import check_memory
    from rlflame.training.stop_signal import NullStop, abort_on_stop

    if not resumed:
        _check_init_file(recipe.learning, init_from)
    with abort_on_stop(stop or NullStop()):
        if dry_run:
            env = components.inspect_env(recipe.learning.environment)
        else:
            env = read_env_spec(recipe, resumed=resumed)
    components.make_policy_spec(recipe.learning, env)
    if not dry_run:
        check_memory(recipe, env, resumed=resumed)
    if resumed or init_from is None:
        return Preflight(recipe, env)
    learning, start = _load_start_policy(recipe.learning, env, init_from)
    return Preflight(recipe.model_copy(update={"learning": learning}), env, start)


def check_settings(recipe: Recipe, runtime: RuntimeSettings) -> None:
    """The checks of settings alone, which a command makes before it opens a fleet."""
    check_learners(recipe.learning, runtime.learners)
    check_critic_helper(recipe.learning, runtime)
    if runtime.tensorboard:
        from rlflame.storage.tracking.tensorboard import check_available

        check_available()


def read_env_spec(recipe: Recipe, *, resumed: bool) -> EnvSpec:
    """The environment as it is here, which may take long to make."""
    from rlflame.experiment import components

    try:
        return components.make_env_spec(recipe.learning.environment)
    except UnknownEnvironmentError as error:
        if not resumed:
            raise
        raise UnknownEnvironmentError(
            error.message, "if it is one of yours, add the file that has it: --env-file FILE.py"
        ) from error


def list_warnings(recipe: Recipe) -> Iterator[str]:
    """What the user should know before the run, and that does not refuse it."""
    from rlflame.rollout.mujoco.known_spaces import find_unverified_version

    if recipe.budget_warning:
        yield recipe.budget_warning
    version = find_unverified_version(recipe.learning.environment.id)
    if version is not None:
        yield (
            f"Gymnasium {version} steps the environments: rlflame's own MuJoCo loop, which is "
            "faster, was not compared with this version."
        )


def _check_init_file(learning: LearningSettings, file: Path | None) -> None:
    if learning.init_policy is not None and file is None:
        raise ConfigError(
            f"The recipe starts from a policy (learning.init_policy = {learning.init_policy}), and "
            "no file was given.",
            "--init-from FILE, or --set learning.init_policy=none",
        )


def _load_start_policy(
    learning: LearningSettings, env: EnvSpec, file: Path
) -> tuple[LearningSettings, PolicyArrays]:
    """The settings of a run that starts from the policy in a file, and that policy."""
    from rlflame.experiment.components import make_policy_spec
    from rlflame.fleet.base import make_policy_id
    from rlflame.rollout.policy import compute_array_shapes
    from rlflame.storage.run_folder import load_policy_file

    source = load_policy_file(file)
    expected = compute_array_shapes(make_policy_spec(learning, env))
    actual = compute_array_shapes(source.policy_spec)
    for tensor in sorted(expected.keys() | actual.keys()):
        if expected.get(tensor) != actual.get(tensor):
            raise ConfigError(
                f"{file} does not fit this recipe: {tensor} is {actual.get(tensor, 'absent')} "
                f"there and {expected.get(tensor, 'absent')} here.",
                "set learning.network and the environment as in that file: "
                f"{format_command('inspect', file)}",
            )
    policy_id = make_policy_id(source.policy)
    if learning.init_policy not in (None, policy_id):
        raise ConfigError(
            f"The recipe starts from the policy {learning.init_policy}, and {file} holds "
            f"{policy_id}.",
            "--init-from the file it was made with, or --set learning.init_policy=none",
        )
    return learning.model_copy(update={"init_policy": policy_id}), source.policy
