"""Action distributions for learning: log-densities, samples and their gradients.

Arrays have shape `[units, rows]` or `[shards, units, rows]`, as in `mlp.py`.

Sampling heads take the noise as an input, so an action is a differentiable function of the
network's outputs (Kingma and Welling, 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlflame.rollout.distributions import (
    LOG_STD_HIGH,
    LOG_STD_LOW,
    VARIANCE_FLOOR,
    group_actions,
    log_slope_of_tanh,
)
from rlflame.rollout.task import Array, Float32

from .flat_vector import FlatVector
from .mlp import MLP

LOG_TWO_PI = math.log(2.0 * math.pi)
_HALF, _FLOAT_ONE, _TWO = np.float32(0.5), np.float32(1.0), np.float32(2.0)
_MINUS_HALF = np.array(-0.5, np.float32)
#: A sum over rows, or an array with a sum for each shard.
Sum = float | Array


class GaussianHead:
    """Independent Gaussians with one learned log std per action dimension.

    `log_prob` takes the network's outputs and returns the log-density of each row's action.
    `sum_entropy` sums the entropy over the rows of each shard. `backward` takes d(loss)/d(log_prob)
    of each row and one d(loss)/d(entropy) for all rows, and returns d(loss)/d(output).
    """

    def __init__(self, log_std: Float32, log_std_gradient: Float32) -> None:
        self._log_std = log_std
        self._gradient = log_std_gradient
        self._z: Float32 = np.empty((len(log_std), 0), np.float32)
        self._squares = self._z
        self._inverse: Float32 = np.empty((len(log_std), 1), np.float32)
        #: The negative log-density at the mean.
        self._log_volume = 0.0

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        total = float(np.add.reduce(self._log_std))
        self._log_volume = total + 0.5 * len(self._log_std) * LOG_TWO_PI
        self._inverse = np.exp(-self._log_std)[:, None]
        z = actions.mT - out
        z *= self._inverse
        self._z = z
        self._squares = z * z
        result: Float32 = np.add.reduce(self._squares, axis=-2)
        result *= _MINUS_HALF
        result -= np.float32(self._log_volume)
        return result

    def sum_entropy(self) -> Sum:
        *leading, _, rows = self._z.shape
        entropy = rows * (self._log_volume + 0.5 * len(self._log_std))
        return np.full(leading, entropy) if leading else entropy

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        rows, total = d_log_prob, np.add.reduce(d_log_prob, axis=-1)
        if d_log_prob.ndim == 1:
            np.dot(self._squares, d_log_prob, out=self._gradient)
        else:
            rows, total = d_log_prob[:, None], total[:, None]
            shards = zip(self._squares, d_log_prob, self._gradient, strict=True)
            for squares, slopes, gradient in shards:
                np.dot(squares, slopes, out=gradient)
        self._gradient += np.float32(d_entropy * d_log_prob.shape[-1]) - total
        result: Float32 = self._z * rows
        result *= self._inverse
        return result


class CategoricalHead:
    """A softmax distribution over discrete actions."""

    def __init__(self) -> None:
        self._log_softmax: Float32 = np.empty((0, 0), np.float32)
        self._softmax = self._log_softmax
        #: The index of the actions in the outputs. `_grid` is the part of this index that depends
        #: only on the shape of the actions, `_shape`.
        self._index: tuple[Array, ...] = ()
        self._grid: tuple[Array, ...] = ()
        self._shape: tuple[int, ...] = ()

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        logits = out - np.maximum.reduce(out, axis=-2, keepdims=True)
        self._softmax = np.exp(logits)
        total = np.add.reduce(self._softmax, axis=-2, keepdims=True)
        self._softmax /= total
        logits -= np.log(total)
        self._log_softmax = logits
        if self._shape != actions.shape:
            self._shape, self._grid = actions.shape, np.indices(actions.shape, sparse=True)
        *shards, rows = self._grid
        self._index = (*shards, actions, rows)
        result: Float32 = logits[self._index]
        return result

    def sum_entropy(self) -> Sum:
        if self._softmax.ndim == 2:
            return -float(np.vdot(self._softmax, self._log_softmax))
        shards = zip(self._softmax, self._log_softmax, strict=True)
        return np.array([-float(np.vdot(*shard)) for shard in shards])

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        result: Float32 = self._softmax * -d_log_prob[..., None, :]
        result[self._index] += d_log_prob
        if d_entropy:
            entropy_slope = self._softmax * self._log_softmax
            total = np.add.reduce(entropy_slope, axis=-2, keepdims=True)
            entropy_slope -= self._softmax * total
            entropy_slope *= np.float32(d_entropy)
            result -= entropy_slope
        return result


class ChoiceHead:
    """Independent softmax distributions over actions with the same number of values.

    The outputs are `[actions * values, rows]`, and the actions `[rows, actions]`.
    """

    def __init__(self, count: int, size: int) -> None:
        self._count, self._size = count, size
        self._log_softmax: Float32 = np.empty((size, count, 0), np.float32)
        self._softmax, self._index = self._log_softmax, np.empty((size, 1, 0), np.int64)

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        *leading, _, rows = out.shape
        logits = out.reshape(*leading, self._size, self._count, rows)
        logits = logits - np.maximum.reduce(logits, axis=-2, keepdims=True)
        self._softmax = np.exp(logits)
        total = np.add.reduce(self._softmax, axis=-2, keepdims=True)
        self._softmax /= total
        logits -= np.log(total)
        self._log_softmax = logits
        self._index = actions.mT[..., None, :].astype(np.int64)
        terms = np.take_along_axis(logits, self._index, axis=-2)
        result: Float32 = np.add.reduce(terms[..., 0, :], axis=-2)
        return result

    def sum_entropy(self) -> Sum:
        terms = self._softmax * self._log_softmax
        total = -np.add.reduce(terms, axis=(-3, -2, -1), dtype=np.float64)
        return total if total.ndim else float(total)

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        slopes = d_log_prob[..., None, None, :]
        result: Float32 = self._softmax * -slopes
        terms = np.take_along_axis(result, self._index, axis=-2)
        np.put_along_axis(result, self._index, terms + slopes, axis=-2)
        if d_entropy:
            entropy_slope = self._softmax * self._log_softmax
            total = np.add.reduce(entropy_slope, axis=-2, keepdims=True)
            entropy_slope -= self._softmax * total
            entropy_slope *= np.float32(d_entropy)
            result -= entropy_slope
        *leading, _, _, rows = result.shape
        return result.reshape(*leading, self._size * self._count, rows)


class CompositeHead:
    """Independent choices and numbers, whose log-probabilities and entropies add up."""

    def __init__(
        self, counts: Sequence[int], log_std: Float32 | None, log_std_gradient: Float32 | None
    ) -> None:
        self._groups = group_actions(counts)
        self._heads: list[ChoiceHead | GaussianHead] = []
        first = 0
        for group in self._groups:
            if group.count:
                self._heads.append(ChoiceHead(group.count, group.size))
                continue
            assert log_std is not None
            assert log_std_gradient is not None
            numbers = slice(first, first + group.size)
            self._heads.append(GaussianHead(log_std[numbers], log_std_gradient[..., numbers]))
            first += group.size

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        terms = [
            head.log_prob(out[..., group.outputs, :], actions[..., group.columns])
            for group, head in zip(self._groups, self._heads, strict=True)
        ]
        return sum(terms[1:], terms[0])

    def sum_entropy(self) -> Sum:
        return sum(head.sum_entropy() for head in self._heads)

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        parts = [head.backward(d_log_prob, d_entropy) for head in self._heads]
        return np.concatenate(parts, axis=-2)


class SquashedGaussianHead:
    """A squashed Gaussian, whose samples are tanh(mean + std * noise).

    `sample` also returns the log-densities. `backward` takes d(loss)/d(action) of each row and one
    d(loss)/d(log_prob) for all rows. It returns d(loss)/d(output) and, with gSDE,
    d(loss)/d(latent).
    """

    def __init__(
        self, action_size: int, lowest: float = LOG_STD_LOW, highest: float = LOG_STD_HIGH
    ) -> None:
        self._size = action_size
        self.limits = self._lowest, self._highest = lowest, highest
        #: The negative log-density of a standard Gaussian at its mean.
        self.log_volume = 0.5 * action_size * LOG_TWO_PI
        empty: Float32 = np.empty((action_size, 0), np.float32)
        self._actions = self._scaled_noise = self._raw_log_std = empty

    def sample(self, out: Float32, noise: Float32) -> tuple[Float32, Float32]:
        size = self._size
        self._raw_log_std = out[size:]
        log_std: Float32 = np.maximum(self._raw_log_std, self._lowest)
        np.minimum(log_std, self._highest, out=log_std)
        self._scaled_noise = np.exp(log_std)
        self._scaled_noise *= noise
        raw: Float32 = out[:size] + self._scaled_noise
        density = noise * noise
        density *= np.float32(-0.5)
        density -= log_std
        density -= log_slope_of_tanh(raw)
        log_probs: Float32 = np.add.reduce(density, axis=0)
        log_probs -= np.float32(self.log_volume)
        self._actions = np.tanh(raw, out=raw)
        return self._actions, log_probs

    def use_sample(self, actions: Float32, scaled_noise: Float32, raw_log_std: Float32) -> None:
        """Prepare `backward` for actions that were sampled by compiled code."""
        self._actions, self._scaled_noise, self._raw_log_std = actions, scaled_noise, raw_log_std

    def backward(self, d_actions: Float32, d_log_prob: float) -> tuple[Float32, Float32 | None]:
        actions, size = self._actions, self._size
        upstream: Float32 = np.empty((2 * size, actions.shape[1]), np.float32)
        d_raw, d_log_std = upstream[:size], upstream[size:]
        # d(action)/d(raw) is 1 - a^2, and d(log_prob)/d(raw) is 2 a.
        np.multiply(actions, actions, out=d_raw)
        np.subtract(_FLOAT_ONE, d_raw, out=d_raw)
        d_raw *= d_actions
        d_raw += actions * np.float32(2.0 * d_log_prob)
        np.multiply(d_raw, self._scaled_noise, out=d_log_std)
        d_log_std -= np.float32(d_log_prob)
        raw = self._raw_log_std
        d_log_std *= (raw >= self._lowest) & (raw <= self._highest)
        return upstream, None


class GsdeVariance:
    """Computes the gSDE variance of each row and action dimension, and its gradients."""

    def __init__(
        self, latent: Callable[[], Float32], log_std: Float32, log_std_gradient: Float32
    ) -> None:
        self._latent = latent
        self._log_std = log_std
        self._gradient = log_std_gradient
        self._variances: Float32 = np.empty_like(log_std)
        self._units = self._squares = self._total = self._upstream = self._variances

    def log_variance(self) -> Float32:
        """Return the log-variances `[action, rows]` for the latest forward pass."""
        np.exp(self._log_std * _TWO, out=self._variances)
        self._units = self._latent()
        self._squares = self._units * self._units
        self._total = self._variances.T @ self._squares
        self._total += np.float32(VARIANCE_FLOOR)
        result: Float32 = np.log(self._total)
        return result

    def backward(self, d_log_variance: Float32) -> None:
        """Write the gradient with respect to the log standard deviations."""
        self._upstream = d_log_variance / self._total
        np.matmul(self._squares, self._upstream.T, out=self._gradient)
        self._gradient *= self._variances
        self._gradient *= _TWO

    def compute_latent_gradient(self) -> Float32:
        """Return d(loss)/d(latent) through the variance; call it after `backward`."""
        result: Float32 = self._variances @ self._upstream
        result *= self._units
        result *= _TWO
        return result


class GsdeHead:
    """Computes the log-densities of given actions under gSDE (Raffin et al., 2020).

    The variance passes no gradient to the network. Otherwise, the network could change the
    likelihood of actions merely by scaling its hidden units.
    """

    def __init__(self, variance: GsdeVariance) -> None:
        self._variance = variance
        self._z: Float32 = np.empty((0, 0), np.float32)
        self._inverse = self._log_variance = self._z

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        self._log_variance = self._variance.log_variance()
        self._inverse = np.exp(self._log_variance * -_HALF)
        self._z = actions.T - out
        self._z *= self._inverse
        density = self._z * self._z
        density += self._log_variance
        result: Float32 = np.add.reduce(density, axis=0)
        result += np.float32(len(density) * LOG_TWO_PI)
        result *= -_HALF
        return result

    def sum_entropy(self) -> float:
        constant = self._log_variance.size * (1.0 + LOG_TWO_PI)
        return 0.5 * (float(self._log_variance.sum()) + constant)

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        d_log_variance = self._z * self._z
        d_log_variance -= _FLOAT_ONE
        d_log_variance *= d_log_prob
        d_log_variance += np.float32(d_entropy)
        d_log_variance *= _HALF
        self._variance.backward(d_log_variance)
        gradient = self._z * d_log_prob
        gradient *= self._inverse
        return gradient


class SquashedGsdeHead:
    """Samples squashed gSDE actions; the variance passes gradients to the network."""

    def __init__(self, action_size: int, variance: GsdeVariance) -> None:
        self._size = action_size
        self._variance = variance
        self._head = SquashedGaussianHead(action_size, -math.inf, math.inf)

    def sample(self, out: Float32, noise: Float32) -> tuple[Float32, Float32]:
        return self._head.sample(
            np.concatenate([out, self._variance.log_variance() * _HALF]), noise
        )

    def backward(self, d_actions: Float32, d_log_prob: float) -> tuple[Float32, Float32 | None]:
        upstream, _ = self._head.backward(d_actions, d_log_prob)
        self._variance.backward(upstream[self._size :] * _HALF)
        return upstream[: self._size], self._variance.compute_latent_gradient()


Head = GaussianHead | CategoricalHead | GsdeHead | CompositeHead
SamplingHead = SquashedGaussianHead | SquashedGsdeHead


def make_head(
    parameters: FlatVector, gradients: FlatVector, actor: MLP, action_counts: Sequence[int] = ()
) -> Head:
    """Return the distribution that matches the actor's parameters and composite actions."""
    has_std = "actor.log_std" in parameters.shapes
    log_std = parameters["actor.log_std"] if has_std else None
    gradient = gradients["actor.log_std"] if has_std else None
    if action_counts:
        return CompositeHead(action_counts, log_std, gradient)
    if log_std is None or gradient is None:
        return CategoricalHead()
    if log_std.ndim == 2:
        return GsdeHead(GsdeVariance(actor.get_latent, log_std, gradient))
    return GaussianHead(log_std, gradient)


def make_sampling_head(
    parameters: FlatVector, gradients: FlatVector, actor: MLP, action_size: int
) -> SamplingHead:
    """Return the squashed distribution that matches the actor's parameters."""
    if "actor.log_std" not in parameters.shapes:
        return SquashedGaussianHead(action_size)
    log_std, gradient = parameters["actor.log_std"], gradients["actor.log_std"]
    return SquashedGsdeHead(action_size, GsdeVariance(actor.get_latent, log_std, gradient))
