"""Losses and distributions by torch's own modules in float64: what the learner is compared with.

Written from the papers' formulas with torch.nn.functional and torch.distributions, sharing no
code with the learner.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.distributions import Categorical, Independent, Normal


def tensors(parameters, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Leaf tensors with the values of a flat vector's views."""
    return {
        name: torch.tensor(parameters[name].copy(), dtype=dtype, requires_grad=True)
        for name in parameters.shapes
    }


def flat(values: dict[str, torch.Tensor], gradients: bool = False) -> np.ndarray:
    """In the order of the flat vector."""
    chosen = [v.grad if gradients else v for v in values.values()]
    return torch.cat([v.detach().reshape(-1) for v in chosen]).numpy()


def outputs(weights: dict[str, torch.Tensor], prefix: str, x, tanh: bool) -> torch.Tensor:
    layers = sum(name.startswith(f"{prefix}.") and name.endswith(".weight") for name in weights)
    x = torch.as_tensor(np.array(x), dtype=weights[f"{prefix}.0.weight"].dtype)
    for layer in range(layers):
        weight, bias = weights[f"{prefix}.{layer}.weight"], weights[f"{prefix}.{layer}.bias"]
        x = torch.nn.functional.linear(x, weight.T, bias)
        if layer < layers - 1:
            x = torch.tanh(x) if tanh else torch.nn.functional.relu(x)
    return x


def distribution(weights: dict[str, torch.Tensor], x, tanh: bool):
    out = outputs(weights, "actor", x, tanh)
    if "actor.log_std" in weights:
        return Independent(Normal(out, weights["actor.log_std"].exp().expand_as(out)), 1)
    return Categorical(logits=out)


def ppo_losses(weights: dict[str, torch.Tensor], batch, tanh: bool) -> dict[str, torch.Tensor]:
    """Per sample: surrogate objective, squared value error, entropy, ratio."""
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
