"""Slots that are stepped together have the bits that each has alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import rollouts

from rlflame.errors import RlflameError
from rlflame.fleet import FleetEvent
from rlflame.fleet.inline import InlineFleet
from rlflame.rollout import wire
from rlflame.rollout.making import describe
from rlflame.rollout.spec import EnvSpec, Fragment, RolloutFailure, RolloutTask
from rlflame.rollout.stack import apart, stacked
from rlflame.rollout.worker import RolloutWorker

HOPPER = describe("Hopper-v5", {}, 14)
ENVS = {
    "hopper": HOPPER,
    "ant": describe("Ant-v5", {}, 11),
    "reacher": describe("Reacher-v5", {}, 7),
    "cartpole": describe("CartPole-v1", {}, None),
    "pendulum": describe("Pendulum-v1", {}, 10),
    "fake": rollouts.fake(length=5, continuous=True),
}


def slots(env: EnvSpec, count: int = 4, *, policy: Any = None, **changes: Any) -> list[RolloutTask]:
    policy = policy or rollouts.policy_spec(env)
    given = {"rows": policy.width, "policy": policy, **changes}
    return [rollouts.task(env, slot, **given) for slot in range(count)]


def alone(tasks: list[RolloutTask], worker: RolloutWorker) -> list[Fragment]:
    return [rollouts.run(task, worker) for task in tasks]


def together(tasks: list[RolloutTask], worker: RolloutWorker, workers: int = 1) -> list[Fragment]:
    """Through the wire, as local workers answer."""
    found = []
    for task in stacked(tasks, workers):
        answer = rollouts.run(wire.decode(wire.encode(task)), worker)
        found += apart(wire.decode(wire.encode(answer)))
    return found


def onward(tasks: list[RolloutTask], fragments: list[Fragment]) -> list[RolloutTask]:
    return [rollouts.following(*pair) for pair in zip(tasks, fragments, strict=True)]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("acting", ["sample", "best", "uniform"])
@pytest.mark.parametrize("name", ENVS)
def test_a_slot_has_the_same_bytes_with_others_beside_it(name: str, acting: Any, rows: int) -> None:
    tasks = slots(ENVS[name], acting=acting, rows=rows)
    lone, shared = RolloutWorker(), RolloutWorker()
    assert [task.slots for task in stacked(tasks, 1)] == [(0, 1, 2, 3)]
    for _ in range(3):
        expected = alone(tasks, lone)
        found = together(tasks, shared)
        assert list(map(wire.encode, found)) == list(map(wire.encode, expected))
        tasks = onward(tasks, expected)


@pytest.mark.parametrize("acting", ["sample", "best", "uniform"])
@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 8), (3, 3)])
@pytest.mark.parametrize("name", ["hopper", "ant", "reacher"])
def test_whole_episodes_have_the_same_bytes_too(
    name: str, rows: int, width: int, record: bool, acting: Any
) -> None:
    """Though they end at different times, and some of their neighbours' much later."""
    env = ENVS[name]
    policy = rollouts.policy_spec(env, width=width, hidden=(24, 8), activation="relu")
    changes = {"unit": "episodes", "steps": 300, "record": record, "acting": acting}
    tasks = slots(env, 9, policy=policy, rows=rows, **changes)
    lone, shared = RolloutWorker(), RolloutWorker()
    for workers in (1, 2):
        expected = alone(tasks, lone)
        found = together(tasks, shared, workers)
        assert list(map(wire.encode, found)) == list(map(wire.encode, expected))
        if (name, acting, rows) == ("hopper", "sample", 1):
            assert len({max(fragment.lengths) for fragment in found}) > 1
        tasks = [dataclasses.replace(task, iteration=task.iteration + 1) for task in tasks]


@pytest.mark.parametrize("squash", [False, True])
def test_of_every_kind_of_network(squash: bool) -> None:
    policy = rollouts.policy_spec(
        HOPPER, hidden=(24,), activation="relu", normalise=False, squash=squash, width=16
    )
    tasks = slots(HOPPER, 2, policy=policy)
    assert [task.slots for task in stacked(tasks, 1)] == [(0, 1)]
    expected = alone(tasks, RolloutWorker())
    assert list(map(wire.encode, together(tasks, RolloutWorker()))) == list(
        map(wire.encode, expected)
    )


def test_slots_may_have_others_beside_them_each_time() -> None:
    """As when the number of workers changes, or one is lost."""
    tasks, lone, shared = slots(HOPPER), RolloutWorker(), RolloutWorker()
    for workers in (2, 1, 4, 3, 1):
        expected = alone(tasks, lone)
        found = together(tasks, shared, workers)
        assert list(map(wire.encode, found)) == list(map(wire.encode, expected))
        tasks = onward(tasks, found)


