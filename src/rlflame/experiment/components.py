"""The composition root: a config goes in, parts come out.

With factory.py and factory.py, which name the fleets and the algorithms, the only place that names
concrete classes. Must not know: the command line, how anything is shown.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from rlflame.config import user_env_file
from rlflame.config.algorithms import SacSettings
from rlflame.config.recipe import EnvironmentSettings, LearningSettings, Recipe, RunConfig
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.errors import ConfigError, format_command
from rlflame.fleet.base import Fleet
from rlflame.learning.base import Algorithm
from rlflame.learning.buffers.replay_buffer import make_emptied_state
from rlflame.learning.factory import (
    compute_environment_fingerprint,
    compute_fingerprint,
    count_blas_threads,
    make_algorithm,
    make_buffer,
    resolve_device,
)
from rlflame.learning.parallel.gradient_shards import Shards
from rlflame.learning.parallel.process_group import (
    ProcessGroup,
    ReplicatedAlgorithm,
    check_fingerprints,
)
from rlflame.learning.policy_average import PolicyAverage
from rlflame.rollout import blas
from rlflame.rollout.mujoco import known_spaces
from rlflame.rollout.policy import compute_array_shapes
from rlflame.rollout.spec import EnvSpec, PolicyArrays, PolicySpec
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.machine_memory import measure_usable_bytes
from rlflame.terminal_text import format_count, format_size
from rlflame.training.critic_helper.helper_client import CriticHelper, NullCriticHelper
from rlflame.training.evaluation import EvaluationPlan
from rlflame.training.trainer import (
    BUFFER_PREFIX,
    Plan,
    Progress,
    Recorder,
    StopRequest,
    Trainer,
    restore_components,
)


def make_env_spec(settings: EnvironmentSettings) -> EnvSpec:
    """The shapes of an environment; refuses what cannot be learned in, by name."""
    known_spec = known_spaces.find_known_spec(
        settings.id, dict(settings.kwargs), settings.max_episode_steps
    )
    if known_spec is not None:
        return known_spec
    from rlflame.experiment.env_spec import inspect_env  # loads Gymnasium

    return inspect_env(settings)


def has_continuous_actions(config: RunConfig) -> bool:
    """Whether a config's environment wants numbers rather than a choice."""
    if config.runtime.env_file is not None:
        user_env_file.load_env_file(config.runtime.env_file)
    return make_env_spec(config.learning.environment).action_kind == "continuous"


def make_policy_spec(learning: LearningSettings, env: EnvSpec) -> PolicySpec:
    """The shape of the policy that a recipe implies for an environment; refuses a misfit."""
    network = learning.network
    if learning.sac is not None:
        _check_squashable(env)
        _check_entropy(learning.sac, env)
    if network.exploration == "gsde" and env.action_kind == "discrete":
        raise ConfigError(
            f"gsde needs actions that are numbers, and {env.id} has {env.action_size} choices.",
            "--set network.exploration=independent",
        )
    return PolicySpec(
        action_kind=env.action_kind,
        observation_size=env.observation_size,
        action_size=env.action_size,
        action_low=env.action_low,
        action_high=env.action_high,
        hidden=tuple(network.hidden),
        activation=network.activation,
        normalise=network.normalise_observations,
        observation_clip=network.observation_clip,
        width=learning.rollout.width,
        squash=learning.sac is not None,
        exploration=network.exploration,
        exploration_interval=network.exploration_interval,
    )


def _check_squashable(env: EnvSpec) -> None:
    """SAC's actions are numbers between two bounds."""
    if env.action_kind == "discrete":
        raise ConfigError(
            f"SAC needs actions that are numbers, and {env.id} has {env.action_size} choices.",
            "--algo ppo",
        )
    if not np.isfinite([*env.action_low, *env.action_high]).all():
        raise ConfigError(
            f"SAC needs actions between two bounds, and those of {env.id} have none.",
            "--algo ppo, or give the environment's action_space finite bounds",
        )


