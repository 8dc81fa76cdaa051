"""`rlflame envs`, `config`, `--version` and help: lists of possible choices."""

from __future__ import annotations

import json

import gymnasium
import pytest
from commands import rlflame
from configs import make_config

from rlflame import __version__
from rlflame.cli.app import app
from rlflame.config import nested_dict, preset_catalog, validation
from rlflame.config.recipe import RunConfig


def test_envs_says_the_sizes_that_gymnasium_says():
    shown = {env["alias"]: env for env in rlflame("envs", "--json").json()}
    assert shown.keys() == preset_catalog.ALIASES.keys()
    for alias in ("cartpole", "pendulum", "lunarlander", "bipedalwalker", "hopper", "humanoid"):
        env = gymnasium.make(preset_catalog.ALIASES[alias].id)
        seen = shown[alias]
        assert seen["observations"] == env.observation_space.shape[0]
        continuous = isinstance(env.action_space, gymnasium.spaces.Box)
        assert seen["continuous"] == continuous
        actions = env.action_space.shape[0] if continuous else env.action_space.n
        assert seen["actions"] == actions
        env.close()


def test_envs_in_lines_and_an_environment_whose_package_is_missing(monkeypatch):
    from rlflame.errors import ConfigError
    from rlflame.experiment import components

    right = components.inspect_env

    def without_box2d(settings):
        if settings.id == "LunarLander-v3":
            raise ConfigError("LunarLander-v3 needs a package that is missing: box2d.", "")
        return right(settings)

    monkeypatch.setattr(components, "inspect_env", without_box2d)
    spoken = rlflame("envs")
    assert spoken.code == 0
    rows = {line.split()[0]: line.split() for line in spoken.lines if line}
    assert rows["hopper"][1:5] == ["Hopper-v5", "11", "3", "continuous"]
    assert rows["lunarlander"][1:4] == ["LunarLander-v3", "-", "-"]
    assert "lunarlander: LunarLander-v3 needs a package that is missing: box2d." in spoken.lines
    for name in preset_catalog.list_presets():
        assert name in spoken.out


def test_config_lists_every_setting_once_with_its_explanation():
    shown = {setting["name"]: setting for setting in rlflame("config", "--json").json()}
    assert list(shown) == list(validation.list_settings())
    lines = rlflame("config").lines
    for name, about in validation.list_settings().items():
        assert shown[name]["description"] == about
        (where,) = [i for i, line in enumerate(lines) if line.startswith(f"{name} = ")]
        assert lines[where + 1] == f"    {about}"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("learning.seed", "0  (integer >= 0 and < 2^63)"),
        ("learning.algorithm", '"ppo"  (ppo | reinforce | sac)'),
        ("learning.network.hidden", "[64, 64]  (list of integers >= 1 and <= 65,536)"),
        ("learning.ppo.learning_rate", "0.0003  (number > 0 and <= 10)"),
        ("learning.ppo.target_kl", '"none"  (number > 0 and <= 100 | none)'),
        ("learning.ppo.scale_rewards", "true  (true | false)"),
        ("learning.rollout.staleness", "0  (0 | 1)"),
        ("learning.sac.entropy_coefficient", '"auto"  (auto | number >= 0 and <= 1e+06)'),
        ("learning.sac.critic_norm", '"none"  (none | batch)'),
        ("learning.environment.kwargs", "{}  (table)"),
        ("runtime.workers", '"none"  (integer >= 1 and <= 4,096 | none)'),
    ],
)
def test_a_setting_says_its_default_and_its_range(name, line):
    assert f"{name} = {line}" in rlflame("config").lines


def test_a_range_is_what_the_model_enforces():
    """The limits of a range are accepted, and the next values are refused."""
    from rlflame.errors import ConfigError

    for path, low, high in (
        ("learning.ppo.epochs", 1, 1000),
        ("learning.rollout.envs_per_slot", 1, 4096),
        ("runtime.max_retries", 0, 1000),
    ):
        (line,) = [text for text in rlflame("config").lines if text.startswith(f"{path} = ")]
        assert line.endswith(f"(integer >= {low} and <= {high:,})")
        for value in (low, high):
            assert nested_dict.get_nested(_with(path, value).model_dump(), path) == value
        for value in (low - 1, high + 1):
            with pytest.raises(ConfigError, match=path):
                _with(path, value)


def _with(path, value):
    return make_config(settings={path: value})


def test_the_schema_is_that_of_the_model():
    schema = rlflame("config", "--schema").json()
    assert schema == RunConfig.model_json_schema()
    assert "clip_range" in json.dumps(schema)


def test_the_version():
    assert rlflame("--version").out == f"rlflame {__version__}\n"


def test_help_names_every_command_and_every_option_has_an_explanation():
    spoken = rlflame("--help")
    assert spoken.code == 0
    commands = {command.name: command for command in app.registered_commands}
    assert {group.name for group in app.registered_groups} == {"bench", "trust"}
    for name in (*commands, "bench", "bench rollouts", "bench scaling", "trust", "trust add"):
        assert f"\n  {name.split()[0]} " in spoken.out
        shown = rlflame(*name.split(), "--help").out
        for line in shown.splitlines():
            words = line.split()
            if words and words[0].startswith("--"):
                assert len(words) > 1, (name, line)
    listed = {"train", "resume", "eval", "render", "inspect", "plot", "report", "runs", "envs"}
    listed |= {"config", "cluster-check", "export"}
    assert commands.keys() == listed


def test_no_words_at_all_is_help():
    spoken = rlflame()
    assert "train" in spoken.out + spoken.err


@pytest.mark.parametrize("words", [["nosuch"], ["train", "--nosuch"], ["eval"], ["inspect"]])
def test_usage_errors_end_with_two(words):
    spoken = rlflame(*words)
    assert spoken.code == 2


def test_config_shows_the_values_of_a_preset_and_filters_by_name():
    words = ("config", "learning_rate", "--env", "hopper", "--algo", "sac", "--json")
    shown = {setting["name"]: setting for setting in rlflame(*words).json()}
    section = preset_catalog.read_preset("hopper-sac")["learning"]["sac"]
    name = "learning.sac.critic_learning_rate"
    assert (shown[name]["value"], shown[name]["preset"]) == (
        section["critic_learning_rate"],
        "hopper-sac",
    )
    assert shown[name]["default"] is None
    assert shown["learning.sac.anneal_learning_rate"]["preset"] is None
    (setting,) = rlflame("config", "environment.episodes", "--env", "hopper", "--json").json()
    assert (setting["value"], setting["preset"]) == ("auto", None)
    assert all("learning_rate" in name and ".ppo." not in name for name in shown)
    (line,) = (x for x in rlflame(*words[:-1]).lines if x.startswith(f"{name} = "))
    assert line.startswith(f"{name} = 0.001  (")
    assert line.endswith(", from hopper-sac)")


def test_config_finds_settings_by_the_names_of_other_libraries():
    lines = rlflame("config", "gamma").lines
    assert any(line.startswith("learning.ppo.discount = ") for line in lines)
    unknown = rlflame("config", "clip_rnge")
    assert (unknown.code, unknown.out) == (2, "")
    assert "learning.ppo.clip_range" in unknown.err
