"""All fields of `learning` change the weights; those of `runtime` do not.

If a field is added to the config, add a scenario here.
"""

from __future__ import annotations

import copy
import dataclasses
from types import NoneType
from typing import Any, get_args

import fakes
import numpy as np
import pytest
from pydantic import BaseModel
from tiny_runs import Run, run

from rlflame import api
from rlflame.config.evaluation import EvaluationSettings
from rlflame.config.recipe import LearningSettings, RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.fleet.base import make_policy_id
from rlflame.learning import policy_average
from rlflame.storage import checkpoint


@dataclasses.dataclass(frozen=True)
class Change:
    """A new value for a field, and the scenario in which it must change the weights."""

    value: Any
    base: str = "cartpole"
    given: dict[str, Any] = dataclasses.field(default_factory=dict)


_ROLLOUT = {"num_slots": 2, "envs_per_slot": 3, "steps": 32}
_PPO = {"epochs": 2, "minibatch_size": 48, "learning_rate": 1e-2}
BASES: dict[str, dict[str, Any]] = {
    "cartpole": {"rollout": _ROLLOUT, "network": {"hidden": [16]}, "ppo": _PPO},
    "pendulum": {
        "environment": {"id": "Pendulum-v1"},
        "rollout": _ROLLOUT,
        "network": {"hidden": [16]},
        "ppo": _PPO,
    },
    "counting": {
        "environment": {"id": "fakes:Counting-v0"},
        "rollout": _ROLLOUT,
        "network": {"hidden": [16]},
        "ppo": _PPO,
    },
    "episodes": {
        "algorithm": "reinforce",
        "rollout": {"unit": "episodes", "num_slots": 2, "envs_per_slot": 3, "steps": 500},
        "network": {"hidden": [16]},
        "reinforce": {"learning_rate": 1e-2},
    },
    "replay": {
        "algorithm": "sac",
        "environment": {"id": "Pendulum-v1"},
        "rollout": _ROLLOUT,
        "network": {"hidden": [16], "normalise_observations": False},
        "sac": {
            "learning_rate": 1e-2,
            "learning_starts": 100,
            "batch_size": 8,
            "updates_per_step": 0.1,
        },
    },
}

