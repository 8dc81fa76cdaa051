"""How long tasks take on this cluster, and how much time it loses between them."""

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
#: Rounds that advice is based on; the first rounds pay for what happens once.
_ROUNDS, _SKIPPED_ROUNDS = 4, 2
#: The share of the collecting time from which overhead is worth advice...
_WASTEFUL_SHARE = 0.35
#: ...in rounds so short that longer fragments help.
_SHORT_ROUND_S = 5.0


class TaskStatistics:
    """The durations of the latest tasks and of the latest rounds of training."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._by_purpose: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_HISTORY_LENGTH)
        )
        #: Of any purpose, as the workers measured them.
        self.busy_s: deque[float] = deque(maxlen=1000)
        #: Of each round: the time it took, the least possible time, the work of its median task.
        self._rounds: deque[tuple[float, float, float]] = deque(maxlen=_ROUNDS)
        self._round_count = 0

    def add(self, purpose: str, busy_s: float) -> None:
        self._by_purpose[purpose].append(busy_s)
        self.busy_s.append(busy_s)

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

    def finish_round(self, wall_s: float, tasks: int) -> None:
        """All tasks of a round of training have come back."""
        self._round_count += 1
        busy_s = list(self.busy_s)[-tasks:]
        if self._round_count > _SKIPPED_ROUNDS and busy_s:
            # With no time lost between tasks.
            minimum_s = max(sum(busy_s) / min(self._capacity, tasks), max(busy_s))
            self._rounds.append((wall_s, minimum_s, median(busy_s)))

    @property
    def overhead_share(self) -> float | None:
        """The share of the collecting time that was no work; None before it can be said."""
        if len(self._rounds) < _ROUNDS:
            return None
        return 1.0 - min(1.0, median(minimum_s / wall_s for wall_s, minimum_s, _ in self._rounds))

    def format_advice(self) -> str:
        """The advice to the user, or nothing."""
        share = self.overhead_share
        if share is None or share < _WASTEFUL_SHARE:
            return ""
        wall_s = median(wall_s for wall_s, _, _ in self._rounds)
        busy_s = median(busy_s for _, _, busy_s in self._rounds)
        if wall_s > _SHORT_ROUND_S:
            return ""
        return (
            f"flame: a fragment is {1000 * busy_s:.0f} ms of work, and {share:.0%} of the "
            "collecting time goes to sending and waiting. --local has the same bits without that; "
            "a preset that ends in -wide has longer fragments, for clusters larger than this one"
        )
