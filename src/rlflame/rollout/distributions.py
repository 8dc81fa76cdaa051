"""The action distributions of policies: categorical, Gaussian, and composites of both.

Arrays have the shape `[width, ...]`, with one row per environment. The result for a row depends
only on that row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from .task import ActionMode, Array, Exploration, Float32, PolicyArrays, PolicySpec

_LOG_TWO = math.log(2.0)
_LOG_TWO_PI = math.log(2.0 * math.pi)
#: Bounds of the log standard deviation of a squashed Gaussian (Haarnoja et al., 2018).
LOG_STD_LOW, LOG_STD_HIGH = -20.0, 2.0
#: Keeps a density finite if all latent units of a state, and therefore its noise, are zero.
VARIANCE_FLOOR = 1e-6
#: The logit of a choice that a mask forbids. Its probability is exactly 0 in float32.
MASKED_LOGIT = np.float32(-1e30)

#: Prepared noise for several steps: arrays `[steps, width, ...]`.
NoiseBlock = tuple[Float32, ...]


def repeat_row(row: Array, width: int) -> Float32:
    """Repeat a row `width` times, because operations on equal shapes are faster."""
    return np.tile(np.asarray(row, np.float32), (width, 1))


def compute_noise_size(spec: PolicySpec, acting: ActionMode = "sample") -> int:
    """Return the number of random numbers that one action requires."""
    if spec.action_kind == "discrete":
        return 1
    if spec.action_kind == "composite":
        return spec.action_size
    is_matrix = acting == "sample" and spec.exploration == "gsde"
    return spec.hidden[-1] * spec.action_size if is_matrix else spec.action_size


def draw_noise(
    spec: PolicySpec, acting: ActionMode, generator: np.random.Generator, steps: int
) -> Float32:
    """Draw noise `[steps, size]`: normal for a sampled Gaussian, otherwise uniform."""
    shape = (steps, compute_noise_size(spec, acting))
    if acting == "sample" and spec.action_kind == "continuous":
        return generator.standard_normal(shape, dtype=np.float32)
    noise: Float32 = generator.random(shape, dtype=np.float32)
    for group in group_actions(spec.action_counts):
        if not group.count:
            columns = noise[:, group.columns]
            columns[...] = generator.standard_normal(columns.shape, dtype=np.float32)
    return noise


@dataclass(frozen=True, slots=True)
class ActionGroup:
    """Neighbouring actions with the same number of values, or numbers if `count` is 0."""

    count: int
    #: The columns of the actions, and the outputs of the network that belong to them.
    columns: slice
    outputs: slice

    @property
    def size(self) -> int:
        """The number of actions."""
        return int(self.columns.stop - self.columns.start)


def group_actions(counts: Sequence[int]) -> list[ActionGroup]:
    """Group composite actions, so that one operation can process all actions of a group."""
    groups: list[ActionGroup] = []
    column = output = 0
    for count, items in groupby(counts):
        size = len(list(items))
        units = size * max(count, 1)
        columns, outputs = slice(column, column + size), slice(output, output + units)
        groups.append(ActionGroup(count, columns, outputs))
        column, output = columns.stop, outputs.stop
    return groups


def find_choice_outputs(spec: PolicySpec) -> Array:
    """Return the indices of the network's outputs that are logits of choices."""
    if spec.action_kind == "discrete":
        return np.arange(spec.action_size)
    groups = [group for group in group_actions(spec.action_counts) if group.count]
    outputs = [np.arange(group.outputs.start, group.outputs.stop) for group in groups]
    return np.concatenate([np.zeros(0, np.int64), *outputs])


