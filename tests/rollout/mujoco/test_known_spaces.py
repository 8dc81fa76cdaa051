"""The stored spaces of known environments are equal to those of real instances."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import importlib.util
import subprocess
import sys
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import WrapperSpec

from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.mujoco import known_spaces


@pytest.mark.parametrize("id", sorted(known_spaces._SPACES))
@pytest.mark.parametrize("limit", [None, 50])
def test_what_is_known_is_what_would_be_seen(id: str, limit: int | None) -> None:
    assert known_spaces.find_known_spec(id, {}, limit) == read_env_spec(id, {}, limit)


def test_all_that_our_own_loop_steps_is_known() -> None:
    ours = {
        spec.id
        for spec in gymnasium.registry.values()
        if str(spec.entry_point).startswith("gymnasium.envs.mujoco.") and spec.version == 5
    }
    assert ours - set(known_spaces._SPACES) == {"HumanoidStandup-v5"}


@pytest.mark.parametrize("id", [*sorted(known_spaces._SPACES), "CartPole-v1", "phys2d/CartPole-v0"])
def test_an_episode_s_limit_is_the_registered_one(id: str) -> None:
    assert known_spaces.find_episode_limit(id) == gymnasium.spec(id).max_episode_steps
    assert (
        known_spaces.find_episode_limit(f"gymnasium.envs:{id}")
        == gymnasium.spec(id).max_episode_steps
    )
    assert known_spaces.find_episode_limit("Nobody-v0") is None


def test_where_it_may_be_otherwise_nothing_is_known(monkeypatch: Any) -> None:
    assert known_spaces.find_known_spec("Hopper-v5", {}, None) is not None
    assert known_spaces.find_known_spec("Hopper-v4", {}, None) is None
    kwargs = {"exclude_current_positions_from_observation": False}
    assert known_spaces.find_known_spec("Hopper-v5", kwargs, None) is None


@pytest.mark.parametrize("name", ["MUJOCO_GL", "PYOPENGL_PLATFORM"])
def test_what_drawing_needs_is_for_trying_to_say(name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(name, "egl")
    assert known_spaces.find_known_spec("Hopper-v5", {}, None) is None


@pytest.mark.parametrize("absent", ["gymnasium", "mujoco"])
def test_of_a_package_that_is_absent_nothing_is_known(absent: str, monkeypatch: Any) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == absent else find(name)
    )
    assert known_spaces.find_known_spec("Hopper-v5", {}, None) is None


@pytest.mark.parametrize(
    "other",
    [
        {"entry_point": "mine:Hopper"},
        {"entry_point": lambda: None},
        {"kwargs": {"reset_noise_scale": 0.1}},
        {"additional_wrappers": (WrapperSpec("Odd", "mine:Odd", None),)},
        None,
    ],
)
def test_a_name_that_stands_for_another_is_not_known(other: Any, monkeypatch: Any) -> None:
    registered = gymnasium.registry["Hopper-v5"]
    if other is None:
        monkeypatch.delitem(gymnasium.registry, "Hopper-v5")
    else:
        changed = dataclasses.replace(copy.deepcopy(registered), **other)
        monkeypatch.setitem(gymnasium.registry, "Hopper-v5", changed)
    assert known_spaces.find_known_spec("Hopper-v5", {}, None) is None
    assert known_spaces.find_known_spec("Ant-v5", {}, None) is not None


def test_packages_that_gymnasium_loads_may_register_anything(monkeypatch: Any) -> None:
    def found(group: str) -> list[str]:
        return ["somebody"] if group == "gymnasium.envs" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    assert known_spaces.find_known_spec("Hopper-v5", {}, None) is None


def test_known_specs_do_not_load_gymnasium() -> None:
    code = (
        "import sys; from rlflame.rollout.mujoco import known_spaces as v\n"
        "known = v.find_known_spec('Hopper-v5', {}, None)\n"
        "print(known.observation_size, 'gymnasium' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["11", "False"]
