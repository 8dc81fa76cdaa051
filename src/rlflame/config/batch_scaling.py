"""Configs with other batches: of a number of episodes, or of several learners together."""

from __future__ import annotations

from rlflame.config.recipe import DEFAULT_SHARDS, LearningSettings, RunConfig
from rlflame.config.validation import validate_config
from rlflame.errors import ConfigError
from rlflame.terminal_text import format_count


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
    data, collected = config.model_dump(), learning.rollout.steps_per_iteration
    settings, field = data["learning"][learning.algorithm], learning.traits.batch_field
    if batch and field is None:
        data["learning"]["rollout"]["num_slots"] *= learners
    elif batch:
        settings[field] *= learners
        if learning.replay is not None:
            settings["updates_per_step"] /= learners
        elif learning.rollout.unit == "steps" and settings[field] > collected:
            # It would not fit the scaled learning rate.
            raise ConfigError(
                f"--scale-batch makes minibatches of {settings[field]:,} samples, and an iteration "
                f"collects {collected:,}.",
                f"--set rollout.steps={-(-settings[field] // learning.rollout.columns)}",
            )
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
    hint = f"--learners with a divisor of {shards}, or a new run with gradient_shards={fitting}"
    if learning.settings.needs_whole_batches:
        hint = "--learners 1"
    shards_text = format_count(shards, "shard")
    raise ConfigError(f"{learners} learners cannot share {shards_text} evenly.", hint)
