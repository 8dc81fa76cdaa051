"""Discounted returns and generalised advantages, with terminated and truncated kept apart.

Pure functions over `[T, columns]` arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlflame.rollout.task import Float64

Mask = NDArray[np.bool_]


def compute_discounted_returns(rewards: Float64, ended: Mask, discount: float) -> Float64:
    """Reward-to-go of each step, within its episode, by one reverse pass."""
    return _accumulate(rewards, np.where(ended, 0.0, discount))


def compute_continued_returns(
    rewards: Float64, terminated: Mask, truncated: Mask, valid: Mask, discount: float
) -> Float64:
    """Reward-to-go where a truncated episode goes on, at the mean reward-to-go of all steps.

    That mean is the one that agrees with itself, V = mean(G + w V), with G the returns cut at the
    truncation and w the weight that the moment after it has at each step.
    """
    ended = terminated | truncated
    returns = compute_discounted_returns(rewards, ended, discount)
    weights = compute_discounted_returns(np.where(truncated, discount, 0.0), ended, discount)
    mean = returns[valid].mean() / (1.0 - weights[valid].mean())
    returns += weights * mean
    return returns


def compute_gae(
    rewards: Float64,
    values: Float64,
    next_values: Float64,
    terminated: Mask,
    truncated: Mask,
    discount: float,
    gae_lambda: float,
) -> Float64:
    """GAE (Schulman et al., 2016).

    `next_values[t]` is the value of what was really observed after step t: of the hidden final
    observation where an episode was truncated. A termination has no future; a truncation has one
    but ends the sum.
    """
    delta = rewards + discount * np.where(terminated, 0.0, next_values) - values
    decay = np.where(terminated | truncated, 0.0, discount * gae_lambda)
    return _accumulate(delta, decay)


def _accumulate(terms: Float64, decay: Float64) -> Float64:
    """`result[t] = terms[t] + decay[t] * result[t + 1]`, from the end."""
    result = terms.copy()
    for t in range(len(terms) - 2, -1, -1):
        result[t] += decay[t] * result[t + 1]
    return result
