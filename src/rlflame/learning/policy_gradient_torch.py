"""The losses of PPO and REINFORCE with their gradients by torch's autograd.

Imported only when a recipe asks for this provider, because importing torch takes seconds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlflame.rollout.distributions import VARIANCE_FLOOR
from rlflame.rollout.task import Array, Float32

from .base import Metrics
from .networks.flat_vector import FlatVector, NetworkShape
from .networks.torch_networks import TorchNetworks
from .ppo.loss import PpoMinibatch
from .reinforce.reinforce import ReinforceMinibatch


class _TorchProvider:
    """The networks of an on-policy algorithm."""

    def __init__(
        self, parameters: FlatVector, network: NetworkShape, threads: int = 1, device: str = "cpu"
    ) -> None:
        # The recipe's number, never the machine's: sums split otherwise have other last bits.
        torch.set_num_threads(threads)
        self._networks = TorchNetworks(parameters, network, device)

    def _evaluate_actions(self, observations: Tensor, actions: Array) -> tuple[Tensor, Tensor]:
        """Log-density of each row's action, and the entropy of each row's distribution."""
        latent = self._networks.compute_latent("actor", observations)
        action_tensor = self._networks.make_tensor(actions)
        out = self._networks.compute_outputs("actor", latent)
        log_std = self._networks.tensors.get("actor.log_std")
        if log_std is None:
            return _evaluate_categorical(out, action_tensor)
        if log_std.dim() == 2:
            return _evaluate_gsde(out, latent.detach(), log_std, action_tensor)
        return _evaluate_gaussian(out, log_std, action_tensor)


def _evaluate_categorical(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(logits, dim=1)
    log_probs = log_softmax.gather(1, actions[:, None])[:, 0]
    return log_probs, -(log_softmax.exp() * log_softmax).sum(dim=1)


def _evaluate_gaussian(mean: Tensor, log_std: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    log_volume = log_std.sum() + 0.5 * len(log_std) * math.log(2.0 * math.pi)
    log_probs = -0.5 * ((actions - mean) / log_std.exp()).square().sum(dim=1) - log_volume
    return log_probs, (log_volume + 0.5 * len(log_std)).expand(len(mean))


def _evaluate_gsde(
    mean: Tensor, latent: Tensor, log_std: Tensor, actions: Tensor
) -> tuple[Tensor, Tensor]:
    variance = latent.square() @ (2.0 * log_std).exp() + VARIANCE_FLOOR
    log_volume = 0.5 * (2.0 * math.pi * variance).log()
    log_probs = -0.5 * (actions - mean).square() / variance - log_volume
    return log_probs.sum(dim=1), (log_volume + 0.5).sum(dim=1)


class TorchPpo(_TorchProvider):
    """The counterpart of `NumpyPpo`."""

    def compute_gradient(self, batch: PpoMinibatch, count: int) -> tuple[Float32, Metrics]:
        tensor = self._networks.make_tensor
        self._networks.refresh()
        observations = tensor(batch.observations)
        log_probs, entropies = self._evaluate_actions(observations, batch.actions)
        log_ratio = log_probs - tensor(batch.log_probs)
        ratio, advantages = log_ratio.exp(), tensor(batch.advantages)
        clipped_ratio = ratio.clamp(1.0 - batch.clip_range, 1.0 + batch.clip_range)
        objectives = torch.minimum(ratio * advantages, clipped_ratio * advantages)
        value_losses = self._compute_value_losses(batch, observations)
        total = (
            batch.value_weight * value_losses.sum()
            - objectives.sum()
            - batch.entropy_weight * entropies.sum()
        )
        gradient = self._networks.compute_gradient(total / count)
        with torch.no_grad():
            return gradient, {
                "policy_gradient_loss": -float(objectives.sum()),
                "entropy_loss": -float(entropies.sum()),
                "approx_kl": float((ratio - 1.0 - log_ratio).sum()),
                "clip_fraction": float((clipped_ratio != ratio).sum()),
                "value_loss": float(value_losses.sum()),
            }

    def compute_values(self, observations: Float32) -> Float32:
        self._networks.refresh()
        with torch.no_grad():
            values = self._compute_values(self._networks.make_tensor(observations))
        result: Float32 = values.cpu().numpy()
        return result

    def _compute_values(self, observations: Tensor) -> Tensor:
        latent = self._networks.compute_latent("critic", observations)
        return self._networks.compute_outputs("critic", latent)[:, 0]

    def _compute_value_losses(self, batch: PpoMinibatch, observations: Tensor) -> Tensor:
        values = self._compute_values(observations)
        returns = self._networks.make_tensor(batch.returns)
        losses = (values - returns).square()
        limit = batch.clip_range_value
        if limit is None:
            return losses
        old = self._networks.make_tensor(batch.old_values)
        clipped_values = old + (values - old).clamp(-limit, limit)
        return torch.maximum(losses, (clipped_values - returns).square())


class TorchReinforce(_TorchProvider):
    """The counterpart of `NumpyReinforce`."""

    def compute_gradient(self, batch: ReinforceMinibatch, count: int) -> tuple[Float32, Metrics]:
        tensor = self._networks.make_tensor
        self._networks.refresh()
        log_probs, entropies = self._evaluate_actions(tensor(batch.observations), batch.actions)
        loss = -(log_probs * tensor(batch.weights)).sum()
        entropy = entropies.sum()
        gradient = self._networks.compute_gradient((loss - batch.entropy_weight * entropy) / count)
        return gradient, {"loss": float(loss.detach()), "entropy_loss": -float(entropy.detach())}
