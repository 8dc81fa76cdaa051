"""The two set-ups of the article on distributed PPO and SAC.

Each set-up has an exact recipe, which is equal for all numbers of learners, and a scaled recipe. As
in the article, the scaled recipe multiplies the batch and the learning rate by the number of
learners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.bench.case import Case
from rlflame.bench.learners import check_learners, find_shard_count
from rlflame.config import resolve
from rlflame.config.batch_flags import scale_config
from rlflame.config.flags import TrainFlags
from rlflame.config.recipe import LearningSettings, RunConfig
from rlflame.experiment import components

SOURCE = "the article on distributed PPO and SAC with Horovod on Spark"


@dataclass(frozen=True, slots=True)
class PublishedSetup:
    """The article's settings of a single process; others are stable-baselines3's.

    Eight environments collect as many steps as one does in the article, to occupy eight workers.
    """

    environment: str
    algorithm: str
    steps: int
    sets: tuple[str, ...]


SETUPS = {
    "dppo": PublishedSetup(
        "CartPole-v1",
        "ppo",
        100_000,
        (
            "rollout.num_slots=8",
            "rollout.envs_per_slot=1",
            "rollout.steps=4096",
            "network.normalise_observations=false",
            "network.log_std_init=0.0",
            "ppo.learning_rate=1e-3",
            "ppo.anneal_learning_rate=false",
            "ppo.minibatch_size=4096",
            "ppo.epochs=10",
            "ppo.discount=0.99",
            "ppo.gae_lambda=0.95",
            "ppo.normalise_advantages=minibatch",
            "ppo.recompute_advantages=false",
            "ppo.scale_rewards=false",
            "ppo.value_weight=0.5",
        ),
    ),
    "dsac": PublishedSetup(
        "Pendulum-v1",
        "sac",
        10_000,
        (
            "rollout.num_slots=8",
            "rollout.envs_per_slot=1",
            "rollout.steps=1",
            "sac.learning_rate=1e-3",
            "sac.buffer_size=32768",
            "sac.learning_starts=2048",
            "sac.batch_size=2048",
            "sac.updates_per_step=1.0",
            "sac.discount=0.99",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A recipe with a number of learners."""

    kind: str
    case: Case
    config: RunConfig

    @property
    def learners(self) -> int:
        learners = self.config.runtime.learners
        assert learners != "auto"
        return learners


def make_variants(
    setup: PublishedSetup,
    counts: Sequence[int],
    *,
    steps: int | None = None,
    sets: Sequence[str] = (),
) -> list[Variant]:
    """Make the exact recipe for each number of learners, and the scaled ones above 1."""
    result = []
    shards = f"learning.gradient_shards={find_shard_count(counts, 8)}"
    for kind in ("exact", "scaled"):
        for learners in counts:
            if kind == "scaled" and learners == 1:
                continue
            flags = TrainFlags(
                env=setup.environment,
                algo=setup.algorithm,
                sets=[*setup.sets, shards, *sets],
                steps=steps or setup.steps,
                learners=str(learners),
            )
            config, _ = resolve.resolve(flags, components.has_continuous_actions)
            check_learners(config.learning, learners)
            scaled = kind == "scaled"
            config = scale_config(config, batch=scaled, learning_rate=scaled)
            result.append(Variant(kind, _make_case(kind, config), config))
    return result


def _make_case(kind: str, config: RunConfig) -> Case:
    recipe = config.recipe.copy_with_horizon()
    quiet = recipe.evaluation.model_copy(update={"every_steps": None, "until_return": None})
    recipe = recipe.model_copy(update={"evaluation": quiet})
    return Case(kind, recipe, components.make_env_spec(recipe.learning.environment))


def make_sb3_request(learning: LearningSettings) -> dict[str, Any]:
    """Make stable-baselines3's arguments for the same recipe with one environment."""
    hidden, environment = list(learning.network.hidden), learning.environment
    common = {"policy_kwargs": {"net_arch": hidden}, "seed": learning.seed}
    if learning.ppo is not None:
        ppo, rollout = learning.ppo, learning.rollout
        arguments: dict[str, Any] = {
            "learning_rate": ppo.learning_rate,
            "n_steps": rollout.columns * rollout.steps,
            "batch_size": ppo.minibatch_size,
            "n_epochs": ppo.epochs,
            "gamma": ppo.discount,
            "gae_lambda": ppo.gae_lambda,
            "clip_range": ppo.clip_range,
            "ent_coef": ppo.entropy_weight,
            "vf_coef": ppo.value_weight,
            "max_grad_norm": ppo.max_gradient_norm or float(2**63),
            "target_kl": ppo.target_kl,
        }
    else:
        assert learning.sac is not None
        sac = learning.sac
        arguments = {
            "learning_rate": sac.learning_rate,
            "buffer_size": sac.buffer_size,
            "learning_starts": sac.learning_starts,
            "batch_size": sac.batch_size,
            "tau": sac.target_update_rate,
            "gamma": sac.discount,
        }
    return {
        "algorithm": learning.algorithm.upper(),
        "environment": environment.id,
        "kwargs": environment.kwargs,
        "arguments": {**arguments, **common},
    }
