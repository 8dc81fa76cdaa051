"""A fleet that alternates between two fleets, then keeps the faster one.

An iteration is timed from the submission of its tasks to the last fragment, because a run waits for
the last fragment. Both fleets return identical fragments, so the choice does not affect results.
The first iterations after a switch are not timed, because workers have to start and restore their
environments. The slower fleet is closed as soon as its last task has ended.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from rlflame.rollout.task import Fragment, PolicyArrays, RolloutTask

from .base import (
    ContextManagerMixin,
    Fleet,
    FleetEvent,
    Observer,
    Submission,
    Traffic,
    ignore_event,
    make_policy_id,
)

FleetSide = Literal["home", "away"]
#: For each fleet, the steps per second of its timed iterations.
Rates = Mapping[FleetSide, list[float]]
#: The maximum number of untimed iterations on the `away` fleet after each switch to it.
_MAX_WARMUP_ITERATIONS = 4
#: If one fleet is faster by this factor, one timed iteration on each fleet is enough.
_CLEAR_FACTOR = 2.0
#: The `away` fleet is chosen only if it is faster by more than this factor.
_TIE_FACTOR = 1.05


def generate_turns(
    is_ready: Callable[[], bool], is_complete: Callable[[], bool], rates: Rates
) -> Iterator[tuple[FleetSide, bool]]:
    """Yield the fleet for each iteration and whether to time the iteration.

    The `home` fleet runs tasks until `is_ready` reports that the `away` fleet has started. The
    choice then takes at most 16 iterations. `is_complete` returns whether all workers of the `away`
    fleet have answered.
    """
    yield "home", False
    while not is_ready():
        yield "home", False
    for count in (1, 2):
        for _ in range(_MAX_WARMUP_ITERATIONS):
            yield "away", False
            if is_complete():
                break
        for _ in range(count):
            yield "away", True
        yield "home", False
        for _ in range(count):
            yield "home", True
        if not 1 / _CLEAR_FACTOR < compute_factor(rates) < _CLEAR_FACTOR:
            return


def compute_factor(rates: Rates) -> float:
    """Return the ratio of the median speeds (`away` / `home`); 1 if unknown."""
    if not all(rates.values()):
        return 1.0
    return median(rates["away"]) / median(rates["home"])


class AutoFleet(ContextManagerMixin):
    """Compares `local` ("home") with `remote` ("away"), then keeps the faster fleet."""

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
        self._rates: Rates = {"home": [], "away": []}
        self._turns = generate_turns(
            lambda: remote.ready, lambda: len(remote.probe()) >= remote.capacity, self._rates
        )
        #: The fleet of the latest training iteration. Evaluations run on this fleet, too.
        self._side: FleetSide = "home"
        self._has_decided = False
        self._open_counts: Counter[FleetSide] = Counter()
        self._release_thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self._fleets[self._side].name if self._has_decided else "auto"

    @property
    def capacity(self) -> int:
        return self._fleets[self._side].capacity

    @property
    def ready(self) -> bool:
        return self._fleets[self._side].ready

    @property
    def candidates(self) -> tuple[tuple[str, int], ...]:
        """The names and capacities of both fleets; empty once a fleet is chosen."""
        if self._has_decided:
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
            return [self._fleets[self._side]] if self._has_decided else [*self._fleets.values()]

    def submit(self, tasks: Sequence[RolloutTask]) -> Submission:
        is_training = bool(tasks) and tasks[0].purpose == "train"
        side, is_timed = self._take_turn(is_training)
        rates, started_at = self._rates[side] if is_timed else None, self._clock()

        def finish(steps: int) -> None:
            seconds = self._clock() - started_at
            if rates is not None and steps and seconds > 0.0:
                rates.append(steps / seconds)
            with self._lock:
                self._open_counts[side] -= 1
                self._release_loser()

        try:
            return _Lap(self._fleets[side].submit(tasks), finish)
        except BaseException:
            finish(0)
            raise

    def probe(self) -> list[dict[str, Any]]:
        return self._fleets[self._side].probe()

    def read_traffic(self) -> Traffic:
        parts = [fleet.read_traffic() for fleet in self._fleets.values()]
        return Traffic(sum(p.bytes_out for p in parts), sum(p.bytes_in for p in parts))

    def close(self) -> None:
        if self._release_thread is not None:
            self._release_thread.join()
        try:
            self._fleets["home"].close()
        finally:
            self._fleets["away"].close()

    def _take_turn(self, is_training: bool) -> tuple[FleetSide, bool]:
        """Return the fleet for the next submission and whether to time the submission.

        After the last iteration of the comparison, choose the faster fleet.
        """
        is_timed = decides = False
        with self._lock:
            if is_training and not self._has_decided:
                turn = next(self._turns, None)
                decides = turn is None
                winner: FleetSide = "away" if compute_factor(self._rates) > _TIE_FACTOR else "home"
                self._side, is_timed = turn or (winner, False)
                self._has_decided = decides
                self._release_loser()
            self._open_counts[self._side] += 1
            side = self._side
        if decides:
            self._observer(FleetEvent("note", "", 0, self._format_choice()))
        return side, is_timed

    def _release_loser(self) -> None:
        """After the choice, close the slower fleet in a new thread if it has no tasks.

        The caller holds the lock.
        """
        loser: FleetSide = "home" if self._side == "away" else "away"
        if self._has_decided and self._release_thread is None and not self._open_counts[loser]:
            self._release_thread = threading.Thread(
                target=self._close_loser, args=(loser,), name="rlflame-release", daemon=True
            )
            self._release_thread.start()

    def _close_loser(self, loser: FleetSide) -> None:
        if loser == "away":  # displays show the number of remote workers
            self._observer(FleetEvent.of_workers(0))
        self._fleets[loser].close()

    def _format_choice(self) -> str:
        sides = [
            f"{fleet.name} (capacity {fleet.capacity}) ran {median(self._rates[side]):,.0f} steps/s"
            for side, fleet in self._fleets.items()
            if self._rates[side]
        ]
        choice = f"using {self._fleets[self._side].name} from now on"
        return f"auto: in alternate iterations, {' and '.join(sides)}: {choice}"


@dataclass(eq=False)
class _Lap:
    """Wraps a submission to report its number of steps.

    `on_finish` is called once, with 0 if the submission fails or is cancelled.
    """

    submission: Submission
    on_finish: Callable[[int], None] | None

    def __iter__(self) -> Iterator[Fragment]:
        steps = 0
        try:
            for fragment in self.submission:
                steps += int(fragment.lengths.sum())
                yield fragment
        except Exception:
            self._finish(0)
            raise
        self._finish(steps)

    def cancel(self) -> None:
        self.submission.cancel()
        self._finish(0)

    def _finish(self, steps: int) -> None:
        on_finish, self.on_finish = self.on_finish, None
        if on_finish is not None:
            on_finish(steps)
