"""The Python interface: the results of the command line, and policies alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from commands import TINY, TINY_REINFORCE, rlflame
from configs import make_config

from rlflame import api
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.base import NullView
from rlflame.errors import CheckpointError, ConfigError
from rlflame.experiment import resume
from rlflame.experiment.resume import Budget
from rlflame.fleet.inline import InlineFleet
from rlflame.rollout.seeding import Role, make_reset_seed
from rlflame.storage import checkpoint
from rlflame.training.evaluation import EvaluationPlan

INLINE = RuntimeSettings(fleet="inline")
FILE = Path("best.safetensors")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tiny(*more: str, env="cartpole", algo=None, **settings):
    words = TINY_REINFORCE if algo == "reinforce" else TINY
    sets = [word for word in words if word != "--set"]
    settings.setdefault("stop_at_steps", 128)
    return make_config(env, algo, [*sets, *more], settings)


# Policies


def by_hand(found, observation):
    """The policy's action in plain Python numbers, unit by unit."""
    weights = {name: array.astype(np.float64).tolist() for name, array in found.policy.items()}
    values = [float(x) for x in np.asarray(observation, np.float32).ravel()]
    if "normaliser.mean" in weights:
        clip = found.policy_spec.observation_clip
        pairs = zip(values, weights["normaliser.mean"], weights["normaliser.scale"], strict=True)
        values = [max(-clip, min(clip, (x - mean) * scale)) for x, mean, scale in pairs]
    layers = len(found.policy_spec.hidden) + 1
    for layer in range(layers):
        columns = zip(*weights[f"actor.{layer}.weight"], strict=True)
        values = [
            sum(x * w for x, w in zip(values, column, strict=True)) + bias
            for column, bias in zip(columns, weights[f"actor.{layer}.bias"], strict=True)
        ]
        if layer < layers - 1:
            values = [math.tanh(x) for x in values]
    return values


def test_a_loaded_policy_takes_the_action_with_the_largest_output():
    result = api.train(tiny())
    policy = api.load_policy(result.folder)
    assert policy.file == result.folder / "best.safetensors"
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(30):
        observation = rng.normal(0.0, 2.0, 4)
        action = policy(observation)
        left, right = by_hand(policy.checkpoint, observation)
        if abs(left - right) > 1e-6:
            assert action == int(right > left)
        seen.add(action)
    assert seen == {0, 1}


def test_a_loaded_policy_of_a_gaussian_takes_its_mean_within_the_bounds():
    result = api.train(tiny(env="pendulum"))
    policy = api.load_policy(str(result.folder / "best.safetensors"))
    env = gymnasium.make("Pendulum-v1")
    rng = np.random.default_rng(0)
    for size in (1.0, 100.0):
        observation = rng.normal(0, size, 3).astype(np.float32)
        action = policy(observation)
        assert env.action_space.contains(action)
        expected = np.clip(by_hand(policy.checkpoint, observation), -2.0, 2.0)
        np.testing.assert_allclose(action, expected, atol=1e-5)
    held = policy(observation)
    before = held.copy()
    policy(-observation)
    assert np.array_equal(held, before)  # the returned array belongs to the caller


def test_observations_are_flattened_and_actions_begin_where_the_space_does():
    config = tiny(env="fakes:Odd-v0", **{"learning.environment.max_episode_steps": 4})
    policy = api.load_policy(api.train(config).folder / "latest.safetensors")
    action = policy(np.zeros((2, 3)))
    assert action in (5, 6, 7)
    assert policy(np.zeros(6)) == action
    with pytest.raises(ValueError, match="4 values; the policy needs 6"):
        policy(np.zeros(4))


@pytest.mark.parametrize("acts", ["matrix", "scalar", "unbounded"])
def test_actions_have_the_shape_of_their_space(acts):
    limit = {"learning.environment.max_episode_steps": 4}
    kwargs = {"learning.environment.kwargs": {"acts": acts}}
    policy = api.load_policy(
        api.train(tiny(env="fakes:Odd-v0", **limit, **kwargs)).folder / "latest.safetensors"
    )
    world = gymnasium.make("fakes:Odd-v0", acts=acts)
    action = policy(world.reset()[0])
    assert isinstance(action, np.ndarray)
    assert world.action_space.contains(action)
    found = policy.checkpoint
    flat = api.LoadedPolicy(replace(found, env=replace(found.env, action_shape=None)))
    assert np.array_equal(flat(np.arange(6)), action.ravel())


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e200])
def test_an_observation_that_holds_no_number_gets_no_action(number):
    policy = api.load_policy(api.train(tiny()).folder / "best.safetensors")
    with pytest.raises(ValueError, match="NaN, infinity or a value too large"):
        policy(np.array([0.0, number, 0.0, 0.0]))
    assert policy(np.zeros(4)) in (0, 1)


