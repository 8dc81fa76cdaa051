"""Defines an environment whose episodes sleep for a given time.

Sleeping uses no processor time, so the number of cores does not limit how many episodes run at
once. All time beyond the sleep is the cost of the fleet.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SIZE = 100


class SleepingEnv(gymnasium.Env[Any, Any]):
    """An environment whose first step sleeps. An observation takes 400 bytes."""

    def __init__(self, episode_ms: float = 0.0, steps: int = 10) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._sleep_s, self._steps = episode_ms / 1000.0, steps
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._sample_observation(), {}

    def step(self, action: Any) -> Any:
        if self._t == 0 and self._sleep_s:
            time.sleep(self._sleep_s)
        self._t += 1
        return self._sample_observation(), float(action), self._t >= self._steps, False, {}

    def _sample_observation(self) -> Any:
        return self.np_random.standard_normal(SIZE, dtype=np.float32)


gymnasium.register("Sleeping-v0", lambda **kwargs: SleepingEnv(**kwargs), disable_env_checker=True)
