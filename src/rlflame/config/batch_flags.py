"""Applies the options of `train` that change several settings, or depend on them."""

from __future__ import annotations

from rlflame.config.algorithms import TRAITS
from rlflame.config.flags import TrainFlags
from rlflame.config.recipe import RunConfig
from rlflame.config.validation import validate_config
from rlflame.errors import ConfigError


def apply_batch_flags(config: RunConfig, flags: TrainFlags) -> RunConfig:
    """Apply the options for the size of an iteration, the batch and the schedules."""
    algorithm, traits = config.learning.algorithm, config.learning.traits
    is_used = (flags.iterations, flags.episodes_per_iter) != (None, None)
    if not traits.counts_iterations and is_used:
        subject, name = "--iterations and --episodes-per-iter are", _find_counter()
        raise make_unit_error(subject, algorithm, f"--steps 100000, or --algo {name}")
    if flags.episodes_per_iter is not None:
        config = copy_with_episodes(config, flags.episodes_per_iter)
    if flags.horizon is not None:
        config = apply_horizon(config, flags.horizon)
    return scale_config(config, batch=flags.scale_batch, learning_rate=flags.scale_lr)


def make_unit_error(subject: str, algorithm: str, hint: str) -> ConfigError:
    """Return the error for options in iterations if the algorithm counts steps."""
    name = _find_counter().upper()
    return ConfigError(f"{subject} for {name}; {algorithm.upper()} counts steps.", hint)


def _find_counter() -> str:
    """Return the algorithm that counts iterations."""
    return next(name for name, traits in TRAITS.items() if traits.counts_iterations)


def apply_horizon(config: RunConfig, horizon: int) -> RunConfig:
    """Return a copy whose schedules end at `horizon`, in the unit of its budget."""
    if config.stop_at_steps is not None and config.stop_at_iterations is not None:
        raise ConfigError(
            f"--horizon {horizon} may be a number of steps or of iterations, because the run is "
            "limited by both.",
            f"--set learning.horizon_steps={horizon}",
        )
    unit = "steps" if config.stop_at_steps is not None else "iterations"
    data = config.model_dump()
    data["learning"] |= {"horizon_steps": None, "horizon_iterations": None}
    data["learning"][f"horizon_{unit}"] = horizon
    return validate_config(data)


def copy_with_episodes(config: RunConfig, episodes: int) -> RunConfig:
    """Return a copy with `episodes` episodes per iteration.

    If necessary, envs_per_slot is reduced.
    """
    if episodes < 1:
        raise ConfigError(
            f"--episodes-per-iter is {episodes}, but must be at least 1.",
            "--episodes-per-iter 100",
        )
    widest = min(config.learning.rollout.envs_per_slot, episodes)
    width = next(n for n in range(widest, 0, -1) if episodes % n == 0)
    data = config.model_dump()
    data["learning"]["rollout"] |= {"envs_per_slot": width, "num_slots": episodes // width}
    return validate_config(data)


def scale_config(config: RunConfig, *, batch: bool, learning_rate: bool) -> RunConfig:
    """Scale the batch and the learning rates by the number of learners, if requested.

    With a replay buffer and N learners, a scaled batch has N times as many samples, and there are
    1/N as many updates.
    """
    learning, learners = config.learning, config.runtime.learners
    if learners == 1 or not (batch or learning_rate):
        return config
    if learners == "auto":
        option = "--scale-batch" if batch else "--scale-lr"
        raise ConfigError(f"{option} needs the number of learners.", f"{option} --learners 2")
    data, steps = config.model_dump(), learning.rollout.steps_per_iteration
    settings, field = data["learning"][learning.algorithm], learning.traits.batch_field
    if batch and field is None:
        data["learning"]["rollout"]["num_slots"] *= learners
    elif batch:
        settings[field] *= learners
        if learning.replay is not None:
            settings["updates_per_step"] /= learners
        elif learning.rollout.unit == "steps" and settings[field] > steps:
            # The minibatch would be too small for the scaled learning rate.
            raise ConfigError(
                f"--scale-batch needs minibatches of {settings[field]:,} samples, but an iteration "
                f"collects {steps:,}.",
                f"--set rollout.steps={-(-settings[field] // learning.rollout.columns)}",
            )
    if learning_rate:
        for name in ("learning_rate", "critic_learning_rate", "entropy_learning_rate"):
            if settings.get(name) is not None:
                settings[name] *= learners
    return validate_config(data)
