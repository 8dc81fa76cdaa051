"""A replay buffer that samples uniformly from the latest steps.

A column holds the steps of one environment, and a row holds one step of every environment. Complete
segments of rows are saved only once, so that successive checkpoints do not repeat them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from rlflame.errors import LearningError
from rlflame.rollout.seeding import Role, make_stream
from rlflame.rollout.task import Array, Float32, Fragment, PolicyArrays

from ..base import (
    Batch,
    Int64,
    ReplayBatch,
    Segment,
    State,
    Transitions,
    compute_digest,
    restore,
    restore_count,
)
from .rollout_buffer import concatenate_fragments
from .transition_ring import TransitionRing, count_final_observation_bytes

#: Transitions per segment, rounded down to whole rows (at least one). Part of the file format.
SEGMENT_TRANSITIONS = 2048
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_TAIL = "tail."
#: More rows than any run writes, but too few to overflow the counters.
_MAX_ROWS = 2**40


def count_segment_rows(columns: int) -> int:
    return max(1, SEGMENT_TRANSITIONS // columns)


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """The sizes of a replay buffer's arrays, derived from its capacity."""

    capacity: int
    columns: int
    observation_size: int
    action_size: int
    #: The maximum length of an episode, if it is limited.
    episode_steps: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows to sample from: the capacity, rounded up to whole rows."""
        return -(-self.capacity // self.columns)

    @property
    def segment_rows(self) -> int:
        return count_segment_rows(self.columns)

    @property
    def stored_rows(self) -> int:
        """The number of rows in memory, enough to keep the oldest segment complete."""
        return self.rows + self.segment_rows - 1

    @property
    def nbytes(self) -> int:
        """The memory that a full replay buffer needs, in bytes."""
        return math.ceil((self.stored_rows + 1) * self.columns * self._transition_bytes)

    @property
    def _transition_bytes(self) -> float:
        """The bytes per transition: numbers, flags and a share of the final observations."""
        size = 4.0 * (self.observation_size + self.action_size + 1) + 1.0
        if self.episode_steps is None:
            return size
        return size + count_final_observation_bytes(self.observation_size) / self.episode_steps


class ReplayBuffer:
    """A replay buffer that also determines how many updates are due.

    After `steps` steps, exactly `floor((steps - learning_starts) * updates_per_step)` updates are
    due in total, no matter how the steps are divided into iterations. Samples are drawn with
    replacement, so the first update can run before the buffer holds a full batch. If an empty
    buffer replaces a lost one (see `make_emptied_state`), its steps are counted from zero.
    """

    def __init__(
        self,
        shape: ReplayShape,
        *,
        seed: int,
        batch_size: int,
        discount: float,
        n_step: int,
        updates_per_step: float,
        learning_starts: int,
    ) -> None:
        self._shape = shape
        self._seed = seed
        # Converted from decimal text, because the float 0.3 is less than three tenths.
        self._updates_per_step = Fraction(repr(updates_per_step))
        self._learning_starts = learning_starts
        self._powers = np.array([discount**k for k in range(n_step + 1)], np.float32)
        self._ring = self._make_ring()
        self._transitions = Transitions(
            observations=np.zeros((batch_size, shape.observation_size), np.float32),
            actions=np.zeros((batch_size, shape.action_size), np.float32),
            rewards=np.zeros(batch_size, np.float32),
            next_observations=np.zeros((batch_size, shape.observation_size), np.float32),
            bootstrap=np.zeros(batch_size, np.float32),
        )
        self._fresh: Batch | None = None
        self._updates = 0
        self._waived_updates = 0
        self._lineage = 0
        #: How often `load_state` has replaced the content.
        self.load_count = 0
        #: For each complete segment in use: its number, the previous segment's digest and its own.
        self._sealed_segments: deque[tuple[int, str, str]] = deque()
        #: The digest of the latest complete segment, which covers all segments before it.
        self._chain_digest = ""

    @property
    def shape(self) -> ReplayShape:
        return self._shape

    @property
    def powers(self) -> Float32:
        """The discounts over 0 to `n_step` steps."""
        return self._powers

    @property
    def size(self) -> int:
        """The number of transitions that can be sampled."""
        return min(self._ring.rows_written, self._shape.rows) * self._shape.columns

    @property
    def total_added(self) -> int:
        return self._ring.rows_written * self._shape.columns

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes

    def add(self, fragments: Sequence[Fragment], behaviour: PolicyArrays) -> None:
        batch = concatenate_fragments(fragments, behaviour)
        first = 0
        while first < len(batch.rewards):
            room = self._shape.segment_rows - self._ring.rows_written % self._shape.segment_rows
            stop = min(first + room, len(batch.rewards))
            self._ring.append(_slice_rows(batch, first, stop))
            if self._ring.rows_written % self._shape.segment_rows == 0:
                self._seal_segment(self._ring.rows_written // self._shape.segment_rows - 1)
            first_segment = self._find_first_needed_segment()
            while self._sealed_segments and self._sealed_segments[0][0] < first_segment:
                self._sealed_segments.popleft()
            first = stop
        self._ring.set_next_observations(batch.last_observations)
        self._fresh = batch

    def take_batches(self) -> Iterator[ReplayBatch]:
        if self._fresh is not None:
            fresh, self._fresh = self._fresh, None
            first, self._updates = self._updates, self._count_owed_updates()
            yield ReplayBatch(fresh, first, self._updates - first, self.draw)

    def draw(self, update: int) -> Transitions:
        """Draw the transitions for one update, using the update's own random stream."""
        self._ring.gather(self.draw_positions(update), self._powers, self._transitions)
        return self._transitions

    def draw_positions(self, update: int) -> Int64:
        """Draw the positions of one update's transitions, counted from the first one ever added."""
        first, stop = self.total_added - self.size, self.total_added
        stream = make_stream(self._seed, Role.REPLAY, update)
        return stream.integers(first, stop, len(self._transitions.rewards))

    def copy_steps(self, first: int, stop: int, out: Transitions, ends: Array) -> None:
        """Write the transitions over one step at these positions to `out`.

        In addition, write to `ends` whether an episode ends there.
        """
        positions = np.arange(first, stop)
        self._ring.gather(positions, self._powers[:2], out)
        ends[:] = self._ring.find_ends(positions)

    def _count_owed_updates(self) -> int:
        excess = max(0, self.total_added - self._learning_starts)
        return self._waived_updates + int(excess * self._updates_per_step)

    def _seal_segment(self, number: int) -> None:
        previous = self._chain_digest
        self._chain_digest = compute_digest(self._read_segment(number, previous))
        self._sealed_segments.append((number, previous, self._chain_digest))

    def _find_first_needed_segment(self) -> int:
        """Return the number of the segment with the oldest row that can be sampled."""
        return max(0, self._ring.rows_written - self._shape.rows) // self._shape.segment_rows

    def _read_segment(self, number: int, previous: str) -> State:
        first = number * self._shape.segment_rows
        if first < self._ring.rows_written - self._shape.stored_rows:
            raise LearningError(f"Segment {number} of the replay is no longer in memory.")
        rows = self._ring.copy_rows(first, first + self._shape.segment_rows)
        return {"previous": _as_bytes(previous), **rows}

    def _make_ring(self) -> TransitionRing:
        shape = self._shape
        return TransitionRing(
            shape.stored_rows, shape.columns, shape.observation_size, shape.action_size
        )

    def list_segments(self) -> tuple[Segment, ...]:
        return tuple(
            Segment(number, digest, partial(self._read_segment, number, previous))
            for number, previous, digest in self._sealed_segments
        )

    def get_state(self) -> State:
        shape, end = self._shape, self._ring.rows_written
        tail = self._ring.copy_rows(end - end % shape.segment_rows, end)
        return {
            "rows": np.array(end, np.int64),
            "updates": np.array(self._updates, np.int64),
            "forgiven": np.array(self._waived_updates, np.int64),
            "lineage": np.array(self._lineage, np.int64),
            "chain": _as_bytes(self._chain_digest),
            "last_observations": self._ring.get_next_observations(),
            **{_TAIL + name: array for name, array in tail.items()},
        }

    def load_state(self, state: Mapping[str, Array], segments: Sequence[Segment]) -> None:
        shape, chain = self._shape, np.zeros(32, np.uint8)
        end = restore_count("rows", state)
        restore(chain, "chain", state)
        segment_count = end // shape.segment_rows
        first = min(max(0, end - shape.rows) // shape.segment_rows, segment_count)
        numbers = [segment.number for segment in segments]
        if end > _MAX_ROWS or numbers != list(range(first, segment_count)):
            raise _make_mismatch_error("its segments do not match its counters")
        # Reuse an empty ring, because a second one may not fit in memory.
        ring = self._make_ring() if self._ring.rows_written else self._ring
        ring.rows_written = first * shape.segment_rows
        previous_digests = [self._restore_segment(segment, ring) for segment in segments]
        if segments and [*previous_digests[1:], _as_digest(chain)] != [s.digest for s in segments]:
            raise _make_mismatch_error("the digests of its segments do not form a chain")
        tail = {n.removeprefix(_TAIL): a for n, a in state.items() if n.startswith(_TAIL)}
        self._check_rows(tail, end % shape.segment_rows)
        ring.append(tail)
        last = np.zeros((shape.columns, shape.observation_size), np.float32)
        restore(last, "last_observations", state)
        ring.set_next_observations(last)
        self._ring, self._chain_digest, self._fresh = ring, _as_digest(chain), None
        self.load_count += 1
        self._sealed_segments = deque(
            (segment.number, previous_digest, segment.digest)
            for segment, previous_digest in zip(segments, previous_digests, strict=True)
        )
        self._updates, self._waived_updates, self._lineage = (
            restore_count(name, state) for name in ("updates", "forgiven", "lineage")
        )
        if not self._waived_updates <= self._updates <= self._count_owed_updates():
            raise _make_mismatch_error("its counters contradict each other")

    def _restore_segment(self, segment: Segment, ring: TransitionRing) -> str:
        """Append the rows of a segment to `ring`; return the previous segment's digest."""
        previous_digest, rows = np.zeros(32, np.uint8), dict(segment.arrays())
        restore(previous_digest, "previous", rows)
        del rows["previous"]
        self._check_rows(rows, self._shape.segment_rows)
        ring.append(rows)
        return _as_digest(previous_digest)

    def _check_rows(self, rows: Mapping[str, Array], steps: int) -> None:
        """Check that saved rows have the shapes that the recipe implies."""
        table = sum(rows.get("boundary_index", np.zeros(0)).shape[:1])
        expected = self._ring.list_shapes(steps, table)
        shapes = {name: (array.dtype.type, array.shape) for name, array in rows.items()}
        if shapes != expected:
            different = dict(shapes.items() ^ expected.items())
            raise _make_mismatch_error(f"unexpected shapes of {', '.join(sorted(different))}")


def make_emptied_state(state: Mapping[str, Array]) -> State:
    """Return the state of an empty buffer that replaces a buffer with lost data.

    Past updates still count. Updates that were still due for the lost steps are dropped. The
    lineage number, which counts such replacements, increases by one.
    """
    updates, lineage = (restore_count(name, state) for name in ("updates", "lineage"))
    tail = {name: array[:0] for name, array in state.items() if name.startswith(_TAIL)}
    return {
        **{name: np.zeros_like(array) for name, array in state.items()},
        **tail,
        "updates": np.array(updates, np.int64),
        "forgiven": np.array(updates, np.int64),
        "lineage": np.array(lineage + 1, np.int64),
    }


def _slice_rows(batch: Batch, first: int, stop: int) -> State:
    steps = slice(first, stop)
    step = batch.boundary_index[:, 0]
    is_inside = (first <= step) & (step < stop)
    return {
        "observations": batch.observations[steps],
        "actions": batch.actions[steps],
        # Limit rewards to the range of float32, so that files contain no infinity.
        "rewards": np.clip(batch.rewards[steps], -_MAX_FLOAT32, _MAX_FLOAT32).astype(np.float32),
        "terminated": batch.terminated[steps],
        "truncated": batch.truncated[steps],
        "boundary_index": batch.boundary_index[is_inside] - np.array([first, 0]),
        "boundary_observations": batch.boundary_observations[is_inside],
    }


def _make_mismatch_error(reason: str) -> LearningError:
    return LearningError(
        f"The saved replay cannot be restored: {reason}.", "use a checkpoint of the same recipe"
    )


def _as_bytes(digest: str) -> Array:
    """Return a digest as an array of bytes; an empty digest becomes zeros."""
    return np.frombuffer(bytes.fromhex(digest or "00" * 32), np.uint8).copy()


def _as_digest(tensor: Array) -> str:
    digest: str = tensor.tobytes().hex()
    return "" if not any(tensor) else digest
