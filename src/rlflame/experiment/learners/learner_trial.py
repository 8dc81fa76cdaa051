"""Finds the number of learners with which updates are the fastest."""

from __future__ import annotations

from collections import defaultdict

#: The number of batches that are timed with each number of learners.
_BATCHES = 3


class LearnerTrial:
    """Times batches with all learners, with one, and then with half as many, and so on.

    Batches with all learners and with one alternate, so that both see the same kind of batches.
    """

    def __init__(self) -> None:
        #: For each number of learners: the seconds per optimizer step of each timed batch.
        self._times_s: defaultdict[int, list[float]] = defaultdict(list)

    def is_alone_due(self, size: int) -> bool:
        """Return whether one learner should process the next batch of a group of this size."""
        count = len(self._times_s[1])
        return count < min(len(self._times_s[size]), _BATCHES)

    def add(self, size: int, seconds: float, updates: int) -> None:
        """Record a batch. A batch without an update shows nothing, and so is not counted."""
        if updates > 0:
            self._times_s[size].append(seconds / updates)

    def is_complete(self, size: int) -> bool:
        """Return whether enough batches have been timed with a group of this size, and with one."""
        return all(len(self._times_s[number]) >= _BATCHES for number in (size, 1))

    def choose_next(self, size: int, smaller: int) -> int:
        """Return a smaller size to try next, or the fastest size if the trial is over.

        `smaller` is the next number of learners that would share the work evenly.
        """
        times_s = self.compute_times()
        if 1 < smaller < size:
            return smaller
        return min(times_s, key=lambda number: (times_s[number], number))

    def compute_times(self) -> dict[int, float]:
        """Return the shortest seconds per optimizer step, by the number of learners."""
        return {size: min(times) for size, times in sorted(self._times_s.items()) if times}
