"""Parts with text, where environments report action masks, and masks that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import rollouts
import space_envs
from gymnasium import spaces

from rlflame.rollout.envs.gymnasium_env import RestorableEnv
from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.envs.spaces import UnsupportedSpace, read_observation_leaves
from rlflame.rollout.task import EnvironmentFault, EnvSpec, RolloutFailure


def read(kind: str, masks: bool = True, **kwargs: Any) -> EnvSpec:
    return read_env_spec(f"space_envs:{kind}-v0", kwargs, None, ("space_envs",), masks=masks)


class Mission(spaces.Space[str]):
    """A space of text that is not a Text space, as in MiniGrid."""

    def __init__(self) -> None:
        super().__init__(dtype=str)


@pytest.mark.parametrize("part", [Mission(), spaces.Text(4)])
def test_a_part_with_text_is_left_out_and_text_alone_is_refused(part: Any) -> None:
    space = spaces.Dict({"mission": part, "view": spaces.Box(0.0, 1.0, (2,))})
    leaves, omissions = read_observation_leaves(space, (), "none")
    assert [leaf.path for leaf in leaves] == [("view",)]
    assert omissions == ("mission",)
    with pytest.raises(UnsupportedSpace, match=type(part).__name__):
        read_observation_leaves(part, (), "none")


@pytest.mark.parametrize(("kind", "place"), space_envs.MASKED.items())
def test_a_mask_is_found_where_the_environment_reports_it(kind: str, place: str) -> None:
    env = read(f"Masked-{kind}")
    choices = len(space_envs.list_choices(space_envs.SPACES[kind][1]))
    assert (env.mask_source, env.mask_size) == (place, choices)
    plain = read(kind)
    assert (plain.mask_source, plain.mask_size) == ("none", 0)
    assert env.observation_size == plain.observation_size
    assert env.row_size == env.observation_size + choices
    off = read(f"Masked-{kind}", masks=False)
    assert off.mask_size == 0
    # Without masks, an entry of the observation is a part like any other.
    extra = choices if place == "observation" else 0
    assert off.observation_size == plain.observation_size + extra


def run_task(env: EnvSpec) -> Any:
    return rollouts.run(rollouts.task(env))


@pytest.mark.parametrize("kind", space_envs.MASKED)
def test_fragments_carry_masks_only_where_they_are_used(kind: str) -> None:
    masked, plain = read(f"Masked-{kind}"), read(kind)
    fragment, other = run_task(masked), run_task(plain)
    size = masked.observation_size
    assert fragment.observations.shape[-1] == size + masked.mask_size
    assert other.observations.shape[-1] == size
    masks = fragment.observations[..., size:]
    assert set(np.unique(masks)) == {0.0, 1.0}
    # The environment forbids one value of each choice.
    counts = [count for value, count in space_envs.list_choices(space_envs.SPACES[kind][1])]
    choices = sum(1.0 / count for count in counts)
    np.testing.assert_allclose(masks.sum(axis=-1), masked.mask_size - choices, rtol=1e-5)


@pytest.mark.parametrize("kind", space_envs.MASKED)
def test_a_mask_of_zeros_is_refused_by_name(kind: str) -> None:
    failure = run_task(read(f"Masked-{kind}", fault="zeros"))
    assert isinstance(failure, RolloutFailure)
    assert f"space_envs:Masked-{kind}-v0 gave an action mask that allows no choice" in str(
        failure.message
    )
    assert failure.step == 2


def test_a_mask_that_does_not_fit_and_one_that_is_missing_are_refused_by_name() -> None:
    failure = run_task(read("Masked-Discrete", fault="short"))
    assert "action mask of 2 numbers, but its actions have 3 choices" in failure.message
    env = read("Masked-Discrete")
    row, out = RestorableEnv(env, 0), np.zeros(env.row_size, np.float32)
    row.reset(0, 1, out)
    row._env.unwrapped._tell = dict
    with pytest.raises(EnvironmentFault, match="gave no action_mask in its info"):
        row.step(np.int64(out[env.observation_size :].argmax()), out)


def test_a_part_to_ignore_that_does_not_exist() -> None:
    parts = spaces.Dict(
        {"robot": spaces.Dict({"arm": spaces.Discrete(2)}), "leg": spaces.Box(0, 1)}
    )
    with pytest.raises(UnsupportedSpace, match="no part 'nope'") as caught:
        read_observation_leaves(parts, ["nope"], "none")
    assert caught.value.hint == "its parts are leg, robot/arm"
    with pytest.raises(UnsupportedSpace, match="no part 'nope'") as caught:
        read_observation_leaves(spaces.Discrete(2), ["nope"], "none")
    assert "omit environment.ignore" in caught.value.hint
