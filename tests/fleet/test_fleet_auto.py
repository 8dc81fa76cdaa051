"""Tests of the fleet `auto`, which tries two fleets and keeps the faster one.

Clocks are fake. test_base_contract checks the fragments of this fleet.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import flames
import pytest
import rollouts
from commands import rlflame
from flame_stub import FlameStub
from test_base_contract import eventually, slots
from test_trainer_same_bits import Diary, outcome, scenario
from test_trainer_same_bits import run as trained

from rlflame.errors import EnvironmentFailure, FleetError
from rlflame.fleet import factory
from rlflame.fleet.auto import AutoFleet, FleetSide, compute_factor, generate_turns
from rlflame.fleet.base import FleetEvent
from rlflame.fleet.inline import InlineFleet
from rlflame.fleet.local import LocalFleet
from rlflame.fleet.prestart import PrestartPool

# The order of turns, and the choice.


def course(
    home: Sequence[float] | float,
    away: Sequence[float] | float,
    *,
    ready_after: int = 1,
    complete_after: int = 1,
) -> tuple[str, float]:
    """The turns as letters, upper-case if they are timed, and the speed-up of `away`."""
    letters = ""
    rates: dict[FleetSide, list[float]] = {"home": [], "away": []}
    values = {
        "home": iter(home if isinstance(home, list) else [home] * 99),
        "away": iter(away if isinstance(away, list) else [away] * 99),
    }
    turns = generate_turns(
        lambda: len(letters) >= ready_after,
        lambda: letters.lower().count("a") >= complete_after,
        rates,
    )
    for side, is_timed in turns:
        letters += side[0].upper() if is_timed else side[0]
        if is_timed:
            rates[side].append(next(values[side]))
        assert len(letters) < 200
    return letters, compute_factor(rates)


def test_one_look_each_is_enough_where_one_is_twice_as_fast():
    assert course(1000.0, 400.0) == ("haAhH", 0.4)
    assert course(1000.0, 2100.0) == ("haAhH", 2.1)


def test_more_looks_and_their_medians_decide_what_is_close():
    letters, factor = course([900.0, 1000.0, 100.0], [990.0, 1500.0, 1350.0])
    assert (letters, factor) == ("haAhHaAAhHH", 1.5)


def test_home_works_until_the_other_side_is_ready_and_all_of_it_is_there():
    letters, _ = course(1000.0, 100.0, ready_after=7, complete_after=3)
    assert letters == "hhhhhhhaaaAhH"
    letters, _ = course(1000.0, 100.0, complete_after=99)
    assert letters == "haaaaAhH"


def test_without_a_rate_of_each_side_nothing_is_faster():
    assert compute_factor({"home": [1.0], "away": []}) == 1.0


# With two fleets.


#: An iteration of `scenario` has 5 slots with 2 environments and 8 steps.
STEPS = 80


class Pace:
    """A clock that submissions advance."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow:
    """A submission that advances the clock."""

    def __init__(self, inner: Any, pace: Pace, seconds: float) -> None:
        self._inner, self._pace, self._seconds = inner, pace, seconds
        self.cancel = inner.cancel

    def __iter__(self) -> Iterator[Any]:
        for fragment in self._inner:
            self._pace.now_s += self._seconds * int(fragment.lengths.sum()) / STEPS
            yield fragment


class Paced:
    """A fleet on which the steps of an iteration take a given time."""

    ready = True

    def __init__(self, name: str, pace: Pace, seconds: float, inner: Any = None) -> None:
        self.inner = InlineFleet() if inner is None else inner
        self.name, self.capacity = name, self.inner.capacity
        self._pace, self._seconds = pace, seconds
        self.purposes: list[str] = []
        self.held = 0
        self.closed = False
        self.probe, self.read_traffic = self.inner.probe, self.inner.read_traffic

    def put(self, policy: Any) -> str:
        self.held += 1
        return self.inner.put(policy)

    def release(self, policy_id: str) -> None:
        self.held -= 1
        self.inner.release(policy_id)

    def submit(self, tasks: Any) -> Slow:
        assert not self.closed
        self.purposes.append(tasks[0].purpose)
        return Slow(self.inner.submit(tasks), self._pace, self._seconds)

    def close(self) -> None:
        self.closed = True
        self.inner.close()


