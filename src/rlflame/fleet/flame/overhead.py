"""What a cluster costs beside the work itself, measured while a run collects.

Must not know: tasks, connections, who is told.
"""

from __future__ import annotations

from collections import deque
from statistics import median

#: Rounds that are looked at; the first ones pay for what happens once.
_ROUNDS = 4
_SKIPPED_ROUNDS = 2
#: Overhead is worth a word from this share of the collecting time on...
_WASTEFUL_SHARE = 0.35
#: ...and where rounds are so short that it can be helped.
_SHORT_ROUND_S = 5.0


class ClusterOverhead:
    """Rounds of tasks, each with what it took and what of that was work."""

    def __init__(self) -> None:
        self._busy_s: list[float] = []
        self._rounds: deque[tuple[float, float, float]] = deque(maxlen=_ROUNDS)
        self._round_count = 0

    def add_task(self, busy_s: float) -> None:
        """A task's own time, as its worker took it."""
        self._busy_s.append(busy_s)

    def finish_round(self, wall_s: float, tasks: int, capacity: int) -> None:
        """All tasks of a round have come back."""
        busy_s, self._busy_s = self._busy_s[-tasks:], []
        self._round_count += 1
        if self._round_count > _SKIPPED_ROUNDS and busy_s:
            # The least that so many workers need, were nothing lost between tasks.
            minimum_s = max(sum(busy_s) / max(1, min(capacity, tasks)), max(busy_s))
            self._rounds.append((wall_s, minimum_s, median(busy_s)))

    @property
    def share(self) -> float | None:
        """Of the collecting time that was not work; None before it can be said."""
        if len(self._rounds) < _ROUNDS:
            return None
        return 1.0 - min(1.0, median(minimum_s / wall_s for wall_s, minimum_s, _ in self._rounds))

    def format_advice(self) -> str:
        """What to tell the user, or nothing."""
        share = self.share
        if share is None or share < _WASTEFUL_SHARE:
            return ""
        wall_s = median(wall_s for wall_s, _, _ in self._rounds)
        busy_s = median(busy_s for _, _, busy_s in self._rounds)
        if wall_s > _SHORT_ROUND_S:
            return ""
        return (
            f"flame: a fragment is {1000 * busy_s:.0f} ms of work, and {share:.0%} of the "
            "collecting "
            "time goes to sending and waiting. --local has the same bits without that; a preset "
            "that ends in -wide has longer fragments, for clusters larger than this machine"
        )
