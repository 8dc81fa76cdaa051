"""Adam, gradient clipping and the guard against NaN and infinity, on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..optim import BETA_1, BETA_2, Adam, GradientGuard
from .graph import Mirror


class DeviceAdam:
    """Adam on a flat tensor, with the state of the host's `Adam`."""

    def __init__(self, adam: Adam, mirror: Mirror) -> None:
        self._epsilon = adam.epsilon
        self._first, self._second = mirror.add(adam.first), mirror.add(adam.second)
        self._count = mirror.add(adam.count)

    @torch.no_grad()
    def step(self, values: Tensor, gradient: Tensor, rate: Tensor, mask: Tensor) -> None:
        """Take a step if `mask` is true; `rate` is a float64 tensor."""
        self._count += mask
        count = self._count.to(torch.float64)
        correction = (1.0 - BETA_2**count).sqrt()
        epsilon = (self._epsilon * correction).to(values.dtype)
        scale = (rate * correction / (1.0 - BETA_1**count)).to(values.dtype)
        first = self._first + (gradient - self._first) * (1.0 - BETA_1)
        second = self._second + (gradient.square() - self._second) * (1.0 - BETA_2)
        values -= torch.where(mask, first / (second.sqrt() + epsilon) * scale, 0.0)
        self._first.copy_(torch.where(mask, first, self._first))
        self._second.copy_(torch.where(mask, second, self._second))


class DeviceGuard:
    """Counts gradients that are not finite, as the host's `GradientGuard` does."""

    def __init__(self, guard: GradientGuard, mirror: Mirror) -> None:
        self._guard = guard
        self._counts = mirror.add(guard.counts)
        #: The most refusals in a row since the last `check`; the norm of the last refused gradient.
        self._longest_streak = mirror.make_zeros(dtype=torch.int64)
        self._norm = mirror.make_zeros(dtype=torch.float64)

    @property
    def tensors(self) -> list[Tensor]:
        return [self._counts, self._longest_streak, self._norm]

    def compute_mask(self, norm: Tensor, sums: Sequence[Tensor], is_active: Tensor) -> Tensor:
        """Return `is_active`, or false if a number is not finite; count refusals."""
        values = torch.stack([norm, *sums])
        is_finite = torch.isfinite(values).all()
        is_refused = is_active & ~is_finite
        count = torch.where(is_finite, 0, self._counts[1] + 1)
        self._counts[0] += is_refused
        self._counts[1] = torch.where(is_active, count, self._counts[1])
        self._norm.copy_(torch.where(is_refused, norm.to(torch.float64), self._norm))
        self._longest_streak.copy_(torch.maximum(self._longest_streak, self._counts[1]))
        return is_active & is_finite

    def check(self) -> None:
        """Raise the guard's error if too many gradients in a row were refused."""
        count = int(self._longest_streak)
        self._longest_streak.zero_()
        if count >= self._guard.limit:
            raise self._guard.make_error(count, float(self._norm))


def clip(gradient: Tensor, norm: Tensor, max_norm: float | None) -> Tensor:
    """Return the gradient scaled to at most `max_norm`, where `norm` is its norm."""
    if max_norm is None:
        return gradient
    scale = torch.where(norm > max_norm, max_norm / (norm + 1e-6), 1.0)
    return gradient * scale.to(gradient.dtype)
