"""Adam, gradient clipping and the guard against NaN and infinity, on a device."""

from __future__ import annotations

import math
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
        betas = torch.tensor([BETA_1, BETA_2], dtype=torch.float64)
        self._betas = betas.to(mirror.device)

    @torch.no_grad()
    def step(self, values: Tensor, gradient: Tensor, rate: Tensor, mask: Tensor) -> None:
        """Take a step if `mask` is true; `rate` is a float64 tensor."""
        self._count += mask
        correction_1, correction_2 = 1.0 - self._betas**self._count
        root = correction_2.sqrt()
        epsilon = (self._epsilon * root).to(values.dtype)
        scale = (rate * root / correction_1).to(values.dtype)
        first = torch.lerp(self._first, gradient, 1.0 - BETA_1)
        second = torch.lerp(self._second, gradient.square(), 1.0 - BETA_2)
        replace_if(mask, values, values - first / (second.sqrt() + epsilon) * scale)
        replace_if(mask, self._first, first)
        replace_if(mask, self._second, second)


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

    def compute_allowed(self) -> Tensor:
        """Return whether learning may go on: too few gradients in a row have been refused."""
        return self._longest_streak < self._guard.limit

    def compute_mask(self, norm: Tensor, sums: Sequence[Tensor], is_active: Tensor) -> Tensor:
        """Return `is_active`, or false if a number is not finite or learning is over.

        Refusals are counted.
        """
        is_active = is_active & self.compute_allowed()
        is_finite = (torch.stack([norm, *sums]).abs() < math.inf).all()
        is_faulty = ~is_finite
        is_refused = is_active & is_faulty
        self._counts[0].add_(is_refused)
        replace_if(is_active, self._counts[1], (self._counts[1] + 1) * is_faulty)
        replace_if(is_refused, self._norm, norm)
        torch.maximum(self._longest_streak, self._counts[1], out=self._longest_streak)
        return is_active & is_finite

    def check(self) -> None:
        """Raise the guard's error if too many gradients in a row were refused."""
        count = int(self._longest_streak)
        self._longest_streak.zero_()
        if count >= self._guard.limit:
            raise self._guard.make_error(count, float(self._norm))


def replace_if(mask: Tensor, target: Tensor, values: Tensor) -> None:
    """Copy the values to the target where `mask` is true."""
    torch.where(mask, values, target, out=target)


def clip(gradient: Tensor, norm: Tensor, max_norm: float | None) -> Tensor:
    """Return the gradient scaled to at most `max_norm`, where `norm` is its norm."""
    if max_norm is None:
        return gradient
    scale = torch.where(norm > max_norm, max_norm / (norm + 1e-6), 1.0)
    return gradient * scale.to(gradient.dtype)
