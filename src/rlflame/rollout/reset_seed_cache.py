"""Seeds of the episodes that follow in a slot, worked out for several of them at once.

Must not know: what is made of a seed.
"""

from __future__ import annotations

from .envs.vector_env import VectorEnv
from .seeding import Role, make_reset_seeds
from .spec import RolloutTask

#: Episodes of each row that are looked ahead.
_EPISODES_AHEAD = 3


class ResetSeedCache:
    """Numbers that are the same whenever they are asked for; the rows hear of them early."""

    def __init__(self, vector_env: VectorEnv) -> None:
        self._vector_env = vector_env
        self._seeds: dict[tuple[int, int, int, int], int] = {}

    def take(self, task: RolloutTask, column: int, episode: int) -> int:
        """The seed of the episode that follows in a row of one of the task's slots."""
        key = (task.seed, *task.locate(column), episode)
        if key not in self._seeds:
            self._compute_seeds(task)
        return self._seeds.pop(key)

    def _compute_seeds(self, task: RolloutTask) -> None:
        keys = []
        for column in range(task.columns):
            first = self._vector_env.get_position(column).episode + 1
            keys += [
                (*task.locate(column), episode) for episode in range(first, first + _EPISODES_AHEAD)
            ]
        previous_seeds = self._seeds
        seeds = make_reset_seeds(task.seed, Role.RESET, keys)
        self._seeds = {(task.seed, *key): seed for key, seed in zip(keys, seeds, strict=True)}
        self._vector_env.prepare_resets(
            [seed for key, seed in self._seeds.items() if key not in previous_seeds]
        )
