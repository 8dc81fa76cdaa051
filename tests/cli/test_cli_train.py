"""`rlflame train`: the effect of each option, --dry-run, and errors."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import shlex
import tomllib
from pathlib import Path

import gymnasium
import pytest
import rollouts
from commands import TINY, TINY_REINFORCE, rlflame

from rlflame.cli.train import train
from rlflame.config import nested_dict, resolve, toml_io, validation
from rlflame.config.flags import TrainFlags
from rlflame.config.recipe import EnvironmentSettings
from rlflame.experiment import components, preflight, resume
from rlflame.experiment import run as running_module
from rlflame.fleet.base import make_policy_id
from rlflame.fleet.prestart import PrestartPool
from rlflame.rollout.mujoco import known_spaces
from rlflame.rollout.policy import compute_array_shapes
from rlflame.rollout.process.channel import Channel, MessageKind
from rlflame.storage import checkpoint


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def resolved(*words):
    """The config that a dry run prints."""
    spoken = rlflame("train", *words, "--dry-run", "--json")
    assert spoken.code == 0, spoken.err
    return spoken.json()


#: The beginning of a command that trains SAC if SAC is possible.
SAC = ("--algo", "sac", "--env", "pendulum")
SHIPPED = tomllib.loads(
    (Path(resolve.__file__).parent / "presets" / "lunarlander-ppo.toml").read_text()
)

# For each option, by the name of its parameter: the words, and the changes in the config.
FLAGS = {
    "env": (["--env", "pendulum"], {"learning.environment.id": "Pendulum-v1"}),
    "algo": (["--algo", "reinforce"], {"learning.algorithm": "reinforce"}),
    "steps": (["--steps", "0.777k"], {"stop_at_steps": 777, "stop_at_iterations": None}),
    "iterations": (
        ["--algo", "reinforce", "--iterations", "7"],
        {"stop_at_steps": None, "stop_at_iterations": 7},
    ),
    "horizon": (
        ["--steps", "777", "--horizon", "1k"],
        {"stop_at_steps": 777, "learning.horizon_steps": 1000},
    ),
    "episodes_per_iter": (
        ["--algo", "reinforce", "--set", "envs_per_slot=8", "--episodes-per-iter", "24"],
        {"learning.rollout.num_slots": 3, "learning.rollout.envs_per_slot": 8},
    ),
    "seed": (["--seed", "5"], {"learning.seed": 5}),
    "preset": (["--preset", "lunarlander-ppo"], {"stop_at_steps": SHIPPED["stop_at_steps"]}),
    "config": (["--config", "mine.toml"], {"learning.ppo.clip_range": 0.123}),
    "sets": (["--set", "ppo.clip_range=0.3"], {"learning.ppo.clip_range": 0.3}),
    "wrap": (
        (
            "--env",
            "pendulum",
            "--wrap",
            "gymnasium.wrappers:RescaleAction,min_action=-1,max_action=1",
        ),
        {
            "learning.environment.wrappers": [
                {
                    "name": "gymnasium.wrappers:RescaleAction",
                    "kwargs": {"min_action": -1, "max_action": 1},
                }
            ]
        },
    ),
    "env_kwargs": (
        ["--env", "fakes:Fake-v0", "--env-kwargs", "length=4", "--env-kwargs", "fault=raise"],
        {"learning.environment.kwargs": {"length": 4, "fault": "raise"}},
    ),
    "until_return": (["--until-return", "99.5"], {"evaluation.until_return": 99.5}),
    "out": (["--out", "there"], {"runtime.out": "there"}),
    "workers": (["--workers", "3"], {"runtime.workers": 3}),
    "learners": (["--learners", "2"], {"runtime.learners": 2}),
    "fleet": (["--fleet", "inline"], {"runtime.fleet": "inline"}),
    "local": (["--local"], {"runtime.fleet": "local"}),
    "quiet": (["--quiet"], {"runtime.progress": "quiet"}),
    "plain": (["--plain"], {"runtime.progress": "plain"}),
    "tensorboard": (["--tensorboard"], {"runtime.tensorboard": True}),
    "debug": (["--debug"], {"runtime.debug": True}),
    "video_every": (["--video-every", "5000"], {"runtime.video_every_steps": 5000}),
}
#: Options that do not change the config, which other tests cover.
NO_CONFIG = {
    *("init_from", "plot", "dry_run", "json_lines", "env_file", "allow_modules"),
    *("seeds", "device", "scale_batch", "scale_lr"),
}


def test_every_flag_has_a_test():
    assert FLAGS.keys() | NO_CONFIG == {*inspect.signature(train).parameters} - {"context"}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_changes_the_config_where_it_should_and_nowhere_else(flag, tmp_path):
    (tmp_path / "mine.toml").write_text("[learning.ppo]\nclip_range = 0.123\n")
    words, expected = FLAGS[flag]
    dry_run = rlflame("train", *words, "--dry-run")
    assert dry_run.code == 0, dry_run.err
    config = validation.validate_config(toml_io.parse(dry_run.out)).model_dump(mode="json")
    for path, value in expected.items():
        assert nested_dict.get_nested(config, path) == value
    if flag in ("env", "algo", "iterations", "episodes_per_iter", "preset", "env_kwargs", "wrap"):
        return  # these change the preset, the algorithm or the environment
    before = validation.validate_config(toml_io.parse(rlflame("train", "--dry-run").out))
    changed = {
        path
        for path in validation.list_settings()
        if nested_dict.get_nested(config, path)
        != nested_dict.get_nested(before.model_dump(mode="json"), path)
    }
    assert changed == {path for path, value in expected.items() if value is not None}


@pytest.mark.parametrize(
    ("episodes", "before", "slots", "width"),
    [(100, 8, 20, 5), (7, 8, 1, 7), (11, 8, 11, 1), (1, 8, 1, 1), (64, 8, 8, 8), (9, 4, 3, 3)],
)
def test_episodes_are_cut_into_slots_as_wide_as_they_can_be(episodes, before, slots, width):
    # Widths by hand: the largest divisor that is not above the previous one.
    config = resolved(
        *("--algo", "reinforce", "--episodes-per-iter", str(episodes)),
        *("--set", f"envs_per_slot={before}"),
    )
    assert (config["num_slots"], config["envs_per_slot"]) == (slots, width)
    assert config["episodes_per_iteration"] == episodes


@pytest.mark.parametrize(
    ("text", "steps"),
    [("1e5", 100_000), ("1M", 1_000_000), ("2.5k", 2_500), ("10_000", 10_000), ("1,000", 1_000)],
)
def test_numbers_of_steps_are_read_as_they_are_spoken(text, steps):
    assert resolved("--steps", text)["stop_at_steps"] == steps


@pytest.mark.parametrize("text", ["1,5k", "1,00", ",5", "1e5,000"])
def test_a_decimal_comma_is_refused(text):
    ended = rlflame("train", "--steps", text, "--dry-run")
    assert ended.code == 2
    assert f"{text!r} is not a number" in ended.err


def test_the_next_command_allows_the_modules_of_wrappers(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Mine(CartPoleEnv):\n    pass\n"
        "gymnasium.register('Mine-v0', Mine, max_episode_steps=20)\n"
    )
    wrapper = "gymnasium.wrappers:RecordEpisodeStatistics"
    words = ("--env-file", tmp_path / "mine.py", "--allow-module", "gymnasium.wrappers")
    ended = rlflame("train", *TINY, "--steps", "64", "--wrap", wrapper, *words, "--out", "mine")
    assert ended.code == 0
    lines = (ended.out + ended.err).splitlines()
    (command,) = [line for line in lines if "rlflame eval" in line]
    assert "--env-file" in command
    assert "--allow-module gymnasium.wrappers" in command


def test_a_policy_for_other_actions_is_not_a_start(tmp_path):
    (tmp_path / "two.py").write_text(
        "import gymnasium, numpy as np\n"
        "from gymnasium.spaces import Box, MultiDiscrete\n"
        "class Two(gymnasium.Env):\n"
        "    observation_space = Box(-1.0, 1.0, (2,))\n"
        "    def __init__(self, counts=(2, 4)):\n"
        "        self.action_space = MultiDiscrete(counts)\n"
        "    def reset(self, **options):\n"
        "        super().reset(**options)\n"
        "        return np.zeros(2, np.float32), {}\n"
        "    def step(self, action):\n"
        "        return np.zeros(2, np.float32), 1.0, False, False, {}\n"
        "gymnasium.register('Two-v0', Two, max_episode_steps=8)\n"
    )
    words = ("train", *TINY, "--env-file", tmp_path / "two.py", "--steps", "64")
    assert rlflame(*words, "--out", "first").code == 0
    start = ("--init-from", "first/best.safetensors", "--dry-run")
    assert rlflame(*words, *start).code == 0
    ended = rlflame(*words, *start, "--env-kwargs", "counts=[4, 2]")
    assert ended.code == 2
    assert "its tensors or its actions are different" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (*SAC, "--set", "sac.learning_starts=5000", "--steps", "5000"),
            ["5,000 steps", "learning.sac.learning_starts"],
        ),
        (("--set", "minibatch_size=4096"), ["4,096", "2,048"]),
        (("--set", "network.hidden=[]"), ["network.hidden", "linear"]),
    ],
)
def test_a_run_that_learns_little_says_so_before_it_starts(words, said):
    dry_run = rlflame("train", *words, "--dry-run")
    assert dry_run.code == 0
    (note,) = dry_run.err.splitlines()
    for text in said:
        assert text in note


def test_an_argument_of_the_environment_wins_over_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text(
        "[learning.environment]\nid = 'fakes:Fake-v0'\nkwargs = {length = 3, at = 2}\n"
    )
    dry_run = resolved("--config", "mine.toml", "--env-kwargs", "length=5")
    assert dry_run["env_kwargs"] == {"length": 5, "at": 2}


@pytest.mark.parametrize(
    ("id", "alias"), [("CartPole-v1", "cartpole"), ("Ant-v5", "ant"), ("Hopper-v5", "hopper")]
)
def test_a_dry_run_reads_the_sizes_from_the_spaces(id, alias):
    env = gymnasium.make(id)
    continuous = isinstance(env.action_space, gymnasium.spaces.Box)
    actions = env.action_space.shape[0] if continuous else int(env.action_space.n)
    dry_run = resolved("--env", alias)
    assert dry_run["obs_dim"] == env.observation_space.shape[0]
    assert (dry_run["act_dim"], dry_run["continuous"]) == (actions, continuous)
    assert dry_run["layers"] == [dry_run["obs_dim"], 64, 64, actions]
    seeds = [seed for slot in dry_run["reset_seeds"] for seed in slot]
    assert len(set(seeds)) == len(seeds) == 64
    env.close()


def test_a_dry_run_says_who_steps():
    words = ("train", "--env", "hopper", "--dry-run")
    assert "# rollouts     stepped by rlflame's own MuJoCo loop" in rlflame(*words).out.splitlines()
    dry_run = json.loads(rlflame(*words, "--env-kwargs", "healthy_reward=true", "--json").out)
    assert dry_run["stepped_by"] == "stepped by Gymnasium"


def test_a_dry_run_in_full():
    words = (*TINY, "--steps", "200", "--preset", "cartpole-ppo")
    spoken = rlflame("train", *words, "--dry-run")
    comments, _, text = spoken.out.partition("\n\n")
    assert comments.splitlines() == [
        "# environment  CartPole-v1: 4 observations, 2 discrete actions",
        "# algorithm    PPO, preset cartpole-ppo, seed 0",
        "# budget       200 steps in 4 iterations",
        "# batch        2 slots x 2 environments x 16 steps",
        "# policy       4-64-64-2 tanh, observations normalised",
        "# learner      numpy, 1 thread",
        "# rollouts     stepped by Gymnasium",
        "# workers      at most 2 can help (learning.rollout.num_slots)",
    ]
    assert tomllib.loads(text)["stop_at_steps"] == 200
    assert spoken.err == ""


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--env", "hopper", "--workers", "3", "--seed", "9"),
        ("--algo", "reinforce", "--preset", "reinforce-classic", "--env", "pendulum"),
        ("--env", "fakes:Fake-v0", "--env-kwargs", 'fault="a\\"b\\nc\\\\"'),
        ("--env", "fakes:Fake-v0", "--env-kwargs", r"fault=\none"),
        ("--env", "fakes:Fake-v0", "--env-kwargs", "seed=none", "--env-kwargs", "fault=it's = #1"),
    ],
)
def test_what_a_dry_run_prints_is_a_config_file_of_the_same_config(words, tmp_path):
    once = rlflame("train", *words, "--dry-run")
    (tmp_path / "again.toml").write_text(once.out)
    again = rlflame("train", "--config", "again.toml", "--dry-run")
    # The config contains everything except the name of the preset.
    same = [line for line in again.lines if not line.startswith("# algorithm")]
    assert same == [line for line in once.lines if not line.startswith("# algorithm")]


def test_arguments_reach_the_environment_as_they_were_typed():
    dry_run = resolved(
        *("--env", "fakes:Fake-v0", "--env-kwargs", r"fault=\none", "--env-kwargs", "seed=none"),
        *("--env-kwargs", "continuous=true", "--env-kwargs", 'marker="1"'),
    )
    expected = {"fault": "none", "seed": None, "continuous": True, "marker": "1"}
    assert dry_run["env_kwargs"] == expected
    assert dry_run["continuous"] is True


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--env", "hoper"], 2, ["'hoper'", "Did you mean: `Hopper`"]),
        (["--env", "nosuchmodule:Foo-v1"], 2, ["nosuchmodule", "missing or cannot be imported"]),
        (["--env", "CartPole-v99"], 2, ["CartPole-v99", "rlflame envs"]),
        (["--env", "cart pole"], 2, ["learning.environment.id", "'cart pole'"]),
        (["--env-kwargs", "foo=1"], 2, ["CartPole-v1", "'foo'", "--env-kwargs"]),
        (["--env-kwargs", "foo"], 2, ["'foo'", "KEY=VALUE"]),
        (["--env-kwargs", "a.b=1"], 2, ["'a.b=1'", "KEY=VALUE"]),
        (["--env-kwargs", "low=[0.1, inf]"], 2, ["low = [0.1, inf]", "finite"]),
        (["--algo", "sarsa"], 2, ["'sarsa'", "ppo or reinforce"]),
        (["--preset", "cartpole"], 2, ["'cartpole'", "cartpole-ppo"]),
        (["--set", "ppo.clip_rnge=1"], 2, ["'ppo.clip_rnge'", "learning.ppo.clip_range"]),
        (
            ["--iterations", "5"],
            2,
            ["--iterations and --episodes-per-iter are for REINFORCE", "--steps"],
        ),
        (["--episodes-per-iter", "5"], 2, ["--episodes-per-iter are for REINFORCE"]),
        (["--seed", "-1"], 2, ["learning.seed", "but is -1"]),
        (["--fleet", "moon"], 2, ["runtime.fleet", "'moon'"]),
        (["--json", "--quiet"], 2, ["--json and --quiet cannot be combined"]),
        (["--json", "--plain", "--quiet"], 2, ["--json and --quiet and --plain"]),
        (
            ["--until-return", "5", "--set", "every_steps=none"],
            2,
            ["--until-return", "every_steps"],
        ),
        (["--config", "absent.toml"], 2, ["absent.toml cannot be read"]),
        (["--init-from", "absent.safetensors"], 1, ["absent.safetensors does not exist"]),
        (["--set", "learning.init_policy=" + "0" * 32], 2, ["no file was given", "--init-from"]),
        (["--workers", "0"], 2, ["runtime.workers", "should be greater", "but is 0"]),
        (["--steps", "0"], 2, ["stop_at_steps", "but is 0"]),
        (["--algo", "reinforce", "--iterations", "0"], 2, ["stop_at_iterations", "but is 0"]),
        (["--algo", "reinforce", "--episodes-per-iter", "0"], 2, ["--episodes-per-iter is 0"]),
        (["--steps", "many"], 2, ["--steps", "'many'"]),
        (["--steps", "1.5"], 2, ["--steps", "'1.5'"]),
        (["--nonsense"], 2, ["--nonsense"]),
        (["--algo", "sac"], 2, ["CartPole-v1 has 2 discrete", "--algo ppo"]),
        (
            ["--algo", "sac", "--env", "fakes:Odd-v0", "--env-kwargs", "acts=unbounded"],
            2,
            ["bounded actions", "fakes:Odd-v0", "have no bounds", "finite bounds"],
        ),
        (
            ["--algo", "sac", "--env", "fakes:Odd-v0", "--env-kwargs", "acts=half-bounded"],
            2,
            ["bounded actions", "fakes:Odd-v0", "are not bounded on both sides"],
        ),
        (
            [*SAC, "--set", "sac.entropy_coefficient=-1"],
            2,
            ["learning.sac.entropy_coefficient (", "should be 'auto' or greater", "but is -1"],
        ),
        (
            [*SAC, "--set", "network.hidden=[0,0]"],
            2,
            ["learning.network.hidden (", "to 1, but is 0"],
        ),
        (
            [*SAC, "--set", "sac.updates_per_step=0"],
            2,
            ["learning.sac.updates_per_step", "but is 0"],
        ),
        ([*SAC, "--set", "rollout.unit=episodes"], 2, ["SAC learns from single steps"]),
        ([*SAC, "--iterations", "5"], 2, ["SAC counts steps"]),
        (["--set", "runtime.env_file=no.py"], 2, ["There is no file", "no.py'"]),
    ],
)
def test_what_is_refused_leaves_nothing_behind(words, code, said, tmp_path):
    spoken = rlflame("train", "--set", "runtime.fleet=inline", *words)
    assert spoken.code == code
    for text in said:
        assert text in spoken.err
    assert "Traceback" not in spoken.err
    assert "bug" not in spoken.err
    dry = rlflame("train", "--set", "runtime.fleet=inline", *words, "--dry-run")
    assert (dry.code, dry.err) == (spoken.code, spoken.err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "last"), [((), 6), (("--set", "network.exploration=gsde"), 3)])
def test_the_layers_of_sac_end_with_means_and_deviations(words, last):
    dry_run = resolved("--env", "hopper", "--algo", "sac", *words)
    assert dry_run["layers"] == [11, 256, 256, last]
    layers = dry_run["layers"]
    env = components.make_env_spec(EnvironmentSettings(id="Hopper-v5"))
    flags = TrainFlags(env="hopper", algo="sac", sets=words[1:])
    config, _ = resolve.resolve(flags, components.has_continuous_actions)
    expected = compute_array_shapes(components.make_policy_spec(config.learning, env))
    weights = [shape for name, shape in expected.items() if name.endswith("weight")]
    assert sorted(map(sorted, weights)) == sorted(
        sorted(pair) for pair in itertools.pairwise(layers)
    )


@pytest.mark.parametrize(
    ("kwarg", "words"),
    [
        ("observes=text", ["observations of type Text", "gymnasium.ObservationWrapper"]),
        ("observes=sequence", ["observations of type Sequence", "gymnasium.ObservationWrapper"]),
        ("observes=graph", ["Graph in 'net'", "--set 'environment.ignore=[\"net\"]'"]),
        ("observes=image", ["images of 84 x 84 x 3", "gymnasium.wrappers:ResizeObservation"]),
        ("acts=text", ["actions of type Text", "gymnasium.ActionWrapper"]),
        ("acts=sequence", ["actions of type Sequence", "gymnasium.ActionWrapper"]),
    ],
)
def test_a_space_that_cannot_be_learned_in_is_refused_by_name(kwarg, words, tmp_path):
    spoken = rlflame("train", "--env", "fakes:Odd-v0", "--fleet", "inline", "--env-kwargs", kwarg)
    assert spoken.code == 2
    for text in ("fakes:Odd-v0", *words):
        assert text in spoken.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["Discrete", "MultiDiscrete", "Tuple"])
def test_sac_says_which_actions_it_takes(kind):
    spoken = rlflame("train", "--env", f"space_envs:{kind}-v0", "--algo", "sac", "--dry-run")
    assert spoken.code == 2
    assert "SAC needs continuous actions (Box spaces with finite bounds)" in spoken.err
    assert "--algo ppo" in spoken.err


def test_a_part_that_is_left_out_is_a_setting_of_the_recipe():
    spoken = rlflame("train", "--env", "space_envs:Dict-v0", "--dry-run", "--json")
    environment = spoken.json()["config"]["learning"]["environment"]
    assert environment["ignore"] == ["mission"]
    assert "mission (environment.ignore)" in spoken.err
    words = ("--set", 'environment.ignore=["view"]', "--dry-run", "--json")
    more = rlflame("train", "--env", "space_envs:Dict-v0", *words).json()
    assert more["config"]["learning"]["environment"]["ignore"] == ["mission", "view"]
    assert more["obs_dim"] == spoken.json()["obs_dim"] - 3
    wrong = rlflame("train", "--env", "space_envs:Dict-v0", "--set", 'environment.ignore=["x"]')
    assert wrong.code == 2
    assert "'x'" in wrong.err
    assert "inner/door" in wrong.err


def test_settings_that_a_recipe_does_not_use_are_not_in_it():
    environment = rlflame("train", "--dry-run", "--json").json()["config"]["learning"]
    assert not {"ignore", "wrappers", "action_mask"} & environment["environment"].keys()


def test_masks_are_on_the_first_screen():
    words = ("train", "--env", "space_envs:Masked-Discrete-v0", "--dry-run")
    assert "3 discrete actions (masked by info)" in rlflame(*words).out
    assert "masked" not in rlflame(*words, "--set", "environment.action_mask=off").out


def test_json_says_an_error_on_both_sides():
    spoken = rlflame("train", "--env", "hoper", "--json")
    (event,) = spoken.events()
    assert event["event"] == "error"
    assert event["exit_code"] == spoken.code == 2
    assert "'hoper'" in event["message"]
    assert event["message"] in spoken.err


def test_a_bug_is_one_sentence_and_with_debug_a_traceback(monkeypatch):
    def broken(settings):
        raise ZeroDivisionError("a wonderful bug")

    monkeypatch.setattr(components, "inspect_env", broken)
    quiet = rlflame("train", "--dry-run")
    assert quiet.code == 1
    assert quiet.err.splitlines() == [
        "rlflame: Internal error in rlflame (ZeroDivisionError: a wonderful bug).",
        "  hint: this is a bug; --debug shows the traceback",
    ]
    loud = rlflame("train", "--dry-run", "--debug")
    assert "in broken" in loud.err
    assert loud.err.endswith(quiet.err)


# Runs


def test_a_run_says_where_its_files_are_and_the_next_command(tmp_path):
    spoken = rlflame("train", *TINY, "--steps", "256")
    assert spoken.code == 0, spoken.err
    assert "  files       runs/cartpole-ppo-0" in spoken.lines
    assert spoken.lines[-1] == "  next        rlflame eval runs/cartpole-ppo-0/best.safetensors"
    assert (tmp_path / "runs/cartpole-ppo-0/best.safetensors").is_file()
    assert spoken.err == ""


def test_a_folder_is_never_written_over(tmp_path):
    first = rlflame("train", *TINY, "--steps", "64", "--out", "x", "--quiet")
    before = {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    second = rlflame("train", *TINY, "--steps", "64", "--out", "x", "--quiet")
    assert (first.out, second.out) == ("x\n", "x-2\n")
    plain = rlflame("train", *TINY, "--steps", "64", "--out", "x", "--plain")
    assert plain.err == "x already exists and is left unchanged; this run is in x-3.\n"
    assert before == {p: p.read_bytes() for p in (tmp_path / "x").rglob("*") if p.is_file()}


def test_the_config_of_a_run_makes_the_same_run_again():
    once = rlflame("train", *TINY, "--steps", "256", "--seed", "3", "--json").events()[-1]
    again = rlflame("train", "--config", "runs/cartpole-ppo-3/config.toml", "--json").events()[-1]
    assert again["folder"] == "runs/cartpole-ppo-3-2"
    assert (again["state_digest"], again["digest"]) == (once["state_digest"], once["digest"])


def test_reinforce_says_a_line_every_ten_iterations_and_one_at_the_last():
    words = (*TINY_REINFORCE, "--algo", "reinforce", "--iterations", "25", "--plain")
    spoken = rlflame("train", *words)
    lines = [line.split() for line in spoken.lines if line.startswith("Iteration")]
    assert [line[1] for line in lines] == ["10/25", "20/25", "25/25"]
    for line in lines:
        assert line[2:4] == ["mean", "return"]
        assert line[5] == "loss"
    end = rlflame("train", *words[:-1], "--json").events()[-1]
    assert (end["iterations"], end["episodes"]) == (25, 25 * 4)
    assert {"seconds", "episodes_per_s", "final_mean_reward"} <= end.keys()


def test_the_mean_return_of_a_resumed_run_includes_the_episodes_before_the_resume():
    whole = rlflame("train", *TINY, "--steps", "256", "--json").events()[-1]
    part = rlflame("train", *TINY, "--steps", "128", "--horizon", "256", "--json").events()[-1]
    rest = rlflame("resume", part["folder"], "--steps", "256", "--json").events()[-1]
    assert rest["digest"] == whole["digest"]
    assert rest["final_mean_reward"] == whole["final_mean_reward"] != part["final_mean_reward"]


def test_init_from_starts_a_new_recipe_from_a_policy():
    rlflame("train", *TINY, "--steps", "256", "--out", "a")
    scratch = rlflame("train", *TINY, "--steps", "64", "--json", "--seed", "1").events()[-1]
    words = (*TINY, "--steps", "64", "--json", "--seed", "1", "--init-from", "a/best.safetensors")
    begun = rlflame("train", *words).events()[-1]
    assert begun["state_digest"] != scratch["state_digest"]
    again = rlflame("train", *words).events()[-1]
    assert again["digest"] == begun["digest"]
    wider = rlflame("train", *words, "--set", "network.hidden=[32]")
    assert wider.code == 2
    assert "a/best.safetensors does not fit" in wider.err


def test_until_return_ends_a_run_that_then_does_not_go_on():
    end = rlflame("train", *TINY, "--steps", "9999", "--until-return", "5", "--json").events()[-1]
    assert end["complete"]
    assert 128 <= end["steps"] < 9999
    again = rlflame("resume", end["folder"], "--steps", "20000")
    assert again.code == 2
    assert "reached 5" in again.err


def test_the_most_workers_that_can_help_are_named(tmp_path):
    spoken = rlflame("train", *TINY, "--steps", "64", "--fleet", "local", "--workers", "1")
    expected = "  rollouts     1 local worker; at most 2 can help (learning.rollout.num_slots)"
    assert expected in spoken.lines
    assert not list(tmp_path.glob("MUJOCO_LOG.TXT"))


def test_the_command_shown_for_a_run_that_reached_its_return_works():
    words = ("--steps", "9999", "--until-return", "5", "--out", "done", *TINY)
    first = rlflame("train", *words)
    assert first.code == 0
    assert any("Finished: --until-return was reached at step " in line for line in first.lines)
    again, refused = rlflame("resume", "done"), rlflame("resume", "done", "--steps", "99999")
    (line,) = (line for line in again.lines if "to continue" in line)
    command = (
        "rlflame train --config done/config.toml --init-from done/best.safetensors "
        "--set evaluation.until_return=none"
    )
    assert line.endswith(command)
    assert refused.code == 2
    assert refused.err.rstrip().endswith(command)
    started = rlflame(*command.split()[1:], "--steps", "64")
    assert started.code == 0, started.err
    again = typed_from(Path("done-2/best.safetensors"))
    assert "--set learning.init_policy=none" in again


def test_the_command_shown_for_a_run_without_its_config_works():
    words = ("--steps", "64", "--set", "ppo.anneal_learning_rate=true", "--out", "done", *TINY)
    assert rlflame("train", *words).code == 0
    refused = rlflame("resume", "done", "--steps", "192")
    (command,) = re.findall(r"rlflame (resume .*)", " ".join(refused.err.split()))
    assert command == "resume done --steps 192 --new-schedule"
    started = rlflame(*command.split())
    assert started.code == 0, started.err
    # The new run takes the steps that are missing, from the best policy of the first.
    first, second = (
        rlflame("inspect", name, "--json").json()["files"][0]["recipe"]
        for name in ("done", "done-2")
    )
    assert (second["stop_at_steps"], second["learning"]["horizon_steps"]) == (128, 128)
    assert second["learning"]["init_policy"] == make_policy_id(checkpoint.load(BEST).policy)
    assert second["learning"]["ppo"] == first["learning"]["ppo"]
    assert rlflame("resume", "done", "--new-schedule").code == 2
    Path("done/config.toml").unlink()
    refused = rlflame("resume", "done", "--steps", "192")
    (command,) = re.findall(r"rlflame (train .*)", " ".join(refused.err.split()))
    assert "--config" not in command
    assert rlflame(*shlex.split(command), "--dry-run").code == 0


BEST = Path("done/best.safetensors")


def typed_from(policy):
    return resume.format_train_command(checkpoint.load(policy), policy)


def test_a_dry_run_looks_at_the_policy_to_start_from():
    absent = rlflame("train", "--dry-run", "--init-from", "nope.safetensors")
    assert (absent.code, absent.out) == (1, "")
    assert "nope.safetensors does not exist" in absent.err
    assert rlflame("train", *TINY, "--steps", "64", "--out", "a").code == 0
    words = ("train", *TINY, "--steps", "64", "--init-from", "a/best.safetensors")
    dry_run = rlflame(*words, "--dry-run", "--json").json()["config"]["learning"]["init_policy"]
    assert rlflame(*words, "--out", "b").code == 0
    (file,) = rlflame("inspect", "b", "--json").json()["files"]
    assert dry_run == file["recipe"]["learning"]["init_policy"]
    other = rlflame(*words, "--env", "acrobot", "--dry-run")
    assert other.code == 2
    assert "does not fit" in other.err


@pytest.mark.parametrize("fleet", ["inline", "local"])
def test_workers_that_began_with_the_command_work_or_end(fleet, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2), raising=False)
    worked, ended = [], []
    send, real = Channel.send_bytes, running_module.train_run

    def sent(self, kind, payload):
        if kind is MessageKind.TASK:
            worked.append(self)
        send(self, kind, payload)

    def trained(*given, **named):
        ended.append(process.has_exited)
        return real(*given, **named)

    monkeypatch.setattr(Channel, "send_bytes", sent)
    monkeypatch.setattr(running_module, "train_run", trained)
    words = ("--fleet", fleet, "--workers", "1", "--steps", "64", "--out", "run")
    begun = rollouts.recorded_processes(monkeypatch, "rlflame.fleet.prestart")
    with PrestartPool() as early:
        (process,) = begun
        assert rlflame("train", *TINY[2:], *words, early=early).code == 0
    assert ended == [fleet == "inline"]  # when training begins
    assert {*worked} == ({process.channel} if fleet == "local" else set())


def test_what_memory_cannot_hold_is_refused_before_it_is_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "measure_usable_bytes", lambda: 300_000_000)
    words = ("train", "--env", "hopper", "--local", "--out", tmp_path / "x")
    spoken = rlflame(*words, "--set", "rollout.steps=100000")
    assert spoken.code == 2
    assert "A batch of 6,400,000 steps takes" in spoken.err
    assert "only 300 MB is available" in spoken.err
    assert "  hint: use a smaller learning.rollout.steps" in spoken.err
    assert not (tmp_path / "x").exists()
    monkeypatch.undo()
    spoken = rlflame(*words, "--set", "network.hidden=[65536,65536]")
    assert spoken.code == 2
    assert "hidden layers of [65536, 65536] units takes" in spoken.err
    assert "a smaller learning.network.hidden" in spoken.err
    dry_run = rlflame(*words, "--set", "network.hidden=[65536,65536]", "--dry-run")
    assert (dry_run.code, "This machine cannot train this recipe: " in dry_run.err) == (0, True)


def test_train_says_once_that_the_fast_loop_is_off(monkeypatch):
    """Gymnasium's source files may differ from those that the loop was compared with."""
    words = ("train", *TINY, "--env", "hopper", "--steps", "64", "--set", "evaluation.episodes=1")
    assert "Gymnasium" not in rlflame(*words).err
    monkeypatch.setattr(known_spaces, "is_verified", lambda module: module != "gymnasium.core")
    note = f"Gymnasium {gymnasium.__version__} steps MuJoCo"
    assert rlflame(*words).err.count(note) == 1
    assert note not in rlflame("train", *TINY, "--steps", "64").err


