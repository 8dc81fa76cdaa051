"""The settings of evaluations."""

from __future__ import annotations

from pydantic import Field

from rlflame.config.runtime import Positive, SettingsModel


class EvaluationSettings(SettingsModel):
    """When and how the policy is evaluated.

    These settings affect the weights only if `until_return` is set.
    """

    every_steps: Positive | None = Field(
        None, description="Steps between evaluations. If unset, evaluate only at the end."
    )
    episodes: Positive = Field(
        8, le=100_000, description="Number of episodes per evaluation during training."
    )
    final_episodes: Positive = Field(
        20, le=100_000, description="Number of episodes in the final evaluation."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed for the evaluation episodes.")
    max_episode_steps: Positive = Field(10_000, description="Maximum steps per evaluation episode.")
    until_return: float | None = Field(
        None, description="Stop when an evaluation's 95% confidence interval is above this value."
    )
