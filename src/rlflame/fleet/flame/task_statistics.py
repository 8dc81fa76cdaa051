"""How long tasks take on this cluster, and what follows for groups of tasks and stragglers."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

#: Enough of the latest tasks for a median, few enough to follow a change.
_HISTORY_LENGTH = 32
#: Short tasks travel together up to about this much work.
_GROUP_WORK_S = 0.6
#: A task that runs for this many times the usual is slow...
_SLOW_FACTOR = 3.0
#: ...but never before this.
_SLOW_FLOOR_S = 1.0


class TaskStatistics:
    """The durations of the latest tasks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._by_purpose: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_HISTORY_LENGTH)
        )

    def add(self, purpose: str, busy_s: float) -> None:
        self._by_purpose[purpose].append(busy_s)

    def compute_group_size(self, purpose: str, waiting: int, under_way: int) -> int:
        """How many of the waiting tasks the next executor is given at once.

        An equal share of what waits, so that groups get smaller towards the end and all executors
        end at about the same time, and no more than `_GROUP_WORK_S` of work. Where there is enough
        for several rounds, executors that begin together are given groups of all sizes: else all
        of them would answer in the same moment, round after round.
        """
        durations_s = self._by_purpose.get(purpose)
        if not durations_s:
            return 1
        share = -(-waiting // self._capacity)
        limit = int(_GROUP_WORK_S / max(median(durations_s), 1e-6))
        if limit < share and under_way < self._capacity:
            limit = 1 + under_way * limit // self._capacity
        return max(1, min(share, limit))

    def compute_slow_s(self, purpose: str, tasks: int) -> float | None:
        """After how long a group of tasks is a straggler; None while nothing is known."""
        durations_s = list(self._by_purpose.get(purpose, ()))  # another thread may add to them
        if not durations_s:
            return None
        return max(_SLOW_FLOOR_S, _SLOW_FACTOR * tasks * median(durations_s))
