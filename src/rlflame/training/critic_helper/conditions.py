"""Which recipes can be updated in halves; needs the config alone."""

from __future__ import annotations

from rlflame.config.recipe import LearningSettings
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError


def check_critic_helper(learning: LearningSettings, runtime: RuntimeSettings) -> None:
    """A critic helper that is asked for by name must be possible."""
    if runtime.critic_helper == "on" and not can_split_update(learning, runtime):
        raise ConfigError(
            "This recipe does not go with a critic helper, which needs PPO with numpy's gradients, "
            "one thread, one learner and learning.gradient_shards = 1.",
            "--set runtime.critic_helper=auto, which has one where it can",
        )


def can_split_update(learning: LearningSettings, runtime: RuntimeSettings) -> bool:
    """Whether the two halves of an update are independent, and a processor is left for one."""
    return (
        learning.traits.splits_update
        and learning.provider == "numpy"
        and max(runtime.learners, learning.gradient_shards, learning.threads) == 1
    )
