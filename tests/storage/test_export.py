"""`rlflame export`: the policy alone, and the ONNX model compared with it."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from commands import TINY, rlflame
from drawing import begun, policy_file

from rlflame.api import load_policy
from rlflame.rollout.policy import Policy
from rlflame.storage import checkpoint, export

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lively(env: str, algorithm: str = "ppo"):
    """A policy whose normaliser, weights, biases and bounds all have an effect."""
    source = begun(env, algorithm=algorithm)
    generator = np.random.default_rng(3)
    policy = {
        name: generator.normal(0.0, 1.5, array.shape).astype(np.float32)
        for name, array in source.policy.items()
    }
    policy["actor.1.bias"] *= np.float32(0.1)  # otherwise, one action would always be the best
    policy["normaliser.scale"] = np.abs(policy["normaliser.scale"]) + np.float32(0.1)
    return replace(source, policy=policy)


def answers(data: bytes, observations):
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: observations})
    return found


@pytest.mark.parametrize(
    ("env", "algorithm"),
    [
        ("CartPole-v1", "ppo"),
        ("Pendulum-v1", "ppo"),
        ("LunarLander-v3", "ppo"),
        ("Hopper-v5", "ppo"),
        ("Pendulum-v1", "sac"),
        ("Hopper-v5", "sac"),
    ],
)
def test_the_model_acts_as_a_loaded_policy_does(tmp_path, env, algorithm):
    source = lively(env, algorithm)
    file = policy_file(tmp_path / "policy.safetensors", source)
    policy = load_policy(file)
    size = source.policy_spec.observation_size
    # The observations include values that the normaliser and the action bounds clip.
    spread = np.random.default_rng(0).normal(0, 1, (60, size)) * np.logspace(-1, 2, 60)[:, None]
    observations = spread.astype(np.float32)
    found = answers(export.write_onnx(source, tmp_path / "x.onnx"), observations)
    expected = np.array([policy(observation) for observation in observations])
    if source.env.action_kind == "discrete":
        assert found.tolist() == expected.tolist()
        assert len(set(found.tolist())) > 1
    else:
        np.testing.assert_allclose(found, expected, atol=1e-5)
        low, high = np.array(source.env.action_low), np.array(source.env.action_high)
        assert found.min() == low.min()
        assert found.max() == high.max()
        assert ((found > low) & (found < high)).any()


def test_the_file_says_whose_policy_it_is(tmp_path):
    export.write_onnx(lively("CartPole-v1"), tmp_path / "x.onnx")
    loaded = onnx.load(tmp_path / "x.onnx")
    said = {entry.key: entry.value for entry in loaded.metadata_props}
    assert (said["environment"], said["algorithm"], said["steps"]) == ("CartPole-v1", "ppo", "0")
    assert [one.name for one in loaded.graph.input] == ["observation"]


def test_the_check_replays_what_the_policy_meets_and_finds_a_difference(tmp_path):
    source = begun("Pendulum-v1")
    met = export.sample_observations(source, 100)
    assert met.shape == (100, 3)
    # Pendulum's observation is a cosine, a sine and a speed.
    np.testing.assert_allclose(np.square(met[:, :2]).sum(axis=1), 1.0, atol=1e-5)
    assert len(np.unique(met[:, 2])) > 50
    policy = Policy(source.policy_spec, source.policy)
    other = dict(source.policy)
    other["actor.1.bias"] = other["actor.1.bias"] + np.float32(0.25)
    data = export.build_onnx_model(source.env, source.policy_spec, other, {})
    inside = export.measure_largest_difference(data, source.env, policy, met)
    assert inside == pytest.approx(0.25, abs=1e-4)


def test_a_choice_between_equals_is_no_difference():
    source = lively("CartPole-v1")
    equal = {name: array * np.float32(0.0) for name, array in source.policy.items()}
    policy = Policy(source.policy_spec, equal)
    rest = np.zeros((5, 4), np.float32)
    other = dict(equal)
    last = max(name for name in equal if name.endswith("bias"))
    other[last] = np.array([0.0, 0.5], np.float32)
    data = export.build_onnx_model(source.env, source.policy_spec, other, {})
    assert answers(data, rest).tolist() == [1] * 5
    assert export.measure_largest_difference(data, source.env, policy, rest) == 0.0
    worse = Policy(source.policy_spec, {**equal, last: np.array([0.75, 0.0], np.float32)})
    assert export.measure_largest_difference(data, source.env, worse, rest) == 0.75


# The command.


def test_a_policy_file_is_small_and_keeps_its_recorded_evaluation():
    trained = rlflame("train", "--env", "cartpole", *TINY, "--steps", "64", "--out", "run")
    assert trained.code == 0, trained.err
    spoken = rlflame("export", "run/latest.safetensors", "-o", "small.safetensors")
    assert spoken.code == 0, spoken.err
    whole, small = (checkpoint.load(_path(name)) for name in ("run/latest", "small"))
    assert not small.resumable
    assert small.evaluation == whole.evaluation is not None
    assert {n: a.tobytes() for n, a in small.policy.items()} == {
        n: a.tobytes() for n, a in whole.policy.items()
    }
    assert _path("small").stat().st_size < min(50_000, 0.7 * _path("run/latest").stat().st_size)
    again = rlflame("eval", "small.safetensors", "--expect-recorded", "--fleet", "inline")
    assert again.code == 0, again.err


def _path(name):
    from pathlib import Path

    return Path(f"{name}.safetensors")


def test_a_model_is_written_and_checked(tmp_path):
    policy_file(tmp_path / "policy.safetensors", lively("Pendulum-v1"))
    spoken = rlflame("export", "policy.safetensors", "--onnx", "--check", "--json")
    said = spoken.json()
    assert (said["file"], said["passed"]) == ("pendulum-ppo.onnx", True)
    assert 0.0 <= said["difference"] < 1e-5
    assert said["bytes"] == (tmp_path / "pendulum-ppo.onnx").stat().st_size


def test_a_model_that_acts_otherwise_is_a_failure(tmp_path, monkeypatch):
    policy_file(tmp_path / "policy.safetensors", lively("Pendulum-v1"))
    monkeypatch.setattr(export, "measure_onnx_difference", lambda source, data: 0.5)
    spoken = rlflame("export", "policy.safetensors", "--onnx", "--check")
    assert spoken.code == 1
    assert "differ from the policy's by 0.5, more than 1e-05" in spoken.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-o", "x.gif"), "does not end in .safetensors"),
        (("-o", "."), "-o policy.small.safetensors"),
        (("-o", ""), "-o policy.small.safetensors"),
        (("-o", "x.safetensors", "--onnx"), "does not end in .onnx"),
        (("--check",), "--check is for ONNX models"),
        (("-o", "policy.safetensors"), "is the checkpoint itself"),
    ],
)
def test_invalid_arguments_are_an_error(tmp_path, words, said):
    file = policy_file(tmp_path / "policy.safetensors", begun())
    before = file.read_bytes()
    spoken = rlflame("export", "policy.safetensors", *words)
    assert spoken.code == 2
    assert said in spoken.err
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == before


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_without_the_extra_there_is_a_sentence(tmp_path, monkeypatch, package):
    policy_file(tmp_path / "policy.safetensors", begun())
    monkeypatch.setitem(sys.modules, package, None)
    spoken = rlflame("export", "policy.safetensors", "-o", "x.onnx")
    assert spoken.code == 2
    assert f"{package} is not installed" in spoken.err
    assert "pip install 'rlflame[onnx]'" in spoken.err
