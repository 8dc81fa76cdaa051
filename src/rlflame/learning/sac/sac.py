"""Soft actor-critic (Haarnoja et al., 2018) with a learned entropy coefficient.

An update draws transitions (s, a, r, s'), samples the actions b ~ pi(s) and b' ~ pi(s'), and
minimises these losses:

    critics  1/2 sum_j mean((Q_j(s, a) - y)^2),  y = r + d (min_j Q'_j(s', b') - w log pi(b'|s'))
    actor    mean(w log pi(b|s) - min_j Q_j(s, b))
    entropy  -log w mean(log pi(b|s) + target_entropy)

Here, w is the entropy coefficient, and d (`bootstrap`) is the discount over the summed steps, or 0
after a termination. The update then moves the target critics Q' towards the critics Q. If critics
standardise their inputs over the batch, Q' is Q. If critics estimate quantiles,
`TruncatedQuantiles` defines the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlflame.config.algorithms import SacSettings
from rlflame.rollout.seeding import Role, make_stream
from rlflame.rollout.task import Array, Float32, PolicyArrays

from ..base import Counter, MetricMeans, Metrics, ReplayBatch, State, StateParts, Transitions
from ..networks.flat_vector import normalise_observations
from ..normalization import make_normaliser, make_policy
from ..optim import GradientGuard, Targets, apply_schedule, clip_by_norm, make_adam
from ..parallel.process_group import Shard, Shards
from ..parallel.thread_pair import ThreadPair
from .loss import SacGradientProvider, SacMinibatch
from .networks import CRITICS, SacNetworks


class Sac:
    """SAC, which performs the updates that are due in each replay batch."""

    def __init__(
        self,
        settings: SacSettings,
        networks: SacNetworks,
        providers: Sequence[SacGradientProvider],
        thread_pair: ThreadPair,
        shards: Shards | None = None,
        *,
        seed: int,
    ) -> None:
        self._settings = settings
        self._networks = networks
        self.shards = shards or Shards()
        # Each shard has a provider, because the actor's gradient reuses parts of the critics' pass.
        self._providers = providers
        self._thread_pair = thread_pair
        self._seed = seed
        size = networks.spec.action_size
        target = settings.target_entropy
        self._target_entropy = float(-size) if target == "auto" else target
        coefficient = settings.entropy_coefficient
        self._fixed_weight = None if coefficient == "auto" else coefficient
        # Computed in float64, because float32 may round a number below 1e-45 to zero.
        initial = math.log(settings.initial_entropy_coefficient)
        self._log_weight: Float32 = np.array([initial], np.float32)
        epsilon = settings.adam_epsilon
        self._actor_adam = make_adam(len(networks.actor.data), epsilon)
        self._critic_adam = make_adam(len(networks.critics.data), epsilon)
        self._entropy_adam = make_adam(1, epsilon)
        self._normaliser = make_normaliser(networks.spec)
        # The guards are separate, because the critics must not reset the actor's count of skips.
        self._guard, self._actor_guard = GradientGuard("sac"), GradientGuard("sac")
        self._updates = Counter()
        moments = networks.moments
        self._state = StateParts(
            actor=networks.actor.data,
            critics=networks.critics.data,
            targets=networks.targets.data if moments is None else None,
            moments=None if moments is None else moments.running.data,
            log_entropy_weight=self._log_weight,
            updates=self._updates,
            guard=self._guard.counts,
            actor_guard=self._actor_guard.counts,
            actor_adam=self._actor_adam.state,
            critic_adam=self._critic_adam.state,
            entropy_adam=self._entropy_adam.state,
            normaliser=None if self._normaliser is None else self._normaliser.state,
        )

    def get_policy(self) -> PolicyArrays:
        return make_policy(self._networks.actor, self._normaliser)

    @np.errstate(over="ignore", invalid="ignore")  # the guard checks the result
    def update(self, batch: ReplayBatch, progress: float) -> Metrics:
        rates = self._compute_rates(progress)
        statistics: PolicyArrays = {}
        if self._normaliser is not None:
            self._normaliser.merge(batch.fresh.observations[batch.fresh.valid])
            statistics = self._normaliser.make_arrays()
        metrics = self._run_updates(batch, statistics, rates)
        self.shards.compare_states()
        return {
            **metrics,
            "ent_coef": self._compute_entropy_weight(),
            "learning_rate": rates["actor"],
            "n_updates": float(self._updates.value),
            "refused_minibatches": float(self._guard.counts[0] + self._actor_guard.counts[0]),
        }

    def _run_updates(
        self, batch: ReplayBatch, statistics: PolicyArrays, rates: Mapping[str, float]
    ) -> Metrics:
        """Perform all updates of the batch; return the means of their metrics."""
        totals = MetricMeans()
        for number, transitions in batch:
            minibatch = self._make_minibatch(number, transitions, statistics)
            totals.add(self._update_once(number, minibatch, rates))
        return totals.make_metrics()

    def _update_once(self, number: int, batch: SacMinibatch, rates: Mapping[str, float]) -> Metrics:
        settings, count = self._settings, len(batch.rewards)
        weight = self._compute_entropy_weight()
        gradient, sums = self._compute_critic_gradient(batch, weight, count)
        norms = [self._clip(gradient[self._networks.critics.find_span(name)]) for name in CRITICS]
        moments = self._networks.moments
        checked_sums = sums if moments is None else {**sums, "moments": moments.sum_latest()}
        if self._guard.is_refused(sum(norms), checked_sums):
            return {}
        updates_targets = (number + 1) % settings.target_update_interval == 0
        self._step_critics(gradient, rates["critic"], updates_targets)
        metrics = {"critic_loss": sums["critic_loss"] / count}
        log_prob = sums["log_prob"] / count
        if number % settings.policy_delay == 0:
            if self._fixed_weight is None:
                metrics["ent_coef_loss"] = self._adapt_entropy(log_prob, rates["entropy"])
            gradient, sums = self._compute_actor_gradient(batch, weight, count)
            if self._actor_guard.is_refused(self._clip(gradient), sums):
                return metrics
            self._step_actor(gradient, rates["actor"])
            metrics["actor_loss"] = sums["actor_loss"] / count
        self._updates.value += 1
        return metrics

    def _compute_critic_gradient(
        self, batch: SacMinibatch, weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        """Return the critics' gradient and sums, including the sum of log-densities."""

        def compute_part(shard: Shard) -> tuple[Float32, Metrics]:
            provider, shard_batch = self._providers[shard.number], batch.select_rows(shard.rows)
            log_probs = provider.sample_actions(shard_batch)
            gradient, sums = provider.compute_critic_gradient(shard_batch, weight, count)
            return gradient, {**sums, "log_prob": float(log_probs.sum(dtype=np.float64))}

        return self.shards.compute_gradient(count, compute_part)

    def _compute_actor_gradient(
        self, batch: SacMinibatch, weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        def compute_part(shard: Shard) -> tuple[Float32, Metrics]:
            shard_batch = batch.select_rows(shard.rows)
            return self._providers[shard.number].compute_actor_gradient(shard_batch, weight, count)

        return self.shards.compute_gradient(count, compute_part)

    def _make_minibatch(
        self, number: int, transitions: Transitions, statistics: PolicyArrays
    ) -> SacMinibatch:
        rows, size = transitions.actions.shape
        stream, spec = make_stream(self._seed, Role.LEARN, number), self._networks.spec
        return SacMinibatch(
            normalise_observations(transitions.observations, statistics, spec),
            transitions.actions,
            transitions.rewards,
            normalise_observations(transitions.next_observations, statistics, spec),
            transitions.bootstrap,
            stream.standard_normal((2, size, rows), dtype=np.float32),
        )

    def _adapt_entropy(self, log_prob: float, learning_rate: float) -> float:
        """Raise the coefficient if the entropy is below the target; otherwise lower it."""
        deficit = log_prob + self._target_entropy
        loss = -float(self._log_weight[0]) * deficit
        self._entropy_adam.step(self._log_weight, np.array([-deficit], np.float32), learning_rate)
        return loss

    def _step_critics(self, gradient: Float32, learning_rate: float, updates_targets: bool) -> None:
        """Take an Adam step for both critics, then update the targets or running moments."""
        networks, targets = self._networks, None
        if updates_targets and networks.moments is None:
            targets = Targets(networks.targets.data, self._settings.target_update_rate)
        self._critic_adam.step_in_lanes(
            self._thread_pair, networks.critics.data, gradient, learning_rate, targets
        )
        if networks.moments is not None:
            networks.moments.update_running()

    def _step_actor(self, gradient: Float32, learning_rate: float) -> None:
        self._actor_adam.step_in_lanes(
            self._thread_pair, self._networks.actor.data, gradient, learning_rate
        )

    def _clip(self, gradient: Float32) -> float:
        return clip_by_norm(gradient, self._settings.max_gradient_norm)

    def _compute_entropy_weight(self) -> float:
        weight = self._fixed_weight
        return float(np.exp(self._log_weight[0])) if weight is None else weight

    def _compute_rates(self, progress: float) -> dict[str, float]:
        settings = self._settings
        rates = {
            "actor": settings.learning_rate,
            "critic": settings.critic_learning_rate or settings.learning_rate,
            "entropy": settings.entropy_learning_rate or settings.learning_rate,
        }
        anneal = settings.anneal_learning_rate
        return {name: apply_schedule(rate, anneal, progress) for name, rate in rates.items()}

    def get_state(self) -> State:
        return self._state.get_state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._state.load_state(state)
