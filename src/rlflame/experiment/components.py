"""Makes the parts of a run from its recipe: environment, policy, algorithm, checkpoint, trainer."""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np

from rlflame.config.module_trust import check_modules
from rlflame.config.recipe import EnvironmentSettings, LearningSettings, Recipe, RunConfig
from rlflame.config.resolve import ALIASES
from rlflame.config.toml_io import format_value
from rlflame.errors import ConfigError, UnknownEnvironmentError
from rlflame.fleet.base import Fleet
from rlflame.learning.base import Algorithm
from rlflame.learning.factory import (
    compute_environment_fingerprint,
    compute_fingerprint,
    count_blas_threads,
    make_algorithm,
    make_buffer,
    resolve_device,
)
from rlflame.learning.parallel.process_group import (
    ProcessGroup,
    ReplicatedAlgorithm,
    Shards,
    check_fingerprints,
)
from rlflame.rollout import blas
from rlflame.rollout.mujoco import known_spaces
from rlflame.rollout.task import EnvSpec, PolicyArrays, PolicySpec
from rlflame.storage.checkpoint import Checkpoint, build_policy_spec
from rlflame.training.trainer import Plan, Progress, Recorder, StopRequest, Trainer


def make_env_spec(settings: EnvironmentSettings) -> EnvSpec:
    """The shapes of an environment, or an error that says why nothing can learn in it."""
    known_spec = known_spaces.find_known_spec(
        settings.id, dict(settings.kwargs), settings.max_episode_steps
    )
    return inspect_env(settings) if known_spec is None else known_spec


def has_continuous_actions(config: RunConfig) -> bool:
    """Whether the actions of a config's environment are numbers, not choices."""
    return make_env_spec(config.learning.environment).action_kind == "continuous"


def inspect_env(settings: EnvironmentSettings) -> EnvSpec:
    """The shapes of an environment, read from an instance of it."""
    import gymnasium  # takes long to load

    from rlflame.rendering import gl_backend
    from rlflame.rollout.envs.make import UnsupportedSpace, read_env_spec

    name = settings.id
    modules = check_modules(name, settings.kwargs)
    try:
        return read_env_spec(name, dict(settings.kwargs), settings.max_episode_steps, modules)
    except UnsupportedSpace as error:
        raise ConfigError(
            f"{name} has {error}, which rlflame does not learn in.",
            "it takes Box observations (no images), and Discrete or Box actions",
        ) from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name} could not be imported: {_get_first_line(error)}.",
            "install what is missing; a module in the current folder is searched for only if the "
            "command names it: --allow-module MODULE",
        ) from error
    except gymnasium.error.DependencyNotInstalled as error:
        cause = error.__cause__
        if cause is not None and gl_backend.is_gl_failure(error):
            raise gl_backend.make_gl_failure_error(_get_first_line(cause)) from error
        if isinstance(cause, ImportError) and not isinstance(cause, ModuleNotFoundError):
            raise ConfigError(
                f"{name} needs a package that cannot be loaded: {_get_first_line(cause)}.",
                "install what that package needs, or the package anew",
            ) from error
        raise ConfigError(
            f"{name} needs a package that is missing: {_get_first_line(error)}.",
            "install it into the environment that rlflame runs in",
        ) from error
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownEnvironmentError(
            f"There is no environment {name!r}.", _suggest_ids(name)
        ) from error
    except gymnasium.error.Error as error:
        raise ConfigError(
            f"{name} cannot be made: {_get_first_line(error)}.", "rlflame envs"
        ) from error
    except (Exception, SystemExit) as error:
        if gl_backend.is_gl_failure(error):
            raise gl_backend.make_gl_failure_error(_get_first_line(error)) from error
        kwargs_text = f" with {format_value(settings.kwargs)}" if settings.kwargs else ""
        hint = "check --env-kwargs" if kwargs_text else _suggest_ids(name)
        raise ConfigError(
            f"{name} cannot be made{kwargs_text}: {_get_first_line(error)}.", hint
        ) from error


