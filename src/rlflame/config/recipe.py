"""Defines the recipe (which determines the result) and the config of a run.

The descriptions of the fields appear in help texts, error messages and the docs' settings table.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rlflame.config.algorithms import (
    TRAITS,
    AlgorithmName,
    AlgorithmSection,
    AlgorithmSections,
    AlgorithmTraits,
    ReplaySettings,
)
from rlflame.config.evaluation import EvaluationSettings
from rlflame.config.flags import DEFAULT_ALGORITHM
from rlflame.config.runtime import Positive, RuntimeSettings, SettingsModel

#: The number of rows in a forward pass is rounded up to a multiple of this.
WIDTH_UNIT = 8


#: Arguments of Gymnasium's wrappers that determine memory or time; a file may name the wrappers.
_WRAPPER_SIZES = {"stack_size", "delay", "skip", "num_repeats", "bins"}


class WrapperSettings(SettingsModel):
    """A wrapper that is applied to the environment."""

    name: str = Field(
        min_length=3,
        max_length=200,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="Class of the wrapper, as `module:Class`.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments for the constructor of the wrapper."
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> WrapperSettings:
        for key, size in self.kwargs.items():
            if key in _WRAPPER_SIZES and isinstance(size, int | float) and size > 1000:
                raise ValueError(f"{key} is {size}, but must be at most 1,000")
        return self


class EnvironmentSettings(SettingsModel):
    id: str = Field(
        "CartPole-v1",
        min_length=1,
        pattern=r"^([A-Za-z_][\w.]*:)?([\w.-]+/)?[\w.:-]+$",
        description="Gymnasium id, or `module:Id` if a module registers the environment.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments for the constructor of the environment."
    )
    max_episode_steps: Positive | None = Field(
        None, description="Maximum steps per episode. If unset, the environment's registered limit."
    )
    file_digest: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the --env-file. Set automatically."
    )
    wrappers: tuple[WrapperSettings, ...] = Field(
        (),
        max_length=16,
        description="Wrappers of the environment, from the innermost to the outermost. Each is a "
        "table with the name `module:Class` and kwargs.",
    )
    ignore: tuple[str, ...] = Field(
        (),
        max_length=1000,
        description="Parts of a Dict observation to leave out, such as `mission` or `robot/name`. "
        "Parts with text are added automatically.",
    )
    action_mask: Literal["auto", "off"] = Field(
        "auto",
        description="Action masks. auto uses the masks that the environment reports: action_mask "
        "in its info or Dict observation, or its method action_masks.",
    )
    episodes: Literal["auto", "fresh", "reuse"] = Field(
        "auto",
        description="Whether each episode uses a new instance of the environment (fresh) or the "
        "instance of the previous episode (reuse). auto compares both before the run starts, "
        "uses reuse if they are identical, and replaces auto by the choice in the recipe.",
    )

    @model_validator(mode="after")
    def _check_kwargs(self) -> EnvironmentSettings:
        # Reject every value, because modes other than "human" may also open a window.
        if "render_mode" in self.kwargs:
            raise ValueError(
                "render_mode would make every copy of the environment render images or open a "
                "window: remove it, and watch the policy with rlflame render --human"
            )
        arguments = [self.kwargs, *(wrapper.kwargs for wrapper in self.wrappers)]
        if len(str(arguments)) > 65_536:  # kwargs in an untrusted file could fill the memory
            raise ValueError("kwargs have more than 65,536 characters")
        return self

    @model_serializer(mode="wrap")
    def _dump_settings(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out settings that few environments need, so that digests do not contain them."""
        data: dict[str, Any] = serialise(self)
        for name in ("wrappers", "ignore", "action_mask", "episodes"):
            if getattr(self, name) == type(self).model_fields[name].default:
                data.pop(name, None)
        return data

    @property
    def wrapper_names(self) -> list[str]:
        return [wrapper.name for wrapper in self.wrappers]


