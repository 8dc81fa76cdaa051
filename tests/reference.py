"""A reference implementation of PPO with torch's modules in float64.

It follows the formulas of the papers and uses torch.nn.functional, torch.distributions and
torch.optim. It shares only the order of shuffled samples with the learner.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch.distributions import Categorical, Independent, Normal

from rlflame.rollout.seeding import Role, make_stream


def tensors(parameters, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Copy the arrays of a flat vector into leaf tensors."""
    return {
        name: torch.tensor(parameters[name].copy(), dtype=dtype, requires_grad=True)
        for name in parameters.shapes
    }


def flat(values: dict[str, torch.Tensor], gradients: bool = False) -> np.ndarray:
    """Concatenate tensors in the order of the flat vector."""
    chosen = [v.grad if gradients else v for v in values.values()]
    return torch.cat([v.detach().reshape(-1) for v in chosen]).numpy()


def outputs(
    weights: dict[str, torch.Tensor], prefix: str, x, tanh: bool, last: bool = True
) -> torch.Tensor:
    """The outputs of the last layer, or of the last hidden layer."""
    layers = sum(name.startswith(f"{prefix}.") and name.endswith(".weight") for name in weights)
    x = torch.as_tensor(np.array(x), dtype=weights[f"{prefix}.0.weight"].dtype)
    for layer in range(layers if last else layers - 1):
        weight, bias = weights[f"{prefix}.{layer}.weight"], weights[f"{prefix}.{layer}.bias"]
        x = torch.nn.functional.linear(x, weight.T, bias)
        if layer < layers - 1:
            x = torch.tanh(x) if tanh else torch.nn.functional.relu(x)
    return x


def distribution(weights: dict[str, torch.Tensor], x, tanh: bool):
    out = outputs(weights, "actor", x, tanh)
    if "actor.log_std" in weights and weights["actor.log_std"].dim() == 2:
        # The noise of an action is a sum over units h of h * N(0, std^2), so the variances add up.
        units = outputs(weights, "actor", x, tanh, last=False).detach()
        parts = units[:, :, None] * weights["actor.log_std"].exp()
        deviation = torch.linalg.vector_norm(parts, dim=1).square().add(1e-6).sqrt()
        return Independent(Normal(out, deviation), 1)
    if "actor.log_std" in weights:
        return Independent(Normal(out, weights["actor.log_std"].exp().expand_as(out)), 1)
    return Categorical(logits=out)


def ppo_losses(weights: dict[str, torch.Tensor], batch, tanh: bool) -> dict[str, torch.Tensor]:
    """The surrogate objective, squared value error, entropy and ratio of each sample."""
    dtype = weights["actor.0.weight"].dtype

    def wide(array):
        return torch.as_tensor(np.array(array), dtype=dtype)

    policy = distribution(weights, batch.observations, tanh)
    ratio = (policy.log_prob(torch.as_tensor(batch.actions)) - wide(batch.log_probs)).exp()
    gain = wide(batch.advantages)
    bounded = torch.clamp(ratio, 1 - batch.clip_range, 1 + batch.clip_range)
    values = outputs(weights, "critic", batch.observations, tanh).squeeze(-1)
    errors = (values - wide(batch.returns)) ** 2
    if batch.clip_range_value is not None:
        old, limit = wide(batch.old_values), batch.clip_range_value
        near = old + torch.clamp(values - old, -limit, limit)
        errors = torch.max(errors, (near - wide(batch.returns)) ** 2)
    return {
        "objective": torch.min(ratio * gain, bounded * gain),
        "value_error": errors,
        "entropy": policy.entropy(),
        "ratio": ratio,
    }


def ppo_loss(losses: dict[str, torch.Tensor], batch) -> torch.Tensor:
    return (
        -losses["objective"].mean()
        + batch.value_weight * losses["value_error"].mean()
        - batch.entropy_weight * losses["entropy"].mean()
    )


