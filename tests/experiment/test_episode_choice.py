"""Environments that keep state between episodes, and those that do not."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from commands import rlflame

from rlflame import api
from rlflame.config.recipe import EnvironmentSettings, RunConfig
from rlflame.console.base import NullView
from rlflame.errors import EnvironmentFailure
from rlflame.experiment import comparison, components, episode_choice
from rlflame.experiment.episode_choice import choose_episode_start, compare_episodes
from rlflame.fleet.inline import InlineFleet
from rlflame.rollout.envs import episode_comparison, gymnasium_env
from rlflame.rollout.envs.episode_comparison import ComparisonEnv
from rlflame.rollout.envs.gymnasium_env import (
    RestorableEnv,
    is_known_reusable,
    is_known_stateful,
)
from rlflame.rollout.task import make_fresh_state
from rlflame.storage import checkpoint
from rlflame.training.stop_signal import NullStop


class Line(gymnasium.Env):
    """A walk on a line, with a kind of state that a used instance keeps."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    #: The numbers of instances that were made and that are open.
    made = opened = 0

    def __init__(self, kind: str = "plain") -> None:
        if kind == "single" and Line.opened:
            raise RuntimeError("the port is in use")
        Line.made += 1
        Line.opened += 1
        self.kind, self.episodes, self.mean = kind, 0, 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.x = self.np_random.uniform(-1.0, 1.0)
        return self._observe(), {}

    def step(self, action):
        self.x += 0.1 * (2 * int(action) - 1)
        bonus = float(self.kind == "counter" and self.episodes >= 3)
        ends = self.kind == "curriculum" and self.episodes >= 5
        return self._observe(), 1.0 + bonus, ends, False, {}

    def close(self):
        Line.opened -= 1

    def _observe(self):
        value = self.x
        if self.kind == "normaliser":
            self.mean = 0.9 * self.mean + 0.1 * self.x
            value -= self.mean
        if self.kind == "random":
            value += np.random.uniform()
        return np.array([value], np.float32)


for limit in (7, 5_000):
    gymnasium.register(f"Line{limit}-v0", Line, max_episode_steps=limit)


@pytest.fixture(autouse=True)
def _no_instances(monkeypatch):
    monkeypatch.setattr(Line, "made", 0)
    monkeypatch.setattr(Line, "opened", 0)
    # No note may depend on the speed of this machine.
    monkeypatch.setattr(episode_choice, "_NOTABLE_SHARE", 1.0)


class Notes(NullView):
    def __init__(self):
        self.notes = []

    def show_note(self, text):
        self.notes.append(text)


def make_config(tmp_path, kind, id="Line7-v0", **environment):
    return RunConfig.model_validate(
        {
            "stop_at_steps": 256,
            "learning": {
                "environment": {"id": id, "kwargs": {"kind": kind}, **environment},
                "rollout": {"num_slots": 2, "envs_per_slot": 2, "steps": 32},
                "network": {"hidden": [8]},
                "ppo": {"minibatch_size": 64, "epochs": 1, "anneal_learning_rate": False},
            },
            "evaluation": {"final_episodes": 2},
            "runtime": {"fleet": "inline", "out": str(tmp_path / "run")},
        }
    )


def train(tmp_path, kind, **options):
    """Train; return the checkpoint, and the notes."""
    view = Notes()
    result = api.train(make_config(tmp_path, kind, **options), show=view)
    return checkpoint.load(result.folder / "latest.safetensors"), view.notes


