"""A fleet over two: both work in turn until it is known which is faster, then that one alone.

Whole iterations of training are timed, from handing them over to the last of their fragments, so
what counts is what a run waits for. A fragment is the same wherever it comes from, so is the run.
The other fleet is closed as soon as nothing runs there any more. Must not know: what fleets there
are, algorithms, files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from rlflame.errors import FleetError
from rlflame.rollout.spec import Fragment, PolicyArrays, RolloutTask

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

Clock = Callable[[], float]


class AutoFleet(ContextManagerMixin):
    """`home` needs nobody else and begins; `away` has to be worth it."""

    def __init__(
        self,
        local: Fleet,
        remote: Fleet,
        *,
        observer: Observer = ignore_event,
        clock: Clock = time.monotonic,
    ) -> None:
        self._fleets: dict[FleetSide, Fleet] = {"home": local, "away": remote}
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._contest = Contest(lambda: remote.ready, self._has_all_workers)
        #: Where what belongs to no turn runs: evaluations, and all once it is decided.
        self._current_side: FleetSide = "home"
        self._decided = False
        #: Whether the user has been told how the choosing ended.
        self._has_reported = False
        self._submitted = 0
        self._open_counts: dict[FleetSide, int] = {"home": 0, "away": 0}
        self._release_thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self._fleets[self._current_side].name if self._decided else "auto"

    @property
    def capacity(self) -> int:
        return self._fleets[self._current_side].capacity

    @property
    def ready(self) -> bool:
        return self._fleets[self._current_side].ready

    @property
    def candidates(self) -> tuple[tuple[str, int], ...]:
        """Names and capacities of those that still may be chosen; none once it is decided."""
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

    def submit(self, tasks: Sequence[RolloutTask]) -> Submission:
        is_training = bool(tasks) and tasks[0].purpose == "train"
        with self._lock:
            turn = self._contest.take_turn() if is_training and not self._decided else None
            if turn is not None:
                self._current_side = turn.side
            decides = is_training and turn is None and not self._decided
            result = self._decide() if decides else None
            side = self._current_side
            self._open_counts[side] += 1
            self._submitted += 1
            number = self._submitted
        if decides:
            self._note(self._format_result(result))
        started_at = self._clock()

        def finish(steps: int | None) -> None:
            """With the steps of all fragments, where all came."""
            seconds = self._clock() - started_at
            if steps and turn and turn.is_timed and seconds > 0.0:
                self._contest.add_rate(side, steps / seconds, exclusive=self._submitted == number)
            with self._lock:
                self._open_counts[side] -= 1
                self._release_loser()

        def report_failure() -> None:
            if side == "away" and not self._decided:
                self._note(
                    f"auto: {self.candidates[1][0]} failed while it was being timed; "
                    f"{self.candidates[0][0]} can go on without it, with the same bits"
                )

        try:
            return _TimedSubmission(self._fleets[side].submit(tasks), finish, report_failure)
        except BaseException as error:
            if isinstance(error, FleetError):
                report_failure()
            finish(None)
            raise

    def probe(self) -> FleetReport:
        return self._fleets[self._current_side].probe()

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

    # With the lock held.

    def _decide(self) -> ContestResult | None:
        result = self._contest.make_result()
        self._current_side = result.winner if result is not None else "home"
        self._decided = True
        self._release_loser()
        return result

    def _release_loser(self) -> None:
        """In a thread of its own: a cluster takes its time to let go."""
        if not self._decided or self._release_thread is not None:
            return
        loser: FleetSide = "home" if self._current_side == "away" else "away"
        if self._open_counts[loser] == 0:
            self._release_thread = threading.Thread(
                target=self._close_loser, args=(loser,), name="rlflame-release", daemon=True
            )
            self._release_thread.start()

    # Without it.

    def _close_loser(self, loser: FleetSide) -> None:
        if loser == "away":  # whose workers come and go, and are told of
            self._observer(FleetEvent.of_workers(0))
        self._fleets[loser].close()

    def _list_open_fleets(self) -> list[Fleet]:
        with self._lock:
            return [self._fleets[self._current_side]] if self._decided else [*self._fleets.values()]

    def _has_all_workers(self) -> bool:
        remote = self._fleets["away"]
        return len(remote.probe().workers) >= remote.capacity

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
            f"{rates['home']:,.0f} "
            f"steps/s and {remote.name} with {remote.capacity} to {rates['away']:,.0f} (medians of "
            f"{iterations['home']} and {iterations['away']} iterations, starts apart): {reason}, "
            "and goes on alone"
        )

    def _note(self, text: str) -> None:
        self._has_reported = True
        self._observer(FleetEvent("note", "", 0, text))


class _TimedSubmission:
    """A submission that says once when it is over, and whether all of it came."""

    def __init__(
        self,
        inner: Submission,
        on_finish: Callable[[int | None], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._on_finish = on_finish
        self._on_failure = on_failure
        self._steps = 0
        self._has_finished = False

    def __iter__(self) -> Iterator[Fragment]:
        try:
            for fragment in self._inner:
                self._steps += int(fragment.lengths.sum())
                yield fragment
        except FleetError:
            self._on_failure()
            raise
        self._finish(self._steps)

    def cancel(self) -> None:
        self._inner.cancel()
        self._finish(None)

    def _finish(self, steps: int | None) -> None:
        if not self._has_finished:
            self._has_finished = True
            self._on_finish(steps)
