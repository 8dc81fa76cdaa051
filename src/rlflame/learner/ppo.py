"""Proximal policy optimisation (Schulman et al., 2017) with the clipped objective.

Minimised over minibatches, with ratio r = pi(a|s) / behaviour(a|s) and advantage A:

    L = mean(-min(r A, clip(r, 1 - c, 1 + c) A)) + value_weight mean((V - R)^2) - entropy_weight H

Must not know: where fragments come from, how long training lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rlflame.config import PpoSettings
from rlflame.rollout.seeding import Role, stream
from rlflame.rollout.spec import Array, Float32, Float64, PolicyArrays

from . import Batch, Metrics, Provider, State
from .actor_critic import Guard, Network, normalised, schedule, training_metrics
from .kernel import Perceptron, make_head
from .parameters import Adam, FlatVector, clip_by_norm
from .returns import advantages
from .statistics import ObservationNormaliser, RewardScaler

MAX_REFUSED_IN_A_ROW = 5
#: A minibatch is refused, and an epoch loop ended, as in the well-known implementations.
KL_STOP_FACTOR = 1.5


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


class NumpyPpo:
    """The loss above and its gradient, derived by hand."""

    def __init__(self, parameters: FlatVector, network: Network) -> None:
        self._gradients = FlatVector(parameters.shapes)
        tanh, layers = network.tanh, network.layers
        self._actor = Perceptron(parameters, self._gradients, "actor", layers, tanh)
        self._critic = Perceptron(parameters, self._gradients, "critic", layers, tanh)
        self._head = make_head(parameters, self._gradients)

    def gradient(self, batch: Minibatch, count: int) -> tuple[Float32, Metrics]:
        log_probs = self._head.log_prob(self._actor.forward(batch.observations), batch.actions)
        log_ratio = log_probs - batch.log_probs
        ratio = np.exp(log_ratio)
        clipped = np.abs(ratio - 1.0) > batch.clip_range
        surrogate = ratio * batch.advantages
        low, high = 1.0 - batch.clip_range, 1.0 + batch.clip_range
        bounded = np.clip(ratio, low, high) * batch.advantages
        # Where the bounded term is the smaller one, the objective is flat in the ratio.
        d_log_prob = np.where(surrogate <= bounded, surrogate, 0.0).astype(np.float32, copy=False)
        d_log_prob *= np.float32(-1.0 / count)
        entropy = float(self._head.entropy().sum())
        self._actor.backward(self._head.backward(d_log_prob, -batch.entropy_weight / count))

        values = self._critic.forward(batch.observations)[:, 0]
        value_losses, d_values = self._value_loss(values, batch)
        d_values *= np.float32(batch.value_weight / count)
        self._critic.backward(d_values[:, None])
        return self._gradients.data, {
            "policy_gradient_loss": -float(np.minimum(surrogate, bounded).sum()),
            "value_loss": float(value_losses.sum()),
            "entropy_loss": -entropy,
            "approx_kl": float((ratio - 1.0 - log_ratio).sum()),
            "clip_fraction": float(clipped.sum()),
        }

    def values(self, observations: Float32) -> Float32:
        return self._critic.forward(observations)[:, 0].copy()

    @staticmethod
    def _value_loss(values: Float32, batch: Minibatch) -> tuple[Float32, Float32]:
        """Squared error and its derivative; with a value clip, the larger of two errors."""
        error = values - batch.returns
        loss = error * error
        if batch.clip_range_value is None:
            return loss, error * np.float32(2.0)
        limit = np.float32(batch.clip_range_value)
        moved = values - batch.old_values
        held_error = batch.old_values + np.clip(moved, -limit, limit) - batch.returns
        held_loss = held_error * held_error
        inside = np.abs(moved) <= limit
        slope = np.where(held_loss > loss, np.where(inside, held_error, 0.0), error)
        return np.maximum(loss, held_loss), slope.astype(np.float32) * np.float32(2.0)


class Ppo:
    """Epochs of minibatches over one on-policy batch."""

    def __init__(
        self,
        settings: PpoSettings,
        network: Network,
        parameters: FlatVector,
        provider: Provider[Minibatch],
        *,
        seed: int,
        columns: int,
    ) -> None:
        self._settings = settings
        self._network = network
        self._parameters = parameters
        self._provider = provider
        self._seed = seed
        self._adam = Adam(len(parameters.data), settings.adam_epsilon)
        self._normaliser = ObservationNormaliser(network.observation_size)
        self._scaler = RewardScaler(columns, settings.discount)
        self._updates = 0
        self._iterations = 0
        self._guard = Guard()

    def policy(self) -> PolicyArrays:
        arrays = self._parameters.copies("actor.")
        return {**arrays, **self._normaliser.arrays()} if self._network.normalise else arrays

    def update(self, batch: Batch, progress: float) -> Metrics:
        settings = self._settings
        learning_rate = schedule(settings.learning_rate, settings.anneal_learning_rate, progress)
        clip_range = schedule(settings.clip_range, settings.anneal_clip_range, progress)
        ended = batch.terminated | batch.truncated
        rewards = batch.rewards
        if settings.scale_rewards:
            rewards = rewards * self._scaler.scale(rewards, ended, batch.valid)
        view = _View(normalised(batch, self._network), self._provider, settings, rewards)
        totals: dict[str, float] = {}
        samples, epochs_done, stopped, norm = 0, 0, False, 0.0
        for epoch in range(settings.epochs):
            if epoch and settings.recompute_advantages:
                view.estimate()
            epochs_done = epoch + 1
            for minibatch in self._minibatches(view, epoch, clip_range):
                count = len(minibatch.returns)
                gradient, sums = self._provider.gradient(minibatch, count)
                if self._too_far(sums, count):
                    stopped = True
                    break
                norm = clip_by_norm(gradient, settings.max_gradient_norm)
                if self._guard.refuses(norm, sums):
                    continue
                self._adam.step(self._parameters.data, gradient, learning_rate)
                self._updates += 1
                samples += count
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + value
            if stopped:
                break
        self._iterations += 1
        if self._network.normalise:
            self._normaliser.merge(batch.observations, batch.valid)
        metrics = {name: value / max(1, samples) for name, value in totals.items()}
        if metrics:
            metrics["loss"] = (
                metrics["policy_gradient_loss"]
                + settings.value_weight * metrics["value_loss"]
                + settings.entropy_weight * metrics["entropy_loss"]
            )
        metrics |= training_metrics(self._parameters, learning_rate, norm, self._updates)
        metrics |= {
            "clip_range": clip_range,
            "explained_variance": view.explained_variance,
            "epochs_done": float(epochs_done),
            "refused_minibatches": float(self._guard.refused),
        }
        if settings.clip_range_value is not None:
            metrics["clip_range_vf"] = settings.clip_range_value
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
        self._parameters.data[:] = state["parameters"]
        self._updates = int(state["updates"])
        self._iterations = int(state["iterations"])
        self._guard.load_state(state)
        self._adam.load_state("adam", state)
        if self._network.normalise:
            self._normaliser.load_state(state)
        if self._settings.scale_rewards:
            self._scaler.load_state(state)

    def _too_far(self, sums: Metrics, count: int) -> bool:
        target = self._settings.target_kl
        return target is not None and sums["approx_kl"] / count > KL_STOP_FACTOR * target

    def _minibatches(self, view: _View, epoch: int, clip_range: float) -> Iterator[Minibatch]:
        """Slices of one shuffled contiguous copy of the samples."""
        settings, size = self._settings, self._settings.minibatch_size
        order = stream(self._seed, Role.SHUFFLE, self._iterations, epoch).permutation(view.count)
        observations, actions = view.observations[order], view.actions[order]
        log_probs, chosen = view.log_probs[order], view.advantages[order]
        returns, old_values = view.returns[order], view.values[order]
        if settings.normalise_advantages == "batch":
            chosen = standardised(chosen)
        for start in range(0, view.count, size):
            part = slice(start, start + size)
            local = chosen[part]
            if settings.normalise_advantages == "minibatch":
                local = standardised(local)
            yield Minibatch(
                observations[part],
                actions[part],
                log_probs[part],
                local,
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
    return (samples - samples.mean()) / (samples.std() + np.float32(1e-8))


class _View:
    """A batch as flat samples, with the critic's view of it."""

    def __init__(
        self,
        batch: Batch,
        provider: Provider[Minibatch],
        settings: PpoSettings,
        rewards: Float64,
    ) -> None:
        self._batch = batch
        self._provider = provider
        self._settings = settings
        self._rewards = rewards
        valid = batch.valid
        self.count = batch.steps
        self.observations = np.ascontiguousarray(batch.observations[valid])
        self.actions = batch.actions[valid]
        self.log_probs = batch.log_probs[valid]
        self.estimate()
        spread = float(self.returns.var())
        residual = float((self.returns - self.values).var())
        self.explained_variance = 1.0 - residual / spread if spread > 0 else 0.0

    def estimate(self) -> None:
        """Values, advantages and returns with the critic as it is now."""
        batch, settings = self._batch, self._settings
        steps, columns = batch.rewards.shape
        values = self._values(batch.observations.reshape(steps * columns, -1)).reshape(
            steps, columns
        )
        following = np.concatenate([values[1:], self._values(batch.last_observations)[None]])
        if len(batch.boundary_index):
            at = batch.boundary_index
            following[at[:, 0], at[:, 1]] = self._values(batch.boundary_observations)
        gae = advantages(
            self._rewards,
            values.astype(np.float64),
            following.astype(np.float64),
            batch.terminated,
            batch.truncated,
            settings.discount,
            settings.gae_lambda,
        )
        valid = batch.valid
        self.values: Float32 = values[valid]
        self.advantages: Float32 = gae[valid].astype(np.float32)
        self.returns: Float32 = (gae[valid] + values[valid]).astype(np.float32)

    def _values(self, observations: Float32) -> Float32:
        return self._provider.values(np.ascontiguousarray(observations))
