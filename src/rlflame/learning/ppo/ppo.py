"""Proximal policy optimisation with the clipped objective (Schulman et al., 2017).

The loss of a minibatch, with ratio r = pi(a|s) / pi_old(a|s), advantage A, clip range c, value V,
return R and mean entropy H, is

    L = mean(-min(r A, clip(r, 1 - c, 1 + c) A)) + value_weight mean((V - R)^2) - entropy_weight H
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlflame.config.algorithms import PpoSettings
from rlflame.rollout.seeding import Role, make_stream
from rlflame.rollout.task import Array, Float32, Float64, PolicyArrays, PolicySpec

from ..base import Batch, Counter, Int64, Metrics, State, StateParts
from ..buffers.rollout_buffer import compute_gae
from ..networks.flat_vector import FlatVector, make_training_metrics, normalise_batch
from ..normalization import RewardScaler, make_normaliser, make_policy
from ..optim import GradientGuard, apply_schedule, clip, make_adam
from ..parallel.process_group import Shard, Shards
from ..parallel.units import ShardGradients, Units
from .compiled_epoch import MEMORY_SIZE, make_compiled_epoch
from .loss import (
    NETWORKS,
    LossMeans,
    PpoMinibatch,
    PpoProvider,
    compute_norm,
    find_kl_limit,
    find_spans,
)


class Ppo:
    """PPO, which learns from each on-policy batch in several epochs of minibatches."""

    def __init__(
        self,
        settings: PpoSettings,
        spec: PolicySpec,
        parameters: FlatVector,
        provider: PpoProvider,
        shards: Shards | None = None,
        *,
        seed: int,
        columns: int,
    ) -> None:
        self._settings = settings
        self.shards = shards or Shards()
        self._spec = spec
        self._parameters = parameters
        self._provider = provider
        self._seed = seed
        self._adam = make_adam(len(parameters.data), settings.adam_epsilon)
        self._normaliser = make_normaliser(spec)
        self._scaler = RewardScaler(columns, settings.discount) if settings.scale_rewards else None
        self._updates, self._iterations = Counter(), Counter()
        self._guard = GradientGuard("ppo")
        self._state = StateParts(
            parameters=parameters.data,
            updates=self._updates,
            iterations=self._iterations,
            guard=self._guard.counts,
            adam=self._adam.state,
            normaliser=None if self._normaliser is None else self._normaliser.state,
            reward_scaler=None if self._scaler is None else self._scaler.state,
        )
        self._units = Units(self.shards, find_spans(parameters), NETWORKS)
        self._compiled_epoch = make_compiled_epoch(
            settings, spec, parameters, provider, self._adam, self._units
        )
        #: The shuffled samples of an epoch, by field.
        self._buffers: dict[str, Array] = {}

    def get_policy(self) -> PolicyArrays:
        return make_policy(self._parameters, self._normaliser)

    @np.errstate(over="ignore", invalid="ignore")  # the guard checks the result
    def update(self, batch: Batch, progress: float) -> Metrics:
        settings = self._settings
        learning_rate = apply_schedule(
            settings.learning_rate, settings.anneal_learning_rate, progress
        )
        clip_range = apply_schedule(settings.clip_range, settings.anneal_clip_range, progress)
        discount = compute_discount(settings, progress)
        rewards = batch.rewards
        if self._scaler is not None:
            ends = batch.terminated | batch.truncated
            rewards = rewards * self._scaler.scale(rewards, ends, batch.valid)
        samples = self._make_samples(batch, rewards, discount)
        self._units.divide()
        self._units.share_memory(MEMORY_SIZE if self._compiled_epoch is not None else 0)
        self._estimate(samples)
        first_update = self._updates.value
        metrics = {
            "explained_variance": samples.explained_variance(),
            "clip_range": clip_range,
            "discount": discount,
            **self._run_epochs(samples, learning_rate, clip_range),
            **make_training_metrics(self._parameters, learning_rate, self._updates.value),
            "refused_minibatches": float(self._guard.counts[0]),
        }
        for vector in (self._parameters.data, self._adam.first, self._adam.second):
            self._units.share_vector(vector)
        if settings.clip_range_value is not None:
            metrics["clip_range_vf"] = settings.clip_range_value
        self._iterations.value += 1
        self.shards.compare_states(self._updates.value - first_update)
        return metrics

    def get_state(self) -> State:
        return self._state.get_state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._state.load_state(state)

    def _make_samples(self, batch: Batch, rewards: Float64, discount: float) -> Samples:
        """Normalise the observations of a batch, and update the statistics of observations."""
        if self._normaliser is not None:
            self._normaliser.merge(batch.observations[batch.valid])
        return Samples(normalise_batch(batch, self._spec), rewards, discount)

    def _estimate(self, samples: Samples) -> None:
        """Compute values, advantages and returns with the current critic."""
        batch, settings = samples.batch, self._settings
        steps, columns, size = batch.observations.shape
        observations = batch.observations.reshape(steps * columns, size)
        values = self._units.compute_values(
            len(observations),
            self._provider.chunk_rows,
            lambda rows: self._provider.compute_values(observations[rows]),
        ).reshape(steps, columns)
        last = self._provider.compute_values(batch.last_observations)
        next_values = np.concatenate([values[1:], last[None]])
        step, column = batch.boundary_index.T
        next_values[step, column] = self._provider.compute_values(batch.boundary_observations)
        gae = compute_gae(
            samples.rewards,
            values.astype(np.float64),
            next_values.astype(np.float64),
            batch.terminated,
            batch.truncated,
            samples.discount,
            settings.gae_lambda,
        )[batch.valid]
        samples.values, samples.advantages = values[batch.valid], gae.astype(np.float32)
        samples.returns = (gae + samples.values).astype(np.float32)
        if settings.normalise_advantages == "batch":
            samples.advantages = standardise(samples.advantages)

    def _run_epochs(self, samples: Samples, learning_rate: float, clip_range: float) -> Metrics:
        """Take one optimizer step per minibatch; stop early at the KL limit."""
        settings, totals = self._settings, LossMeans(self._settings)
        parameters, kl_limit = self._parameters.data, find_kl_limit(settings)
        for epoch in range(settings.epochs):
            if epoch and settings.recompute_advantages:
                self._units.share_vector(parameters)
                self._estimate(samples)
            all_rows = self._draw_epoch_samples(samples, epoch, clip_range)
            start, end = 0, len(all_rows.returns)
            while True:
                if self._compiled_epoch is not None:
                    steps = self._compiled_epoch.run(all_rows, start, totals, learning_rate)
                    self._updates.value += steps
                    start += steps * settings.minibatch_size
                    if steps:
                        self._guard.record_success()
                if start >= end:
                    break
                minibatch = all_rows.select_rows(slice(start, start + settings.minibatch_size))
                start += settings.minibatch_size
                count = len(minibatch.returns)
                gradient, norm, sums = self._compute_gradient(minibatch, count)
                if self._guard.is_refused(norm, sums):
                    continue
                totals.add(count, sums, norm)
                if kl_limit is not None and sums["approx_kl"] / count > kl_limit:
                    return totals.make_metrics(epoch)
                self._adam.count.value += 1
                for span in self._units.own_spans:
                    clip(gradient[span], norm, settings.max_gradient_norm)
                    self._adam.apply(parameters, gradient, learning_rate, span)
                self._units.share_step(parameters)
                self._updates.value += 1
        return totals.make_metrics(settings.epochs)

    def _compute_gradient(
        self, minibatch: PpoMinibatch, count: int
    ) -> tuple[Float32, float, Metrics]:
        """Return the gradient, its norm, and the sums of the losses."""

        def compute_parts(
            shards: Sequence[Shard], networks: Sequence[str]
        ) -> Iterator[ShardGradients]:
            return self._provider.compute_shards(minibatch, count, networks, shards)

        gradient, squares, sums = self._units.compute_gradient(count, compute_parts)
        return gradient, compute_norm(squares), sums

    def _draw_epoch_samples(self, samples: Samples, epoch: int, clip_range: float) -> PpoMinibatch:
        """Return a shuffled, contiguous copy of all samples, whose slices are the minibatches."""
        generator = make_stream(self._seed, Role.SHUFFLE, self._iterations.value, epoch)
        order = generator.permutation(len(samples.returns))
        names = self._units.own_names
        fields = {"observations": samples.observations}
        if "actor" in names:
            fields |= {
                "actions": samples.actions,
                "log_probs": samples.log_probs,
                "advantages": samples.advantages,
            }
        if "critic" in names:
            fields |= {"returns": samples.returns, "values": samples.values}
        arrays = {name: self._take_rows(name, array, order) for name, array in fields.items()}
        # The learner does not read the fields of networks that other learners compute.
        advantages = arrays.get("advantages", samples.advantages)
        settings = self._settings
        if settings.normalise_advantages == "minibatch":
            advantages = standardise_parts(advantages, settings.minibatch_size)
        return PpoMinibatch(
            observations=arrays["observations"],
            actions=arrays.get("actions", samples.actions),
            log_probs=arrays.get("log_probs", samples.log_probs),
            advantages=advantages,
            returns=arrays.get("returns", samples.returns),
            old_values=arrays.get("values", samples.values),
            clip_range=clip_range,
            clip_range_value=settings.clip_range_value,
            value_weight=settings.value_weight,
            entropy_weight=settings.entropy_weight,
        )

    def _take_rows(self, name: str, array: Array, order: Int64) -> Array:
        """Copy the rows of an array in a new order; the copy is valid until the next epoch."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != array.shape:
            buffer = self._buffers[name] = np.empty_like(array)
        # mode="clip" writes directly to the buffer. New memory would cost more than the copy.
        return np.take(array, order, axis=0, out=buffer, mode="clip")


