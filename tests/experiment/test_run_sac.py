"""SAC with the real trainer: numbers of updates, transitions, odd sizes."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import failpoints
import gymnasium
import numpy as np
import pytest
from commands import TINY_SAC, finished, process, rlflame
from gymnasium import spaces
from tiny_runs import Recording, Run, run

from rlflame.config.algorithms import SacSettings
from rlflame.config.recipe import Recipe
from rlflame.errors import EnvironmentFailure, LearningError
from rlflame.experiment import components
from rlflame.fleet.local import LocalFleet
from rlflame.storage import checkpoint
from rlflame.storage.run_folder import load_newest_checkpoint


class Marked(gymnasium.Env):
    """An observation contains the episode's mark and the step in it.

    Episodes with an even mark terminate after three steps. The others never end by themselves.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 2000.0, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._mark, self._t = int(self.np_random.integers(1000)), 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        ends = self._mark % 2 == 0 and self._t == 3
        return self._seen(), float(self._t), ends, False, {}

    def _seen(self) -> Any:
        return np.array([self._mark, self._t], np.float32)


class Edge(gymnasium.Env):
    """Actions of any shape and range, rewards of any size, episodes of any length."""

    def __init__(
        self,
        low: float = -1.0,
        high: float = 1.0,
        shape: tuple[int, ...] = (2,),
        reward: float = 1.0,
        length: int = 6,
        scale: float = 1.0,
        spoiled: str = "",
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Box(low, high, tuple(shape), np.float32)
        self._reward, self._length, self._scale = reward, length, scale
        self._spoiled = spoiled

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        self._spoils = self._spoiled and self.np_random.random() < 0.05
        return self._seen(), {}

    def _seen(self) -> Any:
        return np.float32(self._scale) * self.np_random.standard_normal(3).astype(np.float32)

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"not an action: {action!r}")
        self._t += 1
        seen = self._seen()
        reward = self._reward * float(seen[0] / np.float32(self._scale))
        if self._spoils and self._t == 4:
            quantity, value = self._spoiled.split()
            if quantity == "reward":
                reward = float(value)
            else:
                seen[1] = float(value)
        return seen, reward, self._t >= self._length, False, {}


gymnasium.register("Marked-v0", entry_point=Marked, max_episode_steps=5)
gymnasium.register("Edge-v0", entry_point=Edge)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tiny(iterations: int = 6, env: str = "Pendulum-v1", **changes: Any) -> dict[str, Any]:
    """A recipe of a few updates, with the changes of `sac`, `rollout` and so on."""
    kwargs = changes.pop("kwargs", {})
    learning: dict[str, Any] = {
        "algorithm": "sac",
        "environment": {"id": env, "kwargs": kwargs},
        "rollout": {"num_slots": 2, "envs_per_slot": 2, "steps": 8},
        "network": {"hidden": [16], "normalise_observations": False},
        "sac": {"learning_starts": 40, "batch_size": 16, "updates_per_step": 0.5},
    }
    learning = failpoints.merged(learning, changes)
    return {"stop_at_iterations": iterations, "learning": learning}


def n_updates(made: Run) -> list[int]:
    return [int(metrics["n_updates"]) for metrics in made.recorded.metrics]


# Numbers of updates


def test_the_classical_cadence_is_one_environment_one_step_one_update():
    rollout = {"num_slots": 1, "envs_per_slot": 1, "steps": 1}
    made = run(tiny(30, rollout=rollout, sac={"learning_starts": 12, "updates_per_step": 1.0}))
    assert n_updates(made) == [0] * 12 + list(range(1, 19))
    # Random actions until then, and actions of the policy after that.
    log_probs = [float(fragment.log_probs[0, 0]) for (fragment,) in made.recorded.fragments]
    assert log_probs[:12] == pytest.approx([-math.log(2.0)] * 12)
    assert all(abs(log_prob + math.log(2.0)) > 1e-3 for log_prob in log_probs[12:])


