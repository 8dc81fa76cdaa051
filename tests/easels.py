"""An environment that renders images, with optional faults: `easels:Easel-v0`.

The shade of grey of an image shows the number of steps before it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

#: The size of an image before any scaling.
WIDTH, HEIGHT = 60, 40
SHADE_PER_STEP = 8


class Easel(gymnasium.Env):
    """Episodes of 4 to 30 steps. The seed determines the length and the rewards."""

    metadata = {"render_modes": ["rgb_array", "human"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        render_mode: str | None = None,
        fault: str = "",
        length: int | None = None,
        fps: float = 10,
        modes: list[str] | None = None,
        marker: str = "",
        continuous: bool = False,
    ) -> None:
        self.metadata = {
            "render_modes": ["rgb_array", "human"] if modes is None else modes,
            "render_fps": fps,
        }
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.action_space = (
            spaces.Box(-1.0, 3.0, (2,), np.float32) if continuous else spaces.Discrete(2)
        )
        self._fault, self._length, self._marker = fault, length, marker
        self._t = self._end = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        self._end = self._length or int(self.np_random.integers(4, 31))
        self._worth = float(self.np_random.normal())
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        if self.render_mode == "human":
            self._leave_word(f"shown {self._t}")
        noise = float(self.np_random.normal())
        return self._seen(), self._worth + 0.1 * noise, self._t >= self._end, False, {}

    def render(self) -> Any:
        if self._fault:
            return getattr(self, f"_{self._fault}")()
        return self._picture()

    def _seen(self) -> Any:
        return np.full(3, 0.01 * self._t, np.float32)

    def _picture(self) -> Any:
        return np.full((HEIGHT, WIDTH, 3), min(255, SHADE_PER_STEP * self._t), np.uint8)

    def _nothing(self) -> Any:
        return None

    def _raises(self) -> Any:
        raise OSError("no paint")

    def _crash(self) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)

    def _slow(self) -> Any:
        self._leave_word(str(os.getpid()))
        time.sleep(60)

    def _disturbs(self) -> Any:
        self.np_random.normal()
        return self._picture()

    def _leave_word(self, text: str) -> None:
        if self._marker:
            with Path(self._marker).open("a") as file:
                file.write(text + "\n")


if "Easel-v0" not in gymnasium.registry:
    gymnasium.register("Easel-v0", Easel)
