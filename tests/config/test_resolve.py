"""From command-line options to a config: precedence, errors, limits of TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path

import gymnasium
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflame.config import nested_dict, preset_catalog, synonyms, toml_io, validation
from rlflame.config import resolve as config_resolve
from rlflame.config.algorithms import TRAITS
from rlflame.config.flags import RuntimeFlags, TrainFlags
from rlflame.config.recipe import RunConfig
from rlflame.errors import ConfigError
from rlflame.rollout.envs import user_code


def resolve(*, continuous=lambda config: False, **flags):
    return config_resolve.resolve(TrainFlags(**flags), continuous)[0]


# Precedence

CARTPOLE = tomllib.loads(
    (Path(config_resolve.__file__).parent / "presets" / "cartpole-ppo.toml").read_text()
)
SHIPPED = CARTPOLE["learning"]["ppo"]["gae_lambda"]


def layers(tmp_path):
    """Each layer in turn sets gae_lambda, whose default is 0.95."""
    file = tmp_path / "mine.toml"
    file.write_text("[learning.ppo]\ngae_lambda = 0.3\n")
    return {
        "default": {"env": "hopper", "preset": "default-ppo"},
        "preset": {"env": "cartpole"},
        "file": {"env": "cartpole", "config": file},
        "set": {"env": "cartpole", "config": file, "sets": ["gae_lambda=0.4"]},
    }


@pytest.mark.parametrize(
    ("layer", "expected"),
    [("default", 0.95), ("preset", SHIPPED), ("file", 0.3), ("set", 0.4)],
)
def test_set_over_file_over_preset_over_default(tmp_path, layer, expected):
    assert resolve(**layers(tmp_path)[layer]).learning.ppo.gae_lambda == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "reuse"),
        ({"steps": 500}, "reuse"),
        ({"env": "Acrobot-v1"}, "auto"),
        ({"env_kwargs": ["sutton_barto_reward=true"]}, "auto"),
        ({"wrap": ["gymnasium.wrappers:NormalizeReward"]}, "auto"),
        ({"sets": ["environment.max_episode_steps=9"]}, "auto"),
        ({"env": "Acrobot-v1", "sets": ["environment.episodes=fresh"]}, "fresh"),
    ],
)
def test_a_choice_in_a_file_does_not_apply_to_another_environment(tmp_path, changes, expected):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[learning.environment]\nid = "CartPole-v1"\nepisodes = "reuse"\nignore = ["a"]\n'
    )
    environment = resolve(config=file, **changes).learning.environment
    assert environment.episodes == expected
    assert environment.ignore == (("a",) if expected == "reuse" else ())


def test_an_option_wins_over_set_and_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[learning]\nseed = 3\n[runtime]\nworkers = 3\n")
    assert resolve(config=file, sets=["learning.seed=4"]).learning.seed == 4
    sets = ["learning.seed=4", "runtime.workers=4"]
    config = resolve(config=file, sets=sets, seed=5, workers=5)
    assert (config.learning.seed, config.runtime.workers) == (5, 5)


def test_a_runtime_is_made_of_options_over_set_over_what_was_recorded():
    saved = {"workers": 3, "max_retries": 1, "progress": "json", "debug": True}
    flags = RuntimeFlags(sets=["runtime.workers=4", "runtime.keep_checkpoints=9"], workers=5)
    runtime = config_resolve.resolve_runtime(flags, {"runtime": saved})
    assert (runtime.workers, runtime.keep_checkpoints, runtime.max_retries) == (5, 9, 1)
    # Each command chooses how it displays a run.
    assert (runtime.progress, runtime.debug) == ("auto", False)
    with pytest.raises(ConfigError, match=r"learning\.seed belongs to the recipe"):
        config_resolve.resolve_runtime(RuntimeFlags(sets=["learning.seed=4"]))


def test_a_setting_of_another_version_is_named(tmp_path):
    saved, file = {"runtime": {"companion": "on"}}, tmp_path / "config.toml"
    with pytest.raises(ConfigError, match=r"runtime\.companion") as recorded:
        config_resolve.resolve_runtime(RuntimeFlags(), saved, file)
    assert str(file) in recorded.value.message
    with pytest.raises(ConfigError, match=r"runtime\.companion"):
        resolve(sets=["runtime.companion=on"])
    file.write_text("[learning.ppo]\ndesired_kl = 0.01\n")
    with pytest.raises(ConfigError, match=r"learning\.ppo\.desired_kl"):
        resolve(config=file)


def test_critics_without_a_norm_are_asked_for_by_the_plain_word():
    config = resolve(
        env="ant", algo="sac", sets=["sac.critic_norm=none"], continuous=lambda _: True
    )
    assert config.learning.sac.critic_norm == "none"


def test_the_flag_for_an_environment_wins_over_set_and_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[learning.environment]\nid = "Acrobot-v1"\n')
    assert resolve(config=file).learning.environment.id == "Acrobot-v1"
    with_set = {"config": file, "sets": ["environment.id=pendulum"]}
    assert resolve(**with_set).learning.environment.id == "Pendulum-v1"
    assert resolve(**with_set, env="hopper").learning.environment.id == "Hopper-v5"


def test_a_file_is_found_where_it_was_named_from(tmp_path, monkeypatch):
    """A path is relative to the folder in which it was typed."""
    (tmp_path / "sub").mkdir()
    mine = tmp_path / "sub" / "mine.toml"
    mine.write_text('[runtime]\nenv_file = "../one.py"\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:  # a config file must not select code to run
        resolve(config=Path("sub/mine.toml"))
    assert f"--env-file {tmp_path / 'one.py'}" in refusal.value.hint
    monkeypatch.setenv(user_code.FILE_VARIABLE, "")  # restored after the test
    (tmp_path / "sub" / "second.py").touch()
    by_set = resolve(config=mine, sets=["runtime.env_file=sub/second.py"], env="cartpole")
    assert by_set.runtime.env_file == str(tmp_path / "sub" / "second.py")
    # A file imports modules from its own folder, not from the folder of a link to it.
    (tmp_path / "link.py").symlink_to("sub/second.py")
    linked = resolve(sets=["runtime.env_file=link.py"], env="cartpole")
    assert linked.runtime.env_file == str(tmp_path / "sub" / "second.py")
    (tmp_path / "deep").symlink_to("sub/deeper")
    (tmp_path / "sub" / "deeper").mkdir()
    linked = resolve(sets=["runtime.env_file=deep/../second.py"], env="cartpole")
    assert linked.runtime.env_file == str(tmp_path / "sub" / "second.py")


def test_without_any_words_it_is_ppo_on_cartpole():
    config, preset = config_resolve.resolve(TrainFlags(), lambda config: False)
    assert (config.learning.environment.id, config.learning.algorithm) == ("CartPole-v1", "ppo")
    assert preset == "cartpole-ppo"


@pytest.mark.parametrize(
    ("words", "steps", "iterations"),
    [
        ({}, None, 100),
        ({"sets": ["stop_at_steps=7"]}, 7, None),
        ({"sets": ["stop_at_iterations=7"]}, None, 7),
        ({"sets": ["stop_at_iterations=7", "stop_at_steps=9"]}, 9, 7),
        ({"sets": ["stop_at_steps=9"], "iterations": 3}, None, 3),
        ({"sets": ["stop_at_steps=9"], "seed": 3}, 9, None),
    ],
)
def test_a_given_end_of_a_run_replaces_the_ends_of_the_preset(words, steps, iterations):
    config = resolve(preset="reinforce-classic", **words)
    assert (config.stop_at_steps, config.stop_at_iterations) == (steps, iterations)


# Names


def test_every_alias_is_registered_under_its_id():
    for alias, meant in preset_catalog.ALIASES.items():
        assert meant.id in gymnasium.registry, alias
        assert preset_catalog.resolve_env_id(alias.upper()) == meant.id
        assert preset_catalog.make_short_name(meant.id) == alias


def test_an_id_without_alias_names_a_folder_without_odd_characters():
    assert preset_catalog.make_short_name("my_pack.envs:ns/World-v3") == "my_pack.envs-ns-world-v3"


@pytest.mark.parametrize("name", preset_catalog.list_presets())
def test_every_preset_is_a_whole_recipe_of_its_algorithm(name):
    stem = name.removesuffix("-wide")
    method = "reinforce" if stem.endswith("classic") else stem.rpartition("-")[2]
    env = "hopper" if name.startswith("mujoco") else None
    for continuous in (False, True):
        config = resolve(preset=name, env=env, continuous=lambda config, c=continuous: c)
        assert config.learning.algorithm == method


def test_every_environment_has_a_preset_for_every_algorithm():
    for meant in preset_catalog.ALIASES.values():
        for method in TRAITS:
            assert preset_catalog.choose_preset(meant.id, method) in preset_catalog.list_presets()


def test_the_classic_preset_is_the_example_of_the_text_book():
    choice = resolve(preset="reinforce-classic", env="cartpole")
    numbers = resolve(preset="reinforce-classic", env="hopper", continuous=lambda config: True)
    for config, hidden, rate in ((choice, (128,), 1e-2), (numbers, (256, 256), 3e-4)):
        learning = config.learning
        assert (learning.network.hidden, learning.reinforce.learning_rate) == (hidden, rate)
        assert learning.network.activation == "relu"
        assert learning.network.log_std_init == 0.0
        assert learning.reinforce.discount == 0.99
        assert learning.reinforce.normalise_returns == "episode"
        assert (learning.rollout.num_slots, learning.rollout.envs_per_slot) == (100, 1)
        assert (config.stop_at_iterations, config.stop_at_steps) == (100, None)


def test_whether_actions_are_continuous_is_asked_with_the_arguments_of_the_environment():
    asked = []
    resolve(
        preset="reinforce-classic",
        env="lunarlander",
        env_kwargs=["continuous=true"],
        continuous=lambda config: bool(asked.append(config.learning.environment)),
    )
    (one,) = asked
    assert (one.id, one.kwargs) == ("LunarLander-v3", {"continuous": True})


def test_what_nobody_tuned_for_is_learned_otherwise_where_actions_are_numbers():
    choices = resolve(env="acrobot", continuous=lambda config: False)
    numbers = resolve(env="LunarLanderContinuous-v3", continuous=lambda config: True)
    assert choices.learning.policy_average is None
    assert choices.learning.ppo.normalise_advantages == "minibatch"
    assert numbers.learning.policy_average == 20
    assert numbers.learning.ppo.normalise_advantages == "off"
    mine = resolve(
        env="LunarLanderContinuous-v3",
        sets=["learning.policy_average=3"],
        continuous=lambda config: True,
    )
    assert mine.learning.policy_average == 3


# Errors


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ({"algo": "poo"}, "no algorithm 'poo'", "ppo or reinforce"),
        ({"preset": "cartpol-ppo"}, "no preset 'cartpol-ppo'", "cartpole-ppo"),
        ({"sets": ["ppo.clip_rnge=1"]}, "no setting 'ppo.clip_rnge'", "learning.ppo.clip_range"),
        (
            {"sets": ["ppo.clip=1"]},
            "no setting 'ppo.clip'",
            "did you mean learning.ppo.clip_range, learning.ppo.clip_range_value",
        ),
        (
            {"sets": ["environment.max_episode_stepz=1"]},
            "no setting",
            "did you mean learning.environment.max_episode_steps, evaluation.max_episode_steps",
        ),
        (
            {"sets": ["max_episode_steps=5"]},
            "learning.environment.max_episode_steps, evaluation.max_episode_steps",
            "full name",
        ),
        ({"sets": ["XQZ=1"]}, "no setting 'XQZ'", "rlflame config lists all settings"),
        ({"sets": ["seed"]}, "'seed' is not NAME=VALUE", "--set"),
        ({"sets": ["=3"]}, "'=3' is not NAME=VALUE", "--set"),
        ({"sets": ["ppo.discount=2"]}, "learning.ppo.discount (Discount factor)", "rlflame config"),
        ({"sets": ["ppo.discount=nan"]}, "but is nan", "rlflame config"),
        ({"sets": ["num_slots=many"]}, "but is 'many'", "rlflame config"),
        ({"sets": ["environment.id=[1]"]}, "[1] is not an environment id", "--env"),
        ({"sets": ["environment.id="]}, "'' is not an environment id", "--env"),
        ({"sets": ["environment.kwargs.render_mode=human"]}, "render --human", ""),
        ({"sets": ["environment.kwargs.render_mode=rgb_array"]}, "render --human", ""),
        ({"sets": ["num_slots=true"]}, "true and false are not allowed", "rlflame config"),
        ({"sets": ["network.hidden=[64, true]"]}, "true and false are not allowed", ""),
        ({"sets": ["network.activation=true"]}, "true and false are not allowed", ""),
        ({"sets": ["network.hidden=64"]}, "a list such as [64, 64], but is 64", "rlflame config"),
        (
            {"sets": ["stop_at_steps=none"]},
            "stop_at_steps or stop_at_iter",
            "rlflame config",
        ),
        (
            {"sets": ["until_return=5", "evaluation.every_steps=none"]},
            'every_steps is "none"',
            "every_steps",
        ),
        (
            {"sets": ["until_return=5", "every_steps=64", "evaluation.episodes=1"]},
            "episodes is 1",
            "evaluation.episodes=8",
        ),
        ({"algo": "ppo", "preset": "reinforce-classic"}, "section `reinforce` is set", ""),
        ({"algo": "reinforce", "sets": ["ppo.epochs=1"]}, "section `ppo` is set", ""),
        ({"algo": "reinforce", "sets": ["unit=steps"]}, "whole episodes", ""),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_value_seen(words, said, hint):
    with pytest.raises(ConfigError) as caught:
        resolve(**words)
    assert said in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_file_may_be_absent_or_nonsense_and_is_named(tmp_path):
    file = tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match=r"mine\.toml cannot be read"):
        resolve(config=file)
    for content in (b"a = ", b"\xff\xfe", b"x = " + b"[" * 5000):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"mine\.toml is not valid TOML"):
            resolve(config=file)
    file.write_text("[learning]\nalgorithm = 'reinforce'\n")
    assert resolve(config=file, algo="ppo").learning.algorithm == "ppo"
    file.write_text("[job]\nseeds = [0, 1]\n")
    with pytest.raises(ConfigError) as caught:
        resolve(config=file)
    assert caught.value.hint.startswith(f"rlflame resume {tmp_path} ")
    file.write_text("learning.environment.kwargs.day = 2020-01-01\n")
    with pytest.raises(ConfigError, match="day = datetime"):
        resolve(config=file)
    file.write_text("[ppo]\nepochs = 3\n")
    with pytest.raises(ConfigError, match="no setting 'ppo'"):
        resolve(config=file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning.environment = 'Hopper-v5'", "environment should be a table, but is 'Hopper-v5'"),
        ("learning = 3", "learning should be a table, but is 3"),
        ("[[learning]]\nseed = 3", r"learning should be a table, but is \[{seed = 3}\]"),
        ("learning.ppo = false", "learning.ppo: true and false are not allowed"),
        ("evaluation = 1979-05-27", "evaluation should be a table"),
    ],
)
def test_a_section_that_is_no_table_is_not_passed_over(tmp_path, text, said):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        resolve(config=file)


def test_true_stays_what_it_is_where_it_belongs():
    sets = ["normalise_observations=true", "environment.kwargs.sutton_barto_reward=true"]
    learning = resolve(sets=sets).learning
    assert learning.network.normalise_observations is True
    assert learning.environment.kwargs == {"sutton_barto_reward": True}


# TOML


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3", 3),
        ("3.5", 3.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("word", "word"),
        ("two words", "two words"),
        ('"3"', "3"),
        ("none", None),
        ('"none"', None),
        (r"\none", "none"),
        ("1\ny = 2", "1\ny = 2"),
        ("2020-01-01", "2020-01-01"),
        ("", ""),
        ("{a = 1}", {"a": 1}),
        # Python literals
        ("True", True),
        ("False", False),
        ("None", None),
        (".5", 0.5),
        ("(0.5, 2.0)", [0.5, 2.0]),
        ("64,64", [64, 64]),
        ("[True, None]", [True, None]),
        ("{'a': 1, 'b': (2,)}", {"a": 1, "b": [2]}),
        ('{"a": False}', {"a": False}),
        # Text that has a meaning in Python, but not as a value
        ("1+2j", "1+2j"),
        ("b'a'", "b'a'"),
        ("print(1)", "print(1)"),
        ("2g", "2g"),
        ("0000", "0000"),
    ],
)
def test_a_value_is_toml_or_a_python_literal_or_else_the_text_itself(written, value):
    found = toml_io.parse_value(written)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "written",
    [
        "[1, 2",
        "(0.5, 2.0",
        "{a: 1}",
        "{1: 2}",
        "{1, 2}",
        '"open',
        "[a, b]",
        "TRUE",
        "null",
        "[" * 99,
    ],
)
def test_what_looks_like_a_value_and_is_none_is_refused(written):
    for flags in ({"env_kwargs": [f"x={written}"]}, {"sets": [f"runtime.out={written}"]}):
        with pytest.raises(ConfigError, match="neither a TOML value nor a Python literal") as error:
            resolve(**flags)
        # The spelling that the message names passes the text itself.
        quoted = error.value.message.partition("write ")[2].removesuffix(".")
        if quoted != "it in quotes":
            assert toml_io.parse_value(quoted) == written


def test_an_error_says_what_type_was_read():
    with pytest.raises(ConfigError, match=r"'0\.1x' \(text\)"):
        resolve(sets=["ppo.clip_range=0.1x"])
    with pytest.raises(ConfigError, match=r"\[0, 1\] \(list\)"):
        resolve(sets=["ppo.clip_range=0,1"])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["none", "\\none", "\\\\none", 'a"b', "a\nb", "a\\", "a = b", "#", "'''", "\x00", "\x7f", " "]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(texts, values, max_size=4))
def test_any_arguments_of_an_environment_survive_being_written_and_read(kwargs):
    written = "\n".join(
        f"{toml_io.format_key(name)} = {toml_io.format_value(value)}"
        for name, value in kwargs.items()
    )
    tomllib.loads(written)
    assert toml_io.parse(written) == kwargs


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        texts,
        # JSON has no infinite numbers, so recipes have none either.
        values.filter(lambda value: "inf" not in repr(value)),
        max_size=4,
    ),
    st.none() | st.integers(1, 10**9),
    st.sampled_from(["ppo", "reinforce"]),
)
def test_a_config_reads_back_as_itself(kwargs, limit, method):
    config = resolve(algo=method)
    data = config.model_dump()
    data["learning"]["environment"] |= {"kwargs": kwargs, "max_episode_steps": limit}
    config = validation.validate_config(data)
    text = config_resolve.format_config(config)
    assert validation.validate_config(toml_io.parse(text)) == config
    assert config_resolve.format_config(validation.validate_config(toml_io.parse(text))) == text


@pytest.mark.parametrize("method", TRAITS)
def test_the_sections_of_other_algorithms_are_not_written(method):
    """Only the section of the chosen algorithm is written."""
    learning = tomllib.loads(config_resolve.format_config(resolve(algo=method)))["learning"]
    assert learning.keys() & TRAITS.keys() == {method}


def test_every_setting_with_a_value_is_written():
    """The text has each such setting of the chosen algorithm once, in its table."""
    config = resolve()
    text = config_resolve.format_config(config)
    table, values = tomllib.loads(text), config.model_dump(mode="json")
    for path in validation.list_settings():
        value = nested_dict.get_nested(values, path)
        assert nested_dict.get_nested(table, path) == value, path
    assert isinstance(nested_dict.get_nested(table, "learning.environment.kwargs"), dict)
    assert '"none"' not in text
    assert RunConfig.model_validate(toml_io.parse(text)) == config


def test_none_is_written_only_where_it_changes_a_value_or_is_a_choice(tmp_path):
    # The preset evaluates at intervals, and the default is to clip gradients.
    sets = ["every_steps=none", "ppo.max_gradient_norm=none", "runtime.out=\\none"]
    config = resolve(env="cartpole", sets=sets)
    table = tomllib.loads(config_resolve.format_config(config))
    assert table["evaluation"]["every_steps"] == "none"
    assert table["learning"]["ppo"]["max_gradient_norm"] == "none"
    assert table["runtime"]["out"] == "\\none"
    assert "target_kl" not in table["learning"]["ppo"]
    file = tmp_path / "mine.toml"
    file.write_text(config_resolve.format_config(config))
    assert resolve(config=file) == config

    sets = ["critic_norm=none"]
    config = resolve(env="ant", algo="sac", sets=sets, continuous=lambda _: True)
    text = config_resolve.format_config(config)
    assert 'critic_norm = "none"' in text
    assert text.count('"none"') == 1
    file.write_text(text)
    assert resolve(config=file, continuous=lambda _: True) == config


@pytest.mark.parametrize("algorithm", TRAITS)
def test_every_algorithm_has_a_default_preset(algorithm):
    preset = preset_catalog.read_preset(preset_catalog.choose_preset("Unknown-v0", algorithm))
    assert preset["learning"]["algorithm"] == algorithm


def test_a_bad_option_is_not_blamed_on_the_run_s_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    with pytest.raises(ConfigError) as typed:
        config_resolve.resolve_runtime(RuntimeFlags(workers=-3), {"runtime": {"workers": 2}}, file)
    assert str(file) not in typed.value.message
    with pytest.raises(ConfigError) as saved:
        config_resolve.resolve_runtime(RuntimeFlags(), {"runtime": {"workers": -3}}, file)
    assert str(file) in saved.value.message


# Names and numbers as users type them


def test_a_preset_knows_its_environment():
    config = resolve(preset="hopper-sac")
    assert (config.learning.environment.id, config.learning.algorithm) == ("Hopper-v5", "sac")
    assert resolve(preset="hopper-sac", env="walker2d").learning.environment.id == "Walker2d-v5"
    with pytest.raises(ConfigError, match="several environments") as error:
        resolve(preset="mujoco-sac")
    assert resolve(preset="mujoco-sac", env=error.value.hint.split()[-1])


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"preset": "hopper"}, {"hopper-ppo", "hopper-sac", "default-reinforce"}),
        ({"preset": "x", "env": "hopper", "algo": "sac"}, {"hopper-sac", "mujoco-sac"}),
        ({"preset": "x", "env": "Mine-v0", "algo": "SAC"}, {"default-sac"}),
    ],
)
def test_an_unknown_preset_is_answered_with_those_that_fit(flags, names):
    with pytest.raises(ConfigError) as error:
        resolve(**flags)
    listed = set(error.value.hint.partition(": ")[2].split(", "))
    assert names <= listed <= set(preset_catalog.list_presets())
    assert "cartpole-ppo" not in listed
    if "algo" in flags:
        assert all(name.split("-")[1] == "sac" for name in listed)


@pytest.mark.parametrize("algorithm", TRAITS)
def test_a_short_name_is_a_setting_of_the_chosen_algorithm(algorithm):
    for flags in ({"algo": algorithm.upper()}, {"sets": [f"learning.algorithm={algorithm}"]}):
        sets = [*flags.pop("sets", ()), "learning_rate=0.125"]
        config = resolve(env="pendulum", sets=sets, **flags)
        assert config.learning.settings.learning_rate == 0.125


@pytest.mark.parametrize(
    ("name", "algorithm", "expected"),
    [
        ("lr", "sac", "learning_rate"),
        ("gamma", "ppo", "discount"),
        ("ent_coef", "ppo", "entropy_weight"),
        ("ent_coef", "sac", "entropy_coefficient"),
        ("vf_coef", "ppo", "value_weight"),
        ("batch_size", "ppo", "minibatch_size"),
        ("n_steps", "ppo", "rollout.steps"),
        ("n_epochs", "ppo", "epochs"),
        ("tau", "sac", "target_update_rate"),
        ("tau", "ppo", "target_update_rate"),
        ("net_arch", "ppo", "network.hidden"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(name, algorithm, expected):
    with pytest.raises(ConfigError) as error:
        resolve(env="pendulum", algo=algorithm, sets=[f"{name}=1"])
    assert error.value.hint == f"--set {expected}=VALUE"


def test_every_synonym_means_a_setting_and_is_none_itself():
    settings = [path.split(".") for path in validation.list_settings()]
    for name, meanings in synonyms.SYNONYMS.items():
        for meaning in meanings:
            parts = meaning.split(".")
            assert any(path[-len(parts) :] == parts for path in settings), meaning
        # The settings of SAC with such a name keep it.
        owners = [path[1] for path in settings if path[-1] == name]
        assert owners in ([], ["sac"]), name


def test_names_that_are_the_same_elsewhere_are_just_read():
    assert resolve(sets=["gae_lambda=0.5"]).learning.ppo.gae_lambda == 0.5
    config = resolve(env="pendulum", algo="sac", sets=["batch_size=64"])
    assert config.learning.sac.batch_size == 64


@pytest.mark.parametrize(
    ("steps", "every_steps", "is_valid"),
    # An iteration of CartPole's preset has 2,048 steps.
    [(2_000, 2_049, False), (2_000, 2_048, True), (2_049, 4_096, True), (2_049, 4_097, False)],
)
def test_a_target_return_needs_an_evaluation_within_the_run(steps, every_steps, is_valid):
    flags = {"steps": steps, "until_return": 5.0, "sets": [f"every_steps={every_steps}"]}
    if is_valid:
        assert resolve(**flags).stop_at_steps == steps
        return
    with pytest.raises(ConfigError, match=f"{every_steps:,}") as error:
        resolve(**flags)
    flags["sets"] = [error.value.hint.removeprefix("--set ")]
    assert resolve(**flags).stop_at_steps == steps


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("runtime.flame.python_version=3.12", "3.12"),
        ("python_version=3.10", "3.10"),  # the number would be 3.1
        ('python_version="3.12"', "3.12"),
        ("runtime.out=7", "7"),
        ("python_version=none", None),
        ("runtime.workers=7", 7),
        ("runtime.learners=2", 2),
        ("ppo.learning_rate=1e-3", 1e-3),
    ],
)
def test_a_setting_that_is_text_keeps_the_text_of_a_number(text, value):
    assert validation.parse_set(text)[1] == value


def test_a_pattern_is_explained_with_an_example():
    with pytest.raises(ConfigError, match=r"should be a version such as 3\.12, but is 'abc'"):
        resolve(sets=["runtime.flame.python_version=abc"])
    with pytest.raises(ConfigError, match="should be a size such as 2g, but is 'big'"):
        resolve(sets=["runtime.flame.memory=big"])


GPU = ("torch", "cuda", 1)
HOST = ("numpy", "cpu", 1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("numpy", "cpu", 4)),
        ({"device": "cuda"}, GPU),
        ({"sets": ["learning.device=cuda"]}, GPU),
        ({"device": "cuda", "sets": ["gradient_shards=2"]}, ("torch", "cuda", 2)),
        ({"device": "cpu"}, ("numpy", "cpu", 4)),
        ({"device": "cpu", "sets": ["learning.provider=torch"]}, ("torch", "cpu", 4)),
    ],
)
def test_a_gpu_computes_whole_updates_unless_shards_are_asked_for(flags, expected):
    learning = resolve(env="halfcheetah", preset="mujoco-ppo-wide", **flags).learning
    assert (learning.provider, learning.device, learning.gradient_shards) == expected


def test_the_config_of_a_gpu_run_can_be_learned_on_a_processor(tmp_path):
    file = tmp_path / "gpu.toml"
    sets = ["learning.precision=tf32"]
    config = resolve(env="halfcheetah", preset="mujoco-ppo-wide", device="cuda", sets=sets)
    file.write_text(config_resolve.format_config(config))
    for flags, expected in (({}, GPU), ({"device": "cpu"}, HOST), ({"device": "cuda"}, GPU)):
        learning = resolve(config=file, **flags).learning
        assert (learning.provider, learning.device, learning.gradient_shards) == expected
        assert learning.precision == ("float32" if expected == HOST else "tf32")


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("gradient_shards = 4", {"device": "cuda"}, ("torch", "cuda", 4)),
        ('device = "cuda"\nprovider = "torch"', {}, GPU),
        ('device = "cuda"\nprovider = "torch"\ngradient_shards = 2', {}, ("torch", "cuda", 2)),
    ],
)
def test_the_shards_of_a_file_apply_to_a_gpu(text, flags, expected, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f"[learning]\n{text}\n")
    learning = resolve(env="halfcheetah", preset="mujoco-ppo-wide", config=file, **flags).learning
    assert (learning.provider, learning.device, learning.gradient_shards) == expected
