"""The statistics of observations on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflame.rollout.policy import make_clip_bounds
from rlflame.rollout.task import PolicyArrays, PolicySpec

from ..normalization import ObservationNormaliser
from .graph import Mirror


class DeviceNormaliser:
    """Standardises raw observations, and tracks the statistics of a normaliser.

    With float32 observations, a result has the bits of `normalise_observations`.
    """

    def __init__(self, normaliser: ObservationNormaliser, spec: PolicySpec, mirror: Mirror) -> None:
        self._mirror, self._size = mirror, spec.observation_size
        limit: Any = make_clip_bounds(spec)
        if isinstance(limit, np.ndarray):
            limit = torch.from_numpy(limit).to(mirror.device)
        self._limit = limit
        #: The statistics on the host, which `mirror` updates.
        self.hosts = normaliser.count, normaliser.mean, normaliser.squares
        self._count, self._mean, self._squares = map(mirror.add, self.hosts)

    def normalise(self, raw: Tensor, policy: PolicyArrays) -> Tensor:
        """Standardise rows with the acting policy's statistics; keep any mask at their ends."""
        mean, scale = (
            torch.tensor(policy[f"normaliser.{name}"], device=self._mirror.device)
            for name in ("mean", "scale")
        )
        rows, mask = raw[..., : self._size], raw[..., self._size :]
        rows = ((rows - mean) * scale).clamp(-self._limit, self._limit)
        return torch.cat([rows, mask], dim=-1)

    def merge(self, samples: Tensor) -> None:
        """Merge the moments of rows, as in `RunningMoments.merge`."""
        count = len(samples)
        if count == 0:
            return
        wide = samples[:, : self._size].to(torch.float64)
        mean = wide.mean(dim=0)
        squares = (wide - mean).square().sum(dim=0)
        total = self._count + count
        delta = mean - self._mean
        self._squares += squares + delta.square() * (self._count * count / total)
        self._mean += delta * (count / total)
        self._count.copy_(total)
