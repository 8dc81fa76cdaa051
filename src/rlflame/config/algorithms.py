"""The settings of each algorithm, and the traits that other code reads.

A new algorithm needs a settings class and an entry in TRAITS here, and an entry in
`learning/factory.py`. Apart from `rlflame bench learners`, no other code compares algorithm names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from rlflame.config.runtime import Positive, SettingsModel
from rlflame.errors import ConfigError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0, le=10.0)]
#: With a smaller epsilon, Adam would divide by 0 for a zero gradient, because its moments are
#: float32.
Epsilon = Annotated[float, Field(ge=1e-30, le=10.0)]
MaxNorm = Annotated[float, Field(gt=0.0, le=1e6)] | None
#: In TOML and on the command line, `none` is read as None.
CriticNorm = Annotated[
    Literal["none", "batch"], BeforeValidator(lambda norm: "none" if norm is None else norm)
]


class AlgorithmSection(SettingsModel):
    """Base class for the settings of an algorithm."""

    if TYPE_CHECKING:  # every algorithm defines this field
        anneal_learning_rate: bool = False

    @property
    def needs_whole_batches(self) -> bool:
        """Whether a gradient needs the whole minibatch and cannot be summed over shards."""
        return False

    @property
    def passes(self) -> int:
        """The number of times that an iteration uses each sample of its batch."""
        return 1

    def check_action_size(self, action_size: int) -> None:
        """Raise a ConfigError for settings that are impossible with this action size."""


class PpoSettings(AlgorithmSection):
    learning_rate: Rate = Field(3e-4, description="Adam learning rate.")
    anneal_learning_rate: bool = Field(True, description="Reduce the learning rate linearly to 0.")
    adam_epsilon: Epsilon = Field(1e-5, description="Adam epsilon.")
    discount: Fraction = Field(0.99, description="Discount factor.")
    final_discount: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None,
        description="Discount factor at the end of the schedule. 1 / (1 - discount) changes "
        "linearly. If unset, the discount factor is constant.",
    )
    discount_moves_from: float = Field(
        0.0, ge=0.0, lt=1.0, description="Fraction of the schedule with the initial discount."
    )
    gae_lambda: Fraction = Field(0.95, description="Lambda of generalised advantage estimation.")
    clip_range: float = Field(
        0.2, gt=0.0, le=100.0, description="Clip range of the probability ratio."
    )
    anneal_clip_range: bool = Field(False, description="Reduce the clip range linearly to 0.")
    clip_range_value: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        None, description="Clip range of the value function. If unset, no clipping."
    )
    normalise_advantages: Literal["off", "batch", "minibatch"] = Field(
        "off", description="Standardise advantages over each batch or each minibatch."
    )
    recompute_advantages: bool = Field(True, description="Recompute advantages before every epoch.")
    scale_rewards: bool = Field(
        True, description="Divide rewards by the running standard deviation of discounted returns."
    )
    epochs: Positive = Field(10, le=1000, description="Number of passes over each batch.")
    minibatch_size: Positive = Field(64, le=10_000_000, description="Samples per gradient step.")
    entropy_weight: float = Field(0.0, ge=0.0, le=10.0, description="Weight of the entropy bonus.")
    value_weight: float = Field(0.25, ge=0.0, le=100.0, description="Weight of the value loss.")
    max_gradient_norm: MaxNorm = Field(0.5, description="Clip gradients to this maximum norm.")
    target_kl: Annotated[float, Field(gt=0.0, le=100.0)] | None = Field(
        None, description="End an update if a minibatch's KL estimate exceeds 1.5 times this value."
    )

    @model_validator(mode="after")
    def _check_coherent(self) -> PpoSettings:
        if self.final_discount is not None and self.discount >= 1.0:
            raise ValueError(
                "final_discount needs a discount below 1: reduce discount, or set final_discount "
                "to none"
            )
        if self.final_discount is None and self.discount_moves_from > 0.0:
            raise ValueError(
                f"discount_moves_from is {self.discount_moves_from:g}, but final_discount is not "
                "set: set discount_moves_from to 0"
            )
        return self

    @property
    def passes(self) -> int:
        return self.epochs


class ReinforceSettings(AlgorithmSection):
    learning_rate: Rate = Field(1e-3, description="Adam learning rate.")
    anneal_learning_rate: bool = Field(False, description="Reduce the learning rate linearly to 0.")
    adam_epsilon: Epsilon = Field(1e-8, description="Adam epsilon.")
    discount: Fraction = Field(0.99, description="Discount factor.")
    normalise_returns: Literal["off", "episode", "batch"] = Field(
        "batch", description="Standardise the reward-to-go over each episode or over the batch."
    )
    average: Literal["steps", "episodes"] = Field(
        "steps", description="Divide the summed loss by the number of steps or episodes."
    )
    continue_truncated: bool = Field(
        False,
        description="After a truncation, use the mean reward-to-go as the remaining return. "
        "Requires a discount below 1.",
    )
    entropy_weight: float = Field(0.0, ge=0.0, le=10.0, description="Weight of the entropy bonus.")
    max_gradient_norm: MaxNorm = Field(None, description="Clip gradients to this maximum norm.")

    @model_validator(mode="after")
    def _check_coherent(self) -> ReinforceSettings:
        if self.continue_truncated and self.discount >= 1.0:
            raise ValueError("continue_truncated needs a discount below 1")
        return self


class SacSettings(AlgorithmSection):
    learning_rate: Rate = Field(3e-4, description="Adam learning rate of the actor.")
    critic_learning_rate: Rate | None = Field(
        None, description="Adam learning rate of the critics. If unset, learning_rate."
    )
    entropy_learning_rate: Rate | None = Field(
        None, description="Adam learning rate of the entropy coefficient. If unset, learning_rate."
    )
    anneal_learning_rate: bool = Field(False, description="Reduce learning rates linearly to 0.")
    adam_epsilon: Epsilon = Field(1e-8, description="Adam epsilon.")
    discount: Fraction = Field(0.99, description="Discount factor.")
    batch_size: Positive = Field(256, le=1_000_000, description="Transitions per update.")
    buffer_size: Positive = Field(
        1_000_000, le=1_000_000_000, description="Capacity of the replay buffer in transitions."
    )
    learning_starts: int = Field(
        10_000, ge=0, le=1_000_000_000, description="Random steps before the first update."
    )
    updates_per_step: float = Field(
        1.0, gt=0.0, le=1000.0, description="Gradient updates per environment step."
    )
    n_step: Positive = Field(1, le=1000, description="Number of steps in the n-step return.")
    target_update_rate: float = Field(
        0.005, gt=0.0, le=1.0, description="Rate at which the target critics follow the critics."
    )
    target_update_interval: Positive = Field(
        1, le=1_000_000, description="Number of gradient updates per update of the target critics."
    )
    policy_delay: Positive = Field(
        1,
        le=1_000_000,
        description="Number of critic updates per update of the actor and the entropy coefficient.",
    )
    entropy_coefficient: Literal["auto"] | Annotated[float, Field(ge=0.0, le=1e6)] = Field(
        "auto", description="Weight of the entropy. auto adjusts it to reach target_entropy."
    )
    initial_entropy_coefficient: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        1.0, description="Initial entropy coefficient if entropy_coefficient is auto."
    )
    target_entropy: Literal["auto"] | Annotated[float, Field(ge=-1e6, le=1e6)] = Field(
        "auto", description="Target entropy. auto is minus the number of action dimensions."
    )
    critic_norm: CriticNorm = Field(
        "none",
        description="Normalisation in the critics. With batch, current and next observations are "
        "normalised together, and there are no target critics.",
    )
    quantiles: Positive = Field(
        1, le=100, description="Quantiles per critic. With 1, critics estimate the expected return."
    )
    dropped_quantiles: int = Field(
        0, ge=0, le=99, description="Number of top quantiles per critic to omit from the target."
    )
    max_gradient_norm: MaxNorm = Field(None, description="Clip gradients to this maximum norm.")

    @model_validator(mode="after")
    def _check_coherent(self) -> SacSettings:
        for name in ("target_update_rate", "target_update_interval"):
            value = getattr(self, name)
            if self.critic_norm == "batch" and value != SacSettings.model_fields[name].default:
                raise ValueError(f"{name} is {value}, but critic_norm=batch uses no target critics")
        if self.dropped_quantiles >= self.quantiles:
            raise ValueError(
                f"dropped_quantiles is {self.dropped_quantiles}, but must be less than "
                f"quantiles ({self.quantiles})"
            )
        return self

    @property
    def needs_whole_batches(self) -> bool:
        return self.critic_norm == "batch"

    def check_action_size(self, action_size: int) -> None:
        """Reject an unreachable target entropy, as the coefficient would grow forever."""
        target, highest = self.target_entropy, action_size * math.log(2.0)
        if target != "auto" and target >= highest and self.entropy_coefficient == "auto":
            raise ConfigError(
                f"sac.target_entropy is {target:g}, but the entropy of {action_size} actions in "
                f"[-1, 1] is always below {highest:.2f}.",
                f"--set sac.target_entropy={-action_size}, the value that auto uses",
            )


#: All algorithms with a replay buffer use the same names for its settings.
ReplaySettings = SacSettings


@dataclass(frozen=True, slots=True)
class AlgorithmTraits:
    """The properties of an algorithm that other code needs."""

    settings: type[AlgorithmSection]
    #: The setting with the number of samples per gradient. If None, a gradient uses all samples of
    #: an iteration.
    batch_field: str | None
    #: Number of value networks.
    critics: int
    #: The supported rollout units.
    units: tuple[str, ...] = ("steps", "episodes")
    #: Whether actions are continuous and bounded, and the policy also outputs their standard
    #: deviations.
    squashed_actions: bool = False
    uses_replay: bool = False
    #: Whether budgets and progress count iterations of whole episodes. If so, stale data is not
    #: supported.
    counts_iterations: bool = False
    #: Number of networks with independent gradients, which separate processes can compute.
    independent_networks: int = 1
    #: Whether `learning.threads` is the number of BLAS threads. If not, a value above 1 enables two
    #: Python threads that share the work.
    uses_blas_threads: bool = True


#: Each algorithm has one entry here, and a preset `default-NAME`.
TRAITS: dict[str, AlgorithmTraits] = {
    "ppo": AlgorithmTraits(PpoSettings, "minibatch_size", critics=1, independent_networks=2),
    "reinforce": AlgorithmTraits(
        ReinforceSettings, None, critics=0, units=("episodes",), counts_iterations=True
    ),
    "sac": AlgorithmTraits(
        SacSettings,
        "batch_size",
        critics=2,
        units=("steps",),
        squashed_actions=True,
        uses_replay=True,
        uses_blas_threads=False,
    ),
}

if TYPE_CHECKING:
    AlgorithmName = str

    class AlgorithmSections(SettingsModel): ...

else:
    AlgorithmName = Literal[tuple(TRAITS)]
    AlgorithmSections = create_model(
        "AlgorithmSections",
        __base__=SettingsModel,
        __doc__="Sections for all algorithms. A recipe has only the section of its algorithm.",
        **{name: (traits.settings | None, None) for name, traits in TRAITS.items()},
    )
