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
    Closing,
    Fleet,
    FleetEvent,
    FleetReport,
    Observer,
    Submission,
    Traffic,
    ignore,
    policy_id,
)
from .contest import Side, Trial, Verdict

Clock = Callable[[], float]


class ChoosingFleet(Closing):
    """`home` needs nobody else and begins; `away` has to be worth it."""

    def __init__(
        self,
        home: Fleet,
        away: Fleet,
        *,
        observer: Observer = ignore,
        clock: Clock = time.monotonic,
    ) -> None:
        self._sides: dict[Side, Fleet] = {"home": home, "away": away}
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._trial = Trial(lambda: away.ready, self._complete)
        #: Where what belongs to no turn runs: evaluations, and all once it is decided.
        self._now: Side = "home"
        self._decided = False
        #: Whether the user has been told how the choosing ended.
        self._told = False
        self._submitted = 0
        self._open: dict[Side, int] = {"home": 0, "away": 0}
        self._releasing: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self._sides[self._now].name if self._decided else "auto"

    @property
    def capacity(self) -> int:
        return self._sides[self._now].capacity

    @property
    def ready(self) -> bool:
        return self._sides[self._now].ready

    @property
    def candidates(self) -> tuple[tuple[str, int], ...]:
        """Names and capacities of those that still may be chosen; none once it is decided."""
        if self._decided:
            return ()
        return tuple((fleet.name, fleet.capacity) for fleet in self._sides.values())

    def put(self, policy: PolicyArrays) -> str:
        for fleet in self._living():
            fleet.put(policy)
        return policy_id(policy)

    def release(self, policy_id: str) -> None:
        for fleet in self._living():
            fleet.release(policy_id)

    def submit(self, tasks: Sequence[RolloutTask]) -> Submission:
        training = bool(tasks) and tasks[0].purpose == "train"
        with self._lock:
            turn = self._trial.turn() if training and not self._decided else None
            if turn is not None:
                self._now = turn.side
            decides = training and turn is None and not self._decided
            verdict = self._decide() if decides else None
            side = self._now
            self._open[side] += 1
            self._submitted += 1
            number = self._submitted
        if decides:
            self._note(self._sentence(verdict))
        began = self._clock()

        def over(steps: int | None) -> None:
            """With the steps of all fragments, where all came."""
            seconds = self._clock() - began
            if steps and turn and turn.counts and seconds > 0.0:
                self._trial.saw(side, steps / seconds, alone=self._submitted == number)
            with self._lock:
                self._open[side] -= 1
                self._release_loser()

        def failed() -> None:
            if side == "away" and not self._decided:
                self._note(
                    f"auto: {self.candidates[1][0]} failed while it was being timed; "
                    f"{self.candidates[0][0]} can go on without it, with the same bits"
                )

        try:
            return _Timed(self._sides[side].submit(tasks), over, failed)
        except BaseException as error:
            if isinstance(error, FleetError):
                failed()
            over(None)
            raise

    def probe(self) -> FleetReport:
        return self._sides[self._now].probe()

    def traffic(self) -> Traffic:
        parts = [fleet.traffic() for fleet in self._sides.values()]
        return Traffic(sum(p.bytes_out for p in parts), sum(p.bytes_in for p in parts))

    def close(self) -> None:
        if self._submitted and not self._told:
            self._note("auto: the run was over before both sides had been timed")
        if self._releasing is not None:
            self._releasing.join()
        try:
            self._sides["home"].close()
        finally:
            self._sides["away"].close()

    # With the lock held.

    def _decide(self) -> Verdict | None:
        verdict = self._trial.verdict()
        self._now = verdict.winner if verdict is not None else "home"
        self._decided = True
        self._release_loser()
        return verdict

    def _release_loser(self) -> None:
        """In a thread of its own: a cluster takes its time to let go."""
        if not self._decided or self._releasing is not None:
            return
        loser: Side = "home" if self._now == "away" else "away"
        if self._open[loser] == 0:
            self._releasing = threading.Thread(
                target=self._let_go, args=(loser,), name="rlflame-release", daemon=True
            )
            self._releasing.start()

    # Without it.

    def _let_go(self, loser: Side) -> None:
        if loser == "away":  # whose workers come and go, and are told of
            self._observer(FleetEvent("workers", "", 0, "0"))
        self._sides[loser].close()

    def _living(self) -> list[Fleet]:
        with self._lock:
            return [self._sides[self._now]] if self._decided else [*self._sides.values()]

    def _complete(self) -> bool:
        away = self._sides["away"]
        return len(away.probe().workers) >= away.capacity

    def _sentence(self, verdict: Verdict | None) -> str:
        here, there = self._sides["home"], self._sides["away"]
        if verdict is None:
            return f"auto: no iteration could be timed on both sides; {here.name} goes on alone"
        winner = self._sides[verdict.winner].name
        rates, seen = verdict.steps_per_s, verdict.seen
        why = (
            f"no difference to speak of, and {winner} needs nobody else"
            if verdict.equal
            else f"{winner} is {verdict.factor:.1f} times as fast"
        )
        return (
            f"auto: timed in turn, {here.name} with {here.capacity} comes to {rates['home']:,.0f} "
            f"steps/s and {there.name} with {there.capacity} to {rates['away']:,.0f} (medians of "
            f"{seen['home']} and {seen['away']} iterations, starts apart): {why}, and goes on alone"
        )

    def _note(self, text: str) -> None:
        self._told = True
        self._observer(FleetEvent("note", "", 0, text))


class _Timed:
    """A submission that says once when it is over, and whether all of it came."""

    def __init__(
        self,
        inner: Submission,
        over: Callable[[int | None], None],
        failed: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._over = over
        self._failed = failed
        self._steps = 0
        self._told = False

    def __iter__(self) -> Iterator[Fragment]:
        try:
            for fragment in self._inner:
                self._steps += int(fragment.lengths.sum())
                yield fragment
        except FleetError:
            self._failed()
            raise
        self._tell(self._steps)

    def cancel(self) -> None:
        self._inner.cancel()
        self._tell(None)

    def _tell(self, steps: int | None) -> None:
        if not self._told:
            self._told = True
            self._over(steps)