class Distribution:
    """Converts the outputs of a policy network to actions.

    A new distribution needs a class in this module and an entry in `_CONTINUOUS`.
    """

    def __init__(self, spec: PolicySpec, arrays: PolicyArrays, latent: Float32) -> None:
        """`latent` is the last hidden layer's buffer, which each forward pass overwrites."""
        self._size = spec.action_size
        #: The bounds of continuous actions.
        self._low = np.asarray(spec.action_low, np.float32)
        self._high = np.asarray(spec.action_high, np.float32)

    def prepare_noise(self, noise: Float32) -> NoiseBlock:
        """Prepare noise `[steps, width, ...]` for `sample`."""
        return (noise,)

    def sample(self, out: Float32, block: NoiseBlock, step: int) -> tuple[Array, Float32]:
        """Return sampled actions for `step` and their log-densities.

        This method may overwrite `out`, and the next forward pass may overwrite the result.
        """
        raise NotImplementedError

    def mode(self, out: Float32) -> Array:
        """Return the deterministic action of each row."""
        raise NotImplementedError

    def sample_uniform(self, noise: Float32) -> tuple[Array, Float32]:
        """Return uniform actions and their log-densities, given numbers in [0, 1)."""
        raise NotImplementedError

    def to_environment(self, actions: Array) -> Array:
        """Convert recorded actions to the actions that environments receive."""
        return actions


def sample_choices(logits: Float32, uniform: Float32) -> tuple[Array, Float32]:
    """Return a choice for each uniform number `[..., 1]`, and all log-probabilities.

    The last axis of `logits` contains the values of a choice.
    """
    log_softmax: Float32 = logits - np.maximum.reduce(logits, axis=-1, keepdims=True)
    log_softmax -= np.log(np.add.reduce(np.exp(log_softmax), axis=-1, keepdims=True))
    cumulative = np.add.accumulate(np.exp(log_softmax), axis=-1)
    # A uniform number may be exactly 0 and must not select an action of probability 0.
    choices = np.add.reduce(cumulative <= uniform, axis=-1, dtype=np.int64)
    if np.maximum.reduce(choices, axis=None) == logits.shape[-1]:
        # After rounding, the sum can be less than 1. A number above it selects the last action of
        # positive probability.
        last_likely = np.add.reduce(cumulative < cumulative[..., -1:], axis=-1, dtype=np.int64)
        np.minimum(choices, last_likely, out=choices)
    return choices, log_softmax


class Categorical(Distribution):
    """A softmax distribution over discrete actions."""

    def __init__(self, spec: PolicySpec, arrays: PolicyArrays, latent: Float32) -> None:
        super().__init__(spec, arrays, latent)
        self._rows = np.arange(spec.width)

    def sample(self, out: Float32, block: NoiseBlock, step: int) -> tuple[Array, Float32]:
        choices, log_softmax = sample_choices(out, block[0][step])
        return choices, log_softmax[self._rows, choices]

    def mode(self, out: Float32) -> Array:
        choices: Array = out.argmax(axis=1)
        return choices

    def sample_uniform(self, noise: Float32) -> tuple[Array, Float32]:
        choices = (noise[:, 0] * self._size).astype(np.int64)
        np.minimum(choices, self._size - 1, out=choices)
        return choices, np.full(len(choices), -math.log(self._size), np.float32)


class _ClippedDistribution(Distribution):
    """A distribution of unbounded actions, which are clipped for the environment."""

    def __init__(self, spec: PolicySpec, arrays: PolicyArrays, latent: Float32) -> None:
        super().__init__(spec, arrays, latent)
        self._lows = repeat_row(self._low, spec.width)
        self._highs = repeat_row(self._high, spec.width)

    def mode(self, out: Float32) -> Array:
        return out.copy()

    def sample_uniform(self, noise: Float32) -> tuple[Array, Float32]:
        spread = self._high - self._low
        volume = -float(np.log(spread, dtype=np.float64).sum())
        return self._low + noise * spread, np.full(len(noise), volume, np.float32)

    def to_environment(self, actions: Array) -> Array:
        rows = len(actions)
        env_actions: Array = np.maximum(actions, self._lows[:rows])
        return np.minimum(env_actions, self._highs[:rows], out=env_actions)


