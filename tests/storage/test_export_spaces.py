"""ONNX models and loaded policies of every kind of space, compared with each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import space_envs
from drawing import begun, policy_file
from gymnasium import spaces

from rlflame.api import load_policy
from rlflame.rollout.policy import Policy
from rlflame.rollout.space_codec import ObservationEncoder, format_path, list_action_leaves
from rlflame.storage import export

pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")


def make_source(id: str) -> Any:
    """A checkpoint whose weights all have an effect."""
    source, generator = begun(id), np.random.default_rng(3)
    policy = {
        name: generator.normal(0.0, 1.5, array.shape).astype(np.float32)
        for name, array in source.policy.items()
    }
    if "normaliser.scale" in policy:
        policy["normaliser.scale"] = np.abs(policy["normaliser.scale"]) + np.float32(0.1)
    return replace(source, policy=policy)


def flatten_action(action: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        action = action[key]
    return action


@pytest.mark.parametrize("id", space_envs.IDS)
def test_a_model_and_a_loaded_policy_act_alike_and_in_the_space(id: str, tmp_path: Any) -> None:
    source = make_source(id)
    policy = load_policy(policy_file(tmp_path / "policy.safetensors", source))
    data = export.write_onnx(source, tmp_path / "x.onnx")
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    env = gymnasium.make(id)
    leaves = list_action_leaves(source.env)
    names = [f"action/{format_path(leaf.path)}" if leaf.path else "action" for leaf in leaves]
    assert [output.name for output in session.get_outputs()] == names
    size, masked = source.policy_spec.observation_size, bool(source.policy_spec.mask_size)
    observation, info = env.reset(seed=1)
    for _ in range(40):
        mask = find_mask(env, observation, info)
        action = policy(observation) if mask is None else policy(observation, mask)
        assert env.action_space.contains(action), action
        row = np.zeros((1, size), np.float32)
        if source.env.observation_leaves:
            ObservationEncoder(source.env.observation_leaves).write(observation, row[0])
        else:
            row[0] = observation
        inputs = {"observation": row}
        if masked:
            inputs["action_mask"] = np.asarray(mask, np.float32)[None]
        for leaf, values in zip(leaves, session.run(None, inputs), strict=True):
            expected = flatten_action(action, leaf.path)
            assert values.dtype == np.dtype(leaf.dtype)
            assert values.shape == (1, *leaf.shape)
            np.testing.assert_allclose(values[0], expected, atol=1e-4, rtol=1e-4)
        observation, _, ended, _, info = env.step(action)
        if ended:
            observation, info = env.reset(seed=2)
    rows = np.random.default_rng(0).random((30, source.policy_spec.row_size), np.float32)
    largest = export.measure_largest_difference(
        data, source.env, Policy(source.policy_spec, source.policy), rows
    )
    assert largest < 1e-4


def find_mask(env: gymnasium.Env, observation: Any, info: Any) -> Any:
    if "action_mask" in info:
        return info["action_mask"]
    if env.has_wrapper_attr("action_masks"):
        return env.get_wrapper_attr("action_masks")()
    return (
        observation["action_mask"]
        if isinstance(env.observation_space, spaces.Dict)
        and ("action_mask" in env.observation_space.spaces)
        else None
    )


def test_a_policy_with_masks_needs_a_mask(tmp_path: Any) -> None:
    source = make_source("space_envs:Masked-Discrete-v0")
    policy = load_policy(policy_file(tmp_path / "policy.safetensors", source))
    with pytest.raises(ValueError, match=r"needs an action mask: policy\(observation, action_mask"):
        policy(3)
    for value in range(3):
        mask = np.arange(3) == value
        assert policy(3, mask) == value - 1
    with pytest.raises(ValueError, match="allows no choice"):
        policy(3, np.zeros(3))


def test_a_policy_says_what_is_wrong_with_an_observation(tmp_path: Any) -> None:
    source = make_source("space_envs:Tuple-v0")
    policy = load_policy(policy_file(tmp_path / "policy.safetensors", source))
    with pytest.raises(ValueError, match="whose part '1' contains 3, outside its space"):
        policy((np.zeros(2), 3))
