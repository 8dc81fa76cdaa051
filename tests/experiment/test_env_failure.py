"""Environments that cannot be made, and environments that are named in other ways."""

from __future__ import annotations

import sys

import pytest
from commands import finished, process, rlflame

_CLASS = """
import gymnasium
import numpy as np


class Line(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size=1):
        assert size != 13
        if size < 0:
            raise ValueError(f"size {size} is negative")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


def make_line(size=1):
    return Line(size)


def make_nothing():
    return gymnasium.make("Nowhere-v0")

"""


@pytest.fixture
def write_env(tmp_path, monkeypatch):
    """Write an environment file, which is forgotten after the test."""
    monkeypatch.chdir(tmp_path)

    def write(name, *ids):
        lines = [f'gymnasium.register("{id}", Line, max_episode_steps=5)\n' for id in ids]
        (tmp_path / f"{name}.py").write_text(_CLASS + "".join(lines))
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.delitem(sys.modules, name, raising=False)
        return f"{name}.py"

    return write


def read_environment(*words):
    run = rlflame("train", *words, "--dry-run", "--json")
    assert run.code == 0, run.err
    return run.json()["environment"]


def read_error(*words):
    run = rlflame("train", *words, "--dry-run")
    assert (run.code, run.out) == (2, "")
    assert "Traceback" not in run.err
    return run.err


def test_a_file_alone_names_its_only_environment(write_env):
    file = write_env("lonely_env", "Lonely-v0")
    assert read_environment("--env-file", file) == "Lonely-v0"
    assert read_environment("--set", f"runtime.env_file={file}") == "Lonely-v0"
    # An option still has priority.
    assert read_environment("--env-file", file, "--env", "pendulum") == "Pendulum-v1"


def test_a_file_with_several_environments_is_answered_with_their_list(write_env):
    error = read_error("--env-file", write_env("double_env", "First-v0", "Second-v0"))
    assert "First-v0, Second-v0" in error
    assert "--env First-v0" in error


def test_a_file_without_an_environment_never_trains_cartpole(write_env):
    error = read_error("--env-file", write_env("empty_env"))
    assert "registers no environment" in error
    assert "--env empty_env:make_env" in error
    assert "CartPole" not in error


@pytest.mark.parametrize("name", ["Line", "make_line"])
def test_a_class_or_a_function_is_an_environment(write_env, name):
    write_env("made_env")
    words = ("--env", f"made_env:{name}", "--fleet", "inline", "--steps", "64")
    words += ("--set", "environment.max_episode_steps=5", "--set", "rollout.steps=1")
    words += ("--set", "ppo.minibatch_size=64")
    run = rlflame("train", *words, "--env-kwargs", "size=2", "--json", "--out", "here")
    assert run.code == 0, run.err
    assert run.events()[-1]["evaluation"]["mean"] == 5.0
    # The policy names the module, so an evaluation must allow it.
    words = ("--fleet", "inline", "--episodes", "2", "--allow-module", "made_env")
    assert rlflame("eval", "here", *words).code == 0


def test_a_registered_id_has_priority_over_a_class_of_that_name(write_env):
    write_env("named_env", "Line-v0")
    run = rlflame("train", "--env", "named_env:Line", "--dry-run", "--json")
    assert run.json()["stepped_by"] == "stepped by Gymnasium"
    import gymnasium

    from rlflame.rollout.envs.make import find_constructor

    assert find_constructor("named_env:Line") is None
    gymnasium.registry.pop("Line-v0")
    assert find_constructor("named_env:Line").entry_point == "named_env:Line"


def test_output_of_a_constructor_stays_out_of_the_results(write_env, tmp_path):
    write_env("loud_env")
    code = (tmp_path / "loud_env.py").read_text()
    noise = 'import ctypes, os\n        os.write(1, b"first")\n        print("second")\n'
    noise += '        ctypes.CDLL(None).puts(b"third")\n'
    (tmp_path / "loud_env.py").write_text(
        code.replace("assert size", f"{noise}        assert size")
    )
    spoken = finished(process("train", "--env", "loud_env:Line", "--dry-run", "--json"))
    assert spoken.code == 0, spoken.err
    assert spoken.json()["environment"] == "loud_env:Line"


def test_an_unknown_name_is_answered_with_the_classes_of_the_module(write_env):
    write_env("other_env")
    error = read_error("--env", "other_env:Missing-v0")
    assert "other_env:Line" in error
    assert "Did you mean" not in error


