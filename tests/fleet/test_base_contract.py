"""The contract of all fleets: each task once, equal fragments, clean failures.

Add a new fleet to FLEETS. Failures of processes (deaths, hangs, wrong answers) are in
test_fleet_local.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flames
import numpy as np
import pytest
import rollouts
import space_envs

from rlflame.errors import EnvironmentFailure, FleetError
from rlflame.fleet.auto import AutoFleet
from rlflame.fleet.base import (
    EventCounter,
    Fleet,
    FleetEvent,
    Observer,
    TrafficCounter,
    check_fragment,
    make_policy_id,
)
from rlflame.fleet.inline import InlineFleet
from rlflame.fleet.job_queue import JobSubmission
from rlflame.fleet.local import LocalFleet
from rlflame.rollout import wire
from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.task import Fragment, RolloutTask


def on_flame(observer: Observer) -> Fleet:
    flames.settle(flames.environment())
    return flames.fleet(observer)


FLEETS: dict[str, Callable[[Observer], Fleet]] = {
    "inline": InlineFleet,
    "local": lambda observer: LocalFleet(2, observer=observer),
    "flame": on_flame,
    "choosing": lambda observer: AutoFleet(
        LocalFleet(1, observer=observer), LocalFleet(2, observer=observer), observer=observer
    ),
}
FAKE = rollouts.fake(length=5)
ENDS = {"done", "lost", "cancelled"}


@dataclasses.dataclass
class Watched:
    fleet: Fleet
    events: list[FleetEvent]

    def kinds(self, slot: int) -> list[str]:
        return [event.kind for event in self.events if event.slot == slot and event.purpose]

    def count_episodes(self) -> Counter[str]:
        """The training episodes of each worker."""
        counts: Counter[str] = Counter()
        for event in self.events:
            if event.kind == "episodes":
                counts[event.text] += event.count
        return counts

    def send(self, tasks: Sequence[RolloutTask]) -> Any:
        """Submit with the weights that `rollouts.run` uses."""
        named = self.with_weights(tasks)
        submission = self.fleet.submit(named)
        for task in named:
            self.fleet.release(task.policy_id)
        return submission

    def with_weights(self, tasks: Sequence[RolloutTask]) -> list[RolloutTask]:
        return [
            dataclasses.replace(task, policy_id=self.fleet.put(rollouts.weights(task.policy)))
            for task in tasks
        ]


@pytest.fixture(scope="module", params=FLEETS)
def together(request: Any) -> Iterator[Watched]:
    """A fleet that many tests share, as training and evaluation do."""
    events: list[FleetEvent] = []
    with FLEETS[request.param](events.append) as fleet:
        yield Watched(fleet, events)


@pytest.fixture
def watched(together: Watched) -> Watched:
    together.events.clear()
    return together


@pytest.fixture(params=FLEETS)
def own(request: Any) -> Iterator[Watched]:
    """A fleet for a test that closes it."""
    events: list[FleetEvent] = []
    with FLEETS[request.param](events.append) as fleet:
        yield Watched(fleet, events)


def eventually(happened: Callable[[], bool], patience_s: float = 20.0) -> bool:
    until = time.monotonic() + patience_s
    while not happened():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def slots(count: int, env: Any = FAKE, **changes: Any) -> list[RolloutTask]:
    return [rollouts.task(env, slot=slot, **changes) for slot in range(count)]


def alone(task: RolloutTask, weights: int = 0) -> bytes:
    """The encoded fragment of a task without any fleet."""
    return wire.encode(rollouts.run(task, seed=weights))


def test_every_task_comes_back_once_and_as_if_it_had_been_alone(watched: Watched) -> None:
    tasks = slots(9)
    fragments = list(watched.send(tasks))
    assert sorted(fragment.slot for fragment in fragments) == list(range(9))
    for fragment in fragments:
        assert wire.encode(fragment) == alone(tasks[fragment.slot])


def test_traffic_is_what_was_asked_and_what_was_answered(watched: Watched) -> None:
    tasks = slots(3, run=f"traffic on {watched.fleet.name}")
    count = TrafficCounter(watched.fleet)
    fragments = list(watched.send(tasks))
    moved = count.take()
    if watched.fleet.name == "inline":
        assert moved == {"bytes_out": 0, "bytes_in": 0}
        return
    answers = sum(len(wire.encode(fragment)) for fragment in fragments)
    asked = sum(len(wire.encode(task)) for task in tasks)
    weights = sum(array.nbytes for array in rollouts.weights(tasks[0].policy).values())
    assert answers <= moved["bytes_in"] < 1.5 * answers
    assert moved["bytes_out"] > asked + weights
    assert count.take()["bytes_in"] == 0


@pytest.mark.parametrize(
    "env",
    [
        read_env_spec("Hopper-v5", {"healthy_z_range": [0.6, 9.0]}, 25),
        read_env_spec("BipedalWalker-v3", {}, 12),
        rollouts.fake(length=5, continuous=True),
    ],
    ids=["mujoco", "replay", "fake"],
)
def test_iterations_in_a_row_are_the_same_on_any_fleet(watched: Watched, env: Any) -> None:
    check_iterations(watched, env)


@pytest.mark.parametrize("name", FLEETS)
def test_every_kind_of_space_is_the_same_on_any_fleet(name: str) -> None:
    if name == "flame":
        flames.settle(flames.environment())
        fleet: Fleet = flames.fleet(lambda event: None, env_file=space_envs.__file__)
    else:
        fleet = FLEETS[name](lambda event: None)
    with fleet:
        for id in space_envs.IDS:
            check_iterations(Watched(fleet, []), read_env_spec(id, {}, None, ("space_envs",)))


def check_iterations(watched: Watched, env: Any) -> None:
    """Compare three iterations of a fleet with those of a worker in this process."""
    run = f"{env.id} on {watched.fleet.name}"
    here = slots(5, env, run=run)
    there = slots(5, env, run=run)
    for iteration in range(3):
        arrays = rollouts.weights(here[0].policy, seed=iteration)
        expected = [rollouts.run(task, seed=iteration) for task in here]
        name = watched.fleet.put(arrays)
        named = [dataclasses.replace(task, policy_id=name) for task in there]
        found = sorted(watched.fleet.submit(named), key=lambda fragment: fragment.slot)
        watched.fleet.release(name)
        assert [wire.encode(f) for f in found] == [wire.encode(f) for f in expected]
        here = [rollouts.following(task, f) for task, f in zip(here, expected, strict=True)]
        there = [rollouts.following(task, f) for task, f in zip(there, found, strict=True)]


def test_several_submissions_at_once_each_get_their_own(watched: Watched) -> None:
    training = slots(6, seed=1)
    scoring = slots(3, purpose="evaluate", unit="episodes", record=False, steps=50)
    first, second = watched.send(training), watched.send(scoring)
    a, b = iter(first), iter(second)
    found = [next(b), next(a), next(a)]
    found += list(b) + list(a)
    expected = {alone(task) for task in training + scoring}
    assert {wire.encode(fragment) for fragment in found} == expected
    assert len(found) == 9


def test_submissions_from_several_threads_do_not_mix(own: Watched) -> None:
    if own.fleet.name == "inline":
        pytest.skip("the inline fleet runs in the caller's thread")
    found: dict[int, set[bytes]] = {}

    def work(seed: int) -> None:
        found[seed] = {wire.encode(f) for f in own.send(slots(5, seed=seed))}

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    for seed in range(4):
        assert found[seed] == {alone(task) for task in slots(5, seed=seed)}


def test_a_submission_that_is_iterated_again_goes_on_where_it_was(watched: Watched) -> None:
    submission = watched.send(slots(5))
    first = [fragment.slot for fragment in itertools.islice(submission, 2)]
    rest = [fragment.slot for fragment in submission]
    assert sorted(first + rest) == list(range(5))
    assert list(submission) == []


def test_nothing_submitted_is_nothing_to_wait_for(watched: Watched) -> None:
    assert list(watched.fleet.submit([])) == []


def test_what_was_cancelled_is_not_yielded_and_disturbs_nobody(watched: Watched) -> None:
    untouched = watched.send(slots(3, seed=2))
    submission = watched.send(slots(8, seed=3))
    next(iter(submission))
    submission.cancel()
    submission.cancel()
    assert list(submission) == []
    assert {wire.encode(f) for f in untouched} == {alone(t) for t in slots(3, seed=2)}
    assert {wire.encode(f) for f in watched.send(slots(4))} == {alone(t) for t in slots(4)}


def test_a_waiting_thread_receives_a_cancellation() -> None:
    asked = threading.Event()

    class Answers(queue.Queue[Any]):
        def get(self, *words: Any) -> Any:
            asked.set()
            return super().get(*words)

    submission = JobSubmission(lambda jobs: None, [object()], Answers())
    waiting = threading.Thread(target=lambda: list(submission), daemon=True)
    waiting.start()
    assert asked.wait(20.0)
    submission.cancel()
    waiting.join(20.0)
    assert not waiting.is_alive()


def test_events_tell_each_task_s_story_from_its_submission_to_its_one_end(
    watched: Watched,
) -> None:
    list(watched.send(slots(4)))
    cancelled = watched.send([dataclasses.replace(t, slot=t.slot + 10) for t in slots(4)])
    cancelled.cancel()
    bad = rollouts.task(rollouts.fake(fault="raise"), slot=20)
    with pytest.raises(EnvironmentFailure):
        list(watched.send([bad]))
    every = [*range(4), *range(10, 14), 20]
    assert eventually(lambda: all(ENDS & set(watched.kinds(slot)) for slot in every))
    for slot in every:
        story = watched.kinds(slot)
        assert story[0] == "submitted"
        assert sum(kind in ENDS for kind in story) == 1
        assert story[-1] in ENDS
    for slot in range(4):
        assert watched.kinds(slot) == ["submitted", "running", "done"]
    assert all(watched.kinds(slot)[-1] in ("cancelled", "done") for slot in range(10, 14))
    assert watched.kinds(20) == ["submitted", "running", "lost"]
    purposes = {event.purpose for event in watched.events if event.kind != "episodes"}
    assert purposes == {"train"}


@pytest.mark.parametrize("kind", FLEETS)
def test_an_observer_may_ask_the_fleet_in_turn(kind: str) -> None:
    asked: Counter[str] = Counter()

    def curious(event: FleetEvent) -> None:
        if not event.purpose:  # an event of the fleet itself, perhaps before it exists
            return
        asked[event.kind] += len(fleet.probe()) > 0
        fleet.release(fleet.put({"actor.0.bias": np.zeros(3, np.float32)}))

    with FLEETS[kind](curious) as fleet:
        fleet.probe()
        list(Watched(fleet, []).send(slots(3)))
    # If an observer delays a task, a second worker may run it too.
    doubled = asked.pop("speculated", 0)
    assert asked.keys() == {"submitted", "running", "done"}
    assert asked["submitted"] == asked["done"] == 3
    assert 3 <= asked["running"] <= 3 + doubled


def test_weights_are_named_by_their_content(watched: Watched) -> None:
    fleet, (task,) = watched.fleet, slots(1)
    mine, equal = (rollouts.weights(task.policy, seed=42) for _ in range(2))
    name = fleet.put(mine)
    assert fleet.put(dict(reversed(equal.items()))) == name
    for array in mine:
        changed = {**mine, array: mine[array] + np.float32(1e-6)}
        assert make_policy_id(changed) != name
    assert make_policy_id({**mine, "actor.0.bias": mine["actor.0.bias"][None]}) != name

    fleet.release(name)
    task = dataclasses.replace(task, policy_id=name)
    assert len(list(fleet.submit([task]))) == 1
    fleet.release(name)
    with pytest.raises(KeyError):
        fleet.submit([task])


def test_weights_released_at_once_still_serve_what_was_submitted(watched: Watched) -> None:
    """There are more tasks than workers, so most of them have not started yet."""
    tasks = slots(12)
    name = watched.fleet.put(rollouts.weights(tasks[0].policy, seed=43))
    submission = watched.fleet.submit([dataclasses.replace(t, policy_id=name) for t in tasks])
    watched.fleet.release(name)
    assert {wire.encode(f) for f in submission} == {alone(t, 43) for t in tasks}
    with pytest.raises(KeyError):
        watched.fleet.submit([dataclasses.replace(tasks[0], policy_id=name)])


def test_weights_are_those_of_the_moment_they_were_put(watched: Watched) -> None:
    tasks = slots(3)
    arrays = dict(rollouts.weights(tasks[0].policy, seed=44))
    name = watched.fleet.put(arrays)
    submission = watched.fleet.submit([dataclasses.replace(t, policy_id=name) for t in tasks])
    for array in arrays.values():
        array += 1.0
    assert {wire.encode(f) for f in submission} == {alone(t, 44) for t in tasks}
    watched.fleet.release(name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_not_sent(watched: Watched, bad: float) -> None:
    arrays = dict(rollouts.weights(rollouts.policy_spec(FAKE)))
    arrays["actor.1.bias"][3] = bad
    with pytest.raises(FleetError, match=r"actor\.1\.bias contains NaN or infinity"):
        watched.fleet.put(arrays)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("print_and_raise", "failed in step: ValueError: the moon is wrong"),
        ("exit", "failed in step: SystemExit: gone fishing"),
        ("nan", "an observation with NaN, infinity or"),
        ("inf", "an observation with NaN, infinity or"),
        ("nan_reward", "returned the reward nan"),
        ("shape", "returned an observation of shape (4,), but its space has the shape (3,)"),
    ],
)
def test_a_failure_of_an_environment_keeps_its_own_message(
    watched: Watched, fault: str, words: str
) -> None:
    tasks = slots(3, rows=3, steps=20)
    victim = tasks[1].states[2].seed
    env = rollouts.fake(fault=fault, at=4, seed=victim)
    with pytest.raises(EnvironmentFailure) as caught:
        list(watched.send([dataclasses.replace(task, env=env) for task in tasks]))
    error = caught.value
    assert error.message == (
        error.message.split(" (slot")[0] + f" (slot 1, row 2, seed {victim}, step 4)."
    )
    assert words in error.message
    assert f"reset fakes:Fake-v0 with seed {victim}" in error.hint
    if fault == "print_and_raise":
        assert "in _raise" in error.detail
        assert "a word on stdout" in error.detail
        assert "a word on stderr" in error.detail
    # The fleet still works.
    assert {wire.encode(f) for f in watched.send(slots(3))} == {alone(t) for t in slots(3)}


def test_a_failure_ends_its_own_submission_and_no_other(watched: Watched) -> None:
    good = watched.send(slots(4, seed=5))
    bad = watched.send(slots(4, rollouts.fake(fault="raise")))
    with pytest.raises(EnvironmentFailure):
        list(bad)
    assert list(bad) == []
    assert {wire.encode(f) for f in good} == {alone(t) for t in slots(4, seed=5)}


def test_what_another_thread_prints_is_not_taken_for_the_environment_s(
    capsys: Any, tmp_path: Path
) -> None:
    """A display may print while a task runs in this process."""
    gate = tmp_path / "gate"
    env = rollouts.fake(fault="wait", marker=str(gate))

    def refresh() -> None:
        assert eventually(gate.with_suffix(".here").exists)
        print("a progress bar")
        gate.touch()

    display = threading.Thread(target=refresh)
    display.start()
    with InlineFleet() as fleet:
        list(Watched(fleet, []).send(slots(1, env)))
        with pytest.raises(EnvironmentFailure) as caught:
            list(Watched(fleet, []).send(slots(1, rollouts.fake(fault="print_and_raise"))))
    display.join()
    seen = capsys.readouterr()
    assert seen.out == "a progress bar\n"
    assert "a word on stdout" not in seen.out + seen.err
    assert "progress" not in caught.value.detail


def test_a_fleet_says_what_it_runs_on(watched: Watched) -> None:
    for _ in range(20):  # until workers have answered, and `auto` has chosen a fleet
        list(watched.send(slots(2)))
        if watched.fleet.name != "auto":
            break
    report = watched.fleet.probe()
    if watched.fleet.name == "flame":  # executors start when there is work
        assert 1 <= len(report) <= watched.fleet.capacity
    else:
        assert len(report) == watched.fleet.capacity
    assert len({worker["numpy"] for worker in report}) == 1
    assert len({worker["core"] for worker in report}) == 1


def test_a_closed_fleet_is_closed(own: Watched) -> None:
    pending = own.send(slots(20))
    assert len(list(itertools.islice(pending, 2))) == 2
    late = own.with_weights(slots(2))
    own.fleet.close()
    own.fleet.close()
    with pytest.raises(FleetError, match="closed"):
        list(pending)
    with pytest.raises(FleetError, match="closed"):
        list(own.fleet.submit(late))
    own.fleet.release(late[0].policy_id)
    pending.cancel()


# Checks of answers.


def genuine(unit: str) -> tuple[RolloutTask, Fragment]:
    """A task and its fragment, with terminations and truncations."""
    env = dataclasses.replace(rollouts.fake(length=5, continuous=True), max_episode_steps=4)
    task = rollouts.task(env, slot=3, rows=2, steps=11, unit=unit, iteration=2)
    return task, rollouts.run(task)


def wrong_answers(task: RolloutTask, right: Fragment) -> dict[str, Any]:
    def but(**changes: Any) -> Fragment:
        return dataclasses.replace(right, **changes)

    wrong: dict[str, Any] = {
        "nothing": None,
        "task": task,
        "dict": {"rewards": right.rewards},
        "other slot": but(slot=4),
        "other iteration": but(iteration=1),
        "other actions' type": but(actions=right.actions.astype(np.int64)),
        "boundary outside": but(boundary_index=right.boundary_index + 100),
        "boundary before": but(boundary_index=right.boundary_index - 100),
        "negative length": but(lengths=-right.lengths),
        "no length": but(lengths=right.lengths * 0),
        "other row's episode": but(
            episodes=(dataclasses.replace(right.episodes[0], row=2), *right.episodes[1:])
        ),
        "a state too many": but(states=(*right.states, *task.states[:1], *right.states[:1])),
    }
    if task.unit == "episodes":
        wrong["an episode short"] = but(episodes=right.episodes[:1])
        del wrong["a state too many"]
    for field in dataclasses.fields(Fragment):
        array = getattr(right, field.name)
        if isinstance(array, np.ndarray):
            wrong[f"{field.name} short"] = but(**{field.name: array[:-1]})
            wrong[f"{field.name} deep"] = but(**{field.name: array[..., None]})
    short = {
        field.name: getattr(right, field.name)[:-1]
        for field in dataclasses.fields(Fragment)
        if field.name in ("observations", "actions", "log_probs", "rewards")
        or field.name in ("terminated", "truncated")
    }
    wrong["all steps short"] = but(**short)
    wrong["a row short"] = but(
        **{name: getattr(right, name)[:, :1] for name in short},
        lengths=right.lengths[:1],
        last_observations=right.last_observations[:1],
    )
    return wrong


@pytest.mark.parametrize("unit", ["steps", "episodes"])
def test_only_the_task_s_own_fragment_is_believed(unit: str) -> None:
    task, right = genuine(unit)
    assert len(right.boundary_index) > 0
    assert check_fragment(task, right) is right
    for name, wrong in wrong_answers(task, right).items():
        with pytest.raises(FleetError, match="not a fragment of this task"):
            print(name, check_fragment(task, wrong))


def test_choices_outside_the_action_space_are_not_believed() -> None:
    (task,) = slots(1)
    right = rollouts.run(task)
    for bad in (-1, 2):
        actions = right.actions.copy()
        actions[3, 1] = bad
        with pytest.raises(FleetError, match="not a fragment of this task"):
            check_fragment(task, dataclasses.replace(right, actions=actions))


def test_the_episodes_of_each_worker_add_up(watched: Watched) -> None:
    tasks = slots(6)
    fragments = list(watched.send(tasks))
    counts = watched.count_episodes()
    assert sum(counts.values()) == sum(len(fragment.episodes) for fragment in fragments) > 0
    assert "" not in counts
    assert len(counts) <= max(2, watched.fleet.capacity)
    evaluations = [dataclasses.replace(task, purpose="evaluate") for task in tasks]
    list(watched.send(evaluations))
    assert watched.count_episodes() == counts


def test_workers_are_ordered_by_number():
    counter = EventCounter()
    for number in (10, 2, 1):
        counter(FleetEvent("episodes", "", 0, f"worker-{number}", number))
    assert list(counter.read_episodes()) == ["worker-1", "worker-2", "worker-10"]