class ReferencePpo:
    """All of PPO's update, sample by sample in float64, with Adam from torch.optim.

    It takes only the settings, the order of shuffled samples and the batch from rlflame.
    """

    def __init__(self, ppo, spec, parameters, *, seed: int, columns: int) -> None:
        self.ppo, self.spec, self.seed = ppo, spec, seed
        self.tanh = spec.activation == "tanh"
        self.weights = tensors(parameters)
        self.adam = torch.optim.Adam(self.weights.values(), eps=ppo.adam_epsilon)
        self.iteration, self.discount, self.rate = 0, ppo.discount, ppo.learning_rate
        self.observations_seen: list[np.ndarray] = []
        self.returns_seen: list[float] = []
        self.return_so_far = [0.0] * columns

    def update(self, batch, progress: float) -> dict[str, float]:
        ppo = self.ppo
        left = 1.0 - progress
        rate = self.rate * (left if ppo.anneal_learning_rate else 1.0)
        clip_range = ppo.clip_range * (left if ppo.anneal_clip_range else 1.0)
        self.adam.param_groups[0]["lr"] = rate
        if ppo.final_discount is not None:
            begins = ppo.discount_moves_from
            moved = max(0.0, (progress - begins) / (1 - begins))
            ahead = (1 - moved) / (1 - ppo.discount) + moved / (1 - ppo.final_discount)
            self.discount = (ahead - 1) / ahead
        rewards = batch.rewards * self.reward_factor(batch)
        places = [(t, c) for t, c in np.ndindex(batch.valid.shape) if batch.valid[t, c]]
        observations = np.array([self.seen(batch, batch.observations[p]) for p in places])
        report = []
        for epoch in range(ppo.epochs):
            if epoch == 0 or ppo.recompute_advantages:
                values, gains = self.estimate(batch, rewards)
                old_values = np.array([values[p] for p in places])
                gain = np.array([gains[p] for p in places])
                targets = gain + old_values
                if epoch == 0:
                    explained = 1.0 - np.var(targets - old_values) / np.var(targets)
                if ppo.normalise_advantages == "batch":
                    gain = (gain - gain.mean()) / gain.std()
            order = make_stream(self.seed, Role.SHUFFLE, self.iteration, epoch).permutation(
                len(places)
            )
            while len(order):
                chosen, order = order[: ppo.minibatch_size], order[ppo.minibatch_size :]
                at = [places[i] for i in chosen]
                mine = gain[chosen]
                if ppo.normalise_advantages == "minibatch" and len(chosen) > 1:
                    mine = (mine - mine.mean()) / mine.std()
                minibatch = SimpleNamespace(
                    observations=observations[chosen],
                    actions=np.array([batch.actions[p] for p in at]),
                    log_probs=np.array([batch.log_probs[p] for p in at]),
                    advantages=mine,
                    returns=targets[chosen],
                    old_values=old_values[chosen],
                    clip_range=clip_range,
                    clip_range_value=ppo.clip_range_value,
                    value_weight=ppo.value_weight,
                    entropy_weight=ppo.entropy_weight,
                )
                report += [self.step(minibatch)] * len(chosen)
        self.iteration += 1
        self.observations_seen += [batch.observations[p] for p in places]
        means = {name: np.mean([r[name] for r in report]) for name in report[0]}
        return {**means, "gradient_norm": report[-1]["gradient_norm"], "learning_rate": rate} | {
            "clip_range": clip_range,
            "discount": self.discount,
            "explained_variance": explained,
        }

    def step(self, minibatch) -> dict[str, float]:
        losses = ppo_losses(self.weights, minibatch, self.tanh)
        loss = ppo_loss(losses, minibatch)
        self.adam.zero_grad()
        loss.backward()
        bound = self.ppo.max_gradient_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), bound)
        self.adam.step()
        ratio = losses["ratio"].detach()
        return {
            "loss": loss.item(),
            "policy_gradient_loss": -losses["objective"].mean().item(),
            "value_loss": losses["value_error"].mean().item(),
            "entropy_loss": -losses["entropy"].mean().item(),
            "approx_kl": (ratio - 1 - ratio.log()).mean().item(),
            "clip_fraction": ((ratio - 1).abs() > minibatch.clip_range).double().mean().item(),
            "gradient_norm": norm.item(),
        }

    def reward_factor(self, batch) -> float:
        if not self.ppo.scale_rewards:
            return 1.0
        for t, c in np.ndindex(batch.rewards.shape):
            if batch.valid[t, c]:
                self.return_so_far[c] *= self.ppo.discount
                self.return_so_far[c] += batch.rewards[t, c]
                self.returns_seen.append(self.return_so_far[c])
                if batch.terminated[t, c] or batch.truncated[t, c]:
                    self.return_so_far[c] = 0.0
        return 1.0 / np.std(self.returns_seen)

    def seen(self, batch, observation: np.ndarray) -> np.ndarray:
        """Normalise an observation as the policy that acted did."""
        if not self.spec.normalise:
            return observation
        mean, scale = (batch.behaviour[f"normaliser.{name}"] for name in ("mean", "scale"))
        limit = self.spec.observation_clip
        return np.clip((observation - mean) * scale, -limit, limit)

    def estimate(self, batch, rewards) -> tuple[np.ndarray, np.ndarray]:
        """The values and advantages of all steps, computed column by column."""

        def value(observation) -> float:
            seen = self.seen(batch, observation)[None]
            return outputs(self.weights, "critic", seen, self.tanh).item()

        hidden = {
            tuple(place): observation
            for place, observation in zip(
                batch.boundary_index.tolist(), batch.boundary_observations, strict=True
            )
        }
        values, gains = np.zeros(rewards.shape), np.zeros(rewards.shape)
        for c in range(rewards.shape[1]):
            length = int(batch.valid[:, c].sum())
            following, gain = value(batch.last_observations[c]), 0.0
            for t in reversed(range(length)):
                values[t, c] = value(batch.observations[t, c])
                if batch.terminated[t, c]:
                    following, gain = 0.0, 0.0
                if batch.truncated[t, c]:
                    following, gain = value(hidden[t, c]), 0.0
                surprise = rewards[t, c] + self.discount * following - values[t, c]
                gain = surprise + self.discount * self.ppo.gae_lambda * gain
                gains[t, c] = gain
                following = values[t, c]
        return values, gains