LINEAR = ("--set", "reinforce.anneal_learning_rate=true")
LONGER_RUNS = {
    "iterations": ("--algo", "reinforce", *TINY_REINFORCE, *LINEAR),
    "steps": TINY,
}


@pytest.mark.parametrize(
    ("unit", "half", "end"), [("iterations", "2", "4"), ("steps", "128", "256")]
)
def test_a_run_in_two_parts_equals_a_longer_run(tmp_path, unit, half, end):
    words, option = LONGER_RUNS[unit], f"--{unit}"
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    assert rlflame("train", *words, option, half, "--horizon", end, "-o", a).code == 0
    resumed = rlflame("resume", a, option, end)
    assert resumed.code == 0, resumed.err
    assert rlflame("train", *words, option, end, "-o", b).code == 0
    shown = rlflame("inspect", a, b, "--json")
    assert (shown.code, shown.json()["equal"]) == (0, True)
    # Without the horizon, the first part has learned with another schedule.
    assert rlflame("train", *words, option, half, "-o", c).code == 0
    refused = rlflame("resume", c, option, end)
    assert refused.code == 2
    assert f"resume {c} {option} {end} --new-schedule" in " ".join(refused.err.split())


def test_ppo_is_not_resumed_by_iterations(tmp_path):
    run = tmp_path / "run"
    assert rlflame("train", *TINY, "--steps", "128", "-o", run).code == 0
    for words in ((), ("--new-schedule",)):
        refused = rlflame("resume", run, "--iterations", "3", *words)
        assert (refused.code, refused.out) == (2, "")
        assert len(refused.err.splitlines()) == 2
        assert "--iterations is for REINFORCE; PPO counts steps." in refused.err
        assert "--steps 256" in refused.err
    refused = rlflame("resume", run, "--iterations", "0")
    assert (refused.code, refused.out) == (2, "")
    assert "at least 1" in refused.err
    assert "--new-schedule" not in refused.err