def _suggest_ids(name: str) -> str:
    """The registered ids that a misspelt one may have meant."""
    import gymnasium

    ids = {
        key.lower(): key
        for key, spec in gymnasium.registry.items()
        # What has moved elsewhere has a function of Gymnasium's there, which says so.
        if key != name and not getattr(spec.entry_point, "__name__", "").startswith("_raise")
    } | {key: key for key in ALIASES}
    close = difflib.get_close_matches(name.lower(), ids, n=3, cutoff=0.5)
    if not close:
        return "rlflame envs lists them"
    return f"did you mean {', '.join(ids[key] for key in close)}? rlflame envs lists them"


def _get_first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def make_policy_spec(learning: LearningSettings, env: EnvSpec) -> PolicySpec:
    """The shape of the policy of a recipe, or an error where it does not fit the environment."""
    network = learning.network
    algorithm, is_squashed = learning.algorithm.upper(), learning.traits.squashed_actions
    for name, needs_numbers, hint in (
        (algorithm, is_squashed, "--algo ppo"),
        ("gsde", network.exploration == "gsde", "--set network.exploration=independent"),
    ):
        if needs_numbers and env.action_kind == "discrete":
            raise ConfigError(
                f"{name} needs actions that are numbers, and {env.id} has {env.action_size} "
                "choices.",
                hint,
            )
    if is_squashed and not np.isfinite([*env.action_low, *env.action_high]).all():
        raise ConfigError(
            f"{algorithm} needs actions between two bounds, and those of {env.id} have none.",
            "--algo ppo, or give the environment's action_space finite bounds",
        )
    return build_policy_spec(learning, env)


def make_plan(recipe: Recipe, env: EnvSpec, run: str) -> Plan:
    return Plan(run, recipe, env, make_policy_spec(recipe.learning, env))


def make_initial_checkpoint(
    recipe: Recipe, env: EnvSpec, start: PolicyArrays | None = None
) -> Checkpoint:
    """A run of this recipe before its first step, as a checkpoint without a snapshot."""
    spec = make_policy_spec(recipe.learning, env)
    learner = make_algorithm(recipe.learning, spec, start)
    return Checkpoint(
        recipe=recipe,
        env=env,
        policy_spec=spec,
        policy=learner.get_policy(),
        progress=Progress(),
        fingerprint=compute_environment_fingerprint(recipe.learning),
    )


def make_trainer(
    checkpoint: Checkpoint,
    fleet: Fleet,
    recorder: Recorder,
    stop: StopRequest,
    run: str,
    algorithm: Algorithm[Any] | None = None,
) -> Trainer[Any]:
    """A trainer at the position of the checkpoint; by default this process learns alone."""
    learning = checkpoint.recipe.learning
    blas.set_threads(count_blas_threads(learning))
    trainer: Trainer[Any] = Trainer(
        Plan(run, checkpoint.recipe, checkpoint.env, checkpoint.policy_spec),
        algorithm or make_learner(checkpoint),
        make_buffer(learning, checkpoint.env),
        fleet,
        recorder,
        stop,
    )
    if checkpoint.snapshot is not None:
        trainer.restore(checkpoint.snapshot)
    return trainer


def make_learner(
    checkpoint: Checkpoint,
    start: PolicyArrays | None = None,
    group: ProcessGroup | None = None,
    compare_every: int | None = None,
) -> Algorithm[Any]:
    """The algorithm of a checkpoint's recipe before its first update; in a group, its leader.

    `start` is the policy whose weights it starts from.
    """
    learning, spec = checkpoint.recipe.learning, checkpoint.policy_spec
    if group is None or group.size == 1:
        return make_algorithm(learning, spec, start)
    group.broadcast(
        {
            "learning": learning.model_dump_json(),
            "policy": spec,
            "compare_every": compare_every or 0,
        }
    )
    check_fingerprints(group, compute_fingerprint(learning))
    group.use_device(resolve_device(learning, group.rank))
    shards = Shards(learning.gradient_shards, group)
    learner = make_algorithm(learning, spec, start, shards)
    if compare_every:
        shards.compare_every(compare_every, learner.get_state)
    return ReplicatedAlgorithm(learner, group)