CHANGES: dict[str, Change] = {
    "algorithm": Change("reinforce", given={"ppo": None, "rollout.unit": "episodes"}),
    "seed": Change(1),
    "horizon_steps": Change(2000, given={"horizon_steps": 1000}),
    "horizon_iterations": Change(9),
    "provider": Change("torch"),
    # A different order of additions gives different last bits.
    "gradient_shards": Change(3),
    "environment.id": Change("Acrobot-v1"),
    "environment.kwargs": Change({"g": 5.0}, "pendulum"),
    "environment.max_episode_steps": Change(7),
    "environment.wrappers": Change(
        [{"name": "gymnasium.wrappers:StickyAction", "kwargs": {"repeat_action_probability": 0.5}}]
    ),
    "environment.ignore": Change(["view"], given={"environment.id": "space_envs:Dict-v0"}),
    "environment.action_mask": Change("off", given={"environment.id": "space_envs:Half-Masked-v0"}),
    # The environment keeps a count, which auto resets with a new instance for each episode.
    "environment.episodes": Change("reuse", "counting"),
    "rollout.unit": Change("episodes"),
    "rollout.num_slots": Change(3),
    "rollout.envs_per_slot": Change(4),
    "rollout.steps": Change(33),
    "rollout.staleness": Change(1),
    "network.hidden": Change([15]),
    "network.activation": Change("relu"),
    "network.orthogonal_init": Change(False),
    "network.last_layer_scale": Change(0.02),
    "network.log_std_init": Change(-0.6, "pendulum"),
    "network.exploration": Change("gsde", "pendulum"),
    "network.exploration_interval": Change(5, "pendulum", {"network.exploration": "gsde"}),
    "network.normalise_observations": Change(False),
    "network.observation_clip": Change(0.1),
    "ppo.learning_rate": Change(2e-2),
    "ppo.anneal_learning_rate": Change(False),
    "ppo.adam_epsilon": Change(2e-5),
    "ppo.discount": Change(0.98),
    "ppo.final_discount": Change(0.9),
    "ppo.discount_moves_from": Change(0.5, given={"ppo.final_discount": 0.9}),
    "ppo.gae_lambda": Change(0.94),
    "ppo.clip_range": Change(0.01),
    "ppo.anneal_clip_range": Change(True, given={"ppo.clip_range": 0.02}),
    "ppo.clip_range_value": Change(0.01),
    "ppo.normalise_advantages": Change("minibatch"),
    "ppo.recompute_advantages": Change(False),
    "ppo.scale_rewards": Change(False),
    "ppo.epochs": Change(3),
    "ppo.minibatch_size": Change(47),
    "ppo.entropy_weight": Change(0.01),
    "ppo.value_weight": Change(0.3),
    "ppo.max_gradient_norm": Change(0.01),
    "ppo.target_kl": Change(1e-6),
    "reinforce.learning_rate": Change(2e-2, "episodes"),
    "reinforce.anneal_learning_rate": Change(True, "episodes"),
    "reinforce.adam_epsilon": Change(1e-5, "episodes"),
    "reinforce.discount": Change(0.98, "episodes"),
    "reinforce.normalise_returns": Change("episode", "episodes"),
    # Adam normalises gradients, so a divisor changes the result only with epsilon or a bound.
    "reinforce.average": Change("episodes", "episodes", {"reinforce.max_gradient_norm": 0.05}),
    # Short enough for time limits to end episodes.
    "reinforce.continue_truncated": Change(
        True, "episodes", {"rollout.steps": 9, "environment.max_episode_steps": 9}
    ),
    "reinforce.entropy_weight": Change(0.1, "episodes"),
    "reinforce.max_gradient_norm": Change(1e-4, "episodes"),
    "sac.learning_rate": Change(2e-2, "replay"),
    "sac.critic_learning_rate": Change(2e-2, "replay"),
    "sac.entropy_learning_rate": Change(2e-2, "replay"),
    "sac.anneal_learning_rate": Change(True, "replay"),
    "sac.adam_epsilon": Change(1e-5, "replay"),
    "sac.discount": Change(0.98, "replay"),
    "sac.batch_size": Change(7, "replay"),
    "sac.buffer_size": Change(180, "replay"),
    "sac.learning_starts": Change(200, "replay"),
    "sac.updates_per_step": Change(0.2, "replay"),
    "sac.n_step": Change(2, "replay"),
    "sac.target_update_rate": Change(0.1, "replay"),
    "sac.target_update_interval": Change(2, "replay"),
    "sac.policy_delay": Change(2, "replay"),
    "sac.entropy_coefficient": Change(0.1, "replay"),
    "sac.initial_entropy_coefficient": Change(0.5, "replay"),
    "sac.target_entropy": Change(-3.0, "replay"),
    "sac.critic_norm": Change("batch", "replay"),
    "sac.quantiles": Change(3, "replay"),
    "sac.dropped_quantiles": Change(1, "replay", {"sac.quantiles": 3}),
    "sac.max_gradient_norm": Change(1e-6, "replay"),
}
EXEMPT = {
    "threads": "a matrix product on two threads may have other last bits than on one, which is "
    "why it is in the recipe, but on many machines and at small sizes it has the same",
    "device": "needs a graphics card, on which sums have other last bits",
    "precision": "needs a graphics card: tested with the algorithms of a device",
    "policy_average": "decides which policy is kept, not which one acts: tested below",
    "environment.file_digest": "identifies code that the fields above name: tested with own files",
    "init_policy": "names weights that come from elsewhere: tested below, with those weights",
}


def fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted names of all settings, including those of optional sections."""
    found = []
    for name, field in model.model_fields.items():
        options = [o for o in get_args(field.annotation) or (field.annotation,) if o != NoneType]
        if len(options) == 1 and isinstance(options[0], type) and issubclass(options[0], BaseModel):
            found += fields(options[0], f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def with_values(learning: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy with these values at these paths. None removes a section."""
    result = copy.deepcopy(learning)
    for path, value in values.items():
        *sections, last = path.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return {name: value for name, value in result.items() if value is not None}


def trained(learning: dict[str, Any]) -> Run:
    return run({"stop_at_iterations": 2, "learning": learning})


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def test_every_field_has_a_scenario_or_an_excuse():
    assert not CHANGES.keys() & EXEMPT.keys()
    assert set(fields(LearningSettings)) == CHANGES.keys() | EXEMPT.keys()
    assert len(EXEMPT) == 6


@pytest.mark.parametrize("base", BASES)
def test_equal_recipes_end_in_equal_digests(base, tmp_path):
    one, other = trained(BASES[base]), trained(BASES[base])
    assert one.state_digest(tmp_path) == other.state_digest(tmp_path)


