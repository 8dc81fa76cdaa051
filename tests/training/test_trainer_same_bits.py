"""Equal recipes give bit-for-bit identical results, however they run.

The tests compare the state digest and all recorded numbers with a run in this process without any
parallelism.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json

import failpoints
import flames
import pytest

from rlflame.experiment import components
from rlflame.fleet.inline import InlineFleet
from rlflame.fleet.local import LocalFleet
from rlflame.storage import checkpoint


class Diary:
    """A recorder that keeps all calls in memory."""

    def __init__(self):
        self.lines = []
        self.iterations = 0

    def record_iteration(self, progress, metrics, fragments):
        self.iterations += 1
        episodes = [dataclasses.astuple(e) for f in fragments for e in f.episodes]
        self.lines.append(json.dumps([dataclasses.astuple(progress), metrics, episodes]))

    def record_evaluation(self, progress, record, policy):
        self.lines.append(json.dumps([progress.steps, record.as_dict()]))

    def record_snapshot(self, take, progress, final): ...

    def time_phase(self, name):
        return contextlib.nullcontext()


class StopAfter:
    """Requests a stop after a number of recorded iterations."""

    def __init__(self, diary, iterations):
        self._diary = diary
        self._iterations = iterations

    @property
    def is_requested(self):
        return self._diary.iterations >= self._iterations

    def allow_interrupt(self):
        return contextlib.nullcontext()


def scenario(env, algorithm="ppo", staleness=0, slots=5, iterations=3):
    """A recipe of a few iterations with an evaluation; gSDE intervals span fragments."""
    algorithm, _, exploration = algorithm.partition("+")
    rollout = {"num_slots": slots, "envs_per_slot": 2, "steps": 8, "staleness": staleness}
    if algorithm == "reinforce":
        rollout["steps"] = 16
    learning = {"algorithm": algorithm, "rollout": rollout, "horizon_iterations": 3}
    if exploration:
        learning["network"] = {"exploration": exploration, "exploration_interval": 5}
    config = failpoints.config(
        env,
        learning=learning,
        stop_at_steps=None,
        stop_at_iterations=iterations,
        evaluation={"every_steps": slots * 2 * 8 * 2, "max_episode_steps": 12},
    )
    return config.recipe


def run(recipe, fleet, diary, *, start=None, stop_after=10**9, name="run"):
    """Train a recipe, from a checkpoint if one is given, and return the trainer."""
    begun = start or components.make_initial_checkpoint(
        recipe, components.make_env_spec(recipe.learning.environment)
    )
    begun = dataclasses.replace(begun, recipe=recipe)
    trainer = components.make_trainer(begun, fleet, diary, StopAfter(diary, stop_after), name)
    trainer.run()
    return begun, trainer


def saved(begun, trainer, path):
    """The run's state, saved into a file and loaded again."""
    snapshot = trainer.take_snapshot()
    whole = dataclasses.replace(
        begun, policy=snapshot.policy, progress=snapshot.progress, snapshot=snapshot
    )
    checkpoint.save(path, whole)
    return checkpoint.load(path)


def outcome(recipe, fleet, tmp_path, name):
    diary = Diary()
    begun, trainer = run(recipe, fleet, diary, name=name)
    return saved(begun, trainer, tmp_path / "c.safetensors").digest, diary.lines


FULL = [
    ("CartPole-v1", "ppo", 0),
    ("CartPole-v1", "ppo", 1),
    ("CartPole-v1", "reinforce", 0),
    ("Hopper-v5", "ppo", 0),
    ("Hopper-v5", "ppo", 1),
    ("Hopper-v5", "reinforce", 0),
    ("Hopper-v5", "sac", 0),
    ("Hopper-v5", "sac", 1),
    ("Pendulum-v1", "ppo+gsde", 1),
    ("Pendulum-v1", "sac+gsde", 0),
]
MORE = [
    ("Pendulum-v1", "ppo", 1),
    ("Pendulum-v1", "sac", 0),
    ("Ant-v5", "ppo", 0),
    ("LunarLander-v3", "ppo", 1),
    ("BipedalWalker-v3", "ppo", 0),
]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    """The results of all scenarios on the inline fleet."""
    folder = tmp_path_factory.mktemp("reference")
    outcomes = {}
    for case in FULL + MORE:
        with InlineFleet() as fleet:
            outcomes[case] = outcome(scenario(*case), fleet, folder, "reference")
    return outcomes


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_number_of_workers_changes_no_bit(workers, in_process, tmp_path):
    cases = FULL + MORE if workers in (1, 3) else FULL
    with LocalFleet(workers) as fleet:
        for case in cases:
            found = outcome(scenario(*case), fleet, tmp_path, "-".join(map(str, case)))
            assert found == in_process[case], case


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cluster_changes_no_bit(workers, in_process, tmp_path):
    """The stub, or the cluster that FLAME_ENDPOINT names."""
    flames.settle(flames.environment())
    with flames.fleet(lambda event: None, workers) as fleet:
        for case in FULL + MORE:
            found = outcome(scenario(*case), fleet, tmp_path, "-".join(map(str, case)))
            assert found == in_process[case], case


def test_different_recipes_have_different_digests(in_process):
    digests = [digest for digest, _ in in_process.values()]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("case", [*FULL, MORE[3]], ids=str)
def test_a_run_stopped_after_any_iteration_goes_on_to_equal_bits(case, in_process, tmp_path):
    recipe = scenario(*case)
    for iterations in (1, 2):
        diary = Diary()
        with InlineFleet() as fleet:
            begun, trainer = run(recipe, fleet, diary, stop_after=iterations)
        assert trainer.progress.iteration == iterations
        half = saved(begun, trainer, tmp_path / "half.safetensors")
        # A new fleet, in which no worker holds an environment's state.
        with InlineFleet() as fleet:
            begun, trainer = run(recipe, fleet, diary, start=half)
        whole = saved(begun, trainer, tmp_path / "whole.safetensors")
        assert (whole.digest, diary.lines) == in_process[case]


@pytest.mark.parametrize("staleness", [0, 1])
def test_training_on_to_the_horizon_equals_training_to_it(staleness, in_process, tmp_path):
    """A finished run with more steps equals a run that had them from the start."""
    case = ("CartPole-v1", "ppo", staleness)
    diary = Diary()
    with InlineFleet() as fleet:
        begun, trainer = run(scenario(*case, iterations=2), fleet, diary)
    short = saved(begun, trainer, tmp_path / "short.safetensors")
    assert short.digest != in_process[case][0]
    with InlineFleet() as fleet:
        begun, trainer = run(scenario(*case), fleet, diary, start=short)
    long = saved(begun, trainer, tmp_path / "long.safetensors")
    assert (long.digest, diary.lines) == in_process[case]


def test_one_worker_that_serves_several_runs_in_turn_mixes_nothing_up(in_process, tmp_path):
    cases = [("CartPole-v1", "ppo", 1), ("Hopper-v5", "ppo", 1)]
    with LocalFleet(1) as fleet:
        for case in cases * 2:
            found = outcome(scenario(*case), fleet, tmp_path, f"again-{case[0]}")
            assert found == in_process[case]
