"""A Flame worker's own half, without a Flame: a child process, and answers in its name."""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import rollouts
from test_fleet_contract import FAKE, alone, slots

from rlflame.errors import FleetError
from rlflame.fleet.flame import service
from rlflame.fleet.flame.raw_object import view_array
from rlflame.fleet.flame.worker_versions import WorkerRegistry
from rlflame.fleet.jobs import FleetJob
from rlflame.fleet.retry_policy import classify_answer
from rlflame.rollout import wire
from rlflame.rollout.machine import read_versions
from rlflame.rollout.spec import RolloutTask

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has tasks answered by a service whose run lives, and whose weights are at hand."""
    weights = rollouts.weights(rollouts.policy_spec(FAKE))
    content = wire.encode({"id": "weights", "arrays": weights})
    monkeypatch.setattr(service, "_fetch_policy", lambda endpoint, key: content)
    monkeypatch.setattr(service, "_limit_object_cache", lambda: None)
    monkeypatch.setattr(service.Service, "_exit_when_orphaned", lambda self: None)
    monkeypatch.setattr(service._LeaseReader, "is_over", lambda self: False)
    served = service.Service(core="", step_deadline_s=60.0, lease={})

    def run(*tasks: RolloutTask) -> list[dict[str, Any]]:
        sent = wire.encode({"tasks": [np.frombuffer(wire.encode(t), np.uint8) for t in tasks]})
        answered = served.run(np.frombuffer(sent, np.uint8), "weights", "", "")
        found: dict[str, Any] = wire.decode(view_array(answered))
        return list(found["answers"])

    yield run
    served._close_child()


def test_a_child_that_sends_nonsense_has_died_and_the_next_task_has_another(run: Run) -> None:
    good, bad = slots(1)[0], slots(1, rollouts.fake(fault="garble"))[0]
    before, lost, after = run(good, bad, good)
    assert lost["kind"] == "died"
    assert lost["how"] == "sent a frame of unknown kind 255"
    assert [bytes(answer["body"]) for answer in (before, after)] == [alone(good)] * 2


def test_a_machine_without_room_for_a_child_costs_a_retry_and_no_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine may have some."""

    def full(**_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(service, "WorkerProcess", full)
        (answer,) = run(*slots(1))
    assert answer["kind"] == "died"
    assert answer["how"] == "failed with OSError: [Errno 28] No space left on device"
    assert "in full" in answer["printed"]
    assert [answer["kind"] for answer in run(*slots(1))] == ["result"]


def test_a_group_has_one_look_at_its_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands still in one task goes on standing still in the next."""
    looked: list[service._LeaseReader] = []
    monkeypatch.setattr(service._LeaseReader, "is_due", lambda self, now: True)
    monkeypatch.setattr(service._LeaseReader, "is_over", lambda self: bool(looked.append(self)))
    run(*slots(3, rollouts.fake(fault="doze")))
    assert len(set(map(id, looked))) == 1
    assert len(looked) >= 3


def test_a_death_before_any_word_names_no_place(run: Run) -> None:
    (task,) = slots(1, rollouts.fake(fault="kill", where="init"))
    job = FleetJob(task, b"", b"", queue.SimpleQueue())
    (answer,) = run(task)
    ended = classify_answer(job, answer, 0, 1.0)
    assert isinstance(ended, FleetError)
    assert ended.message.endswith("the last one killed by signal 9, SIGKILL.")
    known = classify_answer(job, {**answer, "position": (0, 1, 5, 7)}, 0, 1.0)
    assert isinstance(known, FleetError)
    assert known.message.endswith("SIGKILL (near slot 0, row 1, seed 5, step 7).")


def test_who_could_not_start_a_child_is_not_compared() -> None:
    told: list[Any] = []
    workers = WorkerRegistry(2, lambda: 2, told.append, lambda topic, text: told.append(text))
    workers.add({"name": "a", "host": "far", "pid": 1, "child": 0})
    assert (told, workers.list_workers()) == ([], [])
    workers.add({**read_versions(), "name": "a", "host": "far"})
    assert told == [1]


def test_of_more_workers_than_there_can_be_those_not_heard_of_for_longest_are_gone() -> None:
    told: list[Any] = []
    workers = WorkerRegistry(2, lambda: 2, told.append, lambda topic, text: told.append(text))
    for name in ("a", "b", "a", "c", "a", "c"):
        workers.add({**read_versions(), "name": name, "host": "here"})
    assert [worker["name"] for worker in workers.list_workers()] == ["a", "c"]
    assert told == [1, 2]
    workers.add({**read_versions(), "name": "d", "host": "here", "numpy": "1.0.0"})
    assert [worker["name"] for worker in workers.list_workers()] == ["c", "d"]
    assert len(told) == 3  # that one is compared as all are


def test_where_room_is_made_all_are_counted() -> None:
    """It is asked for only when it seems to be full, and once it was there it may be used."""
    told: list[int] = []
    rooms = iter([3, 1])
    workers = WorkerRegistry(2, lambda: next(rooms), told.append, lambda topic, text: None)
    for name in ("a", "b", "a", "c", "b", "c", "d", "d"):
        workers.add({**read_versions(), "name": name, "host": "here"})
    assert told == [1, 2, 3]
    assert [worker["name"] for worker in workers.list_workers()] == ["b", "c", "d"]
    assert next(rooms, None) is None


def test_a_package_that_one_of_two_machines_lacks_changes_no_bit() -> None:
    told: list[Any] = []
    workers = WorkerRegistry(
        2, lambda: 2, lambda count: None, lambda topic, text: told.append(text)
    )
    workers.add({**read_versions(), "name": "a", "host": "far", "box2d": "absent"})
    assert told == []
    workers.add({**read_versions(), "name": "b", "host": "far", "mujoco": "1.0.0"})
    assert [text.split(" (")[0] for text in told] == ["the worker on far differs in mujoco 1.0.0"]
