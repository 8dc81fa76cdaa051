"""What is known of environments without making them is what making them shows."""

from __future__ import annotations

import importlib.util
from typing import Any

import gymnasium
import pytest

from rlflame.rollout import v5_spaces
from rlflame.rollout.making import describe


@pytest.mark.parametrize("id", sorted(v5_spaces._SPACES))
@pytest.mark.parametrize("limit", [None, 50])
def test_what_is_known_is_what_would_be_seen(id: str, limit: int | None) -> None:
    assert v5_spaces.known(id, {}, limit) == describe(id, {}, limit)


def test_all_that_our_own_loop_steps_is_known() -> None:
    ours = {
        spec.id
        for spec in gymnasium.registry.values()
        if str(spec.entry_point).startswith("gymnasium.envs.mujoco.") and spec.version == 5
    }
    assert ours - set(v5_spaces._SPACES) == {"HumanoidStandup-v5"}


def test_where_it_may_be_otherwise_nothing_is_known(monkeypatch: Any) -> None:
    assert v5_spaces.known("Hopper-v5", {}, None) is not None
    assert v5_spaces.known("Hopper-v4", {}, None) is None
    kwargs = {"exclude_current_positions_from_observation": False}
    assert v5_spaces.known("Hopper-v5", kwargs, None) is None
    with monkeypatch.context() as drawing:
        drawing.setenv("MUJOCO_GL", "egl")
        assert v5_spaces.known("Hopper-v5", {}, None) is None
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mujoco" else find(name)
    )
    assert v5_spaces.known("Hopper-v5", {}, None) is None
