"""Timing through the real loop and workers, with clocks of our own; recorded steps, repeated."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal

import numpy as np
import pytest
import tiny_runs

from rlflame.analysis.report.bench_comparison import Measurement, compare_measurements
from rlflame.bench import policy_process, raw_stepping, timed_run
from rlflame.bench.base import Case
from rlflame.bench.physics_limit import RawSteppingProcesses
from rlflame.bench.rollouts import CollectorProcesses, RolloutRate, TimedRounds, alternate
from rlflame.bench.scaling import ScalingBenchmark
from rlflame.bench.stepping_processes import SteppingProcesses
from rlflame.config.recipe import Recipe
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
        Measurement("a", "s", False, (4.0,), case(env="fakes:Fake-v0", kwargs=arguments).work)
        for arguments in ({}, {"length": 21})
    )
    other = "kwargs {} before, and with {length = 21} now"
    with pytest.raises(ConfigError, match=re.escape(other)):
        compare_measurements([length], [without], 0.0)
    assert compare_measurements([length], [length], 0.0)


def ticking():
    """A clock that a second passes on whenever one looks."""
    return itertools.count().__next__


class StopAfter:
    """Asks to stop in the n-th wait."""

    def __init__(self, waits):
        self.left = waits
        self.requested = False

    @contextlib.contextmanager
    def allow_interrupt(self):
        if not self.left:
            self.requested = True
            raise StopInterrupt
        self.left -= 1
        yield


# Timing


def test_a_repetition_is_a_training_run_and_its_phases_are_told_apart():
    one = case()
    with InlineFleet() as fleet:
        squares = (n * n for n in itertools.count()).__next__
        found = timed_run.run_once(one, fleet, NullStop(), squares)
        again = timed_run.run_once(one, fleet, NullStop(), ticking())
    # The clock is asked at the beginning (0), twice for each phase (handing over 1 and 2,
    # collecting 3 and 4, learning 5 and 6, handing over 7 and 8, and so on), and at the end (15).
    assert found.seconds == 15 * 15
    assert found.collect_s == (16 - 9) + (100 - 81)
    assert found.learn_s == (36 - 25) + (144 - 121)
    assert found.steps == 2 * 2 * 2 * 7
    trained = tiny_runs.run(recipe())
    assert found.weights == again.weights == make_policy_id(trained.last.policy)
    assert found.weights != make_policy_id(trained.first)


def test_the_last_reward_is_the_mean_of_the_last_iteration_s_episodes():
    words = {"unit": "episodes", "steps": 30}
    with InlineFleet() as fleet:
        found = timed_run.run_once(case(**words), fleet, NullStop(), ticking())
    last = tiny_runs.run(recipe(**words)).recorded.fragments[-1]
    # CartPole pays one for each step.
    assert found.final_return == np.mean([fragment.lengths for fragment in last])
    assert found.episodes == 8


def test_what_is_stopped_is_no_repetition():
    with InlineFleet() as fleet:
        assert timed_run.run_once(case(), fleet, StopAfter(1), ticking()) is None
        assert timed_run.warm(case(), fleet, StopAfter(0), ticking()) is False
        assert timed_run.warm(case(), fleet, StopAfter(1), ticking()) is True


def test_warming_up_waits_for_all_workers_but_not_for_ever(monkeypatch):
    seen = iter([0, 0, 1])
    monkeypatch.setattr(timed_run, "count_answered_workers", lambda fleet: next(seen))
    still = lambda: 0.0  # noqa: E731
    with InlineFleet() as fleet:
        assert timed_run.warm(case(), fleet, NullStop(), still, wait_for_all=True)
        assert next(seen, "all asked") == "all asked"
        monkeypatch.setattr(timed_run, "count_answered_workers", lambda fleet: 0)
        assert timed_run.warm(case(), fleet, NullStop(), ticking(), wait_for_all=True)


# Scaling


def scaling(stop, **words):
    opened, told, kept = [], [], []

    def open_one(kind, count):
        opened.append((kind, count))
        return InlineFleet()

    found = ScalingBenchmark(
        [case("a"), case("b", iterations=1)], ["local", "flame", "inline"], [2, 3], 2, open_one,
        stop, show_status=told.append, save_partial=lambda: kept.append(len(found.cells)),
        clock=ticking(),
        **words,
    )  # fmt: skip
    return found, opened, told, kept


def test_fleets_of_one_size_take_turns_and_all_learn_the_same():
    found, opened, told, kept = scaling(NullStop())
    assert found.run()
    assert opened == [("local", 2), ("flame", 2), ("inline", 2), ("local", 3), ("flame", 3)]
    begun = [text for text in told if text.startswith("a, ") and "iteration" not in text]
    turns = [text.partition(" with")[0] for text in begun][:6]
    assert turns == ["a, local", "a, flame", "a, inline"] * 2
    assert [(c.case, c.fleet, c.workers) for c in found.cells] == [
        (name, fleet, 1 if fleet == "inline" else workers)
        for workers, fleets in ((2, ("local", "flame", "inline")), (3, ("local", "flame")))
        for name in ("a", "b")
        for fleet in fleets
    ]
    assert kept == [3, 6, 8, 10]
    assert {len(cell.repetitions) for cell in found.cells} == {2}
    assert len({one.weights for c in found.cells if c.case == "a" for one in c.repetitions}) == 1
    # Starting is of a fleet's first case; this process counts as one worker whatever is asked.
    assert [cell.start_s is not None for cell in found.cells[:6]] == [True] * 3 + [False] * 3


def test_what_was_measured_before_a_stop_is_kept():
    # Three warm-ups of one wait, then two of each repetition: the fourth of these is cut short.
    noted = []
    found, _, told, kept = scaling(StopAfter(3 + 7), note=noted.append)
    assert not found.run()
    assert "a, inline with 1: 1 of 2, iteration 2 of 2" in told
    (cut,) = noted
    assert cut.startswith("a, local with 2: 2 of 2: stopped after 1 of 2 iterations, ")
    assert [(c.fleet, len(c.repetitions)) for c in found.cells] == [
        ("local", 1), ("flame", 1), ("inline", 1),
    ]  # fmt: skip
    assert kept == []


# Rollouts beside bare stepping


def collected(one, rounds):
    """The script of some rounds, and the rewards that the workers saw."""
    rewards = []
    with InlineFleet() as fleet:
        running = TimedRounds(one, fleet, NullStop())
        add = running.trace.add

        def added(fragments):
            rewards.append(sum(float(f.rewards.sum()) for f in fragments))
            add(fragments)

        running.trace.add = added
        for _ in range(rounds):
            running.record_round()
        running.close()
    return running.trace, sum(rewards)


def test_the_script_is_written_while_warming_up_until_it_is_long_enough(monkeypatch):
    monkeypatch.setattr("rlflame.bench.action_trace._MAX_STEPS", 4 * 28)
    for clock, rounds in ((lambda: 0.0, 4), (ticking(), 4), ((0.0, 9.0).__iter__().__next__, 2)):
        with InlineFleet() as fleet, TimedRounds(case(), fleet, NullStop(), clock) as running:
            running.record_trace()
            assert sum(len(actions) for _, actions in running.trace.list_pieces()) == rounds * 28


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("unit", ["steps", "episodes"])
def test_the_recorded_steps_lead_to_the_rewards_that_workers_saw(tmp_path, unit, continuous):
    """Episodes of ten steps over rounds of seven: begun in one, ended in another, cut off."""
    one = case(
        env="fakes:Fake-v0", kwargs={"length": 10, "continuous": continuous}, unit=unit,
        steps=7 if unit == "steps" else 40,
    )  # fmt: skip
    script, rewards = collected(one, 5)
    script.save(tmp_path / "script.npz")
    spec, pieces = raw_stepping.read_trace(tmp_path / "script.npz")
    steps = sum(len(actions) for _, actions in pieces)
    assert steps == 5 * 4 * (7 if unit == "steps" else 10)
    assert max(len(actions) for _, actions in pieces) == 10
    # Every episode is another one, in every round.
    assert len({seed for seed, _ in pieces}) == len(pieces)
    repeated = raw_stepping.iterate_gymnasium(spec, pieces)
    assert sum(itertools.islice(repeated, steps)) == pytest.approx(rewards, rel=1e-9)


def test_mj_step_alone_moves_the_bodies_as_gymnasium_does():
    spec = read_env_spec("Hopper-v5", {}, None)
    generator = np.random.default_rng(0)
    pieces = [(seed, generator.uniform(-1, 1, (6, 3)).astype(np.float32)) for seed in (5, 6)]
    env, other = make_env(spec).unwrapped, make_env(spec).unwrapped
    steps = raw_stepping._iterate_mujoco(env, pieces)
    for seed, actions in pieces:
        other.reset(seed=seed)
        for action in actions:
            other.step(action)
            next(steps)
            assert np.array_equal(env.data.qpos, other.data.qpos)
            assert np.array_equal(env.data.qvel, other.data.qvel)


def test_only_a_mujoco_model_can_be_stepped_alone():
    assert raw_stepping.iterate_mujoco(read_env_spec("CartPole-v1", {}, None), []) is None


def test_bare_steps_are_counted_until_the_time_is_over():
    for seconds, answer in ((4.0, (300, 5.0)), (0.0, (100, 1.0))):
        times = iter([0.0, 1.0, 2.0, 5.0])
        assert raw_stepping.time_steps(itertools.repeat(0.0), seconds, times.__next__) == answer


def test_processes_that_step_and_do_nothing_else(tmp_path):
    written, _ = collected(case(), 2)
    written.save(tmp_path / "script.npz")
    script = tmp_path / "script.npz"
    with RawSteppingProcesses(script, "gymnasium", 2, 0.001, NullStop()) as stepping:
        assert stepping.is_possible
        assert stepping.measure_rate() > 0.0
        processes = [*stepping._processes]
    assert len(processes) == 2
    assert all(process.has_exited for process in processes)
    with RawSteppingProcesses(script, "mj_step", 1, 0.001, NullStop()) as stepping:
        assert not stepping.is_possible


def test_processes_that_collect_each_with_rounds_of_its_own():
    """Two processes for no time at all: a round each, of four rows and seven steps."""
    rate = RolloutRate("inline", 2)
    with CollectorProcesses(case(), 2, NullStop()) as beside:
        processes = [*beside._processes]
        beside.measure(0.0, rate)
        assert (len(rate.steps_per_s), rate.steps) == (1, 2 * 28)
        beside.measure(0.0, rate)
    assert (len(rate.steps_per_s), rate.steps) == (2, 4 * 28)
    assert [process.has_exited for process in processes] == [True, True]
    text = case().recipe.model_dump_json()
    assert [policy_process.make_case(text, n).recipe.learning.seed for n in range(2)] == [0, 1]


def test_what_several_processes_did_is_their_steps_in_the_time_of_one(monkeypatch):
    rate = RolloutRate("inline", 2)
    answers = [
        {"what": "stepped", "steps": 30, "seconds": 2.0, "episodes": 1, "episode_steps": 9},
        {"what": "stepped", "steps": 40, "seconds": 4.0, "episodes": 2, "episode_steps": 31},
    ]
    with CollectorProcesses(case(), 2, NullStop()) as beside:
        monkeypatch.setattr(beside, "step", lambda seconds: answers)
        beside.measure(1.0, rate)
    assert (rate.steps_per_s, rate.seconds, rate.steps, rate.episodes) == ([25.0], 3.0, 70, 3)
    assert rate.episode_steps == 40


def loud(how):
    return case(env="fakes:Loud-v0", kwargs={"how": how})


@pytest.mark.parametrize("how", ["print", "descriptor 1", "descriptor 2"])
def test_what_an_environment_prints_is_no_answer_and_fills_no_pipe(how):
    rate = RolloutRate("inline", 2)
    with CollectorProcesses(loud(how), 2, NullStop()) as beside:
        for _ in range(2):
            beside.measure(0.0, rate)
    assert rate.steps == 4 * 28


def test_a_process_that_dies_is_told_with_how_and_what_it_said():
    with CollectorProcesses(loud("descriptor 2"), 2, NullStop()) as beside:
        os.kill(beside._processes[1].pid, signal.SIGKILL)
        with pytest.raises(
            RlflameError,
            match=r"^Process \d+, which is measured, was killed by signal 9, SIGKILL\.$",
        ) as caught:
            beside.measure(0.0, RolloutRate("inline", 2))
        assert "so loud" in caught.value.detail
        assert "--workers 1" in caught.value.hint


def test_a_process_that_its_environment_ends_is_said_to_be_ended_by_it():
    with (
        pytest.raises(RlflameError, match=r"on its own\. Process \d+: ended with exit code 3\.$"),
        CollectorProcesses(loud("exit"), 1, NullStop()) as beside,
    ):
        beside.measure(0.0, RolloutRate("inline", 1))


def test_processes_of_which_one_hangs_are_ended_at_once_by_a_stop():
    """Nothing is waited for: neither while they start nor while they step."""
    with pytest.raises(StopInterrupt):
        CollectorProcesses(loud("hang"), 2, StopAfter(0))
    rate = RolloutRate("inline", 2)
    with CollectorProcesses(loud("print"), 2, NullStop()) as beside:
        processes = [*beside._processes]
        beside._stop = StopAfter(0)
        with pytest.raises(StopInterrupt):
            beside.measure(0.0, rate)
    assert [process.has_exited for process in processes] == [True, True]


def test_a_process_ends_with_its_parent_in_the_middle_of_a_measurement():
    """It would step for an hour, and notices all the same that nobody listens."""
    with CollectorProcesses(case(), 1, NullStop()) as beside:
        (process,) = beside._processes
        process.channel.send(MessageKind.TASK, {"seconds": 3600.0})
        process.channel.close_sending()
        process._process.wait(60)


def test_workers_and_limits_take_turns_and_shares_are_of_pairs():
    rate = RolloutRate("local", 2)

    class Played:
        def measure(self, seconds, into):
            into.steps_per_s.append([60.0, 90.0][len(into.steps_per_s)])
            into.episodes, into.episode_steps = into.episodes + 4, into.episode_steps + 300

    limits = {"gymnasium": iter([100.0, 100.0]).__next__}
    played = Played()
    assert alternate(lambda: played.measure(1.0, rate), rate, limits, 2, lambda text: None)
    assert rate.compute_shares("gymnasium") == [0.6, 0.9]
    # Episodes of 75 steps, and each of the two workers does half of 75 steps a second.
    assert rate.ms_per_episode == 2000.0


def test_episodes_longer_than_what_was_timed_do_not_take_longer_for_that():
    """One of three rounds of seven steps ends the episodes of 21."""
    rate = RolloutRate("inline", 1)
    one = case(env="fakes:Fake-v0", kwargs={"length": 21}, steps=7)
    with InlineFleet() as fleet:
        running = TimedRounds(one, fleet, NullStop(), itertools.count().__next__)
        running.warm_up()
        running.measure(0.5, rate)
    assert rate.steps < rate.episode_steps == 21 * rate.episodes
    assert rate.ms_per_episode == pytest.approx(1000.0 * 21 / rate.steps_per_s[0])


def test_a_round_counts_its_steps_and_episodes():
    rate = RolloutRate("inline", 1)
    one = case(env="fakes:Fake-v0", kwargs={"length": 10}, steps=10)
    with InlineFleet() as fleet:
        running = TimedRounds(one, fleet, NullStop(), ticking())
        running.measure(2.0, rate)
        running.close()
    # It looks at 0, at 1 and, after one round of 4 x 10 steps, at 2.
    assert (rate.steps, rate.episodes, rate.seconds) == (40, 4, 2.0)
    assert rate.steps_per_s == [20.0]


def test_an_order_of_any_length_arrives(tmp_path, monkeypatch):
    """Longer than what a pipe takes at once."""
    (tmp_path / "ordered.py").write_text(
        "from rlflame.bench.stepping_processes import StepServer\n"
        "here = StepServer()\n"
        "here.serve(lambda seconds: {'steps': len(here.order['words']), 'seconds': seconds})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    orders = [{"words": "x" * 1_500_000}, {"words": "x" * 2_000_000}]
    with SteppingProcesses("ordered", orders, "No.", "none", NullStop()) as children:
        assert children.is_possible
        heard = children.step(1.0)
    assert [one["steps"] for one in heard] == [1_500_000, 2_000_000]