class _SquashedDistribution(Distribution):
    """A distribution of actions in [-1, 1], which are the tanh of unbounded numbers."""

    def __init__(self, spec: PolicySpec, arrays: PolicyArrays, latent: Float32) -> None:
        super().__init__(spec, arrays, latent)
        # Halve first, because the difference between extreme bounds would overflow float32.
        low, high = self._low * np.float32(0.5), self._high * np.float32(0.5)
        self._middle, self._half_range = low + high, high - low

    def mode(self, out: Float32) -> Array:
        actions: Array = np.tanh(out[:, : self._size])
        return actions

    def sample_uniform(self, noise: Float32) -> tuple[Array, Float32]:
        actions = noise * np.float32(2.0) - np.float32(1.0)
        return actions, np.full(len(noise), -self._size * _LOG_TWO, np.float32)

    def to_environment(self, actions: Array) -> Array:
        # Because of rounding, an action may slightly exceed a bound.
        env_actions: Array = self._middle + actions * self._half_range
        np.maximum(env_actions, self._low, out=env_actions)
        return np.minimum(env_actions, self._high, out=env_actions)


class Gaussian(_ClippedDistribution):
    """Normal distributions whose standard deviations do not depend on the observation."""

    def __init__(self, spec: PolicySpec, arrays: PolicyArrays, latent: Float32) -> None:
        super().__init__(spec, arrays, latent)
        log_std = np.ascontiguousarray(arrays["actor.log_std"], dtype=np.float32)
        self._std = np.exp(log_std)
        self._log_density = np.float32(
            -float(np.sum(log_std, dtype=np.float64)) - 0.5 * spec.action_size * _LOG_TWO_PI
        )

    def prepare_noise(self, noise: Float32) -> NoiseBlock:
        log_probs: Float32 = np.add.reduce(noise * noise, axis=2)
        log_probs *= np.float32(-0.5)
        log_probs += self._log_density
        return self._std * noise, log_probs

    def sample(self, out: Float32, block: NoiseBlock, step: int) -> tuple[Array, Float32]:
        offsets, log_probs = block
        return np.add(out, offsets[step], out), log_probs[step]


class SquashedGaussian(_SquashedDistribution):
    """The tanh of a normal distribution whose log std is a network output."""

    def sample(self, out: Float32, block: NoiseBlock, step: int) -> tuple[Array, Float32]:
        noise = block[0][step]
        log_std: Float32 = np.maximum(out[:, self._size :], LOG_STD_LOW)
        np.minimum(log_std, LOG_STD_HIGH, out=log_std)
        spread: Array = np.exp(log_std)
        raw: Array = out[:, : self._size] + spread * noise
        density = noise * noise
        density *= np.float32(-0.5)
        density -= log_std
        density -= log_slope_of_tanh(raw)
        log_probs = np.add.reduce(density, axis=1)
        log_probs -= np.float32(0.5 * self._size * _LOG_TWO_PI)
        return np.tanh(raw), log_probs


class _StateDependentNoise(Distribution):
    """Base class for state-dependent exploration (gSDE; Raffin et al., 2020).

    Each row has a noise matrix `[latent, action]`, which adds the offset latent @ (std * noise) to
    the mean. The offset in each action dimension is normally distributed, with variance latent^2 @
    std^2. As long as a matrix is used, equal states have equal offsets.
    """

    def __init__(self, spec: PolicySpec, arrays: PolicyArrays, latent: Float32) -> None:
        super().__init__(spec, arrays, latent)
        self._std = np.exp(np.ascontiguousarray(arrays["actor.log_std"], dtype=np.float32))
        self._variances = self._std * self._std
        self._latent = latent
        self._matrices = np.zeros((len(latent), *self._std.shape), np.float32)

    def _sample_offsets(self, noise: Float32) -> tuple[Float32, Float32]:
        """Return the offsets from the means, and the log-density of each offset."""
        matrices, latent = self._matrices, self._latent
        np.multiply(noise.reshape(matrices.shape), self._std, out=matrices)
        matrices *= latent[:, :, None]
        offsets: Float32 = np.add.reduce(matrices, axis=1)
        variance: Float32 = np.matmul(latent * latent, self._variances)
        variance += np.float32(VARIANCE_FLOOR)
        density: Float32 = np.log(variance)
        density += offsets * offsets / variance
        density += np.float32(_LOG_TWO_PI)
        density *= np.float32(-0.5)
        return offsets, density


class StateDependentGaussian(_StateDependentNoise, _ClippedDistribution):
    """A normal distribution whose offset from the mean is state-dependent noise."""

    def sample(self, out: Float32, block: NoiseBlock, step: int) -> tuple[Array, Float32]:
        offsets, density = self._sample_offsets(block[0][step])
        return out + offsets, np.add.reduce(density, axis=1)


