"""Soft actor-critic (Haarnoja et al., 2018) with two critics and a learned entropy coefficient.

An update draws transitions (s, a, r, s') and, with a' ~ pi(s') and a~ ~ pi(s), minimises

    critics  1/2 sum_j mean((Q_j(s, a) - y)^2),  y = r + bootstrap (min_j Q'_j(s', a') - w log pi)
    actor    mean(w log pi(a~|s) - min_j Q_j(s, a~))
    entropy  -log w mean(log pi(a~|s) + target)

and lets the target critics Q' follow the critics; where critics are standardised over the batch, Q'
is Q, and where they tell quantiles, `worth` says what is minimised. Must not know: how transitions
are kept, where fragments come from, how long training lasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlflame.config.algorithms import SacSettings
from rlflame.rollout.policy import normalise
from rlflame.rollout.seeding import Role, stream
from rlflame.rollout.spec import Array, Float32, PolicyArrays

from ..base import Metrics, ReplayBatch, State, Transitions
from ..networks.flat_params import Adam, clip_by_norm, restore, restored_count
from ..networks.network_shape import Guard
from ..normalization import ObservationNormaliser
from ..parallel.gradient_shards import Shard, Shards
from ..parallel.thread_pair import Lanes, half
from ..schedules import schedule
from .loss import Minibatch, SoftProvider
from .networks import CRITICS, SoftNetworks


class _Rates(NamedTuple):
    """Step sizes in force."""

    actor: float
    critic: float
    entropy: float


class Sac:
    """As many updates as the replay says are owed."""

    def __init__(
        self,
        settings: SacSettings,
        networks: SoftNetworks,
        providers: Sequence[SoftProvider],
        lanes: Lanes,
        shards: Shards | None = None,
        *,
        seed: int,
    ) -> None:
        self._settings = settings
        self._networks = networks
        self._shards = shards or Shards()
        # One for each shard: what it keeps of its minibatch is needed again for the actor.
        self._providers = providers
        self._lanes = lanes
        self._seed = seed
        size = networks.action_size
        wanted = settings.target_entropy
        self._target_entropy = float(-size) if wanted == "auto" else wanted
        fixed = settings.entropy_coefficient
        self._fixed_weight = None if fixed == "auto" else fixed
        # The logarithm of a double: float32 knows no number below 1e-45, and this is to be finite.
        initial = math.log(settings.initial_entropy_coefficient)
        self._log_weight: Float32 = np.array([initial], np.float32)
        epsilon = settings.adam_epsilon
        self._actor_adam = Adam(len(networks.actor.data), epsilon)
        self._critic_adam = Adam(len(networks.critics.data), epsilon)
        self._entropy_adam = Adam(1, epsilon)
        self._scratch = np.empty_like(networks.targets.data)
        self._normaliser = ObservationNormaliser(networks.network.observation_size)
        # Each counts its own in a row: critics that learn do not excuse an actor that never does.
        self._guard, self._actor_guard = Guard("sac"), Guard("sac")
        self._updates = 0

    def policy(self) -> PolicyArrays:
        arrays = self._networks.actor.copies()
        if not self._networks.network.normalise:
            return arrays
        return {**arrays, **self._normaliser.arrays()}

    @np.errstate(over="ignore", invalid="ignore")  # the guard sees what comes of it
    def update(self, batch: ReplayBatch, progress: float) -> Metrics:
        rates, totals = self._rates(progress), _Means()
        if self._networks.network.normalise:
            self._normaliser.merge(batch.fresh.observations, batch.fresh.valid)
        moments = self._normaliser.arrays()
        for number, drawn in batch:
            totals.add(self._one(number, self._minibatch(number, drawn, moments), rates))
        self._shards.end()
        return {
            **totals.metrics(),
            "ent_coef": self._entropy_weight(),
            "learning_rate": rates.actor,
            "n_updates": float(self._updates),
            "refused_minibatches": float(self._guard.refused + self._actor_guard.refused),
        }

    def _one(self, number: int, batch: Minibatch, rates: _Rates) -> Metrics:
        settings, count = self._settings, len(batch.rewards)
        weight = self._entropy_weight()
        gradient, sums = self._critic_gradient(batch, weight, count)
        norms = [self._clip(gradient[self._networks.critics.span(name)]) for name in CRITICS]
        learned = {
            "rewards": batch.rewards,
            "observations": batch.observations,
            "next_observations": batch.next_observations,
        }
        moments = self._networks.moments
        fit = sums if moments is None else {**sums, "moments": moments.total()}
        if self._guard.refuses(sum(norms), fit, **learned):
            return {}
        follow = (number + 1) % settings.target_update_interval == 0
        self._step_critics(gradient, rates.critic, follow)
        metrics = {"critic_loss": sums["critic_loss"] / count}
        log_prob = sums["log_prob"] / count
        if number % settings.policy_delay == 0:
            if self._fixed_weight is None:
                metrics["ent_coef_loss"] = self._adapt_entropy(log_prob, rates.entropy)
            gradient, sums = self._actor_gradient(batch, weight, count)
            if self._actor_guard.refuses(self._clip(gradient), sums, **learned):
                return metrics
            self._step_actor(gradient, rates.actor)
            metrics["actor_loss"] = sums["actor_loss"] / count
        self._updates += 1
        return metrics

    def _critic_gradient(
        self, batch: Minibatch, weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        """With the log-densities of the actions that the actor would take now, summed."""

        def part(shard: Shard) -> tuple[Float32, Metrics]:
            provider, mine = self._providers[shard.number], batch.part(shard.rows)
            log_probs = provider.act(mine)
            gradient, sums = provider.critic_gradient(mine, weight, count)
            return gradient, {**sums, "log_prob": float(log_probs.sum(dtype=np.float64))}

        return self._shards.gradient(count, part)

    def _actor_gradient(
        self, batch: Minibatch, weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        def part(shard: Shard) -> tuple[Float32, Metrics]:
            provider = self._providers[shard.number]
            return provider.actor_gradient(batch.part(shard.rows), weight, count)

        return self._shards.gradient(count, part)

    def _minibatch(self, number: int, drawn: Transitions, moments: PolicyArrays) -> Minibatch:
        rows, size = drawn.actions.shape
        noise = stream(self._seed, Role.LEARN, number).standard_normal(
            (2, size, rows), dtype=np.float32
        )

        def seen(raw: Float32) -> Float32:
            network = self._networks.network
            if not network.normalise:
                return raw
            mean, scale = moments["normaliser.mean"], moments["normaliser.scale"]
            clip = network.observation_clip
            return normalise(raw, mean, scale, -clip, clip, np.empty_like(raw))

        return Minibatch(
            observations=seen(drawn.observations),
            actions=drawn.actions,
            rewards=drawn.rewards,
            next_observations=seen(drawn.next_observations),
            bootstrap=drawn.bootstrap,
            noise=noise,
        )

    def _adapt_entropy(self, log_prob: float, learning_rate: float) -> float:
        """Raise the coefficient where the policy is less random than wanted, else lower it."""
        short = log_prob + self._target_entropy
        loss = -float(self._log_weight[0]) * short
        self._entropy_adam.step(self._log_weight, np.array([-short], np.float32), learning_rate)
        return loss

    def _step_critics(self, gradient: Float32, learning_rate: float, follow: bool) -> None:
        """Adam on both critics, then what follows them a little closer."""
        critics, targets = self._networks.critics.data, self._networks.targets.data
        moments = self._networks.moments
        rate = np.float32(self._settings.target_update_rate)
        self._critic_adam.count += 1

        def lane(number: int) -> None:
            part = half(len(critics), number)
            self._critic_adam.apply(critics, gradient, learning_rate, part)
            if follow and moments is None:
                step = np.subtract(critics[part], targets[part], out=self._scratch[part])
                step *= rate
                targets[part] += step

        self._lanes.run(lane)
        if moments is not None:
            moments.follow()

    def _step_actor(self, gradient: Float32, learning_rate: float) -> None:
        actor = self._networks.actor.data
        self._actor_adam.count += 1
        self._lanes.run(
            lambda lane: self._actor_adam.apply(
                actor, gradient, learning_rate, half(len(actor), lane)
            )
        )

    def _clip(self, gradient: Float32) -> float:
        return clip_by_norm(gradient, self._settings.max_gradient_norm)

    def _entropy_weight(self) -> float:
        fixed = self._fixed_weight
        return float(np.exp(self._log_weight[0])) if fixed is None else fixed

    def _rates(self, progress: float) -> _Rates:
        settings = self._settings
        actor = settings.learning_rate
        return _Rates(
            *(
                schedule(actor if rate is None else rate, settings.anneal_learning_rate, progress)
                for rate in (actor, settings.critic_learning_rate, settings.entropy_learning_rate)
            )
        )

    def state(self) -> State:
        networks = self._networks
        followers = {"targets": networks.targets.data.copy()}
        if networks.moments is not None:
            followers = networks.moments.state()
        return {
            "actor": networks.actor.data.copy(),
            "critics": networks.critics.data.copy(),
            **followers,
            "log_entropy_weight": self._log_weight.copy(),
            "updates": np.array(self._updates, np.int64),
            **self._guard.state(),
            **self._actor_guard.state("actor_guard"),
            **self._actor_adam.state("actor_adam"),
            **self._critic_adam.state("critic_adam"),
            **self._entropy_adam.state("entropy_adam"),
            **(self._normaliser.state() if networks.network.normalise else {}),
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        networks = self._networks
        restore(networks.actor.data, "actor", state)
        restore(networks.critics.data, "critics", state)
        if networks.moments is None:
            restore(networks.targets.data, "targets", state)
        else:
            networks.moments.load_state(state)
        restore(self._log_weight, "log_entropy_weight", state)
        self._updates = restored_count("updates", state)
        self._guard.load_state(state)
        if "actor_guard" in state:  # which checkpoints of the first version lack
            self._actor_guard.load_state(state, "actor_guard")
        self._actor_adam.load_state("actor_adam", state)
        self._critic_adam.load_state("critic_adam", state)
        self._entropy_adam.load_state("entropy_adam", state)
        if networks.network.normalise:
            self._normaliser.load_state(state)


class _Means:
    """What the updates of one iteration reported, each metric over those that had it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def metrics(self) -> Metrics:
        return {name: total / count for name, (total, count) in self._sums.items()}
