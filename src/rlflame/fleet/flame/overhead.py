"""What a cluster costs beside the work itself, measured while a run collects.

Must not know: tasks, connections, who is told.
"""

from __future__ import annotations

from collections import deque
from statistics import median

#: Rounds that are looked at; the first ones pay for what happens once.
_ROUNDS = 4
_SKIPPED = 2
#: Overhead is worth a word from this share of the collecting time on...
_WASTEFUL = 0.35
#: ...and where rounds are so short that it can be helped.
_SHORT_S = 5.0


class Overhead:
    """Rounds of tasks, each with what it took and what of that was work."""

    def __init__(self) -> None:
        self._busy_s: list[float] = []
        self._rounds: deque[tuple[float, float, float]] = deque(maxlen=_ROUNDS)
        self._seen = 0

    def worked(self, busy_s: float) -> None:
        """A task's own time, as its worker took it."""
        self._busy_s.append(busy_s)

    def round_over(self, wall_s: float, tasks: int, capacity: int) -> None:
        """All tasks of a round have come back."""
        busy, self._busy_s = self._busy_s[-tasks:], []
        self._seen += 1
        if self._seen > _SKIPPED and busy:
            # The least that so many workers need, were nothing lost between tasks.
            least = max(sum(busy) / max(1, min(capacity, tasks)), max(busy))
            self._rounds.append((wall_s, least, median(busy)))

    @property
    def share(self) -> float | None:
        """Of the collecting time that was not work; None before it can be said."""
        if len(self._rounds) < _ROUNDS:
            return None
        return 1.0 - min(1.0, median(least / wall for wall, least, _ in self._rounds))

    def sentence(self) -> str:
        """What to tell the user, or nothing."""
        share = self.share
        if share is None or share < _WASTEFUL:
            return ""
        wall = median(wall for wall, _, _ in self._rounds)
        busy = median(busy for _, _, busy in self._rounds)
        if wall > _SHORT_S:
            return ""
        return (
            f"flame: a fragment is {1000 * busy:.0f} ms of work, and {share:.0%} of the collecting "
            "time goes to sending and waiting. --local has the same bits without that; a preset "
            "that ends in -wide has longer fragments, for clusters larger than this machine"
        )