def _check_entropy(settings: SacSettings, env: EnvSpec) -> None:
    """An entropy that no policy reaches lets the coefficient grow without end."""
    target, highest = settings.target_entropy, env.action_size * math.log(2.0)
    if target != "auto" and target >= highest and settings.entropy_coefficient == "auto":
        actions = format_count(env.action_size, "action")
        raise ConfigError(
            f"sac.target_entropy is {target:g}, and a policy over {actions} in [-1, 1] stays below "
            f"{highest:.2f}.",
            f"--set sac.target_entropy={-env.action_size}, which is what auto takes",
        )


def check_memory(recipe: Recipe, env: EnvSpec, *, resumed: bool) -> None:
    """Refuse what the machine cannot hold, before minutes or hours have filled it."""
    learning, (available, safe) = recipe.learning, measure_usable_bytes()
    fallback_hint = (
        f"free some, raise a limit, or {'resume' if resumed else 'train'} on another machine"
    )
    needs = [_estimate_replay(recipe, env, safe), _estimate_batch(learning, env, available)]
    for subject, needed, setting in [*filter(None, needs), _estimate_networks(learning, env)]:
        if needed > available:
            raise ConfigError(
                f"{subject} takes {format_size(needed)} of memory, and {format_size(available)} "
                "are "
                "available "
                "for it.",
                fallback_hint if resumed or setting is None else f"--set learning.{setting}",
            )


#: What it is, the bytes that it takes at least, and a setting by which it would be smaller.
_Need = tuple[str, int, str | None]


def _estimate_replay(recipe: Recipe, env: EnvSpec, safe: int) -> _Need | None:
    replay = RecipeSummary(recipe, env, "").replay
    if replay is None:
        return None
    transitions = format_count(replay.rows * replay.columns, "transition")
    fitting = replay.find_capacity(safe)
    enough = fitting >= recipe.learning.rollout.columns
    smaller = f"sac.buffer_size={_round_down(fitting)}" if enough else None
    return f"A replay of {transitions}", replay.nbytes, smaller


def _estimate_batch(learning: LearningSettings, env: EnvSpec, available: int) -> _Need | None:
    """What was collected, and that in another order."""
    rollout = learning.rollout
    if learning.sac is not None or rollout.unit != "steps":
        return None  # the length of episodes decides
    action = env.action_size if env.action_kind == "continuous" else 1
    bytes_per_step = 2 * 4 * (env.observation_size + action + 4) * rollout.columns
    fitting = available // bytes_per_step // 2
    return (
        f"A batch of {format_count(rollout.columns * rollout.steps, 'step')}",
        bytes_per_step * rollout.steps,
        f"rollout.steps={_round_down(fitting)}" if fitting else None,
    )


def _estimate_networks(learning: LearningSettings, env: EnvSpec) -> _Need:
    """Weights, a gradient, and Adam's two moments."""
    shapes = compute_array_shapes(make_policy_spec(learning, env)).values()
    critics = {"ppo": 1, "reinforce": 0, "sac": 2}[learning.algorithm]
    needed = 4 * 4 * sum(math.prod(shape) for shape in shapes) * (1 + critics)
    hidden = list(learning.network.hidden)
    return f"Learning networks of {hidden} units", needed, "network.hidden=[256,256]"


def _round_down(number: int) -> int:
    """Of two digits, rounded down: one that would be typed, and that leaves something over."""
    unit: int = 10 ** max(0, len(str(number)) - 2)
    return number // unit * unit


def check_restorable(checkpoint: Checkpoint) -> None:
    """What was saved is taken up by a learner and a replay that are thrown away again."""
    learning = checkpoint.recipe.learning.model_copy(update={"threads": 1})
    if checkpoint.snapshot is not None:
        learner = make_algorithm(learning, checkpoint.policy_spec)
        restore_components(
            checkpoint.snapshot,
            learning.rollout.staleness,
            learner,
            make_buffer(learning, checkpoint.env),
            PolicyAverage(learning.policy_average, learner.get_policy()),
        )


def read_lineage(checkpoint: Checkpoint) -> int:
    """How often the replay of a run has begun anew."""
    state = {} if checkpoint.snapshot is None else checkpoint.snapshot.learner
    return int(state.get(f"{BUFFER_PREFIX}lineage", 0))


