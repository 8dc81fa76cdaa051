"""Derives group sizes and time limits from the durations of tasks on a cluster."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

#: The number of tasks in a median: enough for a stable value, but few enough to follow changes.
_HISTORY_LENGTH = 32
#: Short tasks are sent in groups that take up to about this long.
_GROUP_WORK_S = 0.6
#: If many tasks wait, a group may be one of this many parts of an equal share, up to this long.
_SHARE_PARTS, _MAX_GROUP_S = 4, 5.0
#: A task is slow if it takes longer than this multiple of the median duration.
_SLOW_FACTOR = 3.0
#: A task that takes less time than this is never slow.
_SLOW_FLOOR_S = 1.0


class TaskStatistics:
    """Records the durations of the latest tasks."""

    def __init__(self, capacity: int, max_group_s: float = _MAX_GROUP_S) -> None:
        self._capacity = max(1, capacity)
        self._max_group_s = min(max_group_s, _MAX_GROUP_S)
        self._by_purpose: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_HISTORY_LENGTH)
        )

    def add(self, purpose: str, busy_s: float) -> None:
        self._by_purpose[purpose].append(busy_s)

    def compute_group_size(self, purpose: str, waiting: int, under_way: int) -> int:
        """Return how many waiting tasks to send to the next executor as one group.

        A group is an equal share of the waiting tasks, so that groups shrink towards the end and
        all executors finish at about the same time. A group of several tasks takes about
        `_GROUP_WORK_S` at most, or longer if many tasks wait, because each message takes time on
        all servers. If there is enough work for several rounds, executors that start together get
        groups of different sizes, because otherwise all of them would answer at the same moment in
        every round.
        """
        durations_s = self._by_purpose.get(purpose)
        if not durations_s:
            return 1
        share = -(-waiting // self._capacity)
        duration_s = max(median(durations_s), 1e-6)
        limit = min(share // _SHARE_PARTS, int(self._max_group_s / duration_s))
        limit = max(limit, int(_GROUP_WORK_S / duration_s))
        if limit < share and under_way < self._capacity:
            limit = 1 + under_way * limit // self._capacity
        return max(1, min(share, limit))

    def compute_slow_s(self, purpose: str, tasks: int) -> float | None:
        """Return the seconds after which a group counts as slow, or None if unknown."""
        durations_s = list(self._by_purpose.get(purpose, ()))  # another thread may add to them
        if not durations_s:
            return None
        return max(_SLOW_FLOOR_S, _SLOW_FACTOR * tasks * median(durations_s))
