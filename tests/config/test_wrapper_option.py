"""Wrappers in recipes: the option, the file, and which wrappers a file may name."""

from __future__ import annotations

import inspect
import sys

import gymnasium
import numpy as np
import pytest
from commands import TINY, rlflame

from rlflame import api
from rlflame.config import module_trust
from rlflame.config.recipe import WrapperSettings
from rlflame.config.wrapper_option import parse_wrapper
from rlflame.errors import ConfigError
from rlflame.rollout.envs import user_code
from rlflame.rollout.envs.user_code import SAFE_WRAPPERS, find_named_modules, load_wrapper

RESHAPE = "gymnasium.wrappers:ReshapeObservation"
RESCALE = "gymnasium.wrappers:RescaleAction"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """A folder whose modules other tests neither import nor trust."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, "")
    monkeypatch.setattr(module_trust, "_command_modules", set())
    yield
    sys.modules.pop("evil", None)


@pytest.mark.parametrize(
    ("text", "kwargs"),
    [
        ("a.b:C", {}),
        ("a.b:C,x=1", {"x": 1}),
        ("a.b:C,shape=[4, 2],mode=zero", {"shape": [4, 2], "mode": "zero"}),
        ("a.b:C,shape=(2,2),x=1", {"shape": [2, 2], "x": 1}),
        ("a.b:C,shape=[[2,2],[1]],x=1", {"shape": [[2, 2], [1]], "x": 1}),
        ('a.b:C, text="x,y", table={a = 1, b = 2}', {"text": "x,y", "table": {"a": 1, "b": 2}}),
    ],
)
def test_arguments_are_toml_values(text, kwargs):
    assert parse_wrapper(text) == {"name": "a.b:C", "kwargs": kwargs}


@pytest.mark.parametrize("value", ["FALSE", "[1", "(0.5, 2.0"])
def test_a_value_that_does_not_parse_is_refused(value):
    with pytest.raises(ConfigError, match="--wrap"):
        parse_wrapper(f"{RESCALE},min_action={value}")


@pytest.mark.parametrize("text", ["C", ":C", "a.b:", "a.b:C,1"])
def test_what_is_not_a_wrapper_is_shown_an_example(text):
    with pytest.raises(ConfigError, match="is not MODULE:CLASS") as caught:
        parse_wrapper(text)
    assert caught.value.hint.startswith("--wrap gymnasium.wrappers:")


@pytest.mark.parametrize("key", ["stack_size", "delay"])
def test_a_wrapper_that_a_file_may_name_cannot_need_any_amount_of_memory(key):
    wrapper = {"name": "gymnasium.wrappers:FrameStackObservation", "kwargs": {key: 10**9}}
    with pytest.raises(ValueError, match="must be at most 1,000"):
        WrapperSettings.model_validate(wrapper)


@pytest.mark.parametrize("text", ["", "Rescale", "a:B,1", "a:B,x", "a:B,=3"])
def test_another_form_is_refused(text):
    with pytest.raises(ConfigError, match=r"MODULE:CLASS,KEY=VALUE"):
        parse_wrapper(text)


def test_safe_wrappers_are_gymnasium_s_and_take_no_functions():
    for name in SAFE_WRAPPERS:
        wrapper = load_wrapper(name)
        assert issubclass(wrapper, gymnasium.Wrapper)
        assert wrapper.__module__.startswith("gymnasium.wrappers.")
        assert (
            not {"func", "path", "folder", "render_mode"}
            & inspect.signature(wrapper).parameters.keys()
        )
    assert find_named_modules("Env-v0", {}, sorted(SAFE_WRAPPERS)) == ()
    for name in ("RecordVideo", "TransformObservation", "ResizeObservation"):
        names = [f"gymnasium.wrappers:{name}"]
        assert find_named_modules("Env-v0", {}, names) == ("gymnasium.wrappers",)


@pytest.mark.parametrize("shape", ["[4]", "(4,)"])
def test_a_wrapper_of_gymnasium_gets_tuples(shape):
    words = ("--env", "space_envs:Box-v0", "--wrap", f"{RESHAPE},shape={shape}")
    spoken = rlflame("train", *words, "--dry-run", "--json")
    assert spoken.code == 0, spoken.err
    assert spoken.json()["obs_dim"] == 4


def test_a_run_keeps_its_wrappers(tmp_path):
    words = ("--env", "pendulum", "--wrap", f"{RESCALE},min_action=-1,max_action=1")
    words += ("--wrap", "gymnasium.wrappers:FrameStackObservation,stack_size=3")
    spoken = rlflame("train", *TINY, *words, "--steps", "64", "--out", "run")
    assert spoken.code == 0, spoken.err
    assert "RescaleAction, FrameStackObservation" in spoken.out + spoken.err
    policy = api.load_policy("run/latest.safetensors")
    assert policy.checkpoint.env.observation_size == 9
    action = policy(np.zeros((3, 3)))
    assert gymnasium.spaces.Box(-1.0, 1.0, (1,)).contains(action)
    assert rlflame("eval", "run/latest.safetensors", "--episodes", "2").code == 0
    assert rlflame("resume", "run", "--steps", "128").code in (0, 2)
    # The saved config has the same wrappers.
    again = rlflame("train", "--config", "run/config.toml", "--dry-run", "--json").json()
    wrappers = again["config"]["learning"]["environment"]["wrappers"]
    assert [wrapper["kwargs"] for wrapper in wrappers] == [
        {"min_action": -1, "max_action": 1},
        {"stack_size": 3},
    ]


def test_a_file_cannot_name_any_wrapper(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\nclass W: ...\n")
    (tmp_path / "mine.toml").write_text(
        '[[learning.environment.wrappers]]\nname = "evil:W"\nkwargs = {}\n'
    )
    spoken = rlflame("train", "--config", "mine.toml", "--dry-run")
    assert spoken.code == 2
    assert "--allow-module evil" in spoken.err
    assert not (tmp_path / "trace").exists()
    typed = rlflame("train", "--wrap", "evil:W", "--dry-run")
    assert "evil:W" in typed.err
    assert (tmp_path / "trace").exists()
