"""PPO whose minibatches stay on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflame.config.algorithms import PpoSettings
from rlflame.rollout.seeding import Role, make_stream
from rlflame.rollout.task import Float64, PolicySpec

from ..base import Batch, Metrics, State
from ..device.graph import Mirror, UpdateGraph
from ..device.observations import DeviceNormaliser
from ..device.optim import DeviceAdam, DeviceGuard, clip, replace_if
from ..networks.flat_vector import FlatVector
from ..torch_gradients import TorchPpo
from .loss import KL_STOP_FACTOR, NETWORKS, LossMeans, PpoMinibatch
from .ppo import Ppo, Samples

#: The sums over samples that the loss reports, in this order.
_SUMS = tuple(name for names in NETWORKS.values() for name in names)
_EPSILON = 1e-8


class DeviceSamples(Samples):
    """The valid samples of a batch, on the device, in buffers that are reused."""

    def __init__(
        self,
        batch: Batch,
        rewards: Float64,
        discount: float,
        mirror: Mirror,
        normaliser: DeviceNormaliser | None,
        previous: DeviceSamples | None,
    ) -> None:
        self.rewards, self.discount = rewards, discount
        self._mirror = mirror
        self.count = batch.steps
        places = self._send(np.flatnonzero(batch.valid))
        observations = {
            "observations": self._send(batch.observations),
            "last_observations": self._send(batch.last_observations),
            "boundary_observations": self._send(batch.boundary_observations),
        }
        if normaliser is not None:
            normaliser.merge(observations["observations"].flatten(0, 1)[places])
            for name, raw in observations.items():
                observations[name] = normaliser.normalise(raw, batch.behaviour)
        self.parts = {
            **{name: self._adapt(tensor) for name, tensor in observations.items()},
            "boundary_index": self._send(batch.boundary_index),
            "terminated": self._send(batch.terminated),
            "truncated": self._send(batch.truncated),
            "rewards": self._send(rewards),
        }
        flat = {
            "observations": self.parts["observations"].flatten(0, 1)[places],
            "actions": self._adapt(self._send(batch.actions).flatten(0, 1)[places]),
            "log_probs": self._adapt(self._send(batch.log_probs).flatten(0, 1)[places]),
        }
        self.places = places
        self.buffers: dict[str, Tensor]
        if previous is not None and previous.count == self.count:
            # A captured graph reads from these addresses.
            self.buffers = previous.buffers
            for name, tensor in flat.items():
                self.buffers[name].copy_(tensor)
            return
        names = ("advantages", "returns", "values")
        empty = {name: mirror.make_zeros(self.count) for name in names}
        order = {"order": mirror.make_zeros(self.count, dtype=torch.int64)}
        self.buffers = {**flat, **empty, **order}

    def explained_variance(self) -> float:
        returns, values = self.buffers["returns"], self.buffers["values"]
        variance, residual = torch.stack(
            [returns.var(correction=0), (returns - values).var(correction=0)]
        ).tolist()
        share = 1.0 - residual / variance if variance > 0.0 else 0.0
        return share if np.isfinite(share) else 0.0

    def _send(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._mirror.device)

    def _adapt(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose float32 numbers have the dtype of the networks."""
        return tensor.to(self._mirror.dtype) if tensor.dtype == torch.float32 else tensor


