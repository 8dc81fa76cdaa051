"""The composition root: a config goes in, parts come out.

With factory.py and factory.py, which name the fleets and the algorithms, the only place that names
concrete classes. Must not know: the command line, how anything is shown.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from rlflame.config import env_file
from rlflame.config.algorithms import SacSettings
from rlflame.config.recipe import EnvironmentSettings, LearningSettings, Recipe, RunConfig
from rlflame.console.recipe_summary import Facts
from rlflame.errors import ConfigError, typed
from rlflame.fleet.base import Fleet
from rlflame.learning.base import Algorithm
from rlflame.learning.buffers.replay_buffer import renewed
from rlflame.learning.factory import (
    algorithm,
    blas_threads,
    device,
    experience,
    fingerprint,
    made_with,
)
from rlflame.learning.parallel.gradient_shards import Shards
from rlflame.learning.parallel.process_group import Group
from rlflame.learning.parallel.replicated import Leading, check_alike
from rlflame.learning.policy_average import PolicyAverage
from rlflame.rollout import blas
from rlflame.rollout.mujoco import known_spaces
from rlflame.rollout.policy import expected_shapes
from rlflame.rollout.spec import EnvSpec, PolicyArrays, PolicySpec
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.machine_memory import room_bytes
from rlflame.text import format_count, format_size
from rlflame.training.critic_helper.critic_helper import Companion, Nobody
from rlflame.training.evaluation import EvaluationPlan
from rlflame.training.trainer import EXPERIENCE, Plan, Progress, Recorder, Stop, Trainer, take_up


def environment(settings: EnvironmentSettings) -> EnvSpec:
    """The shapes of an environment; refuses what cannot be learned in, by name."""
    known = known_spaces.known(settings.id, dict(settings.kwargs), settings.max_episode_steps)
    if known is not None:
        return known
    from rlflame.experiment.env_spec import look_at  # loads Gymnasium

    return look_at(settings)


def acts_continuously(config: RunConfig) -> bool:
    """Whether a config's environment wants numbers rather than a choice."""
    if config.runtime.env_file is not None:
        env_file.admit(config.runtime.env_file)
    return environment(config.learning.environment).action_kind == "continuous"


def policy_spec(learning: LearningSettings, env: EnvSpec) -> PolicySpec:
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
    wanted, highest = settings.target_entropy, env.action_size * math.log(2.0)
    if wanted != "auto" and wanted >= highest and settings.entropy_coefficient == "auto":
        actions = format_count(env.action_size, "action")
        raise ConfigError(
            f"sac.target_entropy is {wanted:g}, and a policy over {actions} in [-1, 1] stays below "
            f"{highest:.2f}.",
            f"--set sac.target_entropy={-env.action_size}, which is what auto takes",
        )


def check_memory(recipe: Recipe, env: EnvSpec, *, begun: bool) -> None:
    """Refuse what the machine cannot hold, before minutes or hours have filled it."""
    learning, (available, safe) = recipe.learning, room_bytes()
    elsewhere = f"free some, raise a limit, or {'resume' if begun else 'train'} on another machine"
    needs = [_replay_need(recipe, env, safe), _batch_need(learning, env, available)]
    for what, needed, smaller in [*filter(None, needs), _network_need(learning, env)]:
        if needed > available:
            raise ConfigError(
                f"{what} takes {format_size(needed)} of memory, and {format_size(available)} are "
                "available "
                "for it.",
                elsewhere if begun or smaller is None else f"--set learning.{smaller}",
            )


#: What it is, the bytes that it takes at least, and a setting by which it would be smaller.
_Need = tuple[str, int, str | None]


def _replay_need(recipe: Recipe, env: EnvSpec, safe: int) -> _Need | None:
    replay = Facts(recipe, env, "").replay
    if replay is None:
        return None
    transitions = format_count(replay.rows * replay.columns, "transition")
    fitting = replay.fitting(safe)
    enough = fitting >= recipe.learning.rollout.columns
    smaller = f"sac.buffer_size={_round_number(fitting)}" if enough else None
    return f"A replay of {transitions}", replay.nbytes, smaller


def _batch_need(learning: LearningSettings, env: EnvSpec, available: int) -> _Need | None:
    """What was collected, and that in another order."""
    rollout = learning.rollout
    if learning.sac is not None or rollout.unit != "steps":
        return None  # the length of episodes decides
    action = env.action_size if env.action_kind == "continuous" else 1
    each = 2 * 4 * (env.observation_size + action + 4) * rollout.columns
    fitting = available // each // 2
    return (
        f"A batch of {format_count(rollout.columns * rollout.steps, 'step')}",
        each * rollout.steps,
        f"rollout.steps={_round_number(fitting)}" if fitting else None,
    )


def _network_need(learning: LearningSettings, env: EnvSpec) -> _Need:
    """Weights, a gradient, and Adam's two moments."""
    shapes = expected_shapes(policy_spec(learning, env)).values()
    critics = {"ppo": 1, "reinforce": 0, "sac": 2}[learning.algorithm]
    needed = 4 * 4 * sum(math.prod(shape) for shape in shapes) * (1 + critics)
    hidden = list(learning.network.hidden)
    return f"Learning networks of {hidden} units", needed, "network.hidden=[256,256]"


