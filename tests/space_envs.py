"""Small deterministic environments with every kind of space and of action mask.

`space_envs:Tuple-v0` observes and acts in spaces of that kind. `Masked-KIND-v0` also masks actions.
An environment fails if an action does not belong to its space, or is masked.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

#: The observation space and the action space of each kind.
SPACES: dict[str, tuple[spaces.Space, spaces.Space]] = {
    "Box": (
        spaces.Box(-9, 9, (2, 2), np.int16),
        spaces.Box(np.array([-1, -np.inf]), np.array([np.inf, np.inf]), dtype=np.float64),
    ),
    "Integers": (spaces.Box(0, 255, (2, 3), np.uint8), spaces.Box(-2, 5, (2, 2), np.int32)),
    "Discrete": (spaces.Discrete(5, start=2), spaces.Discrete(3, start=-1)),
    "MultiDiscrete": (spaces.MultiDiscrete([[3, 2], [2, 4]]), spaces.MultiDiscrete([2, 3, 3])),
    "MultiBinary": (spaces.MultiBinary(4), spaces.MultiBinary([2, 2])),
    "Tuple": (
        spaces.Tuple((spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3))),
        spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(-1.0, 1.0, (2,)))),
    ),
    "Dict": (
        spaces.Dict(
            {
                "view": spaces.Box(0.0, 9.0, (3,)),
                "inner": spaces.Dict({"door": spaces.Discrete(2), "keys": spaces.MultiBinary(2)}),
                "mission": spaces.Text(8),
            }
        ),
        spaces.Dict(
            {
                "move": spaces.MultiDiscrete([2, 4]),
                "push": spaces.Box(-1.0, np.inf, (1,), np.float64),
                "inner": spaces.Tuple((spaces.Box(-3, 9, (), np.int64), spaces.Discrete(2))),
            }
        ),
    ),
}
#: Environments with masks: the kind of their spaces, and where they report the mask.
MASKED = {
    "Discrete": "info",
    "MultiDiscrete": "method",
    "Tuple": "observation",
    "Dict": "info",
}


class SpaceEnv(gymnasium.Env):
    """Episodes of 5 to 9 steps; the reward depends on the action and the step."""

    def __init__(self, kind: str, mask: str = "none", fault: str = "") -> None:
        self._observed, self.action_space = SPACES[kind]
        self._mask, self._fault = mask, fault
        self.observation_space = self._observed
        if mask == "observation":
            size = len(list_choices(self.action_space))
            self.observation_space = spaces.Dict(
                {"observation": self._observed, "action_mask": spaces.MultiBinary(size)}
            )
        if mask == "method":
            self.action_masks = self._make_mask

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t, self._ended = 0, False
        self._length = int(self.np_random.integers(5, 10))
        return self._observe(), self._tell()

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not an action"
        if self._mask != "none" and self._fault != "lenient":
            mask = self._make_mask()
            chosen = find_choices(self.action_space, action)
            assert all(mask[index] for index in chosen), f"{action!r} is masked by {mask}"
        self._t += 1
        self._ended = self._t >= self._length
        reward = float(np.sum(spaces.flatten(self.action_space, action))) % 3 - 0.1 * self._t
        return self._observe(), reward, self._ended, False, self._tell()

    def _observe(self) -> Any:
        self._observed.seed(int(self.np_random.integers(2**31)))
        observation = self._observed.sample()
        if self._mask == "observation":
            mask = self._make_mask().astype(np.int8)
            return {"observation": observation, "action_mask": mask}
        return observation

    def _tell(self) -> dict[str, Any]:
        return {"action_mask": self._make_mask()} if self._mask == "info" else {}

    def _make_mask(self) -> np.ndarray:
        """Forbid one value of each choice, which changes with the step."""
        groups = list_choices(self.action_space)
        if self._ended or (self._fault == "zeros" and self._t == 2):
            return np.zeros(len(groups), bool)
        if self._fault == "short":
            return np.ones(len(groups) - 1, bool)
        return np.array([value != self._t % count for value, count in groups])


def list_choices(space: spaces.Space) -> list[tuple[int, int]]:
    """List each value of each choice, and the number of values of its choice."""
    if isinstance(space, spaces.Dict):
        return [item for part in space.spaces.values() for item in list_choices(part)]
    if isinstance(space, spaces.Tuple):
        return [item for part in space.spaces for item in list_choices(part)]
    if isinstance(space, spaces.Box):
        return []
    counts = [space.n] if isinstance(space, spaces.Discrete) else space.nvec.ravel()
    return [(value, int(count)) for count in counts for value in range(count)]


def find_choices(space: spaces.Space, action: Any) -> list[int]:
    """Return the positions of an action's choices in `list_choices`."""
    flat, start = spaces.flatten(space, action), 0
    kept = np.ones(len(flat), bool)
    for leaf, size in iterate_leaves(space):
        kept[start : start + size] = not isinstance(leaf, spaces.Box)
        start += size
    return np.flatnonzero(flat[kept]).tolist()


def iterate_leaves(space: spaces.Space) -> Any:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for part in parts:
            yield from iterate_leaves(part)
    else:
        yield space, spaces.flatdim(space)


for _kind in SPACES:
    gymnasium.register(f"{_kind}-v0", SpaceEnv, kwargs={"kind": _kind})
for _kind, _place in MASKED.items():
    gymnasium.register(f"Masked-{_kind}-v0", SpaceEnv, kwargs={"kind": _kind, "mask": _place})
# This one allows actions that its mask forbids.
gymnasium.register(
    "Half-Masked-v0", SpaceEnv, kwargs={"kind": "Discrete", "mask": "info", "fault": "lenient"}
)

#: The IDs of all environments, as options of the command line.
IDS = [f"space_envs:{kind}-v0" for kind in SPACES]
IDS += [f"space_envs:Masked-{kind}-v0" for kind in MASKED]