class Both:
    """An AutoFleet with two fleets of given speed, and its events."""

    def __init__(self, home_s: float, away_s: float, **inner: Any) -> None:
        self.pace = Pace()
        self.events: list[FleetEvent] = []
        self.home = Paced("local", self.pace, home_s, inner.get("home"))
        self.away = Paced("flame", self.pace, away_s, inner.get("away"))
        self.fleet = AutoFleet(self.home, self.away, observer=self.events.append, clock=self.pace)

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if event.kind == "note"]


def test_the_loser_is_closed_while_the_winner_goes_on():
    both = Both(1.0, 0.1)
    with both.fleet as fleet:
        assert fleet.name == "auto"
        assert fleet.candidates == (("local", 1), ("flame", 1))
        trained(scenario("CartPole-v1", iterations=9), fleet, Diary())
        assert fleet.name == "flame"
        assert fleet.candidates == ()
        assert eventually(lambda: both.home.closed)
        assert not both.away.closed
        (note,) = both.notes
        assert "local (capacity 1) ran 64 steps/s and flame (capacity 1) ran 640" in note
        assert note.endswith("using flame from now on")
    assert both.away.closed
    times = [side.purposes.count("train") for side in (both.home, both.away)]
    assert sum(times) == 9
    assert times[0] <= 4
    # All versions of the weights were released in the fleet that was used.
    assert both.away.held == 0


def test_who_is_no_faster_is_let_go():
    both = Both(1.0, 0.99)
    with both.fleet as fleet:
        trained(scenario("CartPole-v1", iterations=18), fleet, Diary())
        assert fleet.name == "local"
        assert eventually(lambda: both.away.closed)
        assert both.notes[0].endswith("using local from now on")
        # The display no longer shows executors.
        assert FleetEvent.of_workers(0) in both.events


@pytest.mark.parametrize("seconds", [(1.0, 0.1), (0.1, 1.0), (1.0, 1.0)], ids=str)
@pytest.mark.parametrize(
    "case",
    [("Hopper-v5", "ppo", 1), ("Hopper-v5", "sac", 1), ("CartPole-v1", "reinforce", 0)],
    ids=str,
)
def test_the_bits_are_the_same_whichever_fleet_wins(case, seconds, tmp_path):
    recipe = scenario(*case, iterations=20)
    with InlineFleet() as alone:
        expected = outcome(recipe, alone, tmp_path, "alone")
    both = Both(*seconds)
    with both.fleet as fleet:
        assert outcome(recipe, fleet, tmp_path, "both") == expected
        assert fleet.name != "auto"
        if seconds[0] != seconds[1]:
            assert fleet.name == ("flame" if seconds[1] < seconds[0] else "local")


def test_evaluations_run_where_training_does():
    both = Both(1.0, 0.1)
    with both.fleet as fleet:
        # There is one evaluation every second iteration.
        trained(scenario("CartPole-v1", iterations=10), fleet, Diary())
    assert both.home.purposes.count("train") == 3
    assert "evaluate" in both.away.purposes
    assert fleet.name == "flame"


def test_a_stop_in_the_middle_leaves_nothing_open():
    both = Both(1.0, 1.0)
    with both.fleet as fleet:
        diary = Diary()
        _, trainer = trained(
            scenario("CartPole-v1", staleness=1, iterations=12), fleet, diary, stop_after=4
        )
        assert trainer.progress.iteration == 4
        assert fleet.name == "auto"
        assert both.home.held == both.away.held == 0
    assert both.home.closed
    assert both.away.closed
    assert both.notes == []


class Failing(Paced):
    """Fails in its second submission."""

    def submit(self, tasks: Any) -> Any:
        if len(self.purposes) == 1:
            raise FleetError("The cluster is gone.", "look for it")
        return super().submit(tasks)


def test_a_cluster_that_fails_while_it_is_timed_is_an_error():
    both = Both(1.0, 1.0)
    both.away = Failing("flame", both.pace, 1.0)
    fleet = AutoFleet(both.home, both.away, observer=both.events.append, clock=both.pace)
    with fleet, pytest.raises(FleetError, match="The cluster is gone"):
        trained(scenario("CartPole-v1", iterations=12), fleet, Diary())
    assert both.home.closed
    assert both.away.closed


def test_an_environment_s_failure_is_no_fault_of_the_side_it_met():
    both = Both(1.0, 1.0)
    tasks = slots(2, rollouts.fake(fault="raise"))
    with both.fleet as fleet:
        name = fleet.put(rollouts.weights(tasks[0].policy))
        under_way = fleet.submit([dataclasses.replace(task, policy_id=name) for task in tasks])
        with pytest.raises(EnvironmentFailure):
            list(under_way)
        assert both.notes == []


