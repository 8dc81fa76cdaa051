"""The training loop with fakes: the order of calls, failures, and stops."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from rlflame.config.evaluation import EvaluationSettings
from rlflame.config.recipe import (
    LearningSettings,
    Recipe,
    RolloutSettings,
)
from rlflame.errors import CheckpointError, EnvironmentFailure, FleetError, LearningError
from rlflame.learning import policy_average
from rlflame.rollout.task import EnvSpec, EnvState, EpisodeStat, Fragment, PolicySpec
from rlflame.training.trainer import Plan, StopInterrupt, Trainer

ENV = EnvSpec("Fake-v0", {}, None, 1, "discrete", 2, 0, (), ())
POLICY = PolicySpec("discrete", 1, 2, (), (), (), "tanh", False, 10.0, 8)
SLOTS, ROWS, STEPS = 3, 2, 5
BATCH = SLOTS * ROWS * STEPS


def plan(*, unit="steps", staleness=0, average=None, every=None, target=None, **ends):
    """Four iterations, unless `ends` set the end of the run and of its schedules."""
    horizons = {name: ends.pop(name, None) for name in ("horizon_steps", "horizon_iterations")}
    rollout = RolloutSettings(
        unit=unit, num_slots=SLOTS, envs_per_slot=ROWS, steps=STEPS, staleness=staleness
    )
    recipe = Recipe(
        **{"stop_at_iterations": 4, **ends},
        learning=LearningSettings(rollout=rollout, policy_average=average, **horizons),
        evaluation=EvaluationSettings(episodes=2, every_steps=every, until_return=target),
    )
    return Plan("run", recipe, ENV, POLICY)


def version_of(policy):
    return int(policy["version"][0])


class World:
    """A fake fleet, algorithm, recorder and stop request; `events` has all calls.

    A policy is its version number. A state is a token with the number of iterations of its slot.
    """

    name, capacity = "fake", 1

    def __init__(self, *, fail=None, stop_at=None, returns=lambda version: float(version)):
        self.events = []
        self.learned = []
        self.saved = []
        self.evaluations = []
        self.refcounts = {}
        self.version = 0
        self.is_requested = False
        self._fail = fail or {}
        self._stop_at = stop_at
        self._returns = returns
        self._waiting = False
        self.batches = []

    def happens(self, *event):
        """Record an event. If the test has chosen this event, fail or request a stop."""
        self.events.append(event)
        if event in self._fail:
            raise self._fail[event]
        if event == self._stop_at:
            self.is_requested = True
            if self._waiting:
                raise StopInterrupt

    # Fleet

    def put(self, policy):
        name = str(version_of(policy))
        self.refcounts[name] = self.refcounts.get(name, 0) + 1
        return name

    def release(self, name):
        self.refcounts[name] -= 1
        assert self.refcounts[name] >= 0

    def submit(self, tasks):
        assert all(self.refcounts[task.policy_id] > 0 for task in tasks)
        for task in tasks:
            if task.purpose == "train" and task.unit == "steps" and task.iteration > 0:
                assert [state.token for state in task.states] == [
                    standing(task.slot, task.iteration).token
                ] * ROWS
        first = tasks[0]
        self.happens("submit", first.purpose, first.iteration, int(first.policy_id))
        self.batches.append(Batch(self, tasks))
        return self.batches[-1]

    # Algorithm

    def get_policy(self):
        return {"version": np.array([self.version], np.float32)}

    def update(self, batch, progress):
        self.happens("update", self.version + 1)
        self.learned.append((batch, progress))
        self.version += 1
        return {"loss": 0.5}

    def get_state(self):
        return {"version": np.array(self.version)}

    def load_state(self, state):
        self.version = int(state["version"])

    # Recorder

    def record_iteration(self, progress, metrics, fragments):
        self.happens("record", progress.iteration)

    def record_evaluation(self, progress, record, policy):
        self.happens("recorded evaluation", progress.steps)
        self.evaluations.append((progress.steps, version_of(policy), record.mean))

    def record_snapshot(self, take, progress, final):
        self.saved.append((final, take()))

    def time_phase(self, name):
        return contextlib.nullcontext()

    # Stop

    @contextlib.contextmanager
    def allow_interrupt(self):
        if self.is_requested:
            raise StopInterrupt
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False


class Experience:
    """Returns the fragments that it receives, and records their order."""

    def __init__(self):
        self.given = []

    def add(self, fragments, behaviour):
        self.given.append(([f.slot for f in fragments], version_of(behaviour)))

    def take_batches(self):
        yield self.given[-1]

    def get_state(self):
        return {}

    def list_segments(self):
        return ()

    def load_state(self, state, segments):
        assert (state, segments) == ({}, ())


class Batch:
    """Running tasks, whose fragments arrive in a different order in each iteration."""

    def __init__(self, world, tasks):
        self._world = world
        self._tasks = list(tasks)
        self.cancelled = False

    def __iter__(self):
        turn = self._tasks[0].iteration % len(self._tasks)
        for task in self._tasks[::-1][turn:] + self._tasks[::-1][:turn]:
            self._world.happens("arrive", task.purpose, task.iteration, task.slot)
            yield fragment(task, self._world._returns(int(task.policy_id)))

    def cancel(self):
        self.cancelled = True


def fragment(task, episode_return):
    whole = task.unit == "episodes"
    lengths = np.full(task.rows, task.steps if not whole else task.slot + 1, np.int64)
    episodes = [EpisodeStat(r, 0, 0, episode_return + r, 1, False, 0) for r in range(task.rows)]
    empty = np.zeros((0, task.rows), np.float32)
    return Fragment(
        iteration=task.iteration,
        slot=task.slot,
        observations=empty,
        actions=empty,
        log_probs=empty,
        rewards=np.zeros((0, task.rows)),
        terminated=empty > 0,
        truncated=empty > 0,
        lengths=lengths,
        last_observations=empty,
        boundary_index=np.zeros((0, 2), np.int64),
        boundary_observations=empty,
        episodes=tuple(episodes),
        states=() if whole else (standing(task.slot, task.iteration + 1),) * ROWS,
    )


def standing(slot, iteration):
    """The state of a slot's environments before an iteration."""
    nothing = np.zeros(0, np.float32)
    place = ("fresh", 0, 0, 0, 0.0, nothing, nothing.astype(np.float64), nothing)
    return EnvState(*place, token=f"slot {slot} before iteration {iteration}")