@pytest.mark.parametrize(
    ("shape", "starts", "each"),
    [
        ((2, 2, 8), 40, "0.5"),
        ((3, 1, 7), 0, "0.3"),
        ((1, 5, 3), 31, "2.0"),
        ((2, 1, 1), 5, "0.001"),
        ((1, 3, 2), 7, "7.3"),
    ],
)
def test_updates_are_those_that_the_steps_owe(shape, starts, each):
    rollout = dict(zip(("num_slots", "envs_per_slot", "steps"), shape, strict=True))
    settings = {"learning_starts": starts, "updates_per_step": float(each), "batch_size": 4}
    found = n_updates(run(tiny(12, rollout=rollout, sac=settings)))
    taken = itertools.count(math.prod(shape), math.prod(shape))
    owed = [math.floor(max(0, next(taken) - starts) * Fraction(each)) for _ in range(12)]
    assert found == owed


# Stored transitions


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("n_step", [1, 3, 9])
def test_what_follows_a_step_is_what_was_really_seen(n_step, staleness, monkeypatch):
    """This includes episodes that a time limit ends, and the episodes after them."""
    kept: list[Any] = []

    def remembered(*args):
        kept.append(experience(*args))
        return kept[0]

    experience = components.make_buffer
    monkeypatch.setattr(components, "make_buffer", remembered)
    sac = {"n_step": n_step, "discount": 0.5, "updates_per_step": 0.01, "batch_size": 500}
    made = run(tiny(5, "Marked-v0", sac=sac, rollout={"staleness": staleness}))
    newest = {
        tuple(seen)
        for fragment in made.recorded.fragments[-1]
        for seen in fragment.last_observations
    }
    drawn = kept[0].draw(0)
    limited = terminated = 0
    for row in range(500):
        (mark, t), following = drawn.observations[row], tuple(drawn.next_observations[row])
        end = 3 if mark % 2 == 0 else 5
        # Fewer than n steps if the episode ends or there are no newer steps.
        steps = int(min(n_step, end - t))
        if following in newest and following[0] == mark:
            steps = int(following[1] - t)
        by_itself = end == 3 and t + steps == 3
        # After a termination, the next observation does not count and is not stored.
        assert by_itself or following == (mark, t + steps)
        assert drawn.bootstrap[row] == (0.0 if by_itself else 0.5**steps)
        rewards = [0.5**k * (t + k + 1) for k in range(steps)]
        assert drawn.rewards[row] == pytest.approx(sum(rewards))
        limited += t + steps == 5
        terminated += by_itself
    assert limited > 20
    assert terminated > 20


@pytest.mark.parametrize(
    ("id", "numbers", "iterations"), [("Hopper-v5", 11 + 3 + 1, 10), ("Pendulum-v1", 3 + 1 + 1, 25)]
)
def test_what_crosses_the_wire_does_not_grow_with_the_replay(id, numbers, iterations, tmp_path):
    """Twice the iterations send twice the bytes, despite a larger replay buffer.

    The state of Pendulum contains the actions of its episode, so the runs end after one and two
    whole episodes.
    """

    def traffic(iterations: int) -> Any:
        data = tiny(iterations, id, sac={"learning_starts": 64, "updates_per_step": 0.1})
        begun = components.make_initial_checkpoint(
            recipe := Recipe.model_validate(data),
            components.make_env_spec(recipe.learning.environment),
        )
        with LocalFleet(1) as fleet:
            components.make_trainer(begun, fleet, (told := Recording()), told, "wire").run()
            return fleet.read_traffic()

    short, long = traffic(iterations), traffic(2 * iterations)
    # The tolerance covers messages that are sent once, and the release of the last policy.
    assert long.bytes_in == pytest.approx(2 * short.bytes_in, rel=0.1)
    assert long.bytes_out == pytest.approx(2 * short.bytes_out, rel=0.1)
    # Each step returns its numbers, a reward of 8 bytes, and how it ended.
    assert short.bytes_in > iterations * 32 * (4 * numbers + 8 + 2)


# Odd sizes


