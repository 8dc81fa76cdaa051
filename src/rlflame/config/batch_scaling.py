"""Configs with other batches: of a number of episodes, or of several learners together."""

from __future__ import annotations

from rlflame.config.recipe import DEFAULT_SHARDS, LearningSettings, RunConfig
from rlflame.config.validation import validate_config
from rlflame.errors import ConfigError


def copy_with_episodes(config: RunConfig, episodes: int) -> RunConfig:
    """The config with this many episodes an iteration, in slots of at most its width."""
    if episodes < 1:
        raise ConfigError(f"--episodes-per-iter is {episodes}.", "--episodes-per-iter 100")
    widest = min(config.learning.rollout.envs_per_slot, episodes)
    width = next(n for n in range(widest, 0, -1) if episodes % n == 0)
    data = config.model_dump()
    data["learning"]["rollout"] |= {"envs_per_slot": width, "num_slots": episodes // width}
    return validate_config(data)


def scale_config(config: RunConfig, *, batch: bool, learning_rate: bool) -> RunConfig:
    """The config with the samples of an update, and the learning rates, of all learners together.

    With a replay, N times the samples make an Nth of the updates.
    """
    learning, learners = config.learning, config.runtime.learners
    if learners == 1 or not (batch or learning_rate):
        return config
    check_learners(learning, learners)
    data = config.model_dump()
    settings, field = data["learning"][learning.algorithm], learning.traits.batch_field
    if batch and field is None:
        data["learning"]["rollout"]["num_slots"] *= learners
    elif batch:
        settings[field] *= learners
        if learning.replay is not None:
            settings["updates_per_step"] /= learners
        else:
            _check_minibatch(config, settings[field])
    if learning_rate:
        for name in ("learning_rate", "critic_learning_rate", "entropy_learning_rate"):
            if settings.get(name) is not None:
                settings[name] *= learners
    return validate_config(data)


def check_learners(learning: LearningSettings, learners: int) -> None:
    """Every learner computes the same number of the recipe's shards."""
    shards = learning.gradient_shards
    if shards % learners == 0:
        return
    fitting = learners * -(-DEFAULT_SHARDS // learners)
    shards_hint = f"; or, in a new run, --set learning.gradient_shards={fitting}"
    possible = [str(n) for n in range(1, shards + 1) if shards % n == 0]
    counts = " or ".join(filter(None, [", ".join(possible[:-1]), possible[-1]]))
    raise ConfigError(
        f"{learners} learners cannot share {shards} {'shard' if shards == 1 else 'shards'} evenly.",
        f"--learners {counts}{'' if learning.settings.needs_whole_batches else shards_hint}",
    )


def _check_minibatch(config: RunConfig, size: int) -> None:
    """A larger minibatch than an iteration collects would not fit the scaled learning rate."""
    rollout, learners = config.learning.rollout, config.runtime.learners
    collected = rollout.steps_per_iteration
    if rollout.unit == "steps" and size > collected:
        raise ConfigError(
            f"--scale-batch makes minibatches of {size:,} samples, and an iteration collects "
            f"{collected:,}.",
            f"--set rollout.steps={-(-size // rollout.columns)}, or --learners "
            f"{max(1, collected // (size // learners))}",
        )