def train(world, wanted, snapshot=None):
    """Run a trainer in this world. Check that policies and batches were released."""
    experience = Experience()
    trainer = Trainer(wanted, world, experience, world, world, world)
    if snapshot is not None:
        trainer.restore(snapshot)
    try:
        trainer.complete = trainer.run()
    finally:
        assert set(world.refcounts.values()) <= {0}
        assert all(batch.cancelled for batch in world.batches)
    trainer.given = experience.given
    return trainer


def places(events, *kinds):
    return [event for event in events if event[0] in kinds]


def test_fragments_are_placed_by_slot_whatever_the_order_they_arrive_in():
    world = World()
    trainer = train(world, plan())
    arrived = [slot for _, _, _, slot in places(world.events, "arrive")]
    assert arrived != sorted(range(SLOTS)) * 4
    assert [slots for slots, _ in trainer.given] == [[0, 1, 2]] * 4
    assert trainer.complete
    assert world.version == 4


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_version_that_acts_lags_by_exactly_the_staleness(staleness):
    world = World()
    trainer = train(world, plan(staleness=staleness, stop_at_iterations=5))
    acted = [version for _, version in trainer.given]
    # The first iteration cannot lag behind.
    assert acted == ([0, 1, 2, 3, 4] if staleness == 0 else [0, 0, 1, 2, 3])
    submitted = [version for *_, version in places(world.events, "submit")]
    assert submitted == acted


def test_only_with_staleness_does_collecting_overlap_learning():
    order = {}
    for staleness in (0, 1):
        world = World()
        train(world, plan(staleness=staleness, stop_at_iterations=2))
        order[staleness] = [event[0] for event in places(world.events, "submit", "update")]
    assert order[0] == ["submit", "update", "submit", "update"]
    assert order[1] == ["submit", "submit", "update", "update"]


@pytest.mark.parametrize(
    ("limits", "iterations"),
    [
        ({"stop_at_iterations": 3}, 3),
        ({"stop_at_iterations": None, "stop_at_steps": 2 * BATCH}, 2),
        ({"stop_at_iterations": None, "stop_at_steps": 2 * BATCH + 1}, 3),
        ({"stop_at_iterations": 2, "stop_at_steps": 100 * BATCH}, 2),
        ({"stop_at_iterations": 9, "stop_at_steps": BATCH}, 1),
    ],
)
@pytest.mark.parametrize("staleness", [0, 1])
def test_nothing_is_collected_beyond_the_budget(limits, iterations, staleness):
    world = World()
    trainer = train(world, plan(staleness=staleness, **limits))
    assert len(world.batches) == iterations
    assert trainer.progress.iteration == iterations
    assert trainer.progress.steps == iterations * BATCH
    assert trainer.progress.episodes == iterations * SLOTS * ROWS