@pytest.mark.parametrize("path", CHANGES)
def test_a_learning_field_changes_the_weights(path, tmp_path):
    change = CHANGES[path]
    before = with_values(BASES[change.base], change.given)
    one = trained(before)
    other = trained(with_values(before, {path: change.value}))

    assert one.recipe.learning != other.recipe.learning
    assert one.state_digest(tmp_path) != other.state_digest(tmp_path)
    # The weights must differ, and not only counters or tensors that belong to the field.
    assert not same(weights(one), weights(other))


def weights(run: Run) -> np.ndarray:
    """The weights of the actor, or of actor and critic if they share a vector."""
    learner = run.last.learner
    return learner["actor"] if "actor" in learner else learner["parameters"]


def test_the_policy_to_start_from_changes_the_weights(tmp_path):
    start = trained(with_values(BASES["cartpole"], {"seed": 5})).last.policy
    named = with_values(BASES["cartpole"], {"init_policy": make_policy_id(start)})
    one = trained(BASES["cartpole"])
    other = run({"stop_at_iterations": 2, "learning": named}, start)

    assert not same(one.last.learner["parameters"], other.last.learner["parameters"])


@pytest.mark.parametrize("base", BASES)
def test_an_average_changes_the_policy_that_is_kept_and_not_the_one_that_acts(
    base, tmp_path, monkeypatch
):
    monkeypatch.setattr(policy_average, "_SHARE", 1.0)  # average from the second version on
    one = trained(BASES[base])
    other = trained(with_values(BASES[base], {"policy_average": 2}))
    assert one.state_digest(tmp_path) != other.state_digest(tmp_path)
    assert same(weights(one), weights(other))
    kept = [np.concatenate([a.ravel() for a in run.last.policy.values()]) for run in (one, other)]
    assert not same(*kept)


EVALUATIONS = {
    "every_steps": 200,
    "episodes": 3,
    "final_episodes": 2,
    "seed": 9,
    "max_episode_steps": 5,
    "until_return": 1e9,
}


def saved(tmp_path, name: str, *, evaluation: dict, runtime: dict) -> tuple[str, Any]:
    """Train with the Python interface, and return the digest and the checkpoint."""
    config = RunConfig.model_validate(
        {
            "stop_at_iterations": 3,
            "learning": {**BASES["cartpole"], "gradient_shards": 2},
            "evaluation": {"final_episodes": 1, **evaluation},
            "runtime": {"fleet": "inline", "out": str(tmp_path / name), **runtime},
        }
    )
    result = api.train(config)
    return result.state_digest, checkpoint.load(result.folder / "latest.safetensors").snapshot


def test_no_evaluation_field_changes_a_weight(tmp_path):
    assert EVALUATIONS.keys() == EvaluationSettings.model_fields.keys()
    during = {"every_steps": 300, "episodes": 2}
    _, without = saved(tmp_path, "without", evaluation={}, runtime={})
    for field, value in EVALUATIONS.items():
        _, found = saved(tmp_path, field, evaluation=during | {field: value}, runtime={})
        assert found.learner.keys() == without.learner.keys()
        for name, array in without.learner.items():
            assert same(found.learner[name], array)
        assert [s.token for slot in found.states for s in slot] == [
            s.token for slot in without.states for s in slot
        ]


RUNTIMES: list[dict[str, Any]] = [
    {"fleet": "local", "workers": 1, "step_deadline_s": 5.0, "checkpoint_every_steps": 1},
    {"fleet": "auto", "workers": 3, "max_retries": 0, "debug": True, "keep_checkpoints": 1},
    {"out": "elsewhere", "progress": "json", "flame": {"cpu": 2, "dependencies": "install"}},
    {"fleet": "local", "workers": 1, "env_file": fakes.__file__, "tensorboard": True},
    {"fleet": "inline", "video_every_steps": 1, "checkpoint_every_minutes": 1e-6},
    {"learners": 2, "learner_deadline_s": 50.0, "compare_learners_every": 1},
]


def test_no_runtime_field_changes_a_bit(tmp_path, monkeypatch):
    assert {
        field for runtime in RUNTIMES for field in runtime
    } == RuntimeSettings.model_fields.keys()
    monkeypatch.chdir(tmp_path)
    expected, _ = saved(tmp_path, "expected", evaluation={}, runtime={})
    for number, runtime in enumerate(RUNTIMES):
        found, _ = saved(tmp_path, str(number), evaluation={}, runtime=runtime)
        assert found == expected