def test_a_policy_file_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        api.load_policy(tmp_path / "absent.safetensors")


# Training


def test_python_and_the_command_line_do_the_same():
    words = ("train", *TINY, "--steps", "128", "--json")
    typed = rlflame(*words, "--out", "typed").events()[-1]
    result = api.train(tiny(**{"runtime.out": "called"}))
    assert (result.state_digest, result.digest) == (typed["state_digest"], typed["digest"])
    assert (result.complete, result.has_trained) == (True, True)
    assert result.progress.steps == typed["steps"] == 128
    assert result.evaluation.as_dict()["returns"] == tuple(typed["evaluation"]["returns"])


def test_names_are_enough():
    sets = [word for word in TINY if word != "--set"]
    result = api.train(env="acrobot", sets=[*sets, "stop_at_steps=64"])
    assert result.folder.name == "acrobot-ppo-0"
    assert checkpoint.load(result.folder / "latest.safetensors").env.id == "Acrobot-v1"


def test_a_fleet_that_is_handed_in_serves_several_runs_and_stays_open():
    alone = [api.train(tiny(**{"learning.seed": seed})).digest for seed in (1, 2)]
    with InlineFleet() as fleet:
        shared = [api.train(tiny(**{"learning.seed": seed}), fleet=fleet).digest for seed in (1, 2)]
        result = api.train(tiny(), fleet=fleet)
        source = checkpoint.load(result.folder / "best.safetensors")
        record = api.evaluate(source, EvaluationPlan(3, max_episode_steps=20), fleet=fleet)
        assert record == result.evaluation
    assert shared == alone


class Listening(NullView):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.notes: list[str] = []

    def open(self, run):
        self.heard.append(f"begin {run.folder} {run.fleet} {run.workers} {run.is_resume}")
        return super().open(run)

    def show_iteration(self, metrics, returns):
        self.heard.append(f"iteration {metrics['steps']}")

    def show_evaluation(self, steps, record, best):
        self.heard.append(f"evaluation {steps}")

    def show_checkpoint(self, path, progress):
        self.heard.append(f"saved {progress.steps}")

    def show_note(self, text):
        self.notes.append(text)


def test_a_view_receives_the_events_of_a_run_in_order():
    show = Listening()
    api.train(tiny(), show=show)
    assert show.heard == [
        "begin runs/cartpole-ppo-0 inline 1 False",
        "saved 0",
        "iteration 64",
        "iteration 128",
        "evaluation 128",
        "saved 128",
        "saved 128",  # saved again, with the final evaluation
    ]
    assert show.notes == []


class After:
    """Requests a stop after a number of iterations."""

    def __init__(self, iterations: int) -> None:
        self.left = iterations
        self.inner = Listening()

    @property
    def is_requested(self):
        return sum(text.startswith("iteration") for text in self.inner.heard) >= self.left

    def allow_interrupt(self):
        import contextlib

        return contextlib.nullcontext()