def _round_number(most: int) -> int:
    """Of two digits, rounded down: one that would be typed, and that leaves something over."""
    unit: int = 10 ** max(0, len(str(most)) - 2)
    return most // unit * unit


def check_restores(found: Checkpoint) -> None:
    """What was saved is taken up by a learner and a replay that are thrown away again."""
    learning = found.recipe.learning.model_copy(update={"threads": 1})
    if found.snapshot is not None:
        learner = algorithm(learning, found.policy_spec)
        take_up(
            found.snapshot,
            learning.rollout.staleness,
            learner,
            experience(learning, found.env),
            PolicyAverage(learning.policy_average, learner.policy()),
        )


def lineage(found: Checkpoint) -> int:
    """How often the replay of a run has begun anew."""
    kept = {} if found.snapshot is None else found.snapshot.learner
    return int(kept.get(f"{EXPERIENCE}lineage", 0))


def with_fresh_replay(found: Checkpoint) -> Checkpoint:
    """The same state with an empty replay, of a new lineage."""
    snapshot = found.snapshot
    kept = {} if snapshot is None else dict(snapshot.learner)
    held = {name: kept.pop(name) for name in tuple(kept) if name.startswith(EXPERIENCE)}
    if snapshot is None or not held:
        raise ConfigError(
            f"--fresh-replay is for a replay, and {found.recipe.learning.algorithm} keeps none.",
            "leave it out",
        )
    fresh = renewed({name.removeprefix(EXPERIENCE): array for name, array in held.items()})
    learner = {**kept, **{EXPERIENCE + name: array for name, array in fresh.items()}}
    return replace(found, snapshot=replace(snapshot, learner=learner, segments=()))


def evaluation_plan(recipe: Recipe, *, final: bool) -> EvaluationPlan:
    settings = recipe.evaluation
    return EvaluationPlan(
        episodes=settings.final_episodes if final else settings.episodes,
        seed=settings.seed,
        max_episode_steps=settings.max_episode_steps,
    )


def plan(recipe: Recipe, env: EnvSpec, run: str) -> Plan:
    learning = recipe.learning
    rollout = learning.rollout
    return Plan(
        run=run,
        seed=learning.seed,
        env=env,
        policy=policy_spec(learning, env),
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
        evaluation=evaluation_plan(recipe, final=False),
        evaluate_every_steps=recipe.evaluation.every_steps,
        until_return=recipe.evaluation.until_return,
        average=learning.policy_average,
    )


def starting_policy(start: Checkpoint, spec: PolicySpec, name: str) -> PolicyArrays:
    """The policy to start from, if its tensors fit the new recipe."""
    expected, found = expected_shapes(spec), expected_shapes(start.policy_spec)
    for tensor in sorted(expected.keys() | found.keys()):
        if expected.get(tensor) != found.get(tensor):
            raise ConfigError(
                f"{name} does not fit this recipe: {tensor} is {found.get(tensor, 'absent')} "
                f"there and {expected.get(tensor, 'absent')} here.",
                "set learning.network and the environment as in that file: "
                f"{typed('inspect', name)}",
            )
    return start.policy


def beginning(recipe: Recipe, env: EnvSpec, start: PolicyArrays | None = None) -> Checkpoint:
    """A run of this recipe before its first step, as a checkpoint without a snapshot."""
    spec = policy_spec(recipe.learning, env)
    learner = algorithm(recipe.learning, spec, start)
    return Checkpoint(
        recipe=recipe,
        env=env,
        policy_spec=spec,
        policy=learner.policy(),
        progress=Progress(),
        fingerprint=made_with(recipe.learning),
    )


def trainer(
    checkpoint: Checkpoint,
    fleet: Fleet,
    recorder: Recorder,
    stop: Stop,
    run: str,
    start: PolicyArrays | None = None,
    group: Group | None = None,
    compare_every: int | None = None,
    companion: Companion | Nobody | None = None,
) -> Trainer[Any]:
    """A trainer that stands where the checkpoint does; in a group, the one that leads it, and with
    a companion the one that it follows."""
    learning = checkpoint.recipe.learning
    blas.set_threads(blas_threads(learning))
    result = Trainer(
        plan(checkpoint.recipe, checkpoint.env, run),
        _learner(
            learning, checkpoint.policy_spec, start, group, compare_every, companion or Nobody()
        ),
        experience(learning, checkpoint.env),
        fleet,
        recorder,
        stop,
    )
    if checkpoint.snapshot is not None:
        result.restore(checkpoint.snapshot)
    return result


def _learner(
    learning: LearningSettings,
    spec: PolicySpec,
    start: PolicyArrays | None,
    group: Group | None,
    compare_every: int | None,
    companion: Companion | Nobody,
) -> Algorithm[Any]:
    if group is None or group.size == 1:
        return companion.beside(algorithm(learning, spec, start))
    group.share(
        {
            "learning": learning.model_dump_json(),
            "policy": spec,
            "compare_every": compare_every or 0,
        }
    )
    check_alike(group, fingerprint(learning))
    group.meet_on(device(learning, group.rank))
    shards = Shards(learning.gradient_shards, group)
    found = algorithm(learning, spec, start, shards)
    if compare_every:
        shards.compare_every(compare_every, found.state)
    return Leading(found, group)
