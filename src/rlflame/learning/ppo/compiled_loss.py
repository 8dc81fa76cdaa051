"""Computes the loss of PPO and its gradient for Gaussian policies in two calls of compiled code."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from rlflame.rollout.task import Float32, PolicySpec

from ..base import Metrics
from ..kernels.library import (
    GaussianBuffers,
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

_BUFFERS = "log_probs", "log_ratio", "ratio", "slope", "objective"
#: Gradients of minibatches with these numbers of rows are compared with those of numpy.
_CHECK_ROWS = 5, 64


class Space:
    """The buffers for a number of rows."""

    def __init__(
        self,
        actor: CompiledWorkspace,
        critic: CompiledWorkspace,
        gaussian: GaussianBuffers,
        rows: int,
    ) -> None:
        actions = gaussian.actions
        self.actor, self.critic = actor.address, critic.address
        matrices: Float32 = np.empty((2, actions, rows), np.float32)
        self.vectors: Float32 = np.empty((len(_BUFFERS), rows), np.float32)
        self.inverse: Float32 = np.empty(actions, np.float32)
        self._arrays = actor, critic, matrices
        self.gaussian = GaussianBuffers(
            actions=actions,
            log_std=gaussian.log_std,
            log_std_gradient=gaussian.log_std_gradient,
            z=get_address(matrices[0]),
            squares=get_address(matrices[1]),
            inverse=get_address(self.inverse),
            **{name: get_address(row) for name, row in zip(_BUFFERS, self.vectors, strict=True)},
        )
        self.head = ctypes.addressof(self.gaussian)
        self.losses = get_address(self.vectors[0])


class CompiledPpo(NumpyPpo):
    """Computes the same bits as `NumpyPpo`."""

    def __init__(self, parameters: FlatVector, spec: PolicySpec, kernels: Kernels) -> None:
        super().__init__(parameters, spec, make_mlp)
        networks, log_std = self._networks, parameters["actor.log_std"]
        self._kernels = kernels
        self._gaussian = GaussianBuffers(
            actions=len(log_std),
            log_std=get_address(log_std),
            log_std_gradient=get_address(networks.gradients["actor.log_std"]),
        )
        #: The part of the log volume that does not depend on the parameters.
        self.log_volume_constant = 0.5 * len(log_std) * LOG_TWO_PI
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
            objective, log_volume, kl, changes = self._sums.tolist()
            entropy = rows * (log_volume + 0.5 * self._gaussian.actions)
            sums |= {
                "policy_gradient_loss": -objective,
                "entropy_loss": -entropy,
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
            return Space(actor, critic, self._gaussian, rows)
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
            target.actions = get_array_address(batch.actions)
            target.log_probs = get_array_address(batch.log_probs)
            target.advantages = get_array_address(batch.advantages)
        if "critic" in networks:
            target.returns = get_array_address(batch.returns)
            target.old_values = get_array_address(batch.old_values)
        target.lowest_ratio = 1.0 - batch.clip_range
        target.highest_ratio = 1.0 + batch.clip_range
        target.policy_scale = -1.0 / count
        target.entropy_slope = -batch.entropy_weight / count * rows
        target.value_scale = 2.0 * batch.value_weight / count
        target.clips_values = batch.clip_range_value is not None
        target.value_limit = batch.clip_range_value or 0.0


def make_ppo(parameters: FlatVector, spec: PolicySpec) -> NumpyPpo:
    """Make a provider that uses the kernels as far as they compute the same bits as numpy."""
    kernels, shapes = load_kernels(), tuple(parameters.shapes.items())
    is_gaussian = spec.action_kind == "continuous" and spec.log_std_shape == (spec.action_size,)
    if kernels is not None and is_gaussian and _has_equal_results(spec, kernels, shapes):
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
        actions = make_check_numbers(2, rows, spec.action_size)
        log_probs, advantages, returns, old_values = make_check_numbers(3, 4, rows)
        for value_limit in (None, 0.2):
            batch = PpoMinibatch(
                observations, actions, log_probs - spec.action_size, advantages, returns,
                old_values, 0.2, value_limit, value_weight=0.5, entropy_weight=0.01,
            )  # fmt: skip
            results = [provider.compute_gradient(batch, rows + 1) for provider in providers]
            first, second = ((gradient.tobytes(), sums) for gradient, sums in results)
            if first != second:
                return False
    return True