def copy_with_fresh_replay(checkpoint: Checkpoint) -> Checkpoint:
    """The same state with an empty replay, of a new lineage."""
    snapshot = checkpoint.snapshot
    learner_state = {} if snapshot is None else dict(snapshot.learner)
    replay_state = {
        name: learner_state.pop(name)
        for name in tuple(learner_state)
        if name.startswith(BUFFER_PREFIX)
    }
    if snapshot is None or not replay_state:
        raise ConfigError(
            f"--fresh-replay is for a replay, and {checkpoint.recipe.learning.algorithm} keeps "
            "none.",
            "leave it out",
        )
    fresh = make_emptied_state(
        {name.removeprefix(BUFFER_PREFIX): array for name, array in replay_state.items()}
    )
    learner = {**learner_state, **{BUFFER_PREFIX + name: array for name, array in fresh.items()}}
    return replace(checkpoint, snapshot=replace(snapshot, learner=learner, segments=()))


def make_evaluation_plan(recipe: Recipe, *, final: bool) -> EvaluationPlan:
    settings = recipe.evaluation
    return EvaluationPlan(
        episodes=settings.final_episodes if final else settings.episodes,
        seed=settings.seed,
        max_episode_steps=settings.max_episode_steps,
    )


def make_plan(recipe: Recipe, env: EnvSpec, run: str) -> Plan:
    learning = recipe.learning
    rollout = learning.rollout
    return Plan(
        run=run,
        seed=learning.seed,
        env=env,
        policy=make_policy_spec(learning, env),
        unit=rollout.unit,
        num_slots=rollout.num_slots,
        envs_per_slot=rollout.envs_per_slot,
        steps=rollout.steps,
        staleness=rollout.staleness,
        random_steps=learning.sac.learning_starts if learning.sac is not None else 0,
        stop_at_steps=recipe.stop_at_steps,
        stop_at_iterations=recipe.stop_at_iterations,
        horizon_steps=learning.horizon_steps,
        horizon_iterations=learning.horizon_iterations,
        evaluation=make_evaluation_plan(recipe, final=False),
        evaluate_every_steps=recipe.evaluation.every_steps,
        until_return=recipe.evaluation.until_return,
        average=learning.policy_average,
    )


def check_starting_policy(start: Checkpoint, spec: PolicySpec, name: str) -> PolicyArrays:
    """The policy to start from, if its tensors fit the new recipe."""
    expected, actual = compute_array_shapes(spec), compute_array_shapes(start.policy_spec)
    for tensor in sorted(expected.keys() | actual.keys()):
        if expected.get(tensor) != actual.get(tensor):
            raise ConfigError(
                f"{name} does not fit this recipe: {tensor} is {actual.get(tensor, 'absent')} "
                f"there and {expected.get(tensor, 'absent')} here.",
                "set learning.network and the environment as in that file: "
                f"{format_command('inspect', name)}",
            )
    return start.policy


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
    start: PolicyArrays | None = None,
    group: ProcessGroup | None = None,
    compare_every: int | None = None,
    critic_helper: CriticHelper | NullCriticHelper | None = None,
) -> Trainer[Any]:
    """A trainer that stands where the checkpoint does; in a group, the one that leads it, and with
    a critic helper the one that it follows."""
    learning = checkpoint.recipe.learning
    blas.set_threads(count_blas_threads(learning))
    result = Trainer(
        make_plan(checkpoint.recipe, checkpoint.env, run),
        _make_learner(
            learning,
            checkpoint.policy_spec,
            start,
            group,
            compare_every,
            critic_helper or NullCriticHelper(),
        ),
        make_buffer(learning, checkpoint.env),
        fleet,
        recorder,
        stop,
    )
    if checkpoint.snapshot is not None:
        result.restore(checkpoint.snapshot)
    return result


def _make_learner(
    learning: LearningSettings,
    spec: PolicySpec,
    start: PolicyArrays | None,
    group: ProcessGroup | None,
    compare_every: int | None,
    critic_helper: CriticHelper | NullCriticHelper,
) -> Algorithm[Any]:
    if group is None or group.size == 1:
        return critic_helper.wrap_algorithm(make_algorithm(learning, spec, start))
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