ODD: dict[str, dict[str, Any]] = {
    "one transition an update": {"sac": {"batch_size": 1}},
    "a replay smaller than a batch": {"sac": {"buffer_size": 5, "batch_size": 64}},
    "a replay of one": {"sac": {"buffer_size": 1}},
    "no hidden layer": {"network": {"hidden": []}},
    "a hidden unit": {"network": {"hidden": [1]}},
    "three layers": {"network": {"hidden": [8, 7, 9], "activation": "tanh"}},
    "normalised": {"network": {"normalise_observations": True}, "rollout": {"staleness": 1}},
    "sums beyond the replay": {"sac": {"n_step": 500, "buffer_size": 10}},
    "a late actor": {"sac": {"policy_delay": 3, "target_update_interval": 7}},
    "an actor that moves once": {"sac": {"policy_delay": 1_000_000}},
    "a coefficient below float32": {"sac": {"initial_entropy_coefficient": 1e-300}},
    "no discount": {"sac": {"discount": 1.0}},
    "large rewards": {"env": "Edge-v0", "kwargs": {"reward": 1e6}},
    "tiny bounds": {"env": "Edge-v0", "kwargs": {"low": -1e-3, "high": 1e-3}},
    "wide bounds": {"env": "Edge-v0", "kwargs": {"low": -1e6, "high": 1e6}},
    "all of float32": {"env": "Edge-v0", "kwargs": {"low": -3.4e38, "high": 3.4e38}},
    "bounds that leave no choice": {"env": "Edge-v0", "kwargs": {"low": 1.0, "high": 1.0}},
    "bounds on one side of zero": {"env": "Edge-v0", "kwargs": {"low": 0.1, "high": 0.7}},
    "actions in a table": {"env": "Edge-v0", "kwargs": {"shape": [2, 3]}},
    "an action that is a number": {"env": "Edge-v0", "kwargs": {"shape": []}},
    "episodes of one step": {"env": "Edge-v0", "kwargs": {"length": 1}, "sac": {"n_step": 3}},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes_train(name):
    made = run(tiny(**ODD[name]))
    assert n_updates(made)[-1] == (6 * 32 - 40) // 2
    assert made.recorded.metrics[-1]["refused_minibatches"] == 0.0
    for tensor, array in made.last.learner.items():
        assert np.isfinite(array).all(), tensor
    before, after = made.first, made.last.policy
    assert any(not np.array_equal(before[n], after[n]) for n in before if n.startswith("actor"))


def test_rewards_too_large_for_float32s_squares_end_the_run_with_a_sentence():
    with pytest.raises(LearningError, match="5 times in a row") as caught:
        run(tiny(env="Edge-v0", kwargs={"reward": 1e30}))
    assert "in the environment" in caught.value.hint


def test_so_do_observations_unless_they_are_normalised():
    def made(normalise: bool) -> Run:
        network = {"activation": "relu", "normalise_observations": normalise}
        return run(tiny(env="Edge-v0", kwargs={"scale": 1e30}, network=network))

    with pytest.raises(LearningError, match="5 times in a row") as caught:
        made(False)
    assert "network.normalise_observations" in caught.value.hint
    assert made(True).recorded.metrics[-1]["refused_minibatches"] == 0.0


@pytest.mark.parametrize("spoiled", ["reward inf", "reward nan", "observation nan"])
def test_what_is_not_finite_reaches_neither_replay_nor_normaliser(spoiled):
    told = Recording()
    normalised = {"normalise_observations": True}
    with pytest.raises(EnvironmentFailure, match=r"Edge-v0 returned .*(reward|NaN)"):
        run(tiny(20, "Edge-v0", kwargs={"spoiled": spoiled}, network=normalised), recorded=told)
    saved = told.snapshots[max(told.snapshots)]
    assert saved.progress.steps > 0
    assert int(saved.learner["experience.rows"]) * 4 == saved.progress.steps
    for name, array in saved.learner.items():
        assert np.isfinite(array).all(), name


# As a user runs it


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sac") / "run"
    spoken = rlflame("train", "--env", "pendulum", "--algo", "sac", *TINY_SAC, "--out", folder)
    assert spoken.code == 0, spoken.err
    return folder


def test_a_run_records_what_its_losses_were(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    iterations = [line for line in lines if "n_updates" in line]
    losses = {"actor_loss", "critic_loss", "ent_coef_loss"}
    assert [bool(losses & line.keys()) for line in iterations] == [False] * 3 + [True] * 12
    assert all(losses < line.keys() for line in iterations[3:])
    # Coefficient and rate are logged from the start, and the coefficient begins at one.
    assert [line["ent_coef"] for line in iterations[:3]] == [1.0] * 3
    assert {line["learning_rate"] for line in iterations} == {1e-3}
    assert iterations[-1]["n_updates"] == 240 - 48


def test_a_run_too_short_to_learn_says_so(tmp_path):
    words = ("--env", "pendulum", "--algo", "sac", "--dry-run", "--steps")
    short, long = rlflame("train", *words, "1000"), rlflame("train", *words, "1001")
    assert "after the first 1,000: none in this run, unless sac.learning_starts is" in short.out
    assert "after the first 1,000\n" in long.out


def test_the_commands_take_its_policy(trained):
    best, latest = trained / "best.safetensors", trained / "latest.safetensors"
    scored = rlflame("eval", latest, "--json", "--expect-recorded")
    assert scored.code == 0, scored.err
    assert scored.json()["returns"] == list(checkpoint.load(latest).evaluation.returns)
    assert rlflame("inspect", latest).code == 0
    assert rlflame("export", latest, "-o", "alone.safetensors").code == 0
    assert checkpoint.load(Path("alone.safetensors")).resumable is False
    assert rlflame("eval", "alone.safetensors", "--episodes", "2").code == 0
    strip = rlflame("render", best, "--vs-untrained", "-o", "x.png", "--width", "64")
    assert strip.code == 0, strip.err
    before = latest.read_bytes()
    assert rlflame("resume", trained).code == 0  # a finished run does not change
    assert latest.read_bytes() == before


def test_a_loaded_policy_is_the_squashed_mean_and_needs_no_torch(trained):
    observation = [0.3, -0.8, 2.0]
    program = f"""
import sys
sys.modules["torch"] = None
from rlflame.api import load_policy
print(load_policy({str(trained / "best.safetensors")!r})({observation}).tolist())
"""
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    weights = checkpoint.load(trained / "best.safetensors").policy
    values = np.array(observation, np.float64)
    hidden = np.maximum(values @ weights["actor.0.weight"] + weights["actor.0.bias"], 0.0)
    mean, _ = hidden @ weights["actor.1.weight"] + weights["actor.1.bias"]
    assert json.loads(said.stdout) == pytest.approx([2.0 * math.tanh(mean)], rel=1e-5)


@pytest.mark.parametrize("more", [(), ("sac.quantiles=5", "sac.dropped_quantiles=2")])
def test_a_run_that_is_killed_and_resumed_ends_in_equal_bits(more, trained):
    words = ["--env", "pendulum", "--algo", "sac", *TINY_SAC, "--quiet", "--out", "killed"]
    for setting in more:
        words += ["--set", setting]
    words += ["--set", "runtime.fleet=local", "--workers", "2"]
    words += ["--set", "runtime.checkpoint_every_steps=16"]
    running = process("train", *words, "--steps", "1000000", start_new_session=True)
    # The run is killed once it has learned.
    while not list(Path("killed").glob("checkpoints/step-00000009[0-9].safetensors")):
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    finished(running)
    # The process may have died between writing a checkpoint and linking it as the latest.
    stood = int(load_newest_checkpoint(Path("killed"), print).progress.steps)
    assert stood >= 96
    until = stood + 64
    assert rlflame("resume", "killed", "--steps", str(until), "--fleet", "inline").code == 0
    whole = [*words, "--out", "whole", "--set", f"learning.horizon_steps={1_000_000}"]
    assert rlflame("train", *whole, "--steps", str(until), "--fleet", "inline").code == 0
    killed, untouched = (
        checkpoint.load(Path(run) / "latest.safetensors") for run in ("killed", "whole")
    )
    assert killed.digest == untouched.digest
    for name in ("metrics.jsonl", "episodes.csv"):
        assert (Path("killed") / name).read_bytes() == (Path("whole") / name).read_bytes()


def test_every_setting_and_metric_has_its_line_in_the_docs(trained):
    page = (Path(__file__).parents[2] / "docs/algorithms/sac.md").read_text()
    settings, metrics = (
        page.split("## Settings")[1].split("## Details")[0],
        page.split("## Metrics")[1],
    )
    missing = [name for name in SacSettings.model_fields if f"`{name}`" not in settings]
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    told = {name for line in lines if "n_updates" in line for name in line}
    told -= {"steps", "iteration", "episodes", "episodes_finished", "episode_length_mean"}
    missing += [name for name in told if f"`{name}`" not in metrics]
    assert not missing
