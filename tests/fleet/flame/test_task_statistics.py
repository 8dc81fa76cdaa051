"""Groups of short tasks: their size, and failures of one task in a group."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import rollouts
from test_base_contract import FAKE, slots
from test_flame_fleet import Bench, bench, expected, run

from rlflame.fleet.flame.task_statistics import TaskStatistics
from rlflame.fleet.job_queue import FleetJob, JobQueue

__all__ = ["bench"]

#: A number of running attempts at which no executor waits for its first one.
BUSY = 40


def told(capacity: int, **busy_s: float) -> TaskStatistics:
    pace = TaskStatistics(capacity)
    for purpose, seconds in busy_s.items():
        for _ in range(3):
            pace.add(purpose, seconds)
    return pace


def test_tasks_of_unknown_length_travel_alone() -> None:
    assert TaskStatistics(2).compute_group_size("train", 100, BUSY) == 1
    assert told(2, evaluate=0.001).compute_group_size("train", 100, BUSY) == 1


def test_a_group_is_an_equal_share_of_what_waits() -> None:
    pace = told(2, train=0.001)
    left, groups = 8, []
    while left:
        groups.append(pace.compute_group_size("train", left, BUSY))
        left -= groups[-1]
    # The first four for one executor, the others for the second.
    assert groups == [4, 2, 1, 1]
    assert told(8, train=0.001).compute_group_size("train", 8, BUSY) == 1


def test_a_group_is_soon_over() -> None:
    """0.6 s are enough for 6 tasks of 0.09 s. A longer task is alone in its group."""
    assert told(20, train=0.09).compute_group_size("train", 320, BUSY) == 6
    assert told(20, train=0.4).compute_group_size("train", 140, BUSY) == 1
    assert told(20, train=3600.0).compute_group_size("train", 320, BUSY) == 1
    assert told(20, train=0.0).compute_group_size("train", 40, BUSY) == 2


def test_a_group_is_longer_while_many_tasks_wait() -> None:
    """At most a quarter of an equal share, and at most 5 s."""
    pace = told(64, train=1.0)
    sizes = [pace.compute_group_size("train", 64 * rounds, 64) for rounds in (40, 20, 16, 12, 8, 7)]
    assert sizes == [5, 5, 4, 3, 2, 1]
    assert told(64, train=3.0).compute_group_size("train", 64 * 16, 64) == 1
    cautious = TaskStatistics(64, max_group_s=2.0)
    cautious.add("train", 1.0)
    assert cautious.compute_group_size("train", 64 * 16, 64) == 2


def test_executors_that_begin_together_do_not_end_together() -> None:
    """Of 320 tasks of 0.15 s, 20 executors first get one to four each, then four."""
    pace = told(20, train=0.15)
    left, groups = 320, []
    while len(groups) < 40:
        groups.append(pace.compute_group_size("train", left, len(groups)))
        left -= groups[-1]
    assert groups == [1] * 5 + [2] * 5 + [3] * 5 + [4] * 5 + [4] * 20
    # If the tasks are enough for one round only, all executors end at the same time.
    assert [pace.compute_group_size("train", 40 - 2 * k, k) for k in range(3)] == [2, 2, 2]


def test_a_change_of_pace_is_soon_believed() -> None:
    """After hundreds of short tasks, a round of 40 long tasks changes the group size."""
    pace = TaskStatistics(20)
    for _ in range(320):
        pace.add("train", 0.1)
    for _ in range(40):
        pace.add("train", 1.0)
    assert pace.compute_group_size("train", 60, BUSY) == 1


def test_stragglers_are_three_times_as_slow_but_never_quick() -> None:
    pace = told(2, train=2.0, evaluate=0.01)
    assert pace.compute_slow_s("train", 1) == pytest.approx(6.0)
    assert pace.compute_slow_s("train", 2) == pytest.approx(12.0)
    assert pace.compute_slow_s("evaluate", 4) == 1.0
    assert pace.compute_slow_s("other", 1) is None


def jobs(*kinds: tuple[str, str]) -> list[FleetJob]:
    """Make a job for each policy and purpose."""
    return [
        FleetJob(
            rollouts.task(FAKE, policy_id=policy, purpose=purpose), b"", b"", queue.SimpleQueue()
        )
        for policy, purpose in kinds
    ]


def test_only_tasks_of_one_kind_travel_together() -> None:
    """The order of waiting tasks does not change."""
    waiting = JobQueue()
    a, b, c, d, e = jobs(
        ("x", "train"), ("x", "train"), ("y", "train"), ("x", "train"), ("x", "evaluate")
    )
    waiting.add([a, b, c, d, e])
    groups = []
    while waiting:
        first = waiting.take(None)
        groups.append([first, *waiting.take_similar(first, 9)])
    assert groups == [[a, b], [c], [d], [e]]
    waiting.add([a, b])
    assert waiting.take_similar(waiting.take(None), 0) == []


@pytest.mark.parametrize("what", ["death", "hang", "stray", "loss"])
def test_a_task_that_went_wrong_travels_alone(what: str) -> None:
    waiting = JobQueue()
    a, b, c = jobs(*[("x", "train")] * 3)
    b.failures[what] += 1
    waiting.add([a, b, c])
    assert waiting.take_similar(waiting.take(None), 9) == []
    assert waiting.take_similar(waiting.take(None), 9) == []
    assert waiting.take(None) is c


@pytest.fixture
def sociable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat tasks as short, even if this machine is slow at the moment."""
    monkeypatch.setattr("rlflame.fleet.flame.task_statistics._GROUP_WORK_S", 1e9)


