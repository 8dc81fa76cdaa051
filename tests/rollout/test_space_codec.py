"""Rows of observations, actions and masks, compared with Gymnasium's own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import rollouts
import space_envs
from gymnasium import spaces

from rlflame.rollout.distributions import group_actions
from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.policy import Policy
from rlflame.rollout.space_codec import (
    ActionDecoder,
    MaskEncoder,
    ObservationEncoder,
    SpaceError,
    list_action_leaves,
    list_counts,
)
from rlflame.rollout.task import EnvSpec


def read(id: str, **kwargs: Any) -> EnvSpec:
    return read_env_spec(f"space_envs:{id}", kwargs, None, ("space_envs",))


@pytest.mark.parametrize("kind", [kind for kind in space_envs.SPACES if kind != "Dict"])
def test_observations_have_the_layout_of_gymnasium(kind: str) -> None:
    env, space = read(f"{kind}-v0"), space_envs.SPACES[kind][0]
    encoder, out = ObservationEncoder(env.observation_leaves), np.zeros(100, np.float32)
    assert env.observation_size == spaces.flatdim(space)
    for seed in range(20):
        space.seed(seed)
        value = space.sample()
        encoder.write(value, out)
        expected = spaces.flatten(space, value)
        np.testing.assert_array_equal(out[: env.observation_size], expected.astype(np.float32))


def test_text_is_left_out_of_a_dict() -> None:
    env, space = read("Dict-v0"), space_envs.SPACES["Dict"][0]
    numbers = spaces.Dict({key: part for key, part in space.items() if key != "mission"})
    assert env.ignore == ("mission",)
    assert env.observation_size == spaces.flatdim(numbers)
    value, out = space.sample(), np.zeros(env.observation_size, np.float32)
    ObservationEncoder(env.observation_leaves).write(value, out)
    del value["mission"]
    np.testing.assert_array_equal(out, spaces.flatten(numbers, value))


@pytest.mark.parametrize("kind", space_envs.SPACES)
def test_actions_have_exactly_the_type_of_the_space(kind: str) -> None:
    env, space = read(f"{kind}-v0"), space_envs.SPACES[kind][1]
    decoder, spec = ActionDecoder(env), rollouts.policy_spec(env)
    policy = Policy(spec, rollouts.weights(spec))
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(40):
        rows = generator.standard_normal((8, spec.row_size)).astype(np.float32)
        noise = generator.random((8, max(1, len(env.action_counts) or env.action_size)), np.float32)
        noise = noise[:, :1] if env.action_kind == "discrete" else noise
        for actions in (policy.mode(rows), policy.sample(rows, noise)[0]):
            for row in policy.to_environment(actions):
                action = decoder.decode(row)
                assert space.contains(action), action
                check_types(space, action)
                seen.add(repr(action))
    assert len(seen) > 2


def check_types(space: spaces.Space, action: Any) -> None:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            check_types(part, action[key])
    elif isinstance(space, spaces.Tuple):
        assert type(action) is tuple
        for part, value in zip(space.spaces, action, strict=True):
            check_types(part, value)
    else:
        assert action.dtype == space.dtype
        assert action.shape == space.shape
        assert isinstance(action, np.generic if isinstance(space, spaces.Discrete) else np.ndarray)


def test_a_number_outside_a_wide_space_is_clipped_to_its_bound() -> None:
    high = 0.1  # float32(0.1) lies above it
    space = spaces.Box(-high, high, (1,), np.float64)
    leaf_env = read("Box-v0")
    leaf = list_action_leaves(leaf_env)[0]
    assert leaf.dtype == "float64"
    env = rollouts.dataclasses.replace(
        leaf_env,
        action_size=1,
        action_low=(-high,),
        action_high=(high,),
        action_leaves=(rollouts.dataclasses.replace(leaf, shape=(1,)),),
    )
    assert np.float64(np.float32(high)) > high
    assert space.contains(ActionDecoder(env).decode(np.array([high], np.float32)))


def test_whole_numbers_of_64_bits_do_not_overflow() -> None:
    env = read("Integers-v0")
    for dtype in (np.int64, np.uint64, np.int8):
        limits = np.iinfo(dtype)
        leaf = rollouts.dataclasses.replace(
            list_action_leaves(env)[0], dtype=np.dtype(dtype).name, shape=(2,)
        )
        wide = rollouts.dataclasses.replace(
            env,
            action_size=2,
            action_low=(float(limits.min),) * 2,
            action_high=(float(limits.max),) * 2,
            action_leaves=(leaf,),
        )
        action = ActionDecoder(wide).decode(np.array([-1e30, 1e30], np.float32))
        assert action.dtype == dtype
        assert action[0] == limits.min
        assert limits.max - int(action[1]) <= limits.max >> 52


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("Discrete", 1, "that contains 1, outside its space"),
        ("Discrete", 7, "that contains 7, outside its space"),
        ("Discrete", 3.7, "that contains np.float64.3.7., but its space has integers"),
        ("Discrete", np.nan, "but its space has integers"),
        ("Discrete", "3", "but its space has integers"),
        ("Discrete", None, "but its space has integers"),
        ("MultiDiscrete", [[0, 0], [0, 4]], "that contains 4, outside its space"),
        ("MultiBinary", [0, 1], r"that has the shape \(2,\)"),
        ("Tuple", (np.zeros(2), 3), "whose part '1' contains 3"),
        ("Tuple", (np.zeros(2),), "that has no part '1'"),
        ("Dict", {"view": np.zeros(3)}, "that has no part 'inner/door'"),
        ("Dict", 5, "that has no part 'inner/door'"),
    ],
)
def test_an_observation_outside_its_space_is_refused(kind: str, value: Any, words: str) -> None:
    env = read(f"{kind}-v0")
    with pytest.raises(SpaceError, match=words):
        ObservationEncoder(env.observation_leaves).write(value, np.zeros(99, np.float32))


def test_masks_have_one_array_or_the_form_of_the_space() -> None:
    env = read("Masked-Dict-v0")
    encoder, out = MaskEncoder(env), np.zeros(env.mask_size, np.float32)
    counts = [count for leaf in env.action_leaves for count in list_counts(leaf) if count]
    # The keys of a Dict are sorted: inner, move, push.
    assert counts == [2, 2, 4]
    inner, first, second = [1, 0], [0, 1], [1, 0, 0, 1]
    nested = {"inner": (None, np.array(inner)), "move": (np.array(first), np.array(second))}
    for mask in (np.array(inner + first + second), nested):
        out[:] = -1.0
        encoder.write(mask, out)
        assert out.tolist() == inner + first + second


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([1, 0, 0, 0, 0, 1, 0, 0], "allows no choice for action 1"),
        ([0] * 8, "allows no choice for action 0"),
        ([1] * 7, "7 numbers, but its actions have 8 choices"),
        ([2] * 8, "values other than 0 and 1"),
        ([np.nan] * 8, "values other than 0 and 1"),
        (["a"] * 8, "values other than 0 and 1"),
    ],
)
def test_a_mask_that_allows_nothing_or_does_not_fit_is_refused(mask: Any, words: str) -> None:
    env = read("Masked-MultiDiscrete-v0")
    with pytest.raises(SpaceError, match=words):
        MaskEncoder(env).write(np.array(mask), np.zeros(8, np.float32))


def test_neighbouring_choices_of_equal_size_are_one_group() -> None:
    groups = group_actions((2, 2, 0, 0, 3, 2))
    assert [(g.count, g.size) for g in groups] == [(2, 2), (0, 2), (3, 1), (2, 1)]
    assert [(g.columns.start, g.outputs.start) for g in groups] == [(0, 0), (2, 4), (4, 6), (5, 9)]
    assert groups[-1].outputs.stop == 11