def test_steps_of_whole_episodes_are_counted_as_they_were():
    world = World()
    trainer = train(world, plan(unit="episodes", stop_at_iterations=2))
    # In the fake episodes, slot i has i + 1 steps.
    assert trainer.progress.steps == 2 * ROWS * (1 + 2 + 3)


def test_schedules_receive_the_progress_at_the_start_of_the_iteration():
    world = World()
    train(world, plan(stop_at_iterations=5, horizon_steps=2 * BATCH))
    assert [progress for _, progress in world.learned] == [0.0, 0.5, 1.0, 1.0, 1.0]
    world = World()
    train(world, plan(stop_at_iterations=3, horizon_iterations=4))
    assert [progress for _, progress in world.learned] == [0.0, 0.25, 0.5]
    world = World()
    train(world, plan(stop_at_iterations=3, horizon_iterations=4, horizon_steps=2 * BATCH))
    assert [progress for _, progress in world.learned] == [0.0, 0.5, 1.0]


# Evaluations.


@pytest.mark.parametrize("every", [1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH, 3 * BATCH - 7])
def test_an_evaluation_follows_every_multiple_that_is_passed(every):
    world = World()
    train(world, plan(stop_at_iterations=9, every=every))
    due, passed = [], 0
    for steps in range(1, 9 * BATCH + 1):
        passed += steps % every == 0
        if steps % BATCH == 0 and passed:
            due.append(steps)
            passed = 0
    assert [steps for steps, _, _ in world.evaluations] == due
    # The newest policy is evaluated.
    assert [version for _, version, _ in world.evaluations] == [s // BATCH for s in due]


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_average_is_what_is_evaluated_and_saved_and_never_acts(staleness, monkeypatch):
    monkeypatch.setattr(policy_average, "_SHARE", 1.0)  # average from the second version on
    world = World()
    wanted = {"average": 2, "staleness": staleness, "stop_at_iterations": 5}
    trainer = train(world, plan(**wanted, every=BATCH))
    assert [version for _, version in trainer.given] == (
        [0, 1, 2, 3, 4] if staleness == 0 else [0, 0, 1, 2, 3]
    )
    # Of versions 1, 2, 3, 4 and 5: each but the first moves the average by half.
    averages = [1.0, 1.5, 2.25, 3.125, 4.0625]
    assert [version for _, version, _ in world.evaluations] == [int(a) for a in averages]
    saved = [float(snapshot.policy["version"][0]) for _, snapshot in world.saved]
    assert saved == [0.0, *averages, averages[-1]]


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_average_goes_on_where_a_snapshot_has_it(staleness, monkeypatch):
    monkeypatch.setattr(policy_average, "_SHARE", 1.0)  # average from the second version on
    wanted = {"average": 3, "staleness": staleness, "stop_at_iterations": 6}
    world = World()
    whole = train(world, plan(**wanted))
    for _, begun in world.saved:
        again = train(World(), plan(**wanted), begun)
        assert again.take_snapshot().policy == whole.take_snapshot().policy


def test_without_a_cadence_nothing_is_evaluated():
    world = World()
    train(world, plan())
    assert world.evaluations == []


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_ends_when_an_evaluation_lies_above_the_return_that_was_asked_for(staleness):
    world = World(returns=lambda version: 10.0 * version)
    wanted = plan(
        staleness=staleness,
        stop_at_iterations=9,
        every=2 * BATCH,
        target=40.2,
    )
    trainer = train(world, wanted)
    # Two episodes whose returns differ by 1: after four versions 40 and 41, with a mean above 40.2.
    found = [(steps // BATCH, mean) for steps, _, mean in world.evaluations]
    assert found == [(2, 20.5), (4, 40.5), (6, 60.5)]
    assert trainer.complete
    assert trainer.progress.reached
    assert world.version == 6
    # The run does not continue after a resume.
    again = World()
    assert train(again, wanted, world.saved[-1][1]).complete
    assert not again.batches


# Stop and resume.


def the_middle_of(world):
    """The events after the first iteration at which a stop request can come."""
    return [event for event in dict.fromkeys(world.events) if event[0] != "recorded evaluation"]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_stop_at_any_moment_loses_nothing_and_repeats_nothing(staleness):
    """A run, stopped at any event and resumed, has the events of an undisturbed run."""
    wanted = plan(staleness=staleness, every=BATCH + 7)
    untouched = World()
    whole = train(untouched, wanted)
    kinds = set()
    for moment in the_middle_of(untouched):
        kinds.add(moment[0])
        first = World(stop_at=moment)
        stopped = train(first, wanted)
        final, snapshot = first.saved[-1]
        assert final
        assert stopped.complete == (stopped.progress.iteration == 4)
        second = World()
        resumed = train(second, wanted, snapshot)
        assert resumed.complete
        assert stopped.given[: stopped.progress.iteration] + resumed.given == whole.given
        assert first.evaluations + second.evaluations == untouched.evaluations
        assert first.learned + second.learned == untouched.learned
        assert resumed.progress == whole.progress
    assert kinds == {"submit", "arrive", "update", "record"}


def test_a_stop_while_waiting_ends_the_wait_at_once():
    world = World(stop_at=("arrive", "train", 2, 1))
    trainer = train(world, plan())
    assert world.events[-1] == ("arrive", "train", 2, 1)
    assert not trainer.complete
    assert trainer.progress.iteration == 2


def test_a_stop_while_learning_waits_for_the_update():
    world = World(stop_at=("update", 2))
    trainer = train(world, plan())
    assert trainer.progress.iteration == 2
    assert world.events[-1] == ("record", 2)
    assert version_of(world.saved[-1][1].policy) == 2


def test_an_evaluation_that_was_cut_short_comes_first_after_the_resume():
    wanted = plan(every=2 * BATCH)
    first = World(stop_at=("arrive", "evaluate", 0, 0))
    train(first, wanted)
    snapshot = first.saved[-1][1]
    assert (snapshot.progress.iteration, snapshot.progress.evaluations) == (2, 0)
    second = World()
    train(second, wanted, snapshot)
    assert second.events[0] == ("submit", "evaluate", 0, 2)
    assert [steps for steps, _, _ in second.evaluations] == [2 * BATCH, 4 * BATCH]


def test_with_staleness_the_iteration_in_flight_is_submitted_again_with_its_own_policy():
    wanted = plan(staleness=1)
    first = World(stop_at=("arrive", "train", 2, 0))
    train(first, wanted)
    snapshot = first.saved[-1][1]
    assert version_of(snapshot.policy) == 2
    assert version_of(snapshot.behaviour) == 1
    second = World()
    train(second, wanted, snapshot)
    assert second.events[0] == ("submit", "train", 2, 1)


def test_a_snapshot_is_offered_at_the_start_and_after_every_iteration():
    world = World()
    train(world, plan(stop_at_iterations=2))
    offered = [(final, snapshot.progress.iteration) for final, snapshot in world.saved]
    assert offered == [(False, 0), (False, 1), (False, 2), (True, 2)]


# Failures.


def recorded(world):
    """The recorded iterations."""
    return [event[1] for event in world.events if event[0] == "record"]


@pytest.mark.parametrize("failure", [EnvironmentFailure("It broke."), FleetError("Lost.")])
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_was_learned_is_kept_when_the_fleet_fails(failure, staleness):
    wanted = plan(staleness=staleness, every=3 * BATCH)
    untouched = World()
    whole = train(untouched, wanted)
    for moment in places(untouched.events, "submit", "arrive"):
        first = World(fail={moment: failure})
        with pytest.raises(type(failure)):
            train(first, wanted)
        final, snapshot = first.saved[-1]
        assert final
        second = World()
        resumed = train(second, wanted, snapshot)
        assert resumed.progress == whole.progress
        assert resumed.given == whole.given[len(whole.given) - len(resumed.given) :]
        assert recorded(first) + recorded(second) == recorded(untouched)
        assert first.evaluations + second.evaluations == untouched.evaluations


def test_a_failed_update_is_never_saved():
    world = World(fail={("update", 3): LearningError("NaN.")})
    with pytest.raises(LearningError):
        train(world, plan())
    final, snapshot = world.saved[-1]
    assert not final
    assert snapshot.progress.iteration == 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_policies_are_released_when_a_submission_or_a_record_fails(staleness):
    for moment in (("submit", "train", 1, 1 - staleness), ("record", 2)):
        world = World(fail={moment: OSError("full")})
        with pytest.raises(OSError, match="full"):
            train(world, plan(staleness=staleness))
        assert world.refcounts  # `train` has checked that all of them are zero


def test_snapshots_of_another_staleness_are_refused():
    world = World(stop_at=("record", 2))
    train(world, plan(staleness=1))
    snapshot = world.saved[-1][1]
    with pytest.raises(CheckpointError, match="staleness is 0"):
        train(World(), plan(), snapshot)
    with pytest.raises(CheckpointError, match="missing"):
        train(World(), plan(staleness=1), dataclasses.replace(snapshot, behaviour=None))
