"""The service of a Flame worker, without a Flame: a child process answers."""

from __future__ import annotations

import errno
import io
import os
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import rollouts
from test_base_contract import FAKE, alone, slots

from rlflame.errors import FleetError
from rlflame.fleet.flame import service
from rlflame.fleet.flame.object_cache import view_array
from rlflame.fleet.job_queue import FleetJob
from rlflame.fleet.retry_policy import classify_answer
from rlflame.rollout import wire
from rlflame.rollout.task import RolloutTask

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run tasks in a service whose run is alive and whose weights are available."""
    weights = rollouts.weights(rollouts.policy_spec(FAKE))
    content = wire.encode({"id": "weights", "arrays": weights})
    monkeypatch.setattr(service, "_fetch_policy", lambda endpoint, key: content)
    monkeypatch.setattr(service, "_limit_object_cache", lambda: None)
    monkeypatch.setattr(service.Service, "_exit_when_orphaned", lambda self: None)
    monkeypatch.setattr(service._LeaseReader, "is_over", lambda self: False)
    served = service.Service(core="", step_deadline_s=60.0, lease={})

    def run(*tasks: RolloutTask) -> list[dict[str, Any]]:
        sent = wire.encode({"tasks": [np.frombuffer(wire.encode(t), np.uint8) for t in tasks]})
        answered = served.run(io.BytesIO(sent), "weights", "", "")
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
    """Another machine may have enough memory."""

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
    """A lease that stops moving in one task is also stopped in the next task."""
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
    assert ended.message.endswith("killed by signal 9, SIGKILL.")
    known = classify_answer(job, {**answer, "position": (0, 1, 5, 7)}, 0, 1.0)
    assert isinstance(known, FleetError)
    assert known.message.endswith("SIGKILL (near slot 0, row 1, seed 5, step 7).")