def test_a_run_that_is_limited_by_iterations_continues_by_iterations(tmp_path):
    run = tmp_path / "run"
    ends = ("--set", "stop_at_iterations=1", "--set", "stop_at_steps=none")
    assert rlflame("train", *TINY, *ends, "-o", run).code == 0
    refused = rlflame("resume", run, "--iterations", "3")
    assert f"resume {run} --iterations 3 --new-schedule" in " ".join(refused.err.split())
    onward = rlflame("resume", run, "--iterations", "3", "--new-schedule", "--json")
    assert onward.code == 0, onward.err
    assert onward.events()[-1]["iterations"] == 2


def test_a_new_schedule_is_counted_in_iterations_too(tmp_path):
    words = LONGER_RUNS["iterations"]
    assert rlflame("train", *words, "--iterations", "2", "-o", tmp_path / "a").code == 0
    onward = rlflame("resume", tmp_path / "a", "--iterations", "5", "--new-schedule", "--json")
    assert onward.code == 0, onward.err
    assert onward.events()[-1]["iterations"] == 3


def test_the_end_of_a_run_in_iterations(tmp_path):
    run = tmp_path / "run"
    words = ("--algo", "reinforce", *TINY_REINFORCE, "--iterations", "2", "-o", run)
    assert rlflame("train", *words).code == 0
    finished = rlflame("resume", run)
    assert f"resume {run} --iterations 4" in " ".join(finished.out.split())
    refused = rlflame("resume", run, "--iterations", "1")
    assert (refused.code, "--iterations 4" in refused.err) == (2, True)
    refused = rlflame("resume", run, "--iterations", "4", "--steps", "4000")
    assert (refused.code, "cannot be combined" in refused.err) == (2, True)
    assert rlflame("resume", run, "--iterations", "3", "--json").events()[-1]["iterations"] == 3


def test_an_unknown_device_is_answered_with_the_devices():
    spoken = rlflame("train", "--device", "gpu")
    assert spoken.code == 2
    assert "--device gpu is not a device." in spoken.err
    assert "--device cpu, cuda or auto" in spoken.err
