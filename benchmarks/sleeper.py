"""An environment with a configurable cost, for measurements of everything else."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Sleeper(gymnasium.Env[Any, Any]):
    """Sleeps in the first of every `every` steps, and returns `size` numbers."""

    def __init__(self, seconds: float = 0.0, every: int = 100, size: int = 250) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._seconds, self._every = seconds, every
        self._shown = np.linspace(-1.0, 1.0, size, dtype=np.float32)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._shown, {}

    def step(self, action: Any) -> Any:
        if self._seconds and self._t % self._every == 0:
            time.sleep(self._seconds)
        self._t += 1
        return self._shown, 0.0, False, False, {}


gymnasium.register("Sleeper-v0", Sleeper, disable_env_checker=True)
