"""Which recipes can be updated in halves; needs the config alone."""

from __future__ import annotations

from rlflame.config.recipe import LearningSettings
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError


def check_critic_helper(learning: LearningSettings, runtime: RuntimeSettings) -> None:
    """A critic helper that is asked for by name must be possible."""
    reason = explain_refusal(learning, runtime) if runtime.critic_helper == "on" else ""
    if reason:
        raise ConfigError(
            f"This recipe does not go with a critic helper: {reason}.",
            "--set runtime.critic_helper=auto, which has one where it can",
        )


def explain_refusal(learning: LearningSettings, runtime: RuntimeSettings) -> str:
    """Why there cannot be one; empty where there can."""
    if not learning.traits.splits_update:
        return f"{learning.algorithm} does not learn in two halves that are independent"
    if learning.provider != "numpy":
        return f"the gradients of provider {learning.provider} are not made in halves"
    if runtime.learners > 1 or learning.gradient_shards > 1:
        return "its minibatches are cut for several learners"
    if learning.threads > 1:
        return f"its {learning.threads} threads have the processors that a critic helper would use"
    return ""
