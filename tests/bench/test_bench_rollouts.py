"""Measurements with the real loop and a fake clock, and repeated recorded steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from types import SimpleNamespace

import fakes
import numpy as np
import pytest
import tiny_runs

from rlflame.analysis.report.bench_comparison import Measurement, compare_measurements
from rlflame.bench import raw_stepping
from rlflame.bench.case import Case, Stopwatch, run_case, warm_up
from rlflame.bench.raw_stepping import SteppingProcesses, make_raw_processes, sum_rates
from rlflame.bench.result import Side
from rlflame.bench.rollouts import (
    RolloutRounds,
    RolloutsBenchmark,
    describe_rate,
    make_collectors,
    measure_rounds,
    sum_counts,
)
from rlflame.bench.runner import BenchSession
from rlflame.bench.scaling import ScalingBenchmark
from rlflame.config.recipe import Recipe
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, RlflameError
from rlflame.experiment import components
from rlflame.fleet.base import make_policy_id
from rlflame.fleet.inline import InlineFleet
from rlflame.rollout.envs.make import make_env, read_env_spec
from rlflame.rollout.process.channel import MessageKind
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import StopInterrupt


def recipe(env="CartPole-v1", kwargs=None, *, unit="steps", steps=7, iterations=2):
    algorithm = "ppo" if unit == "steps" else "reinforce"
    return {
        "stop_at_iterations": iterations,
        "learning": {
            "environment": {"id": env, "kwargs": kwargs or {}},
            "algorithm": algorithm,
            "rollout": {"unit": unit, "num_slots": 2, "envs_per_slot": 2, "steps": steps},
        },
    }


def case(name="it", **words):
    found = Recipe.model_validate(recipe(**words)).copy_with_horizon()
    return Case(name, found, components.make_env_spec(found.learning.environment))


def test_an_argument_that_one_environment_alone_had_is_other_work():
    without, length = (
        Measurement("a", "lower", (4.0,), "s", case(env="fakes:Fake-v0", kwargs=arguments).work)
        for arguments in ({}, {"length": 21})
    )
    other = "kwargs {} before, and with {length = 21} now"
    with pytest.raises(ConfigError, match=re.escape(other)):
        compare_measurements([length], [without], 0.0)
    assert compare_measurements([length], [length], 0.0)


def ticking():
    """A clock that advances by one second at each reading."""
    return itertools.count().__next__


class StopAfter:
    """Requests a stop in the n-th wait."""

    def __init__(self, waits):
        self.left = waits
        self.is_requested = False

    @contextlib.contextmanager
    def allow_interrupt(self):
        if not self.left:
            self.is_requested = True
            raise StopInterrupt
        self.left -= 1
        yield


# Timing


class Session(BenchSession):
    """A session whose fleets all run in this process. It keeps its messages."""

    def __init__(self, stop=None, clock=time.perf_counter):
        self.statuses, self.notes, self.opened = [], [], []
        line = SimpleNamespace(show_status=self.statuses.append, show_note=self.notes.append)
        super().__init__(RuntimeSettings(), line, stop or NullStop(), clock)

    def open_fleet(self, kind, workers):
        self.opened.append((kind, workers))
        return InlineFleet()


def run_once(one, stop=None, clock=None):
    with InlineFleet() as fleet:
        return run_case(one, fleet, stop or NullStop(), Stopwatch(clock or ticking()))


def test_a_repetition_is_a_training_run_with_separate_phases():
    squares = (n * n for n in itertools.count()).__next__
    one = case()
    found, again = run_once(one, clock=squares), run_once(one)
    # The clock is read at the beginning (0), twice for each phase (handing over 1 and 2, collecting
    # 3 and 4, learning 5 and 6), at the end of each iteration (7), and at the end (17).
    assert found["seconds"] == 17 * 17
    assert found["collect_s"] == (16 - 9) + (121 - 100)
    assert found["learn_s"] == (36 - 25) + (169 - 144)
    assert found["steps"] == 2 * 2 * 2 * 7
    trained = tiny_runs.run(recipe())
    assert found["weights"] == again["weights"] == make_policy_id(trained.last.policy)
    assert found["weights"] != make_policy_id(trained.first)


def test_the_last_reward_is_the_mean_of_the_last_iteration_s_episodes():
    words = {"unit": "episodes", "steps": 30}
    found = run_once(case(**words))
    last = tiny_runs.run(recipe(**words)).recorded.fragments[-1]
    # CartPole pays 1 for each step.
    assert found["final_return"] == np.mean([fragment.lengths for fragment in last])
    assert found["episodes"] == 8


def test_what_is_stopped_is_no_repetition():
    with pytest.raises(StopInterrupt):
        run_once(case(), StopAfter(1))
    with InlineFleet() as fleet:
        with pytest.raises(StopInterrupt):
            warm_up(case(), fleet, StopAfter(0), ticking())
        warm_up(case(), fleet, StopAfter(1), ticking())


def test_warming_up_waits_for_all_workers_but_not_for_ever(monkeypatch):
    seen = iter([(), (), ("worker",)])
    monkeypatch.setattr(InlineFleet, "probe", lambda fleet: next(seen))
    still = lambda: 0.0  # noqa: E731
    with InlineFleet() as fleet:
        warm_up(case(), fleet, NullStop(), still, wait_for_all=True)
        assert next(seen, "all asked") == "all asked"
        monkeypatch.setattr(InlineFleet, "probe", lambda fleet: ())
        warm_up(case(), fleet, NullStop(), ticking(), wait_for_all=True)


# Scaling


def scaling(stop):
    """The measured benchmark, the number of cells after each part, and the session."""
    session, kept = Session(stop, ticking()), []
    benchmark = ScalingBenchmark(
        [case("a"), case("b", iterations=1)], ["local", "flame", "inline"], [2, 3], 2
    )
    try:
        for _ in benchmark.measure(session):
            kept.append(len(benchmark.sides))
    except StopInterrupt:
        kept.append("stopped")
    return benchmark, session, kept


def test_fleets_of_one_size_take_turns_and_all_learn_the_same():
    found, session, kept = scaling(NullStop())
    assert session.opened == [
        ("local", 2), ("flame", 2), ("inline", 2), ("local", 3), ("flame", 3),
    ]  # fmt: skip
    begun = [text for text in session.statuses if text.startswith("a, ") and text.endswith("of 2")]
    turns = [text.partition(" with")[0] for text in begun][:6]
    assert turns == ["a, local", "a, flame", "a, inline"] * 2
    assert [[c.labels[key] for key in ("case", "fleet", "workers")] for c in found.sides] == [
        [name, fleet, 1 if fleet == "inline" else workers]
        for workers, fleets in ((2, ("local", "flame", "inline")), (3, ("local", "flame")))
        for name in ("a", "b")
        for fleet in fleets
    ]
    assert kept == [3, 6, 8, 10]
    assert {len(cell.repetitions) for cell in found.sides} == {2}
    first = [c for c in found.sides if c.labels["case"] == "a"]
    assert len({weights for c in first for weights in c.list_values("weights")}) == 1
    # The start belongs to the first case of a fleet. `inline` always counts as one worker.
    assert [cell.labels["start_s"] is not None for cell in found.sides[:6]] == [True] * 3 + [
        False
    ] * 3


def test_what_was_measured_before_a_stop_is_kept():
    # Three warm-ups of one wait, then two waits per repetition: the fourth of these is interrupted.
    found, session, kept = scaling(StopAfter(3 + 7))
    assert kept == ["stopped"]
    assert "a, inline with 1: 1 of 2" in session.statuses
    assert session.turn == "a, local with 2: 2 of 2"
    assert [(c.labels["fleet"], len(c.repetitions)) for c in found.sides] == [
        ("local", 1), ("flame", 1), ("inline", 1),
    ]  # fmt: skip


# Rollouts compared with bare stepping


def test_the_script_has_episodes_of_random_actions(monkeypatch):
    monkeypatch.setattr(raw_stepping, "_SCRIPT_STEPS", 25)
    env = fakes.Fake(length=10)
    script = raw_stepping.record_script(env)
    assert [(seed, len(actions)) for seed, actions in script] == [(0, 10), (1, 10), (2, 5)]
    again = raw_stepping.record_script(env)
    assert [actions for _, actions in again] == [actions for _, actions in script]
    assert {int(action) for _, actions in script for action in actions} == {0, 1}


def test_the_script_is_repeated_from_its_resets():
    env, other = (make_env(read_env_spec("CartPole-v1", {}, None)) for _ in range(2))
    script = raw_stepping.record_script(env)[:3]
    length = sum(len(actions) for _, actions in script)
    steps = raw_stepping.iterate_gymnasium(env, script)
    for _ in range(2):
        assert sum(next(steps) for _ in range(length)) == length  # the reward is 1 in each step
    for seed, actions in script:
        other.reset(seed=seed)
        ends = [other.step(action)[2] for action in actions]
        assert ends == [False] * (len(actions) - 1) + [True]


def test_mj_step_alone_moves_the_bodies_as_gymnasium_does():
    spec = read_env_spec("Hopper-v5", {}, None)
    generator = np.random.default_rng(0)
    script = [(seed, [*generator.uniform(-1, 1, (6, 3)).astype(np.float32)]) for seed in (5, 6)]
    env, other = make_env(spec).unwrapped, make_env(spec).unwrapped
    steps = raw_stepping.iterate_mujoco(env, script)
    for seed, actions in script:
        other.reset(seed=seed)
        for action in actions:
            other.step(action)
            next(steps)
            assert np.array_equal(env.data.qpos, other.data.qpos)
            assert np.array_equal(env.data.qvel, other.data.qvel)


def test_only_a_mujoco_model_can_be_stepped_alone():
    order = {"env": read_env_spec("CartPole-v1", {}, None), "way": "mj_step"}
    assert raw_stepping.make_raw_step(order) is None


def test_bare_steps_are_counted_until_the_time_is_over():
    for seconds, counts in ((4.0, (300, 5.0)), (0.0, (100, 1.0))):
        times = iter([0.0, 1.0, 2.0, 5.0])
        answer = raw_stepping.time_steps(itertools.repeat(0.0), seconds, times.__next__)
        assert (answer["steps"], answer["seconds"]) == counts


def test_processes_that_step_and_do_nothing_else():
    with make_raw_processes(case().env, "gymnasium", 2, NullStop()) as stepping:
        assert stepping.is_possible
        assert sum_rates(stepping.step(0.001)) > 0.0
        processes = [*stepping._processes]
    assert len(processes) == 2
    assert all(process.has_exited for process in processes)
    with make_raw_processes(case().env, "mj_step", 1, NullStop()) as stepping:
        assert not stepping.is_possible


def test_processes_that_collect_each_with_rounds_of_its_own():
    """With a time of zero, each process runs one round of four rows and seven steps."""
    with make_collectors(case(), 2, NullStop()) as beside:
        processes = [*beside._processes]
        for _ in range(2):
            assert [one["steps"] for one in beside.step(0.0)] == [28, 28]
    assert [process.has_exited for process in processes] == [True, True]


def test_processes_that_collect_have_seeds_of_their_own(monkeypatch):
    orders = []
    monkeypatch.setattr(
        "rlflame.bench.rollouts.SteppingProcesses", lambda module, given, *_: orders.extend(given)
    )
    make_collectors(case(), 3, NullStop())
    recipes = [Recipe.model_validate_json(order["recipe"]) for order in orders]
    assert [one.learning.seed for one in recipes] == [0, 1, 2]


def test_what_several_processes_did_is_their_steps_in_the_time_of_one():
    counts = [
        {"steps": 30, "seconds": 2.0, "episodes": 1, "episode_steps": 9},
        {"steps": 40, "seconds": 4.0, "episodes": 2, "episode_steps": 31},
    ]
    together = {"steps_per_s": 25.0, "steps": 70, "episodes": 3, "episode_steps": 40}
    assert sum_counts(counts) == together


def loud(how):
    return case(env="fakes:Loud-v0", kwargs={"how": how})


@pytest.mark.parametrize("how", ["print", "descriptor 1", "descriptor 2"])
def test_what_an_environment_prints_is_no_answer_and_fills_no_pipe(how):
    with make_collectors(loud(how), 2, NullStop()) as beside:
        for _ in range(2):
            assert [one["steps"] for one in beside.step(0.0)] == [28, 28]


def test_a_dead_process_is_reported_with_its_signal_and_output():
    with make_collectors(loud("descriptor 2"), 2, NullStop()) as beside:
        os.kill(beside._processes[1].pid, signal.SIGKILL)
        with pytest.raises(
            RlflameError,
            match=r"^Process \d+ of the benchmark: killed by signal 9, SIGKILL\.$",
        ) as caught:
            beside.step(0.0)
        assert "so loud" in caught.value.detail
        assert "--workers 1" in caught.value.hint


def test_a_process_ended_by_its_environment_is_reported_with_its_exit_code():
    with (
        pytest.raises(RlflameError, match=r"of the benchmark: ended with exit code 3\.$"),
        make_collectors(loud("exit"), 1, NullStop()) as beside,
    ):
        beside.step(0.0)


def test_processes_of_which_one_hangs_are_ended_at_once_by_a_stop():
    """The stop does not wait for processes that start or step."""
    with pytest.raises(StopInterrupt):
        make_collectors(loud("hang"), 2, StopAfter(0))
    with make_collectors(loud("print"), 2, NullStop()) as beside:
        processes = [*beside._processes]
        beside._stop = StopAfter(0)
        with pytest.raises(StopInterrupt):
            beside.step(0.0)
    assert [process.has_exited for process in processes] == [True, True]


def test_a_process_ends_with_its_parent_in_the_middle_of_a_measurement():
    """The process steps for an hour, but notices that its parent closed the channel."""
    with make_collectors(case(), 1, NullStop()) as beside:
        (process,) = beside._processes
        process.channel.send(MessageKind.TASK, 3600.0)
        process.channel.close_sending()
        process._process.wait(60)


def rate(workers, *counts):
    return Side("it", {"fleet": "local", "workers": workers}, [*counts])


def test_shares_are_of_pairs():
    counts = {"steps": 60, "episodes": 4, "episode_steps": 300, "gymnasium": 100.0}
    facts = describe_rate(rate(2, *({**counts, "steps_per_s": one} for one in (60.0, 90.0))))
    assert facts["shares"] == {"gymnasium": [0.6, 0.9]}
    assert facts["limits"] == {"gymnasium": [100.0, 100.0]}
    # Episodes have 75 steps, and each of the two workers runs half of 75 steps per second.
    assert facts["ms_per_episode"] == 2000.0


def test_rates_and_limits_of_a_fleet():
    """With a time of zero, each repetition is one round of four rows and seven steps."""
    session = Session(clock=ticking())
    benchmark = RolloutsBenchmark([case()], ["local"], [1, 2], 2, seconds=0.0)
    assert [*benchmark.measure(session)] == [None, None]
    assert session.opened == [("local", 1), ("local", 2)]
    for side in benchmark.sides:
        assert side.list_values("steps") == [28, 28]
        assert side.list_values("retried") == [0, 0]
        # CartPole is not a MuJoCo environment.
        assert [("gymnasium" in one, "mj_step" in one) for one in side.repetitions] == [
            (True, False)
        ] * 2


def test_episodes_longer_than_what_was_timed_do_not_take_longer_for_that():
    """Only one of three rounds of seven steps ends the episodes of 21 steps."""
    one = case(env="fakes:Fake-v0", kwargs={"length": 21}, steps=7)
    with InlineFleet() as fleet, RolloutRounds(one, fleet, NullStop(), "sample") as running:
        running.warm_up()
        counts = sum_counts([measure_rounds(running, 0.5, ticking())])
    assert counts["steps"] < counts["episode_steps"] == 21 * counts["episodes"]
    ms_per_episode = describe_rate(rate(1, counts))["ms_per_episode"]
    assert ms_per_episode == pytest.approx(1000.0 * 21 / counts["steps_per_s"])


def test_rounds_are_iterations_one_after_the_other():
    with InlineFleet() as fleet, RolloutRounds(case(), fleet, NullStop(), "sample") as running:
        iterations = []
        for _ in range(3):
            iterations.append({fragment.iteration for fragment in running.collect()})
    (first,) = iterations[0]
    assert iterations == [{first}, {first + 1}, {first + 2}]


def test_a_round_counts_its_steps_and_episodes():
    one = case(env="fakes:Fake-v0", kwargs={"length": 10}, steps=10)
    with InlineFleet() as fleet, RolloutRounds(one, fleet, NullStop(), "sample") as running:
        counts = measure_rounds(running, 2.0, ticking())
    # The clock is read at 0, at 1 and, after one round of 4 x 10 steps, at 2.
    assert counts == {"steps": 40, "episodes": 4, "seconds": 2.0, "episode_steps": 40}


def test_an_order_of_any_length_arrives(tmp_path, monkeypatch):
    """The order is longer than the buffer of a pipe."""
    (tmp_path / "ordered.py").write_text(
        "from rlflame.bench.raw_stepping import serve_steps\n"
        "serve_steps(lambda order: lambda s: {'steps': len(order['words']), 'seconds': s})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    orders = [{"words": "x" * 1_500_000}, {"words": "x" * 2_000_000}]
    with SteppingProcesses("ordered", orders, "none", NullStop()) as children:
        assert children.is_possible
        heard = children.step(1.0)
    assert [one["steps"] for one in heard] == [1_500_000, 2_000_000]
