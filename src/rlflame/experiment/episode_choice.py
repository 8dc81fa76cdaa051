"""Decides whether an environment's episodes may share an instance.

Some environments keep state between episodes, such as counters, curricula or running normalisers.
In a used instance, an episode would then depend on the worker that runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlflame.errors import ConfigError, EnvironmentFailure, FleetError, FleetUnreachableError
from rlflame.experiment.components import inspect_env
from rlflame.fleet.base import Fleet
from rlflame.rollout.mujoco.known_spaces import find_known_spec
from rlflame.rollout.seeding import Role, make_reset_seed
from rlflame.rollout.task import EpisodeStart, Fragment, RolloutTask, make_fresh_state
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationPlan, make_evaluation_task
from rlflame.training.trainer import StopRequest

if TYPE_CHECKING:
    from rlflame.rollout.envs.episode_comparison import EpisodeComparison

#: A constructor that takes a larger share of the collection time is mentioned.
_NOTABLE_SHARE = 0.1
_LONGEST_EPISODE = 1000


def choose_episode_start(
    source: Checkpoint,
    fleet: Fleet,
    stop: StopRequest,
    show_note: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Checkpoint:
    """Return the checkpoint with the choice of `environment.episodes` in its recipe.

    If the recipe already has a choice, or the environment is known to be reusable, the checkpoint
    is returned unchanged. An environment that fails in an episode on a new instance raises
    EnvironmentFailure.
    """
    with stop.allow_interrupt():
        reason = cost = ""
        if source.env.episodes == "auto" and not is_known(source):
            source, reason = _choose(source, fleet)
        if source.env.episodes == "fresh":
            cost = describe_cost(source, fleet, clock)
    for note in filter(None, (reason, cost)):
        show_note(note)
    return source


def is_known(source: Checkpoint) -> bool:
    """Return whether an environment was tested to reset like a new instance."""
    env = source.env
    if env.wrappers:
        return False
    if find_known_spec(env.id, dict(env.kwargs), env.max_episode_steps) is not None:
        return True
    from rlflame.rollout.envs.gymnasium_env import is_known_reusable  # imports Gymnasium

    return is_known_reusable(env.id)


def _choose(source: Checkpoint, fleet: Fleet) -> tuple[Checkpoint, str]:
    """Return the checkpoint with a choice, and the reason for new instances, if chosen."""
    from rlflame.rollout.envs.gymnasium_env import is_known_stateful  # imports Gymnasium

    if is_known_stateful(source.env.id):
        return copy_with_episodes(source, "fresh"), (
            f"Each episode uses a new instance of {source.env.id}, because its package is known to "
            "keep state between episodes."
        )
    try:
        comparison = compare_episodes(source, fleet)
    except FleetUnreachableError:
        raise
    except (EnvironmentFailure, FleetError) as error:
        return copy_with_episodes(source, "fresh"), (
            f"Each episode uses a new instance of {source.env.id}, because a used instance could "
            f"not be compared with a new one: {error.message}"
        )
    if not comparison.difference:
        return copy_with_episodes(source, "reuse"), ""
    return copy_with_episodes(source, "fresh"), format_comparison(source.env.id, comparison)


def compare_episodes(source: Checkpoint, fleet: Fleet) -> EpisodeComparison:
    """Ask one worker to compare episodes on a used instance with those on new instances."""
    from rlflame.rollout.envs.episode_comparison import COMPARISON_STEPS, read_comparison

    seed = source.recipe.learning.seed
    plan = EvaluationPlan(1, seed, stochastic=True, max_episode_steps=COMPARISON_STEPS)
    env = replace(source.env, episodes="compare")
    task = replace(
        make_evaluation_task(env, source.policy_spec, plan, 0, 1),
        unit="steps",
        record=True,
        states=(make_fresh_state(0, make_reset_seed(seed, Role.EVALUATION_RESET, 0)),),
    )
    return read_comparison(_run_task(task, source, fleet))


def describe_cost(source: Checkpoint, fleet: Fleet, clock: Callable[[], float]) -> str:
    """Return a note on the share of the constructor in the time of an episode, if notable."""
    environment, seed = source.recipe.learning.environment, source.recipe.learning.seed
    plan = EvaluationPlan(1, seed, stochastic=True, max_episode_steps=_LONGEST_EPISODE)
    task = make_evaluation_task(source.env, source.policy_spec, plan, 0, 1)
    try:
        start_s = clock()
        _run_task(task, source, fleet)
        episode_s = clock() - start_s
    except (FleetUnreachableError, EnvironmentFailure):
        raise
    except FleetError:
        return ""
    try:
        inspect_env(environment)  # the first call may import modules
        start_s = clock()
        inspect_env(environment)
        constructor_s = clock() - start_s
    except ConfigError:  # some environments allow one instance, which a worker has
        return ""
    share = min(1.0, constructor_s / episode_s) if episode_s > 0.0 else 0.0
    if share <= _NOTABLE_SHARE:
        return ""
    return (
        f"Making an instance of {source.env.id} takes {constructor_s:.2g} s, about {share:.0%} of "
        "the time for collecting an episode."
    )


def _run_task(task: RolloutTask, source: Checkpoint, fleet: Fleet) -> Fragment:
    policy_id = fleet.put(source.policy)
    try:
        (fragment,) = fleet.submit([replace(task, run="comparison", policy_id=policy_id)])
    finally:
        fleet.release(policy_id)
    return fragment


def format_comparison(id: str, comparison: EpisodeComparison) -> str:
    """Return a note on a difference and its likely cause."""
    from rlflame.rollout.envs.vector_env import GLOBAL_RANDOM_CAUSE

    subject = f"{id} keeps state between episodes"
    cause = (
        ". A stateful wrapper belongs outside the environment; network.normalise_observations "
        "replaces a normaliser"
    )
    if comparison.episode == 1:  # both instances are new
        subject, cause = f"Two new instances of {id} play the same episode differently", ""
    if comparison.uses_global_random:
        cause = GLOBAL_RANDOM_CAUSE
    step = f", step {comparison.step}" if comparison.step else ""
    return (
        f"{subject}, so each episode uses a new instance: in episode {comparison.episode}{step}, "
        f"{comparison.difference} of a used instance differs from that of a new one{cause}."
    )


def copy_with_episodes(source: Checkpoint, episodes: EpisodeStart) -> Checkpoint:
    learning = source.recipe.learning
    environment = learning.environment.model_copy(update={"episodes": episodes})
    learning = learning.model_copy(update={"environment": environment})
    recipe = source.recipe.model_copy(update={"learning": learning})
    return replace(source, recipe=recipe, env=replace(source.env, episodes=episodes))
