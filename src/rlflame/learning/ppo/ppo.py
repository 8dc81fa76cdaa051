"""Proximal policy optimisation (Schulman et al., 2017) with the clipped objective.

Minimised over minibatches, with ratio r = pi(a|s) / behaviour(a|s) and advantage A:

    L = mean(-min(r A, clip(r, 1 - c, 1 + c) A)) + value_weight mean((V - R)^2) - entropy_weight H

Must not know: where fragments come from, how long training lasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from rlflame.config.algorithms import PpoSettings
from rlflame.rollout.seeding import Role, stream
from rlflame.rollout.spec import Array, Float32, Float64, PolicyArrays

from ..base import Batch, Metrics, Provider, State
from ..networks.flat_params import Adam, FlatVector, clip, restore, restored_count
from ..networks.network_shape import Guard, Network, normalised, training_metrics
from ..normalization import ObservationNormaliser, RewardScaler
from ..parallel.gradient_shards import Shards
from ..returns import advantages
from ..schedules import discount_at, rate_after, schedule
from .loss import Minibatch, NumpyPpo
from .split_update import Half, Partner, Whole, Work

#: Epochs end when a minibatch's KL estimate exceeds the target by this factor, as is the custom.
KL_STOP_FACTOR = 1.5


class Ppo:
    """Epochs of minibatches over one on-policy batch."""

    def __init__(
        self,
        settings: PpoSettings,
        network: Network,
        parameters: FlatVector,
        provider: Provider[Minibatch],
        shards: Shards | None = None,
        *,
        seed: int,
        columns: int,
    ) -> None:
        self._settings = settings
        self._shards = shards or Shards()
        self._network = network
        self._parameters = parameters
        self._provider = provider
        self._seed = seed
        self._adam = Adam(len(parameters.data), settings.adam_epsilon)
        self._normaliser = ObservationNormaliser(network.observation_size)
        self._scaler = RewardScaler(columns, settings.discount)
        self._updates = 0
        self._iterations = 0
        self._rate = settings.learning_rate
        self._guard = Guard("ppo")
        self._work: Work = Whole(provider, self._shards, parameters)

    def share(self, name: str, partner: Partner) -> None:
        if not isinstance(self._provider, NumpyPpo):
            raise ValueError("only the gradients that numpy makes come in halves")
        self._work = Half(name, self._provider, self._parameters, partner)

    def stay_alone(self) -> None:
        self._work = Whole(self._provider, self._shards, self._parameters)

    def policy(self) -> PolicyArrays:
        arrays = self._parameters.copies("actor.")
        return {**arrays, **self._normaliser.arrays()} if self._network.normalise else arrays

    @np.errstate(over="ignore", invalid="ignore")  # the guard sees what comes of it
    def update(self, batch: Batch, progress: float) -> Metrics:
        settings = self._settings
        learning_rate = schedule(self._rate, settings.anneal_learning_rate, progress)
        clip_range = schedule(settings.clip_range, settings.anneal_clip_range, progress)
        discount = discount_at(settings, progress)
        rewards = batch.rewards
        if settings.scale_rewards:
            ended = batch.terminated | batch.truncated
            rewards = rewards * self._scaler.scale(rewards, ended, batch.valid)
        seen = normalised(batch, self._network)
        if self._network.normalise and self._work.acts:
            # Here, where somebody else who has the critic makes its estimates meanwhile.
            self._normaliser.merge(batch.observations, batch.valid)
        samples = _Samples(
            seen, self._provider, self._shards, self._work, settings, rewards, discount
        )
        metrics = {
            "explained_variance": samples.explained_variance(),
            "clip_range": clip_range,
            "discount": discount,
            **self._epochs(samples, learning_rate, clip_range),
            **training_metrics(self._parameters, learning_rate, self._updates),
            "refused_minibatches": float(self._guard.refused),
        }
        self._rate = rate_after(self._rate, metrics.get("approx_kl"), settings)
        self._work.complete([self._parameters.data, self._adam.first, self._adam.second])
        if settings.clip_range_value is not None:
            metrics["clip_range_vf"] = settings.clip_range_value
        self._iterations += 1
        self._shards.end()
        return metrics

    def state(self) -> State:
        return {
            "parameters": self._parameters.data.copy(),
            "updates": np.array(self._updates, np.int64),
            "iterations": np.array(self._iterations, np.int64),
            **self._guard.state(),
            **self._adam.state("adam"),
            **(self._normaliser.state() if self._network.normalise else {}),
            **(self._scaler.state() if self._settings.scale_rewards else {}),
            **({} if self._settings.desired_kl is None else {"rate": np.array(self._rate)}),
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        restore(self._parameters.data, "parameters", state)
        self._updates = restored_count("updates", state)
        self._iterations = restored_count("iterations", state)
        self._guard.load_state(state)
        self._adam.load_state("adam", state)
        if self._network.normalise:
            self._normaliser.load_state(state)
        if self._settings.scale_rewards:
            self._scaler.load_state(state)
        if self._settings.desired_kl is not None:
            rate = np.zeros(())
            restore(rate, "rate", state)
            self._rate = float(rate)

    def _epochs(self, samples: _Samples, learning_rate: float, clip_range: float) -> Metrics:
        """One optimizer step a minibatch, until the epochs or the KL budget are used up."""
        settings, work, totals = self._settings, self._work, _Totals(self._settings)
        for epoch in range(settings.epochs):
            if epoch and settings.recompute_advantages:
                samples.estimate()
            for minibatch in self._minibatches(samples, epoch, clip_range):
                count = len(minibatch.returns)
                gradient, norm, sums = work.gradient(minibatch, count)
                learned = {"returns": minibatch.returns, "observations": minibatch.observations}
                if self._guard.refuses(norm, sums, **learned):
                    continue
                totals.add(count, sums, norm)
                if self._too_far(sums["approx_kl"] / count):
                    return totals.metrics(epoch)
                clip(gradient[work.part], norm, settings.max_gradient_norm)
                self._adam.step(self._parameters.data, gradient, learning_rate, work.part)
                self._updates += 1
        return totals.metrics(settings.epochs)

    def _too_far(self, kl: float) -> bool:
        target = self._settings.target_kl
        return target is not None and kl > KL_STOP_FACTOR * target

    def _minibatches(self, samples: _Samples, epoch: int, clip_range: float) -> Iterator[Minibatch]:
        """Slices of one shuffled contiguous copy of the samples."""
        settings, size = self._settings, self._settings.minibatch_size
        generator = stream(self._seed, Role.SHUFFLE, self._iterations, epoch)
        order = generator.permutation(len(samples.returns))
        observations, actions = samples.observations[order], samples.actions[order]
        log_probs, advantages = samples.log_probs[order], samples.advantages[order]
        returns, old_values = samples.returns[order], samples.values[order]
        for start in range(0, len(order), size):
            part = slice(start, start + size)
            chosen = advantages[part]
            if settings.normalise_advantages == "minibatch":
                chosen = standardised(chosen)
            yield Minibatch(
                observations[part],
                actions[part],
                log_probs[part],
                chosen,
                returns[part],
                old_values[part],
                clip_range,
                settings.clip_range_value,
                settings.value_weight,
                settings.entropy_weight,
            )


def standardised(samples: Float32) -> Float32:
    """Zero mean and unit deviation; a single sample has no deviation and is left alone."""
    if len(samples) < 2:
        return samples
    centred: Float32 = samples - samples.mean()
    centred /= samples.std() + np.float32(1e-8)
    return centred


class _Samples:
    """A batch without its idle places, and the critic's opinion of it."""

    def __init__(
        self,
        batch: Batch,
        provider: Provider[Minibatch],
        shards: Shards,
        work: Work,
        settings: PpoSettings,
        rewards: Float64,
        discount: float,
    ) -> None:
        self._batch = batch
        self._provider = provider
        self._shards = shards
        self._work = work
        self._settings = settings
        self._rewards = rewards
        self._discount = discount
        self.observations: Float32 = batch.observations[batch.valid]
        self.actions = batch.actions[batch.valid]
        self.log_probs: Float32 = batch.log_probs[batch.valid]
        self.estimate()

    def estimate(self) -> None:
        """Values, advantages and returns with the critic as it is now."""
        shape = (3, len(self.log_probs))
        self.values, self.advantages, self.returns = self._work.estimates(self._estimates, shape)

    def _estimates(self) -> Float32:
        batch, settings = self._batch, self._settings
        steps, columns, size = batch.observations.shape
        seen = batch.observations.reshape(steps * columns, size)
        values = self._shards.values(
            len(seen), lambda rows: self._provider.values(seen[rows])
        ).reshape(steps, columns)
        last = self._provider.values(batch.last_observations)
        following = np.concatenate([values[1:], last[None]])
        step, column = batch.boundary_index.T
        following[step, column] = self._provider.values(batch.boundary_observations)
        gae = advantages(
            self._rewards,
            values.astype(np.float64),
            following.astype(np.float64),
            batch.terminated,
            batch.truncated,
            self._discount,
            settings.gae_lambda,
        )[batch.valid]
        found: Float32 = np.empty((3, len(gae)), np.float32)
        found[0], found[1] = values[batch.valid], gae
        found[2] = gae + found[0]
        if settings.normalise_advantages == "batch":
            found[1] = standardised(found[1])
        return found

    def explained_variance(self) -> float:
        spread = float(self.returns.var())
        residual = float((self.returns - self.values).var())
        explained = 1.0 - residual / spread if spread > 0.0 else 0.0
        return explained if math.isfinite(explained) else 0.0


class _Totals:
    """Sums over the minibatches of one update, and the means that are reported."""

    def __init__(self, settings: PpoSettings) -> None:
        self._settings = settings
        self._sums: Metrics = {}
        self._samples = 0
        self._norm = 0.0

    def add(self, samples: int, sums: Metrics, norm: float) -> None:
        self._samples += samples
        self._norm = norm
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def metrics(self, epochs_done: int) -> Metrics:
        """Of nothing but refused minibatches there is nothing to report."""
        metrics = {"epochs_done": float(epochs_done)}
        if self._samples:
            means = {name: total / self._samples for name, total in self._sums.items()}
            loss = (
                means["policy_gradient_loss"]
                + self._settings.value_weight * means["value_loss"]
                + self._settings.entropy_weight * means["entropy_loss"]
            )
            metrics |= {"loss": loss, **means, "gradient_norm": self._norm}
        return metrics
