"""Proximal policy optimisation (Schulman et al., 2017) with the clipped objective.

Minimised over minibatches, with ratio r = pi(a|s) / behaviour(a|s) and advantage A:

    L = mean(-min(r A, clip(r, 1 - c, 1 + c) A)) + value_weight mean((V - R)^2) - entropy_weight H

Must not know: where fragments come from, how long training lasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlflame.methods import PpoSettings
from rlflame.rollout.seeding import Role, stream
from rlflame.rollout.spec import Array, Float32, Float64, PolicyArrays

from . import Batch, Metrics, Provider, State
from .actor_critic import Guard, Network, normalised, schedule, training_metrics
from .halves import Half, Partner, norm_of, parts, square_of
from .kernel import CHUNK_ROWS, Perceptron, make_head
from .parameters import Adam, FlatVector, clip, restore, restored_count
from .returns import advantages
from .shards import Shard, Shards
from .statistics import ObservationNormaliser, RewardScaler

#: Epochs end when a minibatch's KL estimate exceeds the target by this factor, as is the custom.
KL_STOP_FACTOR = 1.5
_ZERO, _ONE = np.array(0.0, np.float32), np.array(1.0, np.float32)


@dataclass(slots=True)
class Minibatch:
    """Samples side by side, and the coefficients of the loss for this update."""

    observations: Float32
    actions: Array
    log_probs: Float32
    advantages: Float32
    returns: Float32
    old_values: Float32
    clip_range: float
    clip_range_value: float | None
    value_weight: float
    entropy_weight: float

    def part(self, rows: slice) -> Minibatch:
        if rows == slice(0, len(self.returns)):
            return self
        return replace(
            self,
            observations=self.observations[rows],
            actions=self.actions[rows],
            log_probs=self.log_probs[rows],
            advantages=self.advantages[rows],
            returns=self.returns[rows],
            old_values=self.old_values[rows],
        )


class NumpyPpo:
    """The loss above and its gradient, derived by hand."""

    def __init__(self, parameters: FlatVector, network: Network) -> None:
        self._gradients = FlatVector(parameters.shapes)
        tanh, layers = network.tanh, network.layers
        self._actor = Perceptron(parameters, self._gradients, "actor", layers, tanh)
        self._critic = Perceptron(parameters, self._gradients, "critic", layers, tanh)
        self._head = make_head(parameters, self._gradients, self._actor)

    def gradient(self, batch: Minibatch, count: int) -> tuple[Float32, Metrics]:
        policy_sums = self._policy_gradient(batch, count)
        value_loss = self._value_gradient(batch, count)
        return self._gradients.data, {**policy_sums, "value_loss": value_loss}

    def half(self, name: str, batch: Minibatch, count: int) -> tuple[Float32, Metrics]:
        if name == "actor":
            sums = self._policy_gradient(batch, count)
        else:
            sums = {"value_loss": self._value_gradient(batch, count)}
        return self._gradients.data, sums

    def values(self, observations: Float32) -> Float32:
        result = np.empty(len(observations), np.float32)
        for start in range(0, len(result), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            result[part] = self._critic.forward(observations[part])[0]
        return result

    def _policy_gradient(self, batch: Minibatch, count: int) -> Metrics:
        log_probs = self._head.log_prob(self._actor.forward(batch.observations), batch.actions)
        log_ratio = log_probs - batch.log_probs
        ratio = np.exp(log_ratio)
        held = np.minimum(np.maximum(ratio, 1.0 - batch.clip_range), 1.0 + batch.clip_range)
        clipped = np.count_nonzero(held != ratio)
        surrogate = ratio * batch.advantages
        held *= batch.advantages
        # Where the held term is the smaller one, the objective is flat in the ratio.
        d_log_prob = np.where(surrogate <= held, surrogate, _ZERO)
        d_log_prob *= np.float32(-1.0 / count)
        self._actor.backward(self._head.backward(d_log_prob, -batch.entropy_weight / count))
        objective = np.minimum(surrogate, held)
        ratio -= _ONE
        ratio -= log_ratio
        return {
            "policy_gradient_loss": -float(np.add.reduce(objective)),
            "entropy_loss": -self._head.total_entropy(),
            "approx_kl": float(np.add.reduce(ratio)),
            "clip_fraction": float(clipped),
        }

    def _value_gradient(self, batch: Minibatch, count: int) -> float:
        """Of the squared error; with a value clip, of the larger of two errors."""
        values = self._critic.forward(batch.observations)[0]
        error = values - batch.returns
        slope = error
        loss = error * error
        if batch.clip_range_value is not None:
            limit = batch.clip_range_value
            moved = values - batch.old_values
            held = np.minimum(np.maximum(moved, -limit), limit)
            held_error = batch.old_values + held - batch.returns
            held_loss = held_error * held_error
            # Where the held value is the worse one, the loss is flat in the value.
            slope = np.where((held_loss > loss) & (held != moved), 0.0, error)
            loss = np.maximum(loss, held_loss)
        upstream = slope * np.float32(2.0 * batch.value_weight / count)
        self._critic.backward(upstream[None])
        return float(np.add.reduce(loss))


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
        self._guard = Guard("ppo")
        self._parts = [*parts(parameters).values()]
        self._half: Half[Minibatch] | None = None

    def share(self, name: str, partner: Partner) -> None:
        assert isinstance(self._provider, NumpyPpo)
        self._half = Half(name, self._provider, self._parameters, partner)

    def stay_alone(self) -> None:
        self._half = None

    def policy(self) -> PolicyArrays:
        arrays = self._parameters.copies("actor.")
        return {**arrays, **self._normaliser.arrays()} if self._network.normalise else arrays

    @np.errstate(over="ignore", invalid="ignore")  # the guard sees what comes of it
    def update(self, batch: Batch, progress: float) -> Metrics:
        settings = self._settings
        learning_rate = schedule(settings.learning_rate, settings.anneal_learning_rate, progress)
        clip_range = schedule(settings.clip_range, settings.anneal_clip_range, progress)
        discount = discount_at(settings, progress)
        rewards = batch.rewards
        if settings.scale_rewards:
            ended = batch.terminated | batch.truncated
            rewards = rewards * self._scaler.scale(rewards, ended, batch.valid)
        seen = normalised(batch, self._network)
        samples = _Samples(
            seen, self._provider, self._shards, self._half, settings, rewards, discount
        )
        metrics = {
            "explained_variance": samples.explained_variance(),
            "clip_range": clip_range,
            "discount": discount,
            **self._epochs(samples, learning_rate, clip_range),
            **training_metrics(self._parameters, learning_rate, self._updates),
            "refused_minibatches": float(self._guard.refused),
        }
        if self._half is not None:
            self._half.complete([self._parameters.data, self._adam.first, self._adam.second])
        if settings.clip_range_value is not None:
            metrics["clip_range_vf"] = settings.clip_range_value
        self._iterations += 1
        if self._network.normalise:
            self._normaliser.merge(batch.observations, batch.valid)
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

    def _epochs(self, samples: _Samples, learning_rate: float, clip_range: float) -> Metrics:
        """One optimizer step a minibatch, until the epochs or the KL budget are used up."""
        settings, totals = self._settings, _Totals(self._settings)
        for epoch in range(settings.epochs):
            if epoch and settings.recompute_advantages:
                samples.estimate()
            for minibatch in self._minibatches(samples, epoch, clip_range):
                count = len(minibatch.returns)
                gradient, norm, sums = self._gradient(minibatch, count)
                learned = {"returns": minibatch.returns, "observations": minibatch.observations}
                if self._guard.refuses(norm, sums, **learned):
                    continue
                totals.add(count, sums, norm)
                if self._too_far(sums["approx_kl"] / count):
                    return totals.metrics(epoch)
                part = slice(None) if self._half is None else self._half.part
                clip(gradient[part], norm, settings.max_gradient_norm)
                self._adam.step(self._parameters.data, gradient, learning_rate, part)
                self._updates += 1
        return totals.metrics(settings.epochs)

    def _gradient(self, minibatch: Minibatch, count: int) -> tuple[Float32, float, Metrics]:
        """The gradient, its norm, and what is summed over the samples."""
        if self._half is not None:
            return self._half.gradient(minibatch, count)

        def part(shard: Shard) -> tuple[Float32, Metrics]:
            return self._provider.gradient(minibatch.part(shard.rows), count)

        gradient, sums = self._shards.gradient(count, part)
        return gradient, norm_of([square_of(gradient[part]) for part in self._parts]), sums

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


def discount_at(settings: PpoSettings, progress: float) -> float:
    """The steps that it looks ahead, 1 / (1 - discount), move in a straight line to the horizon."""
    if settings.final_discount is None:
        return settings.discount
    first, last = 1.0 / (1.0 - settings.discount), 1.0 / (1.0 - settings.final_discount)
    return 1.0 - 1.0 / (first + (last - first) * min(1.0, progress))


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
        half: Half[Minibatch] | None,
        settings: PpoSettings,
        rewards: Float64,
        discount: float,
    ) -> None:
        self._batch = batch
        self._provider = provider
        self._shards = shards
        self._half = half
        self._settings = settings
        self._rewards = rewards
        self._discount = discount
        self.observations: Float32 = batch.observations[batch.valid]
        self.actions = batch.actions[batch.valid]
        self.log_probs: Float32 = batch.log_probs[batch.valid]
        self.estimate()

    def estimate(self) -> None:
        """Values, advantages and returns with the critic as it is now."""
        if self._half is None:
            found = self._estimates()
        else:
            found = self._half.estimates(self._estimates, (3, len(self.log_probs)))
        self.values, self.advantages, self.returns = found

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