class RolloutSettings(SettingsModel):
    unit: Literal["steps", "episodes"] = Field(
        "steps",
        description="Collect a fixed number of steps, or one whole episode, per environment.",
    )
    num_slots: Positive = Field(
        8,
        le=100_000,
        description="Number of slots (groups of environments). Limits the number of workers.",
    )
    envs_per_slot: Positive = Field(8, le=4096, description="Number of environments per slot.")
    steps: Positive = Field(
        32,
        le=10_000_000,
        description="Steps per environment. If unit is episodes, the maximum length of an episode.",
    )
    staleness: Literal[0, 1] = Field(
        0, description="0: collect the next batch after an update. 1: collect it during the update."
    )

    @property
    def width(self) -> int:
        """The number of rows in each forward pass that computes actions."""
        return -(-self.envs_per_slot // WIDTH_UNIT) * WIDTH_UNIT

    @property
    def columns(self) -> int:
        return self.num_slots * self.envs_per_slot

    @property
    def steps_per_iteration(self) -> int:
        """The number of steps per iteration, or the maximum if the unit is episodes."""
        return self.columns * self.steps


class NetworkSettings(SettingsModel):
    hidden: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = Field(
        (64, 64), max_length=16, description="Units in each hidden layer of the actor and critic."
    )
    activation: Literal["tanh", "relu"] = Field("tanh", description="Activation function.")
    orthogonal_init: bool = Field(
        True, description="Use orthogonal instead of uniform initial weights."
    )
    last_layer_scale: float = Field(
        0.01, gt=0.0, le=100.0, description="Initial scale of the actor's last layer."
    )
    log_std_init: float = Field(
        -0.5, ge=-10.0, le=5.0, description="Initial log standard deviation of Gaussian actions."
    )
    exploration: Literal["independent", "gsde"] = Field(
        "independent",
        description="Exploration noise: new at every step (independent), or a random function of "
        "the state that stays the same for several steps (gsde).",
    )
    exploration_interval: Positive | None = Field(
        None,
        le=1_000_000_000,
        description="Steps until gsde draws a new function. If unset, one draw per episode.",
    )
    normalise_observations: bool = Field(
        True, description="Standardise observations with running statistics, saved in the policy."
    )
    observation_clip: float = Field(
        10.0, gt=0.0, le=1e6, description="Clip standardised observations to this absolute value."
    )

    @model_validator(mode="after")
    def _check_exploration(self) -> NetworkSettings:
        if self.exploration == "gsde" and not self.hidden:
            raise ValueError("gsde needs a hidden layer: set hidden to one or more layers")
        if self.exploration != "gsde" and self.exploration_interval is not None:
            raise ValueError("exploration_interval applies only to gsde: set exploration to gsde")
        return self


class _CommonLearningSettings(SettingsModel):
    """The settings that all algorithms share."""

    algorithm: AlgorithmName = Field(DEFAULT_ALGORITHM, description="Learning algorithm.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed for all random numbers.")
    horizon_steps: Positive | None = Field(
        None, description="Step at which schedules end. If unset, the initial stop_at_steps."
    )
    horizon_iterations: Positive | None = Field(
        None,
        description="Iteration at which schedules end. If unset, the initial stop_at_iterations.",
    )
    provider: Literal["numpy", "torch"] = Field(
        "numpy", description="Library for gradients: numpy (hand-derived) or torch (autograd)."
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Device on which torch computes gradients. Rollouts always run on CPUs."
    )
    precision: Literal["float32", "tf32", "bf16"] = Field(
        "float32",
        description="Number format of matrix products on a GPU. tf32 and bf16 are faster and less "
        "exact. The weights and the optimizer stay in float32.",
    )
    threads: Positive = Field(
        1, le=256, description="Number of threads that compute gradients. SAC uses at most two."
    )
    gradient_shards: Positive = Field(
        1, le=4096, description="Number of parts into which learners can divide each minibatch."
    )
    policy_average: Positive | None = Field(
        None,
        description="Evaluate and save an average of the policies from about this many recent "
        "iterations, at most the last 5% of the iterations so far. Training uses the newest "
        "policy. If unset, no average.",
    )
    init_policy: str | None = Field(
        None, pattern=r"^[0-9a-f]{32}$", description="Hash of the policy that --init-from copied."
    )
    environment: EnvironmentSettings = EnvironmentSettings()
    rollout: RolloutSettings = RolloutSettings()
    network: NetworkSettings = NetworkSettings()


class LearningSettings(AlgorithmSections, _CommonLearningSettings):
    """The learning settings, such as the algorithm, the environment and the network."""

    @model_validator(mode="before")
    @classmethod
    def _add_algorithm_section(cls, data: Any) -> Any:
        """Accept only the chosen algorithm's section, so that every field has an effect."""
        if isinstance(data, dict):
            algorithm = data.get("algorithm", DEFAULT_ALGORITHM)
            for other in TRAITS:
                if other != algorithm and data.get(other):
                    raise ValueError(f"section `{other}` is set, but the algorithm is {algorithm}")
            if algorithm in TRAITS and data.get(algorithm) is None:
                data = {**data, algorithm: {}}
        return data

    @model_validator(mode="after")
    def _check_coherent(self) -> LearningSettings:
        name, units = self.algorithm.upper(), self.traits.units
        if self.rollout.unit not in units:
            samples = "whole episodes" if units[0] == "episodes" else "single steps"
            raise ValueError(f"{name} learns from {samples}: set rollout.unit to {units[0]}")
        if self.rollout.staleness and self.traits.counts_iterations:
            raise ValueError(f"{name} has no correction for stale data: set rollout.staleness=0")
        if self.device == "cuda" and self.provider != "torch":
            raise ValueError("only torch computes gradients on cuda: set provider to torch")
        if self.precision != "float32" and not self.stays_on_device:
            raise ValueError(
                f"precision {self.precision} is for updates on one GPU: set device to cuda, and "
                "gradient_shards to 1"
            )
        if self.settings.needs_whole_batches and self.gradient_shards > 1:
            raise ValueError(
                "batch normalisation in the critics needs whole minibatches, not "
                f"{self.gradient_shards} shards: set gradient_shards to 1, and use one learner"
            )
        if self.samples_per_gradient < self.gradient_shards:
            limit = self.samples_per_gradient
            raise ValueError(
                f"{limit} samples cannot be split into {self.gradient_shards} shards: set "
                f"gradient_shards to {limit} or less, or use more samples per gradient"
            )
        return self

    @property
    def stays_on_device(self) -> bool:
        """Whether one GPU performs whole updates, which no other learner can share."""
        return self.device == "cuda" and self.gradient_shards == 1

    @property
    def traits(self) -> AlgorithmTraits:
        return TRAITS[self.algorithm]

    @property
    def settings(self) -> AlgorithmSection:
        """The settings of the chosen algorithm."""
        settings: AlgorithmSection = getattr(self, self.algorithm)
        return settings

    @property
    def replay(self) -> ReplaySettings | None:
        """The replay settings; None if the algorithm has no replay buffer."""
        settings: Any = self.settings
        return settings if self.traits.uses_replay else None

    @property
    def samples_per_gradient(self) -> int:
        """The maximum number of samples per gradient; short episodes give fewer samples."""
        batch, field = self.rollout.steps_per_iteration, self.traits.batch_field
        if field is None:
            return batch
        size: int = getattr(self.settings, field)
        return size if self.traits.uses_replay else min(batch, size)


class Recipe(SettingsModel):
    """The settings that determine the result: equal recipes give identical weights."""

    stop_at_steps: Positive | None = Field(None, description="Train for this many steps.")
    stop_at_iterations: Positive | None = Field(None, description="Train for this many iterations.")
    learning: LearningSettings = LearningSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _check_budget(self) -> Recipe:
        if self.stop_at_steps is None and self.stop_at_iterations is None:
            raise ValueError("stop_at_steps or stop_at_iterations must be set")
        return self

    def copy_with_horizon(self) -> Recipe:
        """Return a copy with an explicit horizon, which later budgets do not change."""
        if (self.learning.horizon_steps, self.learning.horizon_iterations) != (None, None):
            return self
        ends = {"horizon_steps": self.stop_at_steps, "horizon_iterations": self.stop_at_iterations}
        return self.model_copy(update={"learning": self.learning.model_copy(update=ends)})

    @property
    def budget_warning(self) -> str | None:
        """A warning if the budget exceeds the horizon, where the learning rate reaches 0."""
        learning = self.learning
        if None not in (self.stop_at_steps, self.stop_at_iterations):
            return None  # the run stops at whichever comes first
        for unit in ("steps", "iterations"):
            end, horizon = getattr(self, f"stop_at_{unit}"), getattr(learning, f"horizon_{unit}")
            anneals = learning.settings.anneal_learning_rate
            if anneals and end is not None and horizon is not None and end > horizon:
                return (
                    f"The learning rate reaches 0 after {horizon:,} {unit} "
                    f"(learning.horizon_{unit}); from there to {end:,}, the weights do not change."
                )
        return None


def make_defaults(algorithm: str) -> dict[str, Any]:
    """Return the default settings of a recipe with this algorithm."""

    def dump_section(section: SettingsModel) -> dict[str, Any]:
        return section.model_dump(mode="json", exclude_none=True)

    learning = dump_section(LearningSettings())
    del learning[DEFAULT_ALGORITHM]
    if algorithm in TRAITS:
        learning[algorithm] = dump_section(TRAITS[algorithm].settings())
    return {"learning": learning, "evaluation": dump_section(EvaluationSettings())}


class RunConfig(Recipe):
    """The config of a run, which consists of a recipe and a runtime."""

    runtime: RuntimeSettings = RuntimeSettings()

    @classmethod
    def from_recipe(cls, recipe: Recipe, runtime: RuntimeSettings) -> RunConfig:
        fields = {name: getattr(recipe, name) for name in Recipe.model_fields}
        return cls(**fields, runtime=runtime)

    @property
    def recipe(self) -> Recipe:
        return Recipe(**{name: getattr(self, name) for name in Recipe.model_fields})


def count_units(learning: LearningSettings) -> int:
    """Return the number of work units in one update: one per network and shard."""
    if learning.stays_on_device:
        return 1
    return learning.gradient_shards * learning.traits.independent_networks


def count_useful_learners(units: int, learners: int) -> int:
    """Return how many learners have work if the units are divided evenly."""
    return -(-units // -(-units // learners))


def find_shards(learning: LearningSettings, learners: int) -> int:
    """Return the number of shards that gives each learner the same work, if possible."""
    if learning.settings.needs_whole_batches:
        return 1
    networks, limit = learning.traits.independent_networks, learning.samples_per_gradient
    enough = range(-(-learners // networks), limit + 1)
    return next((n for n in enough if n * networks % learners == 0), limit)
