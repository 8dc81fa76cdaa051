"""The same losses as the hand-derived ones, with their gradients by torch's autograd.

Imported only when a recipe asks for this provider, because importing
torch takes seconds. Must not know: optimisers, environments, how batches come about.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rlflame.rollout.distributions import VARIANCE_FLOOR
from rlflame.rollout.spec import Array, Float32

from ..base import Metrics
from ..ppo.loss import Minibatch as PpoMinibatch
from ..reinforce.reinforce import Minibatch as ReinforceMinibatch
from .flat_params import FlatVector
from .network_shape import Network
from .torch_params import Leaves


class _ActorCritic:
    """Both networks as functions of leaf tensors that share the flat vectors' memory."""

    def __init__(
        self, parameters: FlatVector, network: Network, threads: int = 1, device: str = "cpu"
    ) -> None:
        # The recipe's number, never the machine's: sums split otherwise have other last bits.
        torch.set_num_threads(threads)
        self._network = network
        self.leaves = Leaves(parameters, device)

    def outputs(self, prefix: str, observations: Tensor) -> Tensor:
        return self._layer(prefix, self._network.layers - 1, self._latent(prefix, observations))

    def act(self, observations: Tensor, actions: Array) -> tuple[Tensor, Tensor]:
        """Log-density of each row's action, and the entropy of each row's distribution."""
        latent, taken = self._latent("actor", observations), self.leaves.tensor(actions)
        out = self._layer("actor", self._network.layers - 1, latent)
        log_std = self.leaves.tensors.get("actor.log_std")
        if log_std is None:
            return _categorical(out, taken)
        if log_std.dim() == 2:
            return _state_dependent(out, latent.detach(), log_std, taken)
        return _gaussian(out, log_std, taken)

    def values(self, observations: Float32) -> Float32:
        self.leaves.refresh()
        with torch.no_grad():
            found = self.outputs("critic", self.leaves.tensor(observations))[:, 0]
        result: Float32 = found.cpu().numpy()
        return result

    def _latent(self, prefix: str, x: Tensor) -> Tensor:
        """What enters the last layer."""
        for layer in range(self._network.layers - 1):
            x = self._layer(prefix, layer, x)
            x = torch.tanh(x) if self._network.tanh else torch.relu(x)
        return x

    def _layer(self, prefix: str, layer: int, x: Tensor) -> Tensor:
        weight = self.leaves.tensors[f"{prefix}.{layer}.weight"]
        return torch.addmm(self.leaves.tensors[f"{prefix}.{layer}.bias"], x, weight)


def _categorical(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(logits, dim=1)
    log_probs = log_softmax.gather(1, actions[:, None])[:, 0]
    return log_probs, -(log_softmax.exp() * log_softmax).sum(dim=1)


def _gaussian(mean: Tensor, log_std: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    log_volume = log_std.sum() + 0.5 * len(log_std) * math.log(2.0 * math.pi)
    log_probs = -0.5 * ((actions - mean) / log_std.exp()).square().sum(dim=1) - log_volume
    return log_probs, (log_volume + 0.5 * len(log_std)).expand(len(mean))


def _state_dependent(
    mean: Tensor, latent: Tensor, log_std: Tensor, actions: Tensor
) -> tuple[Tensor, Tensor]:
    variance = latent.square() @ (2.0 * log_std).exp() + VARIANCE_FLOOR
    log_volume = 0.5 * (2.0 * math.pi * variance).log()
    log_probs = -0.5 * (actions - mean).square() / variance - log_volume
    return log_probs.sum(dim=1), (log_volume + 0.5).sum(dim=1)


class TorchPpo:
    """The loss of `ppo`."""

    def __init__(
        self, parameters: FlatVector, network: Network, threads: int = 1, device: str = "cpu"
    ) -> None:
        self._networks = _ActorCritic(parameters, network, threads, device)

    def gradient(self, batch: PpoMinibatch, count: int) -> tuple[Float32, Metrics]:
        tensor = self._networks.leaves.tensor
        self._networks.leaves.refresh()
        observations = tensor(batch.observations)
        log_probs, entropies = self._networks.act(observations, batch.actions)
        log_ratio = log_probs - tensor(batch.log_probs)
        ratio, advantages = log_ratio.exp(), tensor(batch.advantages)
        held = ratio.clamp(1.0 - batch.clip_range, 1.0 + batch.clip_range)
        objectives = torch.minimum(ratio * advantages, held * advantages)
        value_losses = self._value_losses(batch, observations)
        total = (
            batch.value_weight * value_losses.sum()
            - objectives.sum()
            - batch.entropy_weight * entropies.sum()
        )
        gradient = self._networks.leaves.gradient_of(total / count)
        with torch.no_grad():
            return gradient, {
                "policy_gradient_loss": -float(objectives.sum()),
                "entropy_loss": -float(entropies.sum()),
                "approx_kl": float((ratio - 1.0 - log_ratio).sum()),
                "clip_fraction": float((held != ratio).sum()),
                "value_loss": float(value_losses.sum()),
            }

    def values(self, observations: Float32) -> Float32:
        return self._networks.values(observations)

    def _value_losses(self, batch: PpoMinibatch, observations: Tensor) -> Tensor:
        values = self._networks.outputs("critic", observations)[:, 0]
        returns = self._networks.leaves.tensor(batch.returns)
        losses = (values - returns).square()
        limit = batch.clip_range_value
        if limit is None:
            return losses
        old = self._networks.leaves.tensor(batch.old_values)
        held = old + (values - old).clamp(-limit, limit)
        return torch.maximum(losses, (held - returns).square())


class TorchReinforce:
    """The loss of `reinforce`."""

    def __init__(
        self, parameters: FlatVector, network: Network, threads: int = 1, device: str = "cpu"
    ) -> None:
        self._networks = _ActorCritic(parameters, network, threads, device)

    def gradient(self, batch: ReinforceMinibatch, count: int) -> tuple[Float32, Metrics]:
        tensor = self._networks.leaves.tensor
        self._networks.leaves.refresh()
        log_probs, entropies = self._networks.act(tensor(batch.observations), batch.actions)
        loss = -(log_probs * tensor(batch.weights)).sum()
        entropy = entropies.sum()
        gradient = self._networks.leaves.gradient_of(
            (loss - batch.entropy_weight * entropy) / count
        )
        return gradient, {"loss": float(loss.detach()), "entropy_loss": -float(entropy.detach())}

    def values(self, observations: Float32) -> Float32:
        return np.zeros(len(observations), np.float32)