def test_ends_and_hidden_observations_come_to_their_slots() -> None:
    """Episodes of both kinds of end lie in the fragments that are compared above."""
    fragments = together(slots(HOPPER, steps=40), RolloutWorker())
    for fragment in fragments:
        arrays = [getattr(fragment, field.name) for field in dataclasses.fields(fragment)]
        # Or sums over them would add in another order than over those of a lone slot.
        assert all(x.flags.c_contiguous for x in arrays if isinstance(x, np.ndarray))
        assert {episode.row for episode in fragment.episodes} == set(range(8))
        assert {episode.truncated for episode in fragment.episodes} == {True, False}
        assert len(fragment.boundary_index) == fragment.truncated.sum() > 0
        assert all(fragment.truncated[t, row] for t, row in fragment.boundary_index)


def test_every_worker_has_as_many_slots_as_another() -> None:
    tasks = slots(HOPPER, 9)
    joined = {n: [task.slots for task in stacked(tasks, n)] for n in (1, 2, 3, 9, 20)}
    # No more than 32 rows.
    assert joined[1] == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
    assert joined[2] == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
    assert joined[3] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert joined[9] == joined[20] == [(slot,) for slot in range(9)]


def test_later_episodes_are_joined_in_smaller_groups() -> None:
    """The last to end is then a short one, whoever has it."""
    policy = rollouts.policy_spec(HOPPER, width=1)
    tasks = slots(HOPPER, 50, policy=policy, unit="episodes", states=())
    joined = [len(task.slots) for task in stacked(tasks, 2)]
    assert joined == [13, 10, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1]
    assert [slot for task in stacked(tasks, 2) for slot in task.slots] == list(range(50))
    # One that has them all to itself may as well begin with as many as there may be.
    assert [len(task.slots) for task in stacked(tasks * 2, 1)][:2] == [32, 32]


@pytest.mark.parametrize(
    "changes",
    [
        {"unit": "episodes", "env": ENVS["pendulum"]},
        {"unit": "episodes", "purpose": "evaluate"},
        {"rows": 4, "states": ()},
        {"policy": rollouts.policy_spec(HOPPER, exploration="gsde")},
    ],
    ids=["heavy", "evaluation", "narrow", "gsde"],
)
def test_what_depends_on_others_stays_alone(changes: dict[str, Any]) -> None:
    tasks = [dataclasses.replace(task, **changes) for task in slots(HOPPER)]
    assert stacked(tasks, 1) == tasks


def test_tasks_that_differ_stay_apart() -> None:
    tasks = slots(HOPPER, 6)
    tasks[2:4] = [dataclasses.replace(task, policy_id="other") for task in tasks[2:4]]
    tasks[5] = dataclasses.replace(tasks[5], steps=13)
    assert [task.slots for task in stacked(tasks, 1)] == [(0, 1), (2, 3), (4,), (5,)]


def test_a_fault_is_told_with_its_own_slot_and_row() -> None:
    harmless = slots(rollouts.fake())
    state = harmless[2].states[5]
    env = rollouts.fake(fault="error", at=3, seed=state.seed)
    tasks = [dataclasses.replace(task, env=env) for task in harmless]
    (task,) = stacked(tasks, 1)
    found = rollouts.run(task)
    assert isinstance(found, RolloutFailure)
    assert (found.slot, found.row, found.seed, found.step) == (2, 5, state.seed, 3)
    assert found == rollouts.run(tasks[2])


def test_a_fleet_tells_of_every_slot() -> None:
    events: list[FleetEvent] = []
    with InlineFleet(events.append) as fleet:
        tasks = slots(HOPPER, 8)
        name = fleet.put(rollouts.weights(tasks[0].policy))
        tasks = [dataclasses.replace(task, policy_id=name) for task in tasks]
        fragments = fleet.submit(tasks)
        assert [fragment.slot for fragment in fragments] == list(range(8))
    for kind in ("submitted", "running", "done"):
        assert sorted(e.slot for e in events if e.kind == kind) == list(range(8))


def test_a_fleet_that_fails_tells_of_every_slot() -> None:
    events: list[FleetEvent] = []
    with InlineFleet(events.append) as fleet:
        tasks = slots(rollouts.fake(fault="error", at=3), 6)
        name = fleet.put(rollouts.weights(tasks[0].policy))
        tasks = [dataclasses.replace(task, policy_id=name) for task in tasks]
        with pytest.raises(RlflameError, match="slot 0, row 0"):
            list(fleet.submit(tasks))
    assert sorted(e.slot for e in events if e.kind == "lost") == [0, 1, 2, 3]
    assert sorted(e.slot for e in events if e.kind == "cancelled") == [4, 5]