def ended_there(fleet: Any) -> int:
    """The number of tasks that the cluster has answered."""
    return int(fleet._client.call("get_session", fleet._starter.wait().session.id).succeed)


def test_eight_short_tasks_are_four_of_the_cluster_s(bench: Bench, sociable: None) -> None:
    with bench.fleet() as fleet:
        assert run(fleet, slots(2)) == expected(slots(2))

        before = ended_there(fleet)
        assert run(fleet, slots(8)) == expected(slots(8))
        assert ended_there(fleet) - before == 4
    for slot in range(2, 8):
        kinds = [e.kind for e in bench.events if e.slot == slot and e.kind != "note"]
        assert kinds[:1] == ["submitted"]
        assert sorted(kinds) == ["done", "episodes", "running", "submitted"]


def test_a_death_costs_none_but_its_own_task_a_retry(
    bench: Bench, sociable: None, tmp_path: Path
) -> None:
    env = rollouts.fake(fault="kill_once", marker=str(tmp_path / "once"))
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(2)) == expected(slots(2))
        assert run(fleet, slots(6, env)) == expected(slots(6, env))
    assert bench.kinds("retried") == ["killed by signal 9, SIGKILL"]


def test_a_group_that_the_cluster_loses_is_sent_again(bench: Bench, sociable: None) -> None:
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(2)) == expected(slots(2))
        before = ended_there(fleet)
        bench.stub.faults.fail_tasks = 1
        assert run(fleet, slots(6)) == expected(slots(6))
        # Any of them may be the cause, so each is sent alone.
        assert ended_there(fleet) - before == 6
    # All tasks of the group are retried, each with the reason.
    assert len([e for e in bench.events if e.kind == "retried"]) == 6


def test_weights_that_are_gone_are_put_again_for_a_whole_group(
    bench: Bench, sociable: None
) -> None:
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(2)) == expected(slots(2))
        name = fleet.put(rollouts.weights(slots(1)[0].policy, seed=8))
        fleet._policies.find_reference(name)
        bench.stub.restart_cache(lose=True)
        tasks = [rollouts.task(FAKE, slot=slot, policy_id=name) for slot in range(4)]
        assert len(list(fleet.submit(tasks))) == 4
    # A connection that is opened during the restart is refused, which is retried as well.
    reasons = [r for r in bench.kinds("retried") if not r.startswith("The cluster rejected a call")]
    assert reasons == ["its weights were missing from the cache"] * 4


def test_what_came_to_nothing_says_nothing_of_the_pace(bench: Bench, tmp_path: Path) -> None:
    """Deaths and missing weights do not count; two tasks and one have run."""
    env = rollouts.fake(fault="kill_once", marker=str(tmp_path / "once"))
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(2)) == expected(slots(2))
        assert run(fleet, slots(1, env)) == expected(slots(1, env))
        assert len(bench.kinds("retried")) == 1
        assert len(fleet._scheduler.statistics._by_purpose["train"]) == 3
