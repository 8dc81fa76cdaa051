"""Slots that are stepped together give the same results as each slot alone."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest
import rollouts

from rlflame.errors import RlflameError
from rlflame.fleet.base import FleetEvent
from rlflame.fleet.inline import InlineFleet
from rlflame.rollout import wire
from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.envs.vector_env import make_vector_env
from rlflame.rollout.mujoco.mujoco_env import MujocoVectorEnv
from rlflame.rollout.policy import Policy
from rlflame.rollout.task import EnvSpec, Fragment, RolloutFailure, RolloutTask
from rlflame.rollout.task_batching import merge_tasks, split_fragment
from rlflame.rollout.worker import RolloutWorker

HOPPER = read_env_spec("Hopper-v5", {}, 14)
ENVS = {
    "hopper": HOPPER,
    "ant": read_env_spec("Ant-v5", {}, 11),
    "reacher": read_env_spec("Reacher-v5", {}, 7),
    "cartpole": read_env_spec("CartPole-v1", {}, None),
    "pendulum": read_env_spec("Pendulum-v1", {}, 10),
    "fake": rollouts.fake(length=5, continuous=True),
}


def slots(env: EnvSpec, count: int = 4, *, policy: Any = None, **changes: Any) -> list[RolloutTask]:
    policy = policy or rollouts.policy_spec(env)
    given = {"rows": policy.width, "policy": policy, **changes}
    return [rollouts.task(env, slot, **given) for slot in range(count)]


def alone(tasks: list[RolloutTask], worker: RolloutWorker) -> list[Fragment]:
    return [rollouts.run(task, worker) for task in tasks]


def together(tasks: list[RolloutTask], worker: RolloutWorker, workers: int = 1) -> list[Fragment]:
    """Run merged tasks through the wire format, as local workers do."""
    found = []
    for task in merge_tasks(tasks, workers):
        answer = rollouts.run(wire.decode(wire.encode(task)), worker)
        found += split_fragment(wire.decode(wire.encode(answer)))
    return found


def onward(tasks: list[RolloutTask], fragments: list[Fragment]) -> list[RolloutTask]:
    return [rollouts.following(*pair) for pair in zip(tasks, fragments, strict=True)]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("acting", ["sample", "best", "uniform"])
@pytest.mark.parametrize("name", ENVS)
def test_a_slot_has_the_same_bytes_with_others_beside_it(name: str, acting: Any, rows: int) -> None:
    tasks = slots(ENVS[name], acting=acting, rows=rows)
    lone, shared = RolloutWorker(), RolloutWorker()
    assert [task.slots for task in merge_tasks(tasks, 1)] == [(0, 1, 2, 3)]
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
    """The episodes end at different times, and some slots have to wait for others."""
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
    assert [task.slots for task in merge_tasks(tasks, 1)] == [(0, 1)]
    expected = alone(tasks, RolloutWorker())
    assert list(map(wire.encode, together(tasks, RolloutWorker()))) == list(
        map(wire.encode, expected)
    )


def test_every_size_of_group_keeps_its_policy_while_a_version_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """31 whole episodes run in groups of 16, 8, 4, 2 and 1 in each iteration."""
    made = []

    class Counted(Policy):
        def __init__(self, *given: Any) -> None:
            made.append(given)
            super().__init__(*given)

    monkeypatch.setattr("rlflame.rollout.worker.Policy", Counted)
    worker = RolloutWorker()
    tasks = slots(HOPPER, 31, rows=1, unit="episodes", steps=2)
    for _ in range(2):
        for size in (16, 8, 4, 2, 1):
            together(tasks[:size], worker)
    assert len(made) == 5


def test_slots_may_have_others_beside_them_each_time() -> None:
    """This happens when the number of workers changes or a worker is lost."""
    tasks, lone, shared = slots(HOPPER), RolloutWorker(), RolloutWorker()
    for workers in (2, 1, 4, 3, 1):
        expected = alone(tasks, lone)
        found = together(tasks, shared, workers)
        assert list(map(wire.encode, found)) == list(map(wire.encode, expected))
        tasks = onward(tasks, found)


def test_ends_and_hidden_observations_come_to_their_slots() -> None:
    """The fragments in the tests above contain both kinds of episode ends."""
    fragments = together(slots(HOPPER, steps=40), RolloutWorker())
    for fragment in fragments:
        arrays = [getattr(fragment, field.name) for field in dataclasses.fields(fragment)]
        # Otherwise, sums would add in another order than those of a single slot.
        assert all(x.flags.c_contiguous for x in arrays if isinstance(x, np.ndarray))
        assert {episode.row for episode in fragment.episodes} == set(range(8))
        assert {episode.truncated for episode in fragment.episodes} == {True, False}
        assert len(fragment.boundary_index) == fragment.truncated.sum() > 0
        assert all(fragment.truncated[t, row] for t, row in fragment.boundary_index)


def test_every_worker_has_as_many_slots_as_another() -> None:
    tasks = slots(HOPPER, 9)
    joined = {n: [task.slots for task in merge_tasks(tasks, n)] for n in (1, 2, 3, 9, 20)}
    # A group has at most 32 rows.
    assert joined[1] == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
    assert joined[2] == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
    assert joined[3] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert joined[9] == joined[20] == [(slot,) for slot in range(9)]


def test_later_episodes_are_joined_in_smaller_groups() -> None:
    """The last group is then a short one. Groups have few different sizes."""
    policy = rollouts.policy_spec(HOPPER, width=8)
    tasks = slots(HOPPER, 50, policy=policy, rows=1, unit="episodes", states=())
    joined = {n: [len(task.slots) for task in merge_tasks(tasks, n)] for n in (1, 2, 20)}
    assert joined[1] == [16, 16, 16, 2]
    assert joined[2] == [16, 16, 8, 4, 2, 2, 1, 1]
    assert joined[20] == [2] * 6 + [1] * 38
    assert [slot for task in merge_tasks(tasks, 2) for slot in task.slots] == list(range(50))
    wide = slots(HOPPER, 4, unit="episodes", states=())
    assert [task.slots for task in merge_tasks(wide, 1)] == [(0, 1), (2, 3)]


def test_a_worker_makes_environments_once_for_each_size() -> None:
    made = []

    def opened(spec: EnvSpec, count: int) -> Any:
        made.append(count)
        return make_vector_env(spec, count)

    policy = rollouts.policy_spec(HOPPER)
    tasks, worker = slots(HOPPER, 20, policy=policy, rows=1, unit="episodes"), RolloutWorker(opened)
    for iteration in range(3):
        together([dataclasses.replace(task, iteration=iteration) for task in tasks], worker, 2)
    assert sorted(made) == [1, 2, 4, 8]


class Watched(np.ndarray[Any, Any]):
    """Observations that record the heights of matrix products."""

    heights: ClassVar[list[int]] = []

    def dot(self, other: Any, out: Any = None) -> Any:
        self.heights.append(len(self))
        return np.asarray(self).dot(other, out)


def test_each_slot_has_a_product_of_the_policy_s_width() -> None:
    """One product for all slots is identical with many BLAS libraries, but not all."""
    spec = rollouts.policy_spec(HOPPER, normalise=False)
    policy = Policy(spec, rollouts.weights(spec), slots=4)
    seen = np.zeros((32, 11), np.float32).view(Watched)
    Watched.heights.clear()
    policy.forward(seen)
    policy.set_active_slots([2])
    policy.forward(seen)
    assert Watched.heights == [8] * 5


@pytest.mark.filterwarnings("ignore:invalid")
def test_diverged_weights_are_a_failure() -> None:
    tasks = slots(HOPPER, unit="episodes", states=())
    arrays = rollouts.weights(tasks[0].policy)
    arrays["actor.2.bias"][:] = np.inf  # the environment clips actions to the bounds
    (task,) = merge_tasks(tasks[:2], 1)
    found, expected = (RolloutWorker().run(each, lambda: arrays) for each in (task, tasks[0]))
    assert isinstance(found, RolloutFailure)
    assert "the policy has diverged" in found.message
    assert found == expected


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_what_lies_behind_a_slot_s_last_step_is_nobody_s() -> None:
    """The rows of waiting slots may overflow. This does not count as a divergence."""
    policy = rollouts.policy_spec(HOPPER)
    tasks = slots(HOPPER, 8, policy=policy, rows=1, unit="episodes", steps=300)
    arrays = rollouts.weights(policy)
    arrays["actor.2.bias"][0] = 2e38
    expected = [RolloutWorker().run(task, lambda: arrays) for task in tasks]
    assert all(isinstance(fragment, Fragment) for fragment in expected)
    (task,) = merge_tasks(tasks, 1)
    found = RolloutWorker().run(task, lambda: arrays)
    assert isinstance(found, Fragment)
    assert not np.isfinite(found.actions).all()
    assert list(map(wire.encode, split_fragment(found))) == list(map(wire.encode, expected))


def test_what_is_stepped_now_is_an_episode_that_is_not_over() -> None:
    """If a worker hangs and is killed, the error names this episode."""
    tasks = slots(HOPPER, 16, rows=1, unit="episodes")
    worker, told = RolloutWorker(), []
    step = MujocoVectorEnv.step

    def watched(rows: Any, active: Any, *rest: Any) -> Any:
        ended = step(rows, active, *rest)
        told.append((worker.position[0] in active, worker.position[-1]))
        return ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MujocoVectorEnv, "step", watched)
        found = together(tasks, worker)
    assert len({max(fragment.lengths) for fragment in found}) > 1
    assert all(active for active, _ in told)
    assert [elapsed for _, elapsed in told] == list(range(1, len(told) + 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"unit": "episodes", "env": ENVS["pendulum"]},
        {"unit": "episodes", "env": dataclasses.replace(HOPPER, kwargs={"frame_skip": 2})},
        {"unit": "episodes", "purpose": "evaluate"},
        {"rows": 4, "states": ()},
        {"policy": rollouts.policy_spec(HOPPER, exploration="gsde")},
    ],
    ids=["unknown", "arguments", "evaluation", "narrow", "gsde"],
)
def test_what_depends_on_others_stays_alone(changes: dict[str, Any]) -> None:
    tasks = [dataclasses.replace(task, **changes) for task in slots(HOPPER)]
    assert merge_tasks(tasks, 1) == tasks


def test_tasks_that_differ_stay_apart() -> None:
    tasks = slots(HOPPER, 6)
    tasks[2:4] = [dataclasses.replace(task, policy_id="other") for task in tasks[2:4]]
    tasks[5] = dataclasses.replace(tasks[5], steps=13)
    assert [task.slots for task in merge_tasks(tasks, 1)] == [(0, 1), (2, 3), (4,), (5,)]


def test_a_fault_names_its_own_slot_and_row() -> None:
    harmless = slots(rollouts.fake())
    state = harmless[2].states[5]
    env = rollouts.fake(fault="error", at=3, seed=state.seed)
    tasks = [dataclasses.replace(task, env=env) for task in harmless]
    (task,) = merge_tasks(tasks, 1)
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
