"""The losses of SAC with their gradients by torch's autograd, on the memory of the flat vectors.

Imported only when a recipe asks for this provider. Must not know: replay, optimisers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rlflame.rollout.distributions import LOG_STD_HIGH, LOG_STD_LOW, VARIANCE_FLOOR
from rlflame.rollout.spec import Float32

from ..base import Metrics
from ..networks.batch_norm import BATCH_EPSILON
from ..networks.mlp import LAYER_EPSILON
from ..networks.torch_params import Leaves
from .loss import Minibatch
from .networks import CRITICS, SoftNetworks


class _Lower:
    """The counterpart of `worth.Lower`; values are `[critics, rows, outputs]`."""

    def lowest(self, values: Tensor) -> Tensor:
        return values.min(dim=0).values

    def loss(self, values: Tensor, wanted: Tensor) -> Tensor:
        return 0.5 * (values - wanted).square().sum()

    def of(self, values: Tensor) -> Tensor:
        return values.min(dim=0).values[:, 0]


class _Quantiles:
    """The counterpart of `worth.Quantiles`."""

    def __init__(self, outputs: int, dropped: int) -> None:
        self._outputs, self._dropped = outputs, dropped

    def lowest(self, values: Tensor) -> Tensor:
        together = torch.cat(tuple(values), dim=1).sort(dim=1).values
        # What is not finite has been put last, where it would be left out unseen.
        together[~together[:, -1].isfinite()] = math.nan
        return together[:, : len(values) * (self._outputs - self._dropped)]

    def loss(self, values: Tensor, wanted: Tensor) -> Tensor:
        """Huber's, of every quantile to every wanted value, in the mean."""
        place = torch.arange(self._outputs, dtype=values.dtype, device=values.device)
        fractions = ((place + 0.5) / self._outputs)[:, None]
        apart = wanted[None, :, None, :] - values[..., None]
        far = apart.detach().abs() > 1.0
        huber = torch.where(far, apart.abs() - 0.5, 0.5 * apart.square())
        weight = (fractions - (apart.detach() < 0.0).to(values.dtype)).abs()
        return (weight * huber).mean(dim=(2, 3)).sum()

    def of(self, values: Tensor) -> Tensor:
        return values.mean(dim=(0, 2))


