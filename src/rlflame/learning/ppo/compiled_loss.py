"""Computes the loss of PPO and its gradient in two calls of compiled code.

The actions are independent Gaussian numbers or a single choice.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from rlflame.rollout.task import Array, Float32, PolicySpec

from ..base import Metrics
from ..kernels.library import (
    DistributionBuffers,
    Kernels,
    MinibatchFields,
    get_address,
    get_array_address,
    load_kernels,
    make_check_numbers,
)
from ..networks.compiled_mlp import CompiledWorkspace, make_mlp
from ..networks.flat_vector import FlatVector
from ..networks.heads import LOG_TWO_PI
from ..parallel.process_group import Shard
from ..parallel.units import ShardGradients
from .loss import NETWORKS, NumpyPpo, PpoMinibatch, PpoProvider

_VECTORS = "log_probs", "log_ratio", "ratio", "slope", "objective"
_GAUSSIAN_MATRICES = "z", "squares"
_CHOICE_MATRICES = "softmax", "log_softmax", "upstream", "terms"
#: Gradients of minibatches with these numbers of rows are compared with those of numpy.
_CHECK_ROWS = 5, 64


class Space:
    """The buffers for a number of rows."""

    def __init__(
        self,
        actor: CompiledWorkspace,
        critic: CompiledWorkspace,
        distribution: DistributionBuffers,
        rows: int,
    ) -> None:
        actions = distribution.actions
        self.actor, self.critic = actor.address, critic.address
        names = _CHOICE_MATRICES if distribution.is_choice else _GAUSSIAN_MATRICES
        matrices: Float32 = np.empty((len(names), actions, rows), np.float32)
        vectors: Float32 = np.empty((len(_VECTORS), rows), np.float32)
        inverse: Float32 = np.empty(actions, np.float32)
        self._arrays = actor, critic, matrices, vectors, inverse
        self.distribution = DistributionBuffers.from_buffer_copy(distribution)
        self.distribution.inverse = get_address(inverse)
        for name, array in [
            *zip(names, matrices, strict=True),
            *zip(_VECTORS, vectors, strict=True),
        ]:
            setattr(self.distribution, name, get_address(array))
        self.head = ctypes.addressof(self.distribution)
        self.losses = get_address(vectors[0])


class CompiledPpo(NumpyPpo):
    """Computes the same bits as `NumpyPpo`."""

    def __init__(self, parameters: FlatVector, spec: PolicySpec, kernels: Kernels) -> None:
        super().__init__(parameters, spec, make_mlp)
        self._kernels = kernels
        self._distribution = DistributionBuffers(
            is_choice=spec.action_kind == "discrete", actions=spec.action_size
        )
        if not self._distribution.is_choice:
            gradients = self._networks.gradients
            self._distribution.log_std = get_address(parameters["actor.log_std"])
            self._distribution.log_std_gradient = get_address(gradients["actor.log_std"])
        #: The part of the log volume that does not depend on the parameters.
        self.log_volume_constant = 0.5 * spec.action_size * LOG_TWO_PI
        self._space: Space | None = None
        self._rows = 0
        self._minibatch = MinibatchFields()
        self._address = ctypes.addressof(self._minibatch)
        self._sums = np.zeros(4)
        self._sums_address = get_address(self._sums)

    def compute_gradient(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str] = tuple(NETWORKS)
    ) -> tuple[Float32, Metrics]:
        rows = len(minibatch.returns)
        space = self.prepare_space(rows)
        if space is None:
            return super().compute_gradient(minibatch, count, networks)
        self.write_minibatch(self._minibatch, minibatch, rows, count, networks)
        sums: Metrics = {}
        if "actor" in networks:
            self._kernels.compute_policy_gradient(
                space.actor, space.head, self._address, self.log_volume_constant, self._sums_address
            )
            objective, entropy_loss, kl, changes = self._sums.tolist()
            sums |= {
                "policy_gradient_loss": -objective,
                "entropy_loss": entropy_loss,
                "approx_kl": kl,
                "clip_fraction": changes,
            }
        if "critic" in networks:
            sums["value_loss"] = self._kernels.compute_value_gradient(
                space.critic, self._address, space.losses
            )
        return self._networks.gradients.data, sums

    def compute_shards(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str], shards: Sequence[Shard]
    ) -> Iterator[ShardGradients]:
        # A call costs so little that a common pass of several shards would not be faster.
        return PpoProvider.compute_shards(self, minibatch, count, networks, shards)

    @property
    def gradient(self) -> Float32:
        return self._networks.gradients.data

    def prepare_space(self, rows: int) -> Space | None:
        """Return the buffers for a number of rows, or None if the kernels cannot compute it."""
        if rows != self._rows:
            self._space, self._rows = self._make_space(rows), rows
        return self._space

    def _make_space(self, rows: int) -> Space | None:
        networks = self._networks.actor.network, self._networks.critic
        actor, critic = (network.prepare_workspace(rows) for network in networks)
        if isinstance(actor, CompiledWorkspace) and isinstance(critic, CompiledWorkspace):
            return Space(actor, critic, self._distribution, rows)
        return None

    def write_minibatch(
        self,
        target: MinibatchFields,
        batch: PpoMinibatch,
        rows: int,
        count: int,
        networks: Sequence[str],
    ) -> None:
        """Write the addresses of samples, and the coefficients for a minibatch or shard.

        The minibatch has `count` rows, of which `rows` are in the shard.
        """
        target.observations = get_array_address(batch.observations)
        if "actor" in networks:
            target.actions = self._find_actions(batch.actions)
            target.log_probs = get_array_address(batch.log_probs)
            target.advantages = get_array_address(batch.advantages)
        if "critic" in networks:
            target.returns = get_array_address(batch.returns)
            target.old_values = get_array_address(batch.old_values)
        target.lowest_ratio = 1.0 - batch.clip_range
        target.highest_ratio = 1.0 + batch.clip_range
        target.policy_scale = -1.0 / count
        target.entropy_slope = -batch.entropy_weight / count
        if not self._distribution.is_choice:
            target.entropy_slope = -batch.entropy_weight / count * rows
        target.value_scale = 2.0 * batch.value_weight / count
        target.clips_values = batch.clip_range_value is not None
        target.value_limit = batch.clip_range_value or 0.0

    def _find_actions(self, actions: Array) -> int:
        """Return the address of the actions; raise IndexError if a choice is out of range."""
        if not self._distribution.is_choice:
            return get_array_address(actions)
        if len(actions) and not 0 <= actions.min() <= actions.max() < self._spec.action_size:
            raise IndexError(f"an action is not between 0 and {self._spec.action_size - 1}")
        return get_array_address(actions, np.int64)


def make_check_actions(spec: PolicySpec, rows: int) -> Array:
    """Return varied actions, to compare results of the kernels and of numpy."""
    if spec.action_kind == "discrete":
        return np.arange(rows, dtype=np.int64) % spec.action_size
    return make_check_numbers(2, rows, spec.action_size)


def make_ppo(parameters: FlatVector, spec: PolicySpec) -> NumpyPpo:
    """Make a provider that uses the kernels as far as they compute the same bits as numpy."""
    kernels, shapes = load_kernels(), tuple(parameters.shapes.items())
    if spec.action_kind == "continuous":
        is_known = spec.log_std_shape == (spec.action_size,)
    else:
        is_known = spec.action_kind == "discrete" and not spec.mask_size
    if kernels is not None and is_known and _has_equal_results(spec, kernels, shapes):
        return CompiledPpo(parameters, spec, kernels)
    return NumpyPpo(parameters, spec, make_mlp)


@functools.cache
def _has_equal_results(
    spec: PolicySpec, kernels: Kernels, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> bool:
    """Return whether the kernels and numpy compute the same bits for varied numbers."""
    parameters = FlatVector(dict(shapes))
    parameters.data[:] = np.float32(0.1) * make_check_numbers(0, len(parameters.data))
    providers = NumpyPpo(parameters, spec), CompiledPpo(parameters, spec, kernels)
    for rows in _CHECK_ROWS:
        observations = make_check_numbers(1, rows, spec.observation_size)
        actions = make_check_actions(spec, rows)
        log_probs, advantages, returns, old_values = make_check_numbers(3, 4, rows)
        for value_limit, entropy_weight in ((None, 0.0), (0.2, 0.01)):
            batch = PpoMinibatch(
                observations, actions, log_probs - spec.action_size, advantages, returns,
                old_values, 0.2, value_limit, value_weight=0.5, entropy_weight=entropy_weight,
            )  # fmt: skip
            results = [provider.compute_gradient(batch, rows + 1) for provider in providers]
            first, second = ((gradient.tobytes(), sums) for gradient, sums in results)
            if first != second:
                return False
    return True