def test_a_constructor_that_fails_is_answered_with_its_own_error_and_line(write_env, tmp_path):
    write_env("wrong_env", "Wrong-v0")
    lines = (tmp_path / "wrong_env.py").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "raise ValueError" in line)
    error = read_error("--env", "wrong_env:Wrong-v0", "--env-kwargs", "size=-1")
    assert "ValueError: size -1 is negative" in error
    assert f"line {number} of {tmp_path / 'wrong_env.py'}" in error
    # An assertion without a message is named with its line.
    number = next(i for i, line in enumerate(lines, 1) if "assert size" in line)
    error = read_error("--env", "wrong_env:Wrong-v0", "--env-kwargs", "size=13")
    assert f": AssertionError in line {number} of {tmp_path / 'wrong_env.py'}" in error
    # An ID that the constructor itself asks for is not taken for the ID of the command.
    error = read_error("--env", "wrong_env:make_nothing")
    assert "wrong_env:make_nothing cannot be created" in error
    assert "Nowhere" in error
    assert "There is no environment" not in error


@pytest.mark.parametrize(
    ("id", "spelling", "package"),
    [
        ("ALE/Pong-v5", "ale_py:ALE/Pong-v5", "ale-py"),
        ("MiniGrid-Empty-5x5-v0", "minigrid:MiniGrid-Empty-5x5-v0", "minigrid"),
        ("highway-v0", "highway_env:highway-v0", "highway-env"),
        ("highway-fast-v0", "highway_env:highway-fast-v0", "highway-env"),
        ("FetchReach-v4", "gymnasium_robotics:FetchReach-v4", "gymnasium-robotics"),
        ("PandaReach-v3", "panda_gym:PandaReach-v3", "panda-gym"),
        ("MinAtar/Breakout-v1", "minatar.gym:BaseEnv --env-kwargs game=breakout", "MinAtar"),
    ],
)
def test_an_id_of_a_known_package_is_answered_with_its_module(id, spelling, package):
    error = read_error("--env", id)
    assert f"--env {spelling}" in error
    assert package in error


@pytest.mark.parametrize(
    ("id", "suggestion"),
    [("Taxi-v3", "--env Taxi-v4"), ("Taxi-v9", "--env Taxi-v4")],
)
def test_the_id_that_gymnasium_suggests_is_the_hint(id, suggestion):
    refused = rlflame("train", "--env", id, "--dry-run")
    assert (refused.code, refused.out) == (2, "")
    assert f"hint: {suggestion}" in refused.err


def test_an_id_that_gymnasium_only_repeats_is_no_hint():
    refused = rlflame("train", "--env", "NoSuchWorld-v0", "--dry-run")
    assert refused.code == 2
    assert "hint: rlflame envs lists some ids; yours needs --env-file" in refused.err


def test_a_part_to_ignore_that_does_not_exist():
    words = ("--env", "pendulum", "--set", 'environment.ignore=["nope"]', "--dry-run")
    refused = rlflame("train", *words)
    assert refused.code == 2
    assert "Pendulum-v1 has no part 'nope'" in refused.err
    assert "omit environment.ignore" in refused.err


@pytest.mark.parametrize(
    ("id", "sentence"),
    [
        ("CartPole-v9", "CartPole has the versions v0 and v1."),
        ("Hopper-v9", "Hopper has the versions v2, v3, v4 and v5."),
        ("Pendulum-v9", "Pendulum has the version v1."),
    ],
)
def test_an_unknown_version_is_answered_with_the_versions(id, sentence):
    assert f"There is no environment {id!r}. {sentence}" in read_error("--env", id)


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        (
            ("--env", "FrozenLake-v1", "--env-kwargs", "is_slippery=Fasle"),
            "is_slippery is true or false by default, but 'Fasle' is text.",
            "--env-kwargs is_slippery=false",
        ),
        (
            ("--env", "Pendulum-v1", "--env-kwargs", "g=strong"),
            "g is a number by default, but 'strong' is text.",
            "--env-kwargs g=10.0",
        ),
    ],
)
def test_text_is_refused_where_a_boolean_or_number_is_expected(words, sentence, hint):
    error = read_error(*words)
    assert sentence in error
    assert hint in error


def test_text_is_kept_where_an_environment_expects_it():
    words = ("--env", "FrozenLake-v1", "--env-kwargs", "map_name=8x8", "--dry-run", "--json")
    run = rlflame("train", *words)
    assert run.code == 0, run.err
