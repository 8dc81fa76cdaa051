"""Consecutive failures that end a run, with a fake clock."""

from __future__ import annotations

import pytest

from rlflame.errors import FleetError
from rlflame.fleet.flame.attempt import ClusterUnreachableError
from rlflame.fleet.flame.scheduler import CircuitBreaker

DEAD_EXECUTOR = FleetError("All recent tasks failed.")
OUTAGE = ClusterUnreachableError("The object cache does not answer.")


def fail(breaker: CircuitBreaker, times: int, first: float, last: float) -> None:
    for number in range(times):
        breaker.record_failure(first + (last - first) * number / max(1, times - 1))


@pytest.mark.parametrize(
    ("failures", "over_s", "tripped"), [(24, 46.0, True), (23, 46.0, False), (24, 45.0, False)]
)
def test_many_failures_over_some_time_trip_it(failures: int, over_s: float, tripped: bool) -> None:
    breaker = CircuitBreaker(reconnect_s=120.0)
    fail(breaker, failures, 10.0, 10.0 + over_s)
    assert breaker.is_tripped(10.0 + over_s) == tripped


def test_an_answer_begins_the_count_anew() -> None:
    breaker = CircuitBreaker(reconnect_s=120.0)
    fail(breaker, 30, 0.0, 100.0)
    breaker.record_answer()
    fail(breaker, 24, 101.0, 140.0)
    assert not breaker.is_tripped(140.0)
    assert breaker.is_tripped(147.0)


def test_a_server_that_is_away_may_come_back_within_the_time_for_that() -> None:
    breaker = CircuitBreaker(reconnect_s=120.0)
    fail(breaker, 24, 0.0, 50.0)
    assert breaker.choose_error(OUTAGE, 50.0) is None
    assert breaker.choose_error(OUTAGE, 121.0) is OUTAGE


def test_failures_of_an_outage_do_not_count_against_executors() -> None:
    breaker = CircuitBreaker(reconnect_s=120.0)
    fail(breaker, 40, 0.0, 60.0)
    assert breaker.choose_error(OUTAGE, 60.0) is None
    assert breaker.choose_error(DEAD_EXECUTOR, 70.0) is None  # the server is available again
    fail(breaker, 24, 71.0, 120.0)
    assert breaker.choose_error(DEAD_EXECUTOR, 120.0) is DEAD_EXECUTOR
