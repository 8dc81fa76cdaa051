"""Seeds of the episodes that follow in a slot, worked out for several of them at once.

Must not know: what is made of a seed.
"""

from __future__ import annotations

from .envs.vector_env import Rows
from .seeding import Role, reset_seeds
from .spec import RolloutTask

#: Episodes of each row that are looked ahead.
_FAR = 3


class NextSeeds:
    """Numbers that are the same whenever they are asked for; the rows hear of them early."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._known: dict[tuple[int, int, int, int], int] = {}

    def take(self, task: RolloutTask, column: int, episode: int) -> int:
        """The seed of the episode that follows in a row of one of the task's slots."""
        wanted = (task.seed, *task.place(column), episode)
        if wanted not in self._known:
            self._look_ahead(task)
        return self._known.pop(wanted)

    def _look_ahead(self, task: RolloutTask) -> None:
        keys = []
        for column in range(task.columns):
            first = self._rows.standing(column).episode + 1
            keys += [(*task.place(column), episode) for episode in range(first, first + _FAR)]
        before = self._known
        seeds = reset_seeds(task.seed, Role.RESET, keys)
        self._known = {(task.seed, *key): seed for key, seed in zip(keys, seeds, strict=True)}
        self._rows.expect([seed for key, seed in self._known.items() if key not in before])