class DevicePpo(Ppo):
    """PPO, with the weights, the optimizer and the batch on one device.

    The statistics of observations are there too. The host scales rewards and draws the shuffles.
    """

    def __init__(
        self,
        settings: PpoSettings,
        spec: PolicySpec,
        parameters: FlatVector,
        provider: TorchPpo,
        *,
        seed: int,
        columns: int,
        captures: bool = True,
    ) -> None:
        super().__init__(settings, spec, parameters, provider, seed=seed, columns=columns)
        self._networks, self._loss = provider.networks, provider.compute_loss
        self._estimate_values = provider.estimate_values
        values = self._networks.values
        self._mirror = mirror = Mirror(str(values.device), values.dtype)
        self._values = mirror.add_pair(parameters.data, values)
        self._device_adam = DeviceAdam(self._adam, mirror)
        self._device_guard = DeviceGuard(self._guard, mirror)
        self._update_count = mirror.add(self._updates)
        self._device_normaliser: DeviceNormaliser | None = None
        if self._normaliser is not None:
            self._device_normaliser = DeviceNormaliser(self._normaliser, spec, mirror)
        self._captures = captures
        self._samples: DeviceSamples | None = None
        #: For each minibatch size: the graph, and the row numbers from 0 to size - 1.
        self._graphs: dict[int, UpdateGraph] = {}
        self._places: dict[int, Tensor] = {}
        wide = torch.float64
        #: The sums over the samples so far, the number of samples, and the latest gradient's norm.
        self._totals = mirror.make_zeros(len(_SUMS), dtype=wide)
        self._count, self._norm = mirror.make_zeros(dtype=wide), mirror.make_zeros(dtype=wide)
        self._offset, self._epoch, self._stop_epoch = (
            mirror.make_zeros(dtype=torch.int64) for _ in range(3)
        )
        self._is_active = mirror.make_zeros(dtype=torch.bool)
        self._rate, self._clip_range = mirror.make_zeros(dtype=wide), mirror.make_zeros()
        mirror.copy_to_device()

    def get_state(self) -> State:
        self._mirror.copy_to_host()
        return super().get_state()

    def load_state(self, state: Any) -> None:
        super().load_state(state)
        self._mirror.copy_to_device()

    def _make_samples(self, batch: Batch, rewards: Float64, discount: float) -> Samples:
        previous, self._samples = self._samples, None
        self._samples = DeviceSamples(
            batch, rewards, discount, self._mirror, self._device_normaliser, previous
        )
        if previous is None or previous.count != self._samples.count:
            self._graphs.clear()
            self._places.clear()
        return self._samples

    @torch.no_grad()
    def _estimate(self, samples: Samples) -> None:
        assert isinstance(samples, DeviceSamples)
        parts, settings = samples.parts, self._settings
        steps, columns = parts["rewards"].shape
        values = self._estimate_values(parts["observations"].flatten(0, 1)).view(steps, columns)
        last = self._estimate_values(parts["last_observations"])
        next_values = torch.cat([values[1:], last[None]])
        if len(parts["boundary_index"]):
            final_values = self._estimate_values(parts["boundary_observations"])
            next_values[tuple(parts["boundary_index"].T)] = final_values
        wide = values.to(torch.float64)
        advantages = compute_gae(parts, wide, next_values, samples.discount, settings.gae_lambda)
        places, buffers = samples.places, samples.buffers
        flat_values, flat = wide.flatten()[places], advantages.flatten()[places]
        buffers["values"].copy_(flat_values)
        buffers["returns"].copy_(flat + flat_values)
        buffers["advantages"].copy_(flat)
        if settings.normalise_advantages == "batch":
            buffers["advantages"].copy_(standardise(buffers["advantages"]))

    def _run_epochs(self, samples: Samples, learning_rate: float, clip_range: float) -> Metrics:
        assert isinstance(samples, DeviceSamples)
        settings, size, count = self._settings, self._settings.minibatch_size, samples.count
        self._rate.fill_(learning_rate)
        self._clip_range.fill_(clip_range)
        self._stop_epoch.fill_(settings.epochs)
        self._is_active.fill_(True)
        for tensor in (self._totals, self._count, self._norm):
            tensor.zero_()
        orders = np.stack([self._make_order(epoch, count) for epoch in range(settings.epochs)])
        all_orders = torch.from_numpy(orders).to(self._mirror.device)
        for epoch in range(settings.epochs):
            if epoch and settings.recompute_advantages:
                self._estimate(samples)
            samples.buffers["order"].copy_(all_orders[epoch])
            self._epoch.fill_(epoch)
            self._offset.zero_()
            for start in range(0, count, size):
                self._run_update(samples, min(size, count - start))
        self._mirror.copy_to_host()
        self._device_guard.check()
        sums = dict(zip(_SUMS, self._totals.tolist(), strict=True))
        means = LossMeans(settings)
        if total := int(self._count):
            means.add(total, sums, float(self._norm))
        return means.make_metrics(int(self._stop_epoch))

    def _make_order(self, epoch: int, count: int) -> Any:
        stream = make_stream(self._seed, Role.SHUFFLE, self._iterations.value, epoch)
        return stream.permutation(count)

    def _run_update(self, samples: DeviceSamples, size: int) -> None:
        """Learn from the next minibatch; the last one of an epoch may be smaller."""
        graph = self._graphs.get(size)
        if graph is None:
            graph = UpdateGraph(self._mirror.device, captures=self._captures)
            self._graphs[size] = graph
            self._places[size] = torch.arange(size, device=self._mirror.device)
        update = partial(self._learn, samples.buffers, self._places[size])
        graph.run(update, self._list_state())

    def _learn(self, buffers: dict[str, Tensor], places: Tensor) -> None:
        """Take one optimizer step, unless the gradient is not finite or the KL limit is reached."""
        settings, count = self._settings, len(places)
        loss, sums = self._loss(self._select(buffers, self._offset + places))
        gradient = self._networks.compute_device_gradient(loss / count)
        with torch.no_grad():
            norm = gradient.square().sum().sqrt()
            is_counted = self._device_guard.compute_mask(norm, list(sums.values()), self._is_active)
            totals = torch.stack([sums[name].to(torch.float64) for name in _SUMS])
            replace_if(is_counted, self._totals, self._totals + totals)
            self._count += is_counted * count
            replace_if(is_counted, self._norm, norm)
            if settings.target_kl is not None:
                limit = count * KL_STOP_FACTOR * settings.target_kl
                is_at_limit = is_counted & (sums["approx_kl"] > limit)
                replace_if(is_at_limit, self._stop_epoch, self._epoch)
                self._is_active &= ~is_at_limit
            mask = is_counted & self._is_active
            gradient = clip(gradient, norm, settings.max_gradient_norm)
            self._device_adam.step(self._values, gradient, self._rate, mask)
            self._update_count += mask
            self._offset += count

    def _select(self, buffers: dict[str, Tensor], places: Tensor) -> PpoMinibatch:
        rows = buffers["order"].index_select(0, places)
        settings = self._settings
        arrays: dict[str, Any] = {
            name: tensor.index_select(0, rows)
            for name, tensor in buffers.items()
            if name not in ("order", "values")
        }
        if settings.normalise_advantages == "minibatch":
            arrays["advantages"] = standardise(arrays["advantages"])
        clip_range: Any = self._clip_range
        return PpoMinibatch(
            **arrays,
            old_values=buffers["values"].index_select(0, rows),  # type: ignore[arg-type]
            clip_range=clip_range,
            clip_range_value=settings.clip_range_value,
            value_weight=settings.value_weight,
            entropy_weight=settings.entropy_weight,
        )

    def _list_state(self) -> list[Tensor]:
        sums = [
            self._totals,
            self._count,
            self._norm,
            self._offset,
            self._stop_epoch,
            self._is_active,
        ]
        return [*self._mirror.tensors, *self._device_guard.tensors, *sums]


def standardise(samples: Tensor) -> Tensor:
    """Standardise the samples; leave a single sample unchanged."""
    if len(samples) < 2:
        return samples
    return (samples - samples.mean()) / (samples.std(correction=0) + _EPSILON)


def compute_gae(
    parts: dict[str, Tensor],
    values: Tensor,
    next_values: Tensor,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """Compute the estimates of `buffers.rollout_buffer.compute_gae`, in log2(steps) passes."""
    terminated, truncated = parts["terminated"], parts["truncated"]
    following = torch.where(terminated, 0.0, next_values.to(torch.float64))
    result = parts["rewards"] + discount * following - values
    decay = (~(terminated | truncated)).to(torch.float64) * (discount * gae_lambda)
    distance = 1
    while distance < len(result):
        # Each row is now a sum over `distance` steps; add the sum over the steps that follow.
        next_terms, next_decay = torch.zeros_like(result), torch.zeros_like(decay)
        next_terms[:-distance] = decay[:-distance] * result[distance:]
        next_decay[:-distance] = decay[:-distance] * decay[distance:]
        result, decay, distance = result + next_terms, next_decay, 2 * distance
    return result
