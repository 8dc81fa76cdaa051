"""Makes the components of a run, such as its folder, algorithm and trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.config import toml_io
from rlflame.config.flags import DEFAULT_ALGORITHM
from rlflame.config.module_trust import check_modules
from rlflame.config.preset_catalog import make_short_name
from rlflame.config.recipe import EnvironmentSettings, LearningSettings, Recipe, RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError
from rlflame.experiment.env_failure import explain_env_failure
from rlflame.experiment.learners import replica_main
from rlflame.fleet.base import Fleet
from rlflame.learning.base import Algorithm
from rlflame.learning.factory import (
    compute_environment_fingerprint,
    count_blas_threads,
    keep_replay,
    make_algorithm,
    make_buffer,
)
from rlflame.learning.parallel.process_group import ProcessGroup, ReplicatedAlgorithm
from rlflame.rollout import blas
from rlflame.rollout.mujoco import known_spaces
from rlflame.rollout.task import EnvSpec, PolicyArrays, PolicySpec
from rlflame.storage.checkpoint import Checkpoint, build_policy_spec, make_wrapper_specs
from rlflame.storage.run_folder import RunFolder
from rlflame.training.trainer import Plan, Progress, Recorder, StopRequest, Trainer


def make_env_spec(settings: EnvironmentSettings) -> EnvSpec:
    """Return the spec of an environment, if possible without creating it.

    Raises ConfigError if the environment cannot be created or is not supported.
    """
    known_spec = known_spaces.find_known_spec(
        settings.id, dict(settings.kwargs), settings.max_episode_steps
    )
    if known_spec is None or settings.wrappers or settings.ignore:
        return inspect_env(settings)
    return replace(known_spec, episodes=settings.episodes)


def has_continuous_actions(config: RunConfig) -> bool:
    """Return whether the environment of a config has continuous actions."""
    return make_env_spec(config.learning.environment).action_kind == "continuous"


def inspect_env(settings: EnvironmentSettings) -> EnvSpec:
    """Return the spec of an environment, read from a new instance."""
    from rlflame.rollout.envs.make import read_env_spec  # Gymnasium is slow to import

    modules = check_modules(settings.id, settings.kwargs, settings.wrapper_names)
    try:
        spec = read_env_spec(
            settings.id,
            dict(settings.kwargs),
            settings.max_episode_steps,
            modules,
            wrappers=make_wrapper_specs(settings),
            ignore=settings.ignore,
            masks=settings.action_mask == "auto",
        )
        return replace(spec, episodes=settings.episodes)
    except (Exception, SystemExit) as error:
        raise explain_env_failure(settings, error) from error


def check_env_arguments(settings: EnvironmentSettings) -> None:
    """Raise ConfigError if an argument is text, but must be a boolean or a number.

    The environment must have been created before.
    """
    if not any(isinstance(value, str) for value in settings.kwargs.values()):
        return
    from rlflame.rollout.envs.make import find_text_argument

    argument = find_text_argument(settings.id, settings.kwargs)
    if argument is not None:
        name, default = argument
        is_boolean = isinstance(default, bool)
        kind, example = ("true or false", not default) if is_boolean else ("a number", default)
        raise ConfigError(
            f"{name} is {kind} by default, but {settings.kwargs[name]!r} is text.",
            f"--env-kwargs {name}={toml_io.format_value(example)}",
        )


def make_policy_spec(learning: LearningSettings, env: EnvSpec) -> PolicySpec:
    """Return the spec of a policy for an environment.

    Raises ConfigError if the settings do not support the actions of the environment.
    """
    network = learning.network
    learning.settings.check_action_size(env.action_size)
    algorithm, is_squashed = learning.algorithm.upper(), learning.traits.squashed_actions
    other = f"--algo {DEFAULT_ALGORITHM}"
    if env.action_kind != "continuous" and (is_squashed or network.exploration == "gsde"):
        discrete = env.action_kind == "discrete"
        actions = f"{env.action_size} discrete actions" if discrete else "choices among its actions"
        raise ConfigError(
            f"{algorithm if is_squashed else 'gsde'} needs continuous actions (Box spaces with "
            f"finite bounds), but {env.id} has {actions}.",
            other if is_squashed else "--set network.exploration=independent",
        )
    is_bounded = np.isfinite([env.action_low, env.action_high])
    if is_squashed and not is_bounded.all():
        bounds = "are not bounded on both sides" if is_bounded.any() else "have no bounds"
        raise ConfigError(
            f"{algorithm} needs bounded actions, but those of {env.id} {bounds}.",
            f"use {other}, or give the environment's action_space finite bounds",
        )
    return build_policy_spec(learning, env)


def create_folder(
    runtime: RuntimeSettings,
    learning: LearningSettings,
    name: str,
    show_note: Callable[[str], None],
) -> RunFolder:
    """Create the folder of a run or sweep, at `runtime.out` or in `runs/`."""
    short_name = make_short_name(learning.environment.id)
    path = Path(runtime.out or f"runs/{short_name}-{learning.algorithm}-{name}")
    folder = RunFolder.create(path)
    if note := folder.format_relocation_note(runtime.out):
        show_note(note)
    return folder


def make_plan(recipe: Recipe, env: EnvSpec, run: str) -> Plan:
    return Plan(run, recipe, env, make_policy_spec(recipe.learning, env))


def make_initial_checkpoint(
    recipe: Recipe, env: EnvSpec, start: PolicyArrays | None = None
) -> Checkpoint:
    """Make the checkpoint that a new run starts from. It has no snapshot."""
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
    show_note: Callable[[str], None] = lambda note: None,
) -> Trainer[Any]:
    """Make a trainer that starts from a checkpoint.

    By default, it uses the algorithm of the recipe with a single learner.
    """
    learning = checkpoint.recipe.learning
    blas.set_threads(count_blas_threads(learning))
    algorithm, buffer = algorithm or make_learner(checkpoint), make_buffer(learning, checkpoint.env)
    if note := keep_replay(learning, algorithm, buffer):
        show_note(note)
    trainer: Trainer[Any] = Trainer(
        Plan(run, checkpoint.recipe, checkpoint.env, checkpoint.policy_spec),
        algorithm,
        buffer,
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
    """Make the algorithm of a checkpoint's recipe, with initial weights.

    If `start` is given, the initial weights are those of this policy. If `group` has several
    learners, this function runs on rank 0 and broadcasts the recipe. The returned algorithm then
    broadcasts every change to the other learners.
    """
    learning, spec = checkpoint.recipe.learning, checkpoint.policy_spec
    if group is None or group.size == 1:
        return make_algorithm(learning, spec, start)
    message = {
        "learning": learning.model_dump_json(),
        "policy": spec,
        "compare_every": compare_every or 0,
    }
    group.broadcast(message)
    learner = replica_main.make_learner(learning, spec, group, compare_every or 0, start)
    return ReplicatedAlgorithm(learner, group)