class StateDependentSquashedGaussian(_StateDependentNoise, _SquashedDistribution):
    """The tanh of a normal distribution with state-dependent noise."""

    def sample(self, out: Float32, block: NoiseBlock, step: int) -> tuple[Array, Float32]:
        raw, density = self._sample_offsets(block[0][step])
        raw += out
        density -= log_slope_of_tanh(raw)
        return np.tanh(raw), np.add.reduce(density, axis=1)


class Composite(Distribution):
    """Independent choices and numbers: one categorical or normal distribution for each.

    A row of actions contains the index of each choice, and the numbers. The log-probabilities add
    up.
    """

    def __init__(self, spec: PolicySpec, arrays: PolicyArrays, latent: Float32) -> None:
        super().__init__(spec, arrays, latent)
        self._groups = group_actions(spec.action_counts)
        log_std = np.asarray(arrays.get("actor.log_std", ()), np.float32)
        self._std = np.exp(log_std)
        #: The negative log-density of the numbers at their means.
        self._log_volume = float(np.sum(log_std, dtype=np.float64))
        self._log_volume += 0.5 * len(log_std) * _LOG_TWO_PI

    def sample(self, out: Float32, block: NoiseBlock, step: int) -> tuple[Array, Float32]:
        noise = block[0][step]
        actions: Float32 = np.empty_like(noise)
        log_probs: Float32 = np.full(len(out), -self._log_volume, np.float32)
        first = 0
        for group in self._groups:
            part, columns = noise[:, group.columns], actions[:, group.columns]
            if group.count:
                choices, log_softmax = sample_choices(
                    self._get_logits(out, group), part[:, :, None]
                )
                columns[...] = choices
                terms = np.take_along_axis(log_softmax, choices[:, :, None], axis=2)
                log_probs += np.add.reduce(terms[:, :, 0], axis=1)
            else:
                std = self._std[first : first + group.size]
                first += group.size
                np.multiply(part, std, out=columns)
                columns += out[:, group.outputs]
                log_probs -= np.float32(0.5) * np.add.reduce(part * part, axis=1)
        return actions, log_probs

    def mode(self, out: Float32) -> Array:
        actions: Float32 = np.empty((len(out), self._size), np.float32)
        for group in self._groups:
            if group.count:
                actions[:, group.columns] = self._get_logits(out, group).argmax(axis=2)
            else:
                actions[:, group.columns] = out[:, group.outputs]
        return actions

    def to_environment(self, actions: Array) -> Array:
        env_actions: Array = np.maximum(actions, self._low)
        return np.minimum(env_actions, self._high, out=env_actions)

    def _get_logits(self, out: Float32, group: ActionGroup) -> Float32:
        """Return the logits of a group, `[rows, actions, values]`."""
        return out[:, group.outputs].reshape(len(out), group.size, group.count)


#: Distributions of continuous actions by exploration and squashing.
_CONTINUOUS: dict[tuple[Exploration, bool], type[Distribution]] = {
    ("independent", False): Gaussian,
    ("independent", True): SquashedGaussian,
    ("gsde", False): StateDependentGaussian,
    ("gsde", True): StateDependentSquashedGaussian,
}


def find_distribution(spec: PolicySpec) -> type[Distribution]:
    """Return the distribution class for this policy spec."""
    if spec.action_kind == "discrete":
        return Categorical
    if spec.action_kind == "composite":
        return Composite
    return _CONTINUOUS[spec.exploration, spec.squash]


def log_slope_of_tanh(raw: Float32) -> Float32:
    """Return log(1 - tanh(x)^2), accurate even where tanh(x) rounds to one.

    The formula is 2 (log 2 - |x| - log1p(e^-2|x|)). It holds for both signs of x, and the
    exponential cannot overflow.
    """
    size = np.abs(raw)
    tail: Float32 = np.exp(size * np.float32(-2.0))
    np.log1p(tail, out=tail)
    tail += size
    np.subtract(np.float32(_LOG_TWO), tail, out=tail)
    tail *= np.float32(2.0)
    return tail
