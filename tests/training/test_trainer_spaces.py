"""Every kind of space: equal bits on all fleets, after a resumption, and with more learners."""

from __future__ import annotations

import failpoints
import flames
import gloo
import pytest
import space_envs
from test_trainer_same_bits import Diary, outcome, run, saved, scenario
from tiny_runs import run as run_tiny

from rlflame.experiment.resume import check_environment
from rlflame.fleet.inline import InlineFleet
from rlflame.fleet.local import LocalFleet
from rlflame.learning.parallel.process_group import release_replicas

#: Environments and algorithms. SAC learns in spaces of numbers with bounds.
CASES = [(id, "ppo", 1) for id in space_envs.IDS]
CASES += [("space_envs:Masked-Tuple-v0", "reinforce", 0), ("space_envs:Dict-v0", "reinforce", 0)]
CASES += [("space_envs:Integers-v0", "sac", 0)]
SLOW = [pytest.mark.slow]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    """The results of all cases on the inline fleet."""
    folder = tmp_path_factory.mktemp("reference")
    outcomes = {}
    for case in CASES:
        with InlineFleet() as fleet:
            outcomes[case] = outcome(scenario(*case), fleet, folder, "reference")
    return outcomes


@pytest.mark.parametrize("workers", [1, 2])
def test_local_workers_change_no_bit(workers, in_process, tmp_path):
    with LocalFleet(workers) as fleet:
        for case in CASES:
            found = outcome(scenario(*case), fleet, tmp_path, "-".join(map(str, case)))
            assert found == in_process[case], case


def test_a_cluster_changes_no_bit(in_process, tmp_path):
    flames.settle(flames.environment())
    with flames.fleet(lambda event: None, 2, env_file=space_envs.__file__) as fleet:
        for case in CASES:
            found = outcome(scenario(*case), fleet, tmp_path, "-".join(map(str, case)))
            assert found == in_process[case], case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_that_stops_inside_episodes_goes_on_to_equal_bits(case, in_process, tmp_path):
    recipe, diary = scenario(*case), Diary()
    with InlineFleet() as fleet:
        begun, trainer = run(recipe, fleet, diary, stop_after=1)
    half = check_environment(saved(begun, trainer, tmp_path / "half.safetensors"))
    assert case[1] == "reinforce" or any(
        state.elapsed for slot in half.snapshot.states for state in slot
    )
    with LocalFleet(1) as fleet:
        begun, trainer = run(recipe, fleet, diary, start=half)
    whole = saved(begun, trainer, tmp_path / "whole.safetensors")
    assert (whole.digest, diary.lines) == in_process[case]


@pytest.mark.parametrize("id", space_envs.IDS)
def test_a_killed_run_is_resumed_to_equal_bytes(id, tmp_path):
    assert_resumed(failpoints.config(id, tmp_path / "run"))


#: The fleet handles every kind of space alike, so that one of them is enough for each test run.
@pytest.mark.parametrize(
    ("id", "workers"),
    [
        pytest.param(id, workers, marks=[] if "Masked-Dict" in id and workers == 2 else SLOW)
        for id in space_envs.IDS
        for workers in (1, 2)
    ],
)
def test_a_killed_run_with_workers_is_resumed_to_equal_bytes(id, workers, tmp_path):
    runtime = {"fleet": "local", "workers": workers}
    assert_resumed(failpoints.config(id, tmp_path / "run", runtime=runtime))


def assert_resumed(wanted):
    """Kill a run, kill its resumption too, and compare the end with that of another run."""
    result = failpoints.failing_runs(wanted, chains=[[40, 30]])
    assert not result["complaints"], result["complaints"]
    assert result["runs"] > 0


@pytest.fixture(scope="module", params=[2, 3], ids="{} learners".format)
def learners(request):
    with gloo.gathered(request.param) as group:
        yield group


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
def test_the_number_of_learners_changes_no_bit(algorithm, learners, tmp_path):
    for id in space_envs.IDS:
        recipe = {
            "stop_at_iterations": 2,
            "learning": {
                "algorithm": algorithm,
                "environment": {"id": id},
                "rollout": {
                    "num_slots": 2,
                    "envs_per_slot": 2,
                    "steps": 16,
                    "unit": "steps" if algorithm == "ppo" else "episodes",
                },
                "gradient_shards": 3,
                algorithm: {"epochs": 2, "minibatch_size": 20} if algorithm == "ppo" else {},
            },
        }
        expected = run_tiny(recipe)
        actual = run_tiny(recipe, group=learners, compare_every=1)
        release_replicas(learners)
        assert actual.state_digest(tmp_path) == expected.state_digest(tmp_path), id
        assert actual.recorded.metrics == expected.recorded.metrics, id
