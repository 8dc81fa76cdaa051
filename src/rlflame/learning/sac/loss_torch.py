"""Computes the gradients of SAC's losses with torch autograd.

This module is imported only if a recipe uses torch, because importing torch takes seconds.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rlflame.rollout.distributions import LOG_STD_HIGH, LOG_STD_LOW, VARIANCE_FLOOR
from rlflame.rollout.task import Float32

from ..base import Metrics
from ..networks.mlp import BATCH_EPSILON, BatchMoments
from ..torch_gradients import TorchNetworks
from .loss import SacMinibatch
from .networks import CRITICS, SacNetworks


class _ClippedDoubleQ:
    """The torch counterpart of `ClippedDoubleQ`, with `[critics, rows, outputs]`."""

    def compute_target_values(self, values: Tensor) -> Tensor:
        return values.min(dim=0).values

    def compute_loss(self, values: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (values - target).square().sum()

    def compute_value(self, values: Tensor) -> Tensor:
        # The gradient of `min` would copy numbers from the CPU, which no CUDA graph can capture.
        first, second = values[..., 0].unbind()
        return torch.where((second < first) | second.isnan(), second, first)


class _TruncatedQuantiles:
    """The torch counterpart of `TruncatedQuantiles`."""

    def __init__(self, outputs: int, drop_count: int) -> None:
        self._outputs, self._drop_count = outputs, drop_count

    def compute_target_values(self, values: Tensor) -> Tensor:
        pool = torch.cat(tuple(values), dim=1).sort(dim=1).values
        # NaN and infinity are sorted last and would be dropped unnoticed. `where` is used because
        # an index assignment would make the host wait for a GPU.
        pool = torch.where(pool[:, -1:].isfinite(), pool, math.nan)
        return pool[:, : len(values) * (self._outputs - self._drop_count)]

    def compute_loss(self, values: Tensor, target: Tensor) -> Tensor:
        """Return the sum over critics and rows of the mean quantile Huber loss."""
        place = torch.arange(self._outputs, dtype=values.dtype, device=values.device)
        fractions = ((place + 0.5) / self._outputs)[:, None]
        difference = target[None, :, None, :] - values[..., None]
        is_far = difference.detach().abs() > 1.0
        huber = torch.where(is_far, difference.abs() - 0.5, 0.5 * difference.square())
        weight = (fractions - (difference.detach() < 0.0).to(values.dtype)).abs()
        return (weight * huber).mean(dim=(2, 3)).sum()

    def compute_value(self, values: Tensor) -> Tensor:
        return values.mean(dim=(0, 2))


def make_critic_objective(networks: SacNetworks) -> _ClippedDoubleQ | _TruncatedQuantiles:
    """Return the loss for the outputs of these critics."""
    if networks.quantiles == 1:
        return _ClippedDoubleQ()
    return _TruncatedQuantiles(networks.quantiles, networks.drop_count)


def sample_actions(
    actor: TorchNetworks, observations: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return squashed actions `[rows, actions]` and their log-densities."""
    size = noise.shape[1]
    latent = actor.compute_latent("actor", observations)
    out = actor.compute_outputs("actor", latent)
    parameter = actor.tensors.get("actor.log_std")
    if parameter is None:
        log_std = out[:, size:].clamp(LOG_STD_LOW, LOG_STD_HIGH)
    else:
        log_std = 0.5 * (latent.square() @ (2.0 * parameter).exp() + VARIANCE_FLOOR).log()
    raw = out[:, :size] + log_std.exp() * noise
    density = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
    slope = 2.0 * (math.log(2.0) - raw - torch.nn.functional.softplus(-2.0 * raw))
    return torch.tanh(raw), (density - slope).sum(dim=1)