@pytest.mark.parametrize("algo", ["ppo", "reinforce"])
def test_stopped_and_resumed_equals_undisturbed(algo, tmp_path):
    flags = {"stop_at_steps": None, "stop_at_iterations": 6}
    config = tiny(algo=algo, **flags, **{"runtime.out": "a"})
    undisturbed = api.train(config)
    stop = After(2)
    config = tiny(algo=algo, **flags, **{"runtime.out": "b"})
    cut = api.train(config, show=stop.inner, stop=stop)
    assert (cut.complete, cut.progress.iteration, cut.evaluation) == (False, 2, None)
    whole = api.resume(cut.folder, INLINE)
    assert (whole.complete, whole.digest) == (True, undisturbed.digest)
    for name in ("metrics.jsonl", "episodes.csv", "result.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert whole.evaluation == undisturbed.evaluation


def test_a_finished_run_is_left_alone_and_a_missing_score_is_made_up_for():
    done = api.train(tiny())
    again = api.resume(done.folder, INLINE)
    assert (again.has_trained, again.complete, again.digest) == (False, True, done.digest)
    assert again.evaluation == done.evaluation
    # As if the process had been killed between the last checkpoint and the final evaluation.
    (done.folder / "result.json").unlink()
    scored = api.resume(done.folder, INLINE)
    assert (scored.has_trained, scored.digest) == (True, done.digest)
    assert scored.evaluation == done.evaluation
    assert (done.folder / "result.json").exists()


def test_extending_changes_the_end_and_nothing_else():
    done = api.train(tiny())
    found = checkpoint.load(done.folder / "latest.safetensors")
    longer = resume.copy_with_end(found, Budget("steps", 500))
    assert longer.recipe.stop_at_steps == 500
    assert longer.recipe.learning == found.recipe.learning
    assert longer.recipe.evaluation == found.recipe.evaluation
    assert resume.extend_budget(found, None, FILE) is found
    assert resume.extend_budget(found, Budget("steps", 128), FILE) is found
    with pytest.raises(ConfigError, match="reached 0 by step 128") as refused:
        resume.extend_budget(found, Budget("steps", 100), FILE)
    assert "--steps 100" in (refused.value.hint or "")
    assert resume.is_finished(found)
    assert not resume.is_finished(longer)


def test_a_different_machine_is_noted_at_resume():
    stop = After(1)
    cut = api.train(tiny(), show=stop.inner, stop=stop)
    for file in (cut.folder / "latest.safetensors", *(cut.folder / "checkpoints").iterdir()):
        found = checkpoint.load(file)
        checkpoint.save(file, replace(found, fingerprint={**found.fingerprint, "numpy": "1.0"}))
    show = Listening()
    api.resume(cut.folder, INLINE, show=show)
    assert [note for note in show.notes if "numpy: 1.0 -> " in note]


def test_a_policy_that_does_not_fit_is_refused_before_a_folder_is_made(tmp_path):
    source = api.train(tiny(**{"runtime.out": "a"})).folder / "best.safetensors"
    with pytest.raises(ConfigError, match="does not fit this recipe"):
        api.train(tiny(env="acrobot"), init_from=source)
    assert not (tmp_path / "runs").exists()


def test_starting_from_a_policy_starts_with_its_very_weights():
    source = api.train(tiny()).folder / "best.safetensors"

    class First(NullView):
        def open(self, run):
            (checkpoint,) = run.checkpoints.values()
            self.policy = checkpoint.policy
            return super().open(run)

    show = First()
    api.train(tiny(**{"learning.seed": 9}), init_from=source, show=show)
    theirs = checkpoint.load(source).policy
    for name in theirs:
        if name.startswith("actor."):
            assert np.array_equal(theirs[name], show.policy[name]), name
    np.testing.assert_allclose(show.policy["normaliser.mean"], theirs["normaliser.mean"])
    np.testing.assert_allclose(
        show.policy["normaliser.scale"], theirs["normaliser.scale"], rtol=1e-4
    )


def test_a_recipe_that_names_its_policy_starts_from_no_other():
    one, other = (
        api.train(tiny(**{"learning.seed": seed})).folder / "best.safetensors" for seed in (1, 2)
    )
    begun = api.train(tiny(**{"learning.seed": 9}), init_from=one)
    named = checkpoint.load(begun.folder / "latest.safetensors").recipe.learning.init_policy
    again = {"learning.seed": 9, "learning.init_policy": named}
    assert api.train(tiny(**again), init_from=one).digest == begun.digest
    before = sorted(Path("runs").iterdir())
    with pytest.raises(ConfigError, match=f"policy {named}, but {other} holds [0-9a-f]{{32}}"):
        api.train(tiny(**again), init_from=other)
    assert sorted(Path("runs").iterdir()) == before


# Evaluation


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "Hopper-v5"])
def test_an_evaluation_is_what_a_plain_loop_over_gymnasium_returns(env):
    source = checkpoint.load(api.train(tiny(env=env)).folder / "best.safetensors")
    record = api.evaluate(source, EvaluationPlan(5, seed=7), INLINE)
    policy, world = api.LoadedPolicy(source), gymnasium.make(env)
    for episode in range(5):
        seed = make_reset_seed(7, Role.EVALUATION_RESET, episode)
        observation, _ = world.reset(seed=seed)
        total, length, over = 0.0, 0, False
        while not over:
            observation, reward, terminated, truncated, _ = world.step(policy(observation))
            total, length, over = total + float(reward), length + 1, terminated or truncated
        assert record.lengths[episode] == length
        assert record.returns[episode] == pytest.approx(total, rel=1e-9)


def test_an_environment_that_has_changed_is_named():
    source = checkpoint.load(api.train(tiny()).folder / "best.safetensors")
    other = replace(source, env=replace(source.env, observation_size=5))
    with pytest.raises(CheckpointError, match="observation_size 4 here, but 5 in the checkpoint"):
        api.evaluate(other, EvaluationPlan(1), INLINE)


def test_seeds_are_refused_with_several_learners(tmp_path):
    config = tiny("runtime.learners=2", f"runtime.out={tmp_path / 'x'}")
    with pytest.raises(ConfigError):
        api.train_seeds(config, (0, 1))
    assert not (tmp_path / "x").exists()
