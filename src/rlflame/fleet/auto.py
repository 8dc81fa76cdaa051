"""A fleet over two: both work in turn until it is known which is faster, then that one alone.

Whole iterations of training are timed, from their submission to the last of their fragments: what
counts is how long a run waits. A fragment is the same wherever it comes from, and so is the run.
The loser is closed as soon as nothing runs there any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlflame.errors import FleetError
from rlflame.rollout.task import Fragment, PolicyArrays, RolloutTask

from .base import (
    ContextManagerMixin,
    Fleet,
    FleetEvent,
    FleetReport,
    Observer,
    Submission,
    Traffic,
    ignore_event,
    make_policy_id,
)
from .contest import Contest, ContestResult, FleetSide


@dataclass(frozen=True, slots=True)
class _Lap:
    """One submission: where it runs, its number and start, and whether its time counts."""

    side: FleetSide
    number: int
    started_at: float
    is_timed: bool


class AutoFleet(ContextManagerMixin):
    """`local` ("home") is there already and begins; `remote` ("away") has to be worth it."""

    def __init__(
        self,
        local: Fleet,
        remote: Fleet,
        *,
        observer: Observer = ignore_event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleets: dict[FleetSide, Fleet] = {"home": local, "away": remote}
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._contest = Contest(
            lambda: remote.ready, lambda: len(remote.probe().workers) >= remote.capacity
        )
        #: Where evaluations run, and everything after the choice.
        self._side: FleetSide = "home"
        self._decided = self._has_reported = False
        self._submitted = 0
        self._open_counts: dict[FleetSide, int] = {"home": 0, "away": 0}
        self._release_thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self._fleets[self._side].name if self._decided else "auto"

    @property
    def capacity(self) -> int:
        return self._fleets[self._side].capacity

    @property
    def ready(self) -> bool:
        return self._fleets[self._side].ready

    @property
    def candidates(self) -> tuple[tuple[str, int], ...]:
        """Names and capacities of the fleets that may still be chosen; none after the choice."""
        if self._decided:
            return ()
        return tuple((fleet.name, fleet.capacity) for fleet in self._fleets.values())

    def put(self, policy: PolicyArrays) -> str:
        for fleet in self._list_open_fleets():
            fleet.put(policy)
        return make_policy_id(policy)

    def release(self, policy_id: str) -> None:
        for fleet in self._list_open_fleets():
            fleet.release(policy_id)

    def _list_open_fleets(self) -> list[Fleet]:
        with self._lock:
            return [self._fleets[self._side]] if self._decided else [*self._fleets.values()]

    def submit(self, tasks: Sequence[RolloutTask]) -> Submission:
        lap = self._start_lap(is_training=bool(tasks) and tasks[0].purpose == "train")
        try:
            return _TimedSubmission(self, lap, self._fleets[lap.side].submit(tasks))
        except BaseException as error:
            self.finish_lap(lap, error=error)
            raise

    def probe(self) -> FleetReport:
        return self._fleets[self._side].probe()

    def read_traffic(self) -> Traffic:
        parts = [fleet.read_traffic() for fleet in self._fleets.values()]
        return Traffic(sum(p.bytes_out for p in parts), sum(p.bytes_in for p in parts))

    def close(self) -> None:
        if self._submitted and not self._has_reported:
            self._note("auto: the run was over before both sides had been timed")
        if self._release_thread is not None:
            self._release_thread.join()
        try:
            self._fleets["home"].close()
        finally:
            self._fleets["away"].close()

    def _start_lap(self, *, is_training: bool) -> _Lap:
        with self._lock:
            competes = is_training and not self._decided
            turn = self._contest.take_turn() if competes else None
            decides = competes and turn is None
            result = self._contest.make_result() if decides else None
            if decides:
                self._decided = True
                self._side = result.winner if result is not None else "home"
                self._release_loser()
            elif turn is not None:
                self._side = turn.side
            side = self._side
            self._open_counts[side] += 1
            self._submitted += 1
            number = self._submitted
        if decides:
            self._note(self._format_result(result))
        return _Lap(side, number, self._clock(), turn is not None and turn.is_timed)

    def finish_lap(self, lap: _Lap, *, steps: int = 0, error: BaseException | None = None) -> None:
        """With the steps of all fragments, or the error that ended the submission."""
        seconds = self._clock() - lap.started_at
        if steps and lap.is_timed and seconds > 0.0:
            exclusive = self._submitted == lap.number
            self._contest.add_rate(lap.side, steps / seconds, exclusive=exclusive)
        if isinstance(error, FleetError) and lap.side == "away" and not self._decided:
            self._note(
                f"auto: {self._fleets['away'].name} failed while it was being timed; "
                f"{self._fleets['home'].name} can go on without it, with the same bits"
            )
        with self._lock:
            self._open_counts[lap.side] -= 1
            self._release_loser()

    def _release_loser(self) -> None:
        """In a thread, because a cluster takes its time to let go; with the lock held."""
        loser: FleetSide = "home" if self._side == "away" else "away"
        if self._decided and self._release_thread is None and not self._open_counts[loser]:
            self._release_thread = threading.Thread(
                target=self._close_loser, args=(loser,), name="rlflame-release", daemon=True
            )
            self._release_thread.start()

    def _close_loser(self, loser: FleetSide) -> None:
        if loser == "away":  # displays show the number of its workers
            self._observer(FleetEvent.of_workers(0))
        self._fleets[loser].close()

    def _format_result(self, result: ContestResult | None) -> str:
        local, remote = self._fleets["home"], self._fleets["away"]
        if result is None:
            return f"auto: no iteration could be timed on both sides; {local.name} goes on alone"
        winner = self._fleets[result.winner].name
        rates, iterations = result.steps_per_s, result.iterations
        reason = (
            f"no difference to speak of, and {winner} needs nobody else"
            if result.is_tie
            else f"{winner} is {result.factor:.1f} times as fast"
        )
        return (
            f"auto: timed in turn, {local.name} with {local.capacity} comes to "
            f"{rates['home']:,.0f} steps/s and {remote.name} with {remote.capacity} to "
            f"{rates['away']:,.0f} (medians of {iterations['home']} and {iterations['away']} "
            f"iterations, starts apart): {reason}, and goes on alone"
        )

    def _note(self, text: str) -> None:
        self._has_reported = True
        self._observer(FleetEvent("note", "", 0, text))


class _TimedSubmission:
    """A submission that reports once when it is over, and whether all of it came."""

    def __init__(self, fleet: AutoFleet, lap: _Lap, inner: Submission) -> None:
        self._fleet = fleet
        self._lap = lap
        self._inner = inner
        self._steps = 0
        self._has_finished = False

    def __iter__(self) -> Iterator[Fragment]:
        try:
            for fragment in self._inner:
                self._steps += int(fragment.lengths.sum())
                yield fragment
        except FleetError as error:
            self._finish(error=error)
            raise
        self._finish(steps=self._steps)

    def cancel(self) -> None:
        self._inner.cancel()
        self._finish()

    def _finish(self, *, steps: int = 0, error: FleetError | None = None) -> None:
        if not self._has_finished:
            self._has_finished = True
            self._fleet.finish_lap(self._lap, steps=steps, error=error)