class TorchSac:
    """The counterpart of `NumpySac`."""

    def __init__(self, networks: SoftNetworks, threads: int = 1, device: str = "cpu") -> None:
        # The recipe's number, never the machine's: sums split otherwise have other last bits.
        torch.set_num_threads(threads)
        self._layers, self._tanh = networks.network.layers, networks.network.tanh
        self._standardise = networks.norm == "layer"
        self._size = networks.action_size
        self._worth = (
            _Lower()
            if networks.quantiles == 1
            else _Quantiles(networks.quantiles, networks.dropped)
        )
        self._actor = Leaves(networks.actor, device)
        self._critics = Leaves(networks.critics, device)
        self._targets = Leaves(networks.targets, device)
        self._actions = self._log_probs = torch.empty(0)
        self._next_actions = self._next_log_probs = torch.empty(0)

    def act(self, batch: Minibatch) -> Float32:
        self._actor.refresh()
        noise = self._actor.tensor(batch.noise)
        self._actions, self._log_probs = self._sample(batch.observations, noise[0].T)
        with torch.no_grad():
            drawn = self._sample(batch.next_observations, noise[1].T)
        self._next_actions, self._next_log_probs = drawn
        log_probs: Float32 = self._log_probs.detach().cpu().numpy()
        return log_probs

    def critic_gradient(
        self, batch: Minibatch, entropy_weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        self._critics.refresh()
        values, following = self._both_sides(batch)
        tensor = self._critics.tensor
        soft = self._worth.lowest(following) - entropy_weight * self._next_log_probs[:, None]
        wanted = tensor(batch.rewards)[:, None] + tensor(batch.bootstrap)[:, None] * soft
        gradient = self._critics.gradient_of(self._worth.loss(values, wanted) / count)
        off = values.detach().mean(dim=2) - wanted.mean(dim=1)
        return gradient, {"critic_loss": 0.5 * float(off.square().sum())}

    def _both_sides(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """The critics' values of what was done, and of what follows, which has no gradient."""
        self._targets.refresh()
        with torch.no_grad():
            following = self._values(self._targets, batch.next_observations, self._next_actions)
        taken = self._critics.tensor(batch.actions)
        return self._values(self._critics, batch.observations, taken), following

    def actor_gradient(
        self, batch: Minibatch, entropy_weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        self._critics.refresh()
        values = self._values(self._critics, batch.observations, self._actions)
        loss = (entropy_weight * self._log_probs - self._worth.of(values)).sum()
        gradient = self._actor.gradient_of(loss / count)
        return gradient, {"actor_loss": float(loss.detach())}

    def _sample(self, observations: Float32, noise: Tensor) -> tuple[Tensor, Tensor]:
        latent = self._latent(self._actor, "actor", self._actor.tensor(observations))
        out = self._layer(self._actor, "actor", self._layers - 1, latent)
        mean, log_std = out[:, : self._size], self._log_std(latent, out)
        raw = mean + log_std.exp() * noise
        density = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
        slope = 2.0 * (math.log(2.0) - raw - torch.nn.functional.softplus(-2.0 * raw))
        return torch.tanh(raw), (density - slope).sum(dim=1)

    def _log_std(self, latent: Tensor, out: Tensor) -> Tensor:
        """The second half of the outputs; with gsde, what the latent units make of a parameter."""
        own = self._actor.tensors.get("actor.log_std")
        if own is None:
            return out[:, self._size :].clamp(LOG_STD_LOW, LOG_STD_HIGH)
        return 0.5 * (latent.square() @ (2.0 * own).exp() + VARIANCE_FLOOR).log()

    def _values(self, critics: Leaves, observations: Float32, actions: Tensor) -> Tensor:
        """`[critics, rows, outputs]`."""
        inputs = torch.cat((critics.tensor(observations), actions), dim=1)
        return torch.stack([self._forward(critics, name[:-1], inputs) for name in CRITICS])

    def _forward(self, leaves: Leaves, prefix: str, x: Tensor) -> Tensor:
        latent = self._latent(leaves, prefix, x, self._standardise)
        return self._layer(leaves, prefix, self._layers - 1, latent)

    def _latent(self, leaves: Leaves, prefix: str, x: Tensor, standardise: bool = False) -> Tensor:
        """What enters the last layer."""
        for layer in range(self._layers - 1):
            x = self._layer(leaves, prefix, layer, x)
            if standardise:
                x = torch.nn.functional.layer_norm(x, x.shape[1:], eps=LAYER_EPSILON)
            x = torch.tanh(x) if self._tanh else torch.relu(x)
        return x

    def _layer(self, leaves: Leaves, prefix: str, layer: int, x: Tensor) -> Tensor:
        weight = leaves.tensors[f"{prefix}.{layer}.weight"]
        return torch.addmm(leaves.tensors[f"{prefix}.{layer}.bias"], x, weight)


class TorchJointSac(TorchSac):
    """The counterpart of `NumpyJointSac`."""

    def __init__(self, networks: SoftNetworks, threads: int = 1, device: str = "cpu") -> None:
        super().__init__(networks, threads, device)
        if networks.moments is None:
            raise ValueError("critics without moments")
        self._moments = networks.moments
        self._in_batch = False

    def _both_sides(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        tensor, rows = self._critics.tensor, len(batch.rewards)
        seen = np.concatenate((batch.observations, batch.next_observations))
        actions = torch.cat((tensor(batch.actions), self._next_actions))
        self._in_batch = True
        try:
            values = self._values(self._critics, seen, actions)
        finally:
            self._in_batch = False
        return values[:, :rows], values[:, rows:].detach()

    def _forward(self, leaves: Leaves, prefix: str, x: Tensor) -> Tensor:
        for layer in range(self._layers):
            if layer:
                x = torch.tanh(x) if self._tanh else torch.relu(x)
            x = self._layer(leaves, prefix, layer, self._standard(f"{prefix}.{layer}", x))
        return x

    def _standard(self, layer: str, x: Tensor) -> Tensor:
        names = (f"{layer}.mean", f"{layer}.variance")
        if self._in_batch:
            mean, variance = x.mean(dim=0), x.var(dim=0, unbiased=False)
            for name, moment in zip(names, (mean, variance), strict=True):
                self._moments.latest[name][:] = moment.detach().cpu().numpy()
        else:
            mean, variance = (self._critics.tensor(self._moments.running[name]) for name in names)
        return (x - mean) / (variance + BATCH_EPSILON).sqrt()
