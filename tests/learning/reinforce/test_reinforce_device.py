"""REINFORCE on a device, run on the CPU: compared with a plain float64 implementation and numpy."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import reference
import torch
from batches import policy_spec, random_batch, random_network

from rlflame.config.algorithms import ReinforceSettings
from rlflame.errors import LearningError
from rlflame.learning.reinforce.reinforce import NumpyReinforce, Reinforce
from rlflame.learning.reinforce.reinforce_device import DeviceReinforce
from rlflame.learning.torch_gradients import TorchReinforce

VARIANTS = {
    "classic": ("continuous", "relu", {"normalise_returns": "episode", "average": "episodes"}),
    "options": (
        "discrete",
        "tanh",
        {
            "continue_truncated": True,
            "entropy_weight": 0.05,
            "max_gradient_norm": 0.5,
            "anneal_learning_rate": True,
            "discount": 0.9,
        },
    ),
    "gsde": ("gsde", "relu", {"normalise_returns": "off", "entropy_weight": 0.02}),
}
LENGTHS = (12, 3, 9, 1, 7, 12)


def make(variant, algorithm=DeviceReinforce, provider=TorchReinforce, normalise=True):
    kind, activation, settings = VARIANTS[variant]
    spec = policy_spec(kind, activation=activation, normalise=normalise)
    network, parameters = random_network(np.random.default_rng(0), spec, critic=False)
    given = ReinforceSettings(**{"learning_rate": 2e-3, **settings})
    return algorithm(given, network, parameters, provider(parameters, network)), parameters, spec


def draw_episodes(rng, spec, arrays):
    """One whole episode in each column; the second half is truncated."""
    columns = len(LENGTHS)
    batch = random_batch(rng, spec, arrays, max(LENGTHS), columns, ends=0.0)
    t = np.arange(max(LENGTHS))[:, None]
    is_last = t == np.array(LENGTHS) - 1
    is_truncated = np.arange(columns) >= columns // 2
    valid = t < np.array(LENGTHS)
    return dataclasses.replace(
        batch,
        valid=valid,
        terminated=is_last & ~is_truncated,
        truncated=is_last & is_truncated,
        rewards=np.where(valid, 1.0 + batch.rewards, 0.0),
    )


class Plain:
    """One step of REINFORCE per batch, episode by episode in float64, with Adam from torch."""

    def __init__(self, settings, spec, parameters) -> None:
        self.settings, self.tanh = settings, spec.activation == "tanh"
        self.weights = reference.tensors(parameters)
        self.adam = torch.optim.Adam(self.weights.values(), eps=settings.adam_epsilon)

    def update(self, batch, progress: float) -> dict[str, float]:
        settings, episodes = self.settings, []
        for c, length in enumerate(batch.valid.sum(axis=0)):
            togo, rest = [], 0.0
            for reward in reversed(batch.rewards[:length, c]):
                rest = reward + settings.discount * rest
                togo.insert(0, rest)
            steps = np.arange(length, 0, -1)
            weights = settings.discount**steps * bool(batch.truncated[length - 1, c])
            episodes.append([np.array(togo), weights])
        if settings.continue_truncated:
            mean = np.concatenate([togo for togo, _ in episodes]).mean()
            mean /= 1.0 - np.concatenate([weights for _, weights in episodes]).mean()
            for episode in episodes:
                episode[0] = episode[0] + episode[1] * mean
        returns = [togo for togo, _ in episodes]
        if settings.normalise_returns == "batch":
            everything = np.concatenate(returns)
            returns = [(togo - everything.mean()) / (everything.std() + 1e-8) for togo in returns]
        if settings.normalise_returns == "episode":
            returns = [
                (togo - togo.mean()) / (togo.std(ddof=1) + 1e-8) if len(togo) > 1 else togo
                for togo in returns
            ]
        loss = entropy = torch.zeros((), dtype=torch.float64)
        for c, togo in enumerate(returns):
            rows = slice(0, len(togo)), c
            policy = reference.distribution(self.weights, batch.observations[rows], self.tanh)
            log_probs = policy.log_prob(torch.as_tensor(batch.actions[rows]))
            loss = loss - (log_probs * torch.as_tensor(togo)).sum()
            entropy = entropy + policy.entropy().sum()
        count = sum(map(len, returns)) if settings.average == "steps" else len(returns)
        total = (loss - settings.entropy_weight * entropy) / count
        left = 1.0 - progress if settings.anneal_learning_rate else 1.0
        self.adam.param_groups[0]["lr"] = settings.learning_rate * left
        self.adam.zero_grad()
        total.backward()
        bound = settings.max_gradient_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), bound)
        self.adam.step()
        return {"loss": total.item(), "gradient_norm": norm.item()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hundred_float64_updates_are_those_of_a_plain_implementation(variant):
    provider = partial(TorchReinforce, dtype=torch.float64)
    learner, parameters, spec = make(variant, provider=provider, normalise=False)
    plain = Plain(learner._settings, spec, parameters)
    rng, before = np.random.default_rng(1), parameters.data.copy()
    for number in range(100):
        batch = draw_episodes(rng, spec, learner.get_policy())
        metrics, wanted = learner.update(batch, number / 200), plain.update(batch, number / 200)
        assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert metrics["n_updates"] == 100.0
    found = learner._values.numpy()
    assert np.abs(found - reference.flat(plain.weights)).max() < 1e-9
    assert np.abs(found - before).max() > 0.03


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_updates_are_close_to_numpys(variant):
    learner, weights, spec = make(variant)
    numpy_learner, numpy_weights, _ = make(variant, Reinforce, NumpyReinforce)
    rng, before = np.random.default_rng(2), weights.data.copy()
    for number in range(20):
        batch = draw_episodes(rng, spec, learner.get_policy())
        metrics, wanted = learner.update(batch, 0.2), numpy_learner.update(batch, 0.2)
        difference = np.abs(weights.data - numpy_weights.data).max()
        assert difference < (1e-3 if number else 1e-5)
        assert metrics == pytest.approx(wanted, rel=2e-3, abs=2e-4)
    assert np.abs(weights.data - before).max() > 1e-2


def test_the_statistics_of_observations_are_numpys():
    learner, _, spec = make("classic")
    numpy_learner, _, _ = make("classic", Reinforce, NumpyReinforce)
    rng = np.random.default_rng(5)
    for _ in range(3):
        batch = draw_episodes(rng, spec, learner.get_policy())
        learner.update(batch, 0.0)
        numpy_learner.update(batch, 0.0)
        policy = learner.get_policy()
    assert learner._normaliser.count == 3 * sum(LENGTHS)
    for name, array in numpy_learner._normaliser.make_arrays().items():
        np.testing.assert_allclose(policy[name], array, rtol=1e-6, err_msg=name)
    for name, array in numpy_learner.get_state().items():
        if name.startswith("normaliser."):
            np.testing.assert_allclose(learner.get_state()[name], array, rtol=1e-12, err_msg=name)


def test_a_saved_state_continues_bit_by_bit():
    straight, _, spec = make("options")
    second = make("options")[0]
    rng = np.random.default_rng(3)
    for number in range(4):
        batch = draw_episodes(rng, spec, straight.get_policy())
        if number == 2:
            second.load_state(straight.get_state())
        metrics = straight.update(batch, 0.1 * number)
        if number >= 2:
            assert second.update(batch, 0.1 * number) == metrics
    for name, array in straight.get_state().items():
        np.testing.assert_array_equal(second.get_state()[name], array)


def test_a_refused_gradient_changes_nothing_and_the_fifth_in_a_row_ends_the_run():
    learner, _, spec = make("classic", normalise=False)
    batch = draw_episodes(np.random.default_rng(4), spec, learner.get_policy())
    far = dataclasses.replace(batch, actions=np.full_like(batch.actions, 1e30))
    before = learner.get_state()
    for number in range(1, 5):
        metrics = learner.update(far, 0.0)
        assert metrics["refused_minibatches"] == float(number)
        assert "loss" not in metrics
    after = learner.get_state()
    for name in ("parameters", "adam.first", "adam.second", "adam.count", "updates"):
        np.testing.assert_array_equal(after[name], before[name])
    with pytest.raises(LearningError, match="5 times in a row"):
        learner.update(far, 0.0)