class TorchSac:
    """The torch counterpart of `NumpySac`."""

    def __init__(self, networks: SacNetworks, threads: int = 1, device: str = "cpu") -> None:
        # The recipe sets the number of threads, because the number affects the order of additions.
        torch.set_num_threads(threads)
        spec = networks.spec
        self._layers = len(spec.hidden) + 1
        self._moments = networks.moments
        self._critic_objective = make_critic_objective(networks)
        self._actor = TorchNetworks(networks.actor, spec, device)
        self._critics = TorchNetworks(networks.critics, spec, device)
        self._targets = TorchNetworks(networks.targets, spec, device)
        self._actions = self._log_probs = torch.empty(0)
        self._next_actions = self._next_log_probs = torch.empty(0)

    def sample_actions(self, batch: SacMinibatch) -> Float32:
        self._actor.refresh()
        noise = self._actor.make_tensor(batch.noise)
        self._actions, self._log_probs = self._sample(batch.observations, noise[0].T)
        with torch.no_grad():
            next_sample = self._sample(batch.next_observations, noise[1].T)
        self._next_actions, self._next_log_probs = next_sample
        log_probs: Float32 = self._log_probs.detach().cpu().numpy()
        return log_probs

    def compute_critic_gradient(
        self, batch: SacMinibatch, entropy_weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        self._critics.refresh()
        values, next_values = self._compute_both_values(batch)
        tensor = self._critics.make_tensor
        soft = (
            self._critic_objective.compute_target_values(next_values)
            - entropy_weight * self._next_log_probs[:, None]
        )
        target = tensor(batch.rewards)[:, None] + tensor(batch.bootstrap)[:, None] * soft
        gradient = self._critics.compute_gradient(
            self._critic_objective.compute_loss(values, target) / count
        )
        mean_error = values.detach().mean(dim=2) - target.mean(dim=1)
        return gradient, {"critic_loss": 0.5 * float(mean_error.square().sum())}

    def _compute_both_values(self, batch: SacMinibatch) -> tuple[Tensor, Tensor]:
        """Return the values of recorded actions, and detached values of next actions."""
        actions, next_actions = self._critics.make_tensor(batch.actions), self._next_actions
        if self._moments is None:
            self._targets.refresh()
            with torch.no_grad():
                next_values = self._compute_values(
                    self._targets, batch.next_observations, next_actions
                )
            return self._compute_values(self._critics, batch.observations, actions), next_values
        observations = np.concatenate((batch.observations, batch.next_observations))
        actions, rows = torch.cat((actions, next_actions)), len(batch.rewards)
        values = self._compute_values(self._critics, observations, actions, uses_batch=True)
        return values[:, :rows], values[:, rows:].detach()

    def compute_actor_gradient(
        self, batch: SacMinibatch, entropy_weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        self._critics.refresh()
        values = self._compute_values(self._critics, batch.observations, self._actions)
        loss = (
            entropy_weight * self._log_probs - self._critic_objective.compute_value(values)
        ).sum()
        gradient = self._actor.compute_gradient(loss / count)
        return gradient, {"actor_loss": float(loss.detach())}

    def _sample(self, observations: Float32, noise: Tensor) -> tuple[Tensor, Tensor]:
        return sample_actions(self._actor, self._actor.make_tensor(observations), noise)

    def _compute_values(
        self,
        critics: TorchNetworks,
        observations: Float32,
        actions: Tensor,
        *,
        uses_batch: bool = False,
    ) -> Tensor:
        """Return the critics' values `[critics, rows, outputs]`.

        If critics standardise their inputs, `uses_batch` selects the moments of these rows instead
        of the running moments.
        """
        inputs = torch.cat((critics.make_tensor(observations), actions), dim=1)
        return torch.stack(
            [self._forward(critics, name[:-1], inputs, uses_batch) for name in CRITICS]
        )

    def _forward(self, critics: TorchNetworks, prefix: str, x: Tensor, uses_batch: bool) -> Tensor:
        for layer in range(self._layers):
            if layer:
                x = critics.apply_activation(x)
            if self._moments is not None:
                x = self._standardise_inputs(self._moments, f"{prefix}.{layer}", x, uses_batch)
            x = critics.apply_layer(prefix, layer, x)
        return x

    def _standardise_inputs(
        self, moments: BatchMoments, layer: str, x: Tensor, uses_batch: bool
    ) -> Tensor:
        names = (f"{layer}.mean", f"{layer}.variance")
        if uses_batch:
            mean, variance = x.mean(dim=0), x.var(dim=0, unbiased=False)
            for name, moment in zip(names, (mean, variance), strict=True):
                moments.latest[name][:] = moment.detach().cpu().numpy()
        else:
            mean, variance = (self._critics.make_tensor(moments.running[name]) for name in names)
        return (x - mean) / (variance + BATCH_EPSILON).sqrt()
