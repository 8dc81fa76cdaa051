"""REINFORCE whose updates run on one device."""

from __future__ import annotations

from typing import Any

import torch

from rlflame.config.algorithms import ReinforceSettings
from rlflame.rollout.task import Array, Float64, PolicySpec

from ..base import Batch, Metrics, State
from ..device.graph import Mirror
from ..device.observations import DeviceNormaliser
from ..device.optim import DeviceAdam, DeviceGuard, clip
from ..networks.flat_vector import FlatVector
from ..torch_gradients import TorchReinforce
from .reinforce import Reinforce, ReinforceMinibatch


class DeviceReinforce(Reinforce):
    """REINFORCE, with the weights, the optimizer and the batch on one device.

    The number of samples differs from batch to batch, so no update is captured as a CUDA graph.
    """

    def __init__(
        self,
        settings: ReinforceSettings,
        spec: PolicySpec,
        parameters: FlatVector,
        provider: TorchReinforce,
    ) -> None:
        super().__init__(settings, spec, parameters, provider)
        self._networks, self._compute_loss = provider.networks, provider.compute_loss
        values = self._networks.values
        self._mirror = mirror = Mirror(str(values.device), values.dtype)
        self._values = mirror.add_pair(parameters.data, values)
        self._device_adam = DeviceAdam(self._adam, mirror)
        self._device_guard = DeviceGuard(self._guard, mirror)
        self._update_count = mirror.add(self._updates)
        self._device_normaliser: DeviceNormaliser | None = None
        self._statistics: tuple[Array, ...] = ()
        if self._normaliser is not None:
            self._device_normaliser = DeviceNormaliser(self._normaliser, spec, mirror)
            self._statistics = self._device_normaliser.hosts
        self._true = mirror.make_zeros(dtype=torch.bool).fill_(True)
        mirror.copy_to_device()

    def get_state(self) -> State:
        self._mirror.copy_to_host()
        return super().get_state()

    def load_state(self, state: Any) -> None:
        super().load_state(state)
        self._mirror.copy_to_device()

    def _take_step(
        self, batch: Batch, weights: Float64, count: int, learning_rate: float
    ) -> tuple[Metrics, float] | None:
        valid = batch.valid
        observations: Any = torch.from_numpy(batch.observations[valid]).to(self._mirror.device)
        if self._device_normaliser is not None:
            self._device_normaliser.merge(observations)
            observations = self._device_normaliser.normalise(observations, batch.behaviour)
        minibatch = ReinforceMinibatch(
            observations.to(self._mirror.dtype),
            self._send(batch.actions[valid]),
            self._send(weights[valid]),
            self._settings.entropy_weight,
        )
        loss, sums = self._compute_loss(minibatch)
        gradient = self._networks.compute_device_gradient(loss / count)
        with torch.no_grad():
            norm = gradient.square().sum().sqrt()
            mask = self._device_guard.compute_mask(norm, list(sums.values()), self._true)
            gradient = clip(gradient, norm, self._settings.max_gradient_norm)
            rate = self._mirror.make_zeros(dtype=torch.float64).fill_(learning_rate)
            self._device_adam.step(self._values, gradient, rate, mask)
            self._update_count += mask
            numbers = torch.stack([norm, *sums.values()]).tolist()
        first_update = self._updates.value
        self._mirror.copy_to_host(
            self._parameters.data, self._updates, self._guard.counts, *self._statistics
        )
        self._device_guard.check()
        if self._updates.value == first_update:
            return None
        return dict(zip(sums, numbers[1:], strict=True)), numbers[0]

    def _send(self, array: Array) -> Any:
        """Return the array as a tensor on the device, floats with the mirror's dtype."""
        tensor = torch.from_numpy(array)
        dtype = self._mirror.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self._mirror.device, dtype)