@pytest.mark.parametrize(
    ("kind", "place", "difference"),
    [
        ("counter", "episode 3, step 1,", "the reward"),
        ("normaliser", "episode 2,", "the first observation"),
        ("curriculum", "episode 5, step 1,", "the end"),
    ],
)
def test_an_environment_that_keeps_state_gets_new_instances_and_one_note(
    tmp_path, kind, place, difference
):
    source, notes = train(tmp_path, kind)
    assert source.recipe.learning.environment.episodes == source.env.episodes == "fresh"
    (note,) = notes
    for text in (f"in {place}", f"{difference} of a used instance", "normalise_observations"):
        assert text in note
    assert "np.random" not in note
    # Each of the 4 x 64 / 7 episodes of training has an instance of its own.
    assert Line.made > 4 * (64 // 7)
    assert 'episodes = "fresh"' in (tmp_path / "run" / "config.toml").read_text()


def test_a_wrapper_may_keep_state_of_a_known_environment(tmp_path):
    wrapper = {"name": "gymnasium.wrappers:NormalizeObservation", "kwargs": {}}
    environment = {"id": "CartPole-v1", "kwargs": {}, "wrappers": [wrapper]}
    config = make_config(tmp_path, "plain")
    learning = config.learning.model_dump() | {"environment": environment}
    config = RunConfig.model_validate(config.model_dump() | {"learning": learning})
    view = Notes()
    folder = api.train(config, show=view).folder
    source = checkpoint.load(folder / "latest.safetensors")
    assert source.env.episodes == "fresh"
    assert any("CartPole-v1 keeps state between episodes" in note for note in view.notes)


def test_global_random_numbers_are_named_as_the_cause(tmp_path):
    source, notes = train(tmp_path, "random")
    assert source.env.episodes == "fresh"
    (note,) = notes
    assert "Two new instances" in note
    assert "np.random" in note
    assert "self.np_random" in note


def test_an_environment_without_such_state_is_reused_with_equal_bits(tmp_path):
    source, notes = train(tmp_path / "auto", "plain")
    assert notes == []
    assert source.recipe.learning.environment.episodes == source.env.episodes == "reuse"
    # One instance is made to read the spaces, six by the comparison, four by the rows in training
    # and two by the rows of the evaluation.
    assert Line.made == 1 + 6 + 4 + 2
    fresh, _ = train(tmp_path / "fresh", "plain", episodes="fresh")
    assert fresh.state_digest == source.state_digest
    assert fresh.digest != source.digest
    # A choice in the recipe is not questioned.
    reused, _ = train(tmp_path / "reuse", "plain", episodes="reuse")
    assert reused.digest == source.digest


def test_an_environment_that_cannot_be_compared_gets_new_instances(tmp_path):
    source = components.make_initial_checkpoint(
        make_config(tmp_path, "single").recipe,
        replace(
            components.inspect_env(EnvironmentSettings(id="Line7-v0")), kwargs={"kind": "single"}
        ),
    )
    notes = []
    with InlineFleet() as fleet:
        choice = choose_episode_start(source, fleet, NullStop(), notes.append)
    assert choice.env.episodes == "fresh"
    (note,) = notes
    assert "the port is in use" in note


def test_an_environment_that_fails_on_a_new_instance_ends_the_run_before_it_starts(
    tmp_path, monkeypatch
):
    def fail(self, action):
        raise RuntimeError("the line is broken")

    monkeypatch.setattr(Line, "step", fail)
    config, notes = make_config(tmp_path, "plain"), []
    env = components.inspect_env(config.recipe.learning.environment)
    source = components.make_initial_checkpoint(config.recipe, env)
    with InlineFleet() as fleet, pytest.raises(EnvironmentFailure, match="the line is broken"):
        choose_episode_start(source, fleet, NullStop(), notes.append)
    assert not notes


def test_a_worker_can_compare_again(tmp_path):
    recipe = make_config(tmp_path, "counter").recipe
    env = components.inspect_env(recipe.learning.environment)
    source = components.make_initial_checkpoint(recipe, env)
    with InlineFleet() as fleet:
        first, second = (compare_episodes(source, fleet) for _ in range(2))
    assert first == second
    assert (first.episode, first.step) == (3, 1)


def test_a_resumed_run_keeps_its_choice_without_a_question(tmp_path):
    first, _ = train(tmp_path, "counter")
    view = Notes()
    runtime = make_config(tmp_path, "counter").runtime
    result = api.resume(tmp_path / "run", runtime, steps=512, show=view)
    resumed = checkpoint.load(result.folder / "latest.safetensors")
    assert resumed.env.episodes == first.env.episodes == "fresh"
    assert view.notes == []
    evaluated = api.evaluate(resumed, comparison.make_recorded_plan(resumed, tmp_path), runtime)
    assert evaluated.returns == resumed.evaluation.returns


@pytest.mark.parametrize("id", ["CartPole-v1", "Acrobot-v1", "LunarLander-v3", "BipedalWalker-v3"])
def test_known_environments_are_reused_without_a_question(id):
    assert is_known_reusable(id)
    settings = EnvironmentSettings(id=id)
    assert settings.model_dump(mode="json").keys() == {
        "id",
        "kwargs",
        "max_episode_steps",
        "file_digest",
    }
    env = RestorableEnv(components.inspect_env(settings), 0)
    out = np.zeros(env.spec.observation_size, np.float32)
    env.reset(0, 1, out)
    assert env._is_reusable
    env.close()


def test_every_environment_that_is_reused_today_is_known_by_its_id():
    for id in gymnasium.registry:
        if not id.startswith(("phys2d/", "tabular/", "GymV", "Line")) and is_known_reusable(id):
            assert gymnasium.registry[id].entry_point.startswith("gymnasium.envs.")
    assert not is_known_reusable("Line7-v0")
    assert not is_known_reusable("FrozenLake-v1")
    assert not is_known_reusable("Unknown-v0")


def test_a_run_may_insist_on_a_choice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--set", "environment.episodes=fresh", "--dry-run", "--json")
    config = rlflame("train", *words).json()["config"]
    assert config["learning"]["environment"]["episodes"] == "fresh"
    wrong = rlflame("train", "--set", "environment.episodes=never", "--dry-run")
    assert wrong.code == 2
    assert "'fresh'" in wrong.err


def make_spec(kind, id="Line7-v0"):
    spec = components.inspect_env(EnvironmentSettings(id=id, kwargs={"kind": kind}))
    return replace(spec, episodes="compare")


def play(spec):
    """Play a comparison with a fixed action; return its answer and the number of episodes."""
    env, out = ComparisonEnv(spec), np.zeros((1, 1), np.float32)
    steps = episode_comparison.COMPARISON_STEPS
    rewards, ends = np.zeros((steps, 1)), np.zeros((2, 1), np.bool_)
    env.restore(0, make_fresh_state(0, 0), out[0])
    episode = 0
    for step in range(steps):
        if env.step(range(1), np.ones(1, np.int64), out, rewards[step], ends[0], ends[1]):
            episode += 1
            env.reset_row(0, episode, episode, out[0])
    fragment = type("Fragment", (), {"rewards": rewards})
    return episode_comparison.read_comparison(fragment), episode


def test_long_episodes_are_compared_up_to_a_thousand_steps():
    answer, episodes = play(make_spec("plain", "Line5000-v0"))
    assert (answer.difference, episodes) == ("", 5)
    answer, _ = play(make_spec("counter", "Line5000-v0"))
    assert (answer.episode, answer.step, answer.difference) == (3, 1, "the reward")
    assert Line.opened == 0


@pytest.mark.parametrize(
    ("kind", "seconds_per_step", "figure"),
    # An episode has seven steps beside the constructor: 2 / (2 + 7 x 0.5), and 2 / (2 + 7 x 3).
    [("counter", 0.5, "takes 2 s, about 36%"), ("counter", 3.0, ""), ("plain", 0.5, "")],
)
def test_a_note_names_the_share_of_a_constructor_of_two_seconds(
    tmp_path, monkeypatch, kind, seconds_per_step, figure
):
    now = 0.0
    make, step = Line.__init__, Line.step

    def make_in_two_seconds(self, **kwargs):
        nonlocal now
        now += 2.0
        make(self, **kwargs)

    def step_for_a_while(self, action):
        nonlocal now
        now += seconds_per_step
        return step(self, action)

    monkeypatch.setattr(episode_choice, "_NOTABLE_SHARE", 0.1)
    monkeypatch.setattr(Line, "__init__", make_in_two_seconds)
    monkeypatch.setattr(Line, "step", step_for_a_while)
    recipe, notes = make_config(tmp_path, kind).recipe, []
    env = components.inspect_env(recipe.learning.environment)
    source = components.make_initial_checkpoint(recipe, env)
    with InlineFleet() as fleet:
        choose_episode_start(source, fleet, NullStop(), notes.append, lambda: now)
    costs = [note for note in notes if "Making an instance" in note]
    assert len(costs) == bool(figure)
    assert all(figure in note for note in costs)
    assert len(notes) - len(costs) == (kind == "counter")


def test_a_replay_that_differs_names_global_random_numbers():
    for kind, is_named in (("random", True), ("plain", False)):
        spec = replace(make_spec(kind), episodes="auto")
        env, out = RestorableEnv(spec, 0), np.zeros(1, np.float32)
        env.reset(0, 1, out)
        env.step(np.int64(1), out)
        state = env.snapshot(out + (0.0 if is_named else 1.0))
        with pytest.raises(Exception, match="different observation") as error:
            RestorableEnv(spec, 0).restore(state, np.zeros(1, np.float32))
        assert ("np.random" in str(error.value)) == is_named


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("panda_gym:PandaReach-v3", True),
        ("minatar.gym:BaseEnv", True),
        ("Bullet-v0", True),
        ("CartPole-v1", False),
        ("my_panda_gym:Reach-v0", False),
    ],
)
def test_packages_that_keep_state_are_known(id, expected, monkeypatch):
    entry = "pybullet_envs_gymnasium.gym_pendulum_envs:InvertedPendulumBulletEnv"
    spec = gymnasium.envs.registration.EnvSpec("Bullet-v0", entry_point=entry)
    monkeypatch.setitem(gymnasium.registry, "Bullet-v0", spec)
    assert is_known_stateful(id) == expected


def test_an_environment_that_is_known_to_keep_state_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(gymnasium_env, "_STATEFUL_PACKAGES", {__name__})
    source, (note,) = train(tmp_path, "plain")
    assert source.env.episodes == "fresh"
    assert "is known to keep state" in note