def standardise(samples: Float32) -> Float32:
    """Standardise samples along the last axis; leave a single sample unchanged."""
    if samples.shape[-1] < 2:
        return samples
    result: Float32 = samples - samples.mean(-1, keepdims=True)
    result /= samples.std(-1, keepdims=True) + np.float32(1e-8)
    return result


def standardise_parts(samples: Float32, size: int) -> Float32:
    """Standardise each group of `size` samples, and any shorter last group."""
    end = len(samples) - len(samples) % size
    parts = standardise(samples[:end].reshape(-1, size)).reshape(-1)
    return np.concatenate([parts, standardise(samples[end:])])


class Samples:
    """The valid samples of a batch, with the critic's estimates."""

    def __init__(self, batch: Batch, rewards: Float64, discount: float) -> None:
        self.batch, self.rewards, self.discount = batch, rewards, discount
        self.observations: Float32 = batch.observations[batch.valid]
        self.actions = batch.actions[batch.valid]
        self.log_probs: Float32 = batch.log_probs[batch.valid]
        self.values = self.advantages = self.returns = np.empty_like(self.log_probs)

    def explained_variance(self) -> float:
        variance = float(self.returns.var())
        residual = float((self.returns - self.values).var())
        share = 1.0 - residual / variance if variance > 0.0 else 0.0
        return share if math.isfinite(share) else 0.0


def compute_discount(settings: PpoSettings, progress: float) -> float:
    """Return the discount, which changes from `discount` to `final_discount`.

    The change starts at the progress `discount_moves_from`; 1 / (1 - discount) changes linearly.
    """
    start = settings.discount_moves_from
    if settings.final_discount is None or progress <= start:
        return settings.discount
    first, last = 1.0 / (1.0 - settings.discount), 1.0 / (1.0 - settings.final_discount)
    fraction = min(1.0, (progress - start) / (1.0 - start))
    return 1.0 - 1.0 / (first + (last - first) * fraction)