def test_no_children_are_left_of_the_side_that_lost():
    both = Both(1.0, 0.1, home=LocalFleet(2))
    pids = both.home.inner.list_pids()
    with both.fleet as fleet:
        trained(scenario("CartPole-v1", iterations=7), fleet, Diary())
        assert fleet.name == "flame"
        assert eventually(lambda: not any(_alive(pid) for pid in pids))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# With a cluster.


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlameStub]:
    FlameStub.reset_client()
    with FlameStub(executors=2) as found:
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
        yield found
    FlameStub.reset_client()


@pytest.mark.parametrize("seconds", [(1.0, 0.1), (0.1, 1.0)], ids=["flame wins", "flame loses"])
def test_on_a_cluster_the_bits_are_the_same_and_nothing_is_left(stub, seconds, tmp_path):
    recipe = scenario("Hopper-v5", "ppo", 1, iterations=12)
    with InlineFleet() as alone:
        expected = outcome(recipe, alone, tmp_path, "alone")
    both = Both(*seconds, home=LocalFleet(2), away=flames.fleet(lambda event: None, 2))
    both.away.inner.probe()
    with both.fleet as fleet:
        assert outcome(recipe, fleet, tmp_path, "both") == expected
        assert fleet.name == ("flame" if seconds[1] < seconds[0] else "local")
        if fleet.name == "local":
            assert eventually(lambda: stub.applications() == [])
    assert stub.applications() == []
    assert not [session for session in stub.sessions() if session.state == "Open"]


def short(*more: str) -> tuple[str, ...]:
    quick = ("rollout.num_slots=2", "rollout.envs_per_slot=2", "rollout.steps=16", "ppo.epochs=1",
             "evaluation.final_episodes=2", "evaluation.max_episode_steps=20",
             "network.hidden=[8]")  # fmt: skip
    sets = tuple(word for setting in quick for word in ("--set", setting))
    return ("train", "--env", "cartpole", "--steps", "1920", *sets, *more)


def test_train_times_both_sides_and_says_so(stub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = rlflame(*short("--local", "--json", "--out", "here"))
    both = rlflame(*short("--json", "--out", "both"))
    assert both.code == 0, both.err
    assert stub.applications() == []
    first, last = both.events()[0], both.events()[-1]
    told = next(event for event in both.events() if event["event"] == "start")
    assert told["fleet"] == "auto"
    assert last["digest"] == here.events()[-1]["digest"], first
    (entry,) = json.loads((tmp_path / "both" / "machines.json").read_text())
    notes = [e["text"] for e in both.events() if e["event"] == "note" and "auto:" in e["text"]]
    # The test does not depend on which fleet is faster, or on the cluster being ready in time.
    assert len(notes) == (entry["fleet"] != "auto")


def test_the_first_line_says_where_it_begins(stub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = rlflame(*short("--plain"))
    assert "on this machine and on Flame in turn, then on the faster" in both.lines[0]
    assert any("local worker" in line and "2 Flame executors" in line for line in both.lines)


def test_workers_that_began_early_are_those_here(stub, monkeypatch):
    from rlflame.config.recipe import RuntimeSettings

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2), raising=False)
    begun = rollouts.recorded_processes(monkeypatch, "rlflame.fleet.prestart")
    with (
        PrestartPool() as early,
        factory.make_fleet(RuntimeSettings(), 2, prestart_pool=early, is_training=True) as fleet,
    ):
        assert isinstance(fleet, AutoFleet)
        assert len(early) == 0
        assert not begun[0].has_exited
    assert begun[0].has_exited


@pytest.mark.parametrize("asked", ["local", "flame"])
def test_a_named_fleet_is_used_as_given(stub, asked):
    from rlflame.config.recipe import RuntimeSettings

    with factory.make_fleet(RuntimeSettings(fleet=asked), 2, is_training=True) as fleet:
        assert fleet.name == asked
        assert not isinstance(fleet, AutoFleet)


def test_a_cluster_that_cannot_be_reached_is_an_error_before_anything_begins(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    FlameStub.reset_client()
    monkeypatch.setenv("FLAME_ENDPOINT", "http://127.0.0.1:1")
    spoken = rlflame(*short())
    assert spoken.code == 3
    assert not (tmp_path / "runs").exists()
