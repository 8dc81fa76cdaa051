"""Tests of REINFORCE: a textbook example in torch, a bandit, and error cases."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from importlib import resources

import numpy as np
import pytest
import reference
import torch
from batches import policy_spec, random_batch, random_network
from tiny_runs import run

from rlflame.config.algorithms import ReinforceSettings
from rlflame.errors import LearningError
from rlflame.learning.base import Batch
from rlflame.learning.reinforce import reinforce
from rlflame.learning.reinforce.reinforce import NumpyReinforce, Reinforce, normalise_returns
from rlflame.learning.torch_gradients import TorchReinforce

PROVIDERS = (NumpyReinforce, TorchReinforce)


class Recording(NumpyReinforce):
    """Records gradients and their divisors, and damages those that `spoil` names."""

    def __init__(self, parameters, network, spoil=lambda call: False):
        super().__init__(parameters, network)
        self.gradients, self.counts, self.spoil = [], [], spoil

    def compute_gradient(self, batch, count):
        gradient, sums = super().compute_gradient(batch, count)
        if self.spoil(len(self.counts)):
            gradient[0] = np.nan
        self.counts.append(count)
        self.gradients.append(gradient.copy())
        return gradient, sums


def learner(settings, spec, provider=Recording, **options):
    network, parameters = random_network(np.random.default_rng(0), spec, critic=False)
    gradients = provider(parameters, network, **options)
    return Reinforce(settings, network, parameters, gradients), parameters, gradients


def episodes(rng, spec, arrays, lengths):
    """A batch with one whole episode in each column."""
    batch = random_batch(rng, spec, arrays, max(lengths), len(lengths), ends=0.0)
    t = np.arange(max(lengths))[:, None]
    return dataclasses.replace(
        batch,
        valid=t < np.array(lengths),
        terminated=t == np.array(lengths) - 1,
        rewards=np.where(t < np.array(lengths), 1.0 + batch.rewards, 0.0),
    )


def textbook_step(weights, batches, continuous, rate):
    """One iteration of the example's training loop on recorded episodes."""
    layers = []
    for i in range(len(weights) // 2):
        weight, bias = weights[f"actor.{i}.weight"], weights[f"actor.{i}.bias"]
        linear = torch.nn.Linear(*weight.shape)
        linear.weight.data, linear.bias.data = torch.tensor(weight.T), torch.tensor(bias)
        layers += [linear, torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers[:-1])
    parameters = list(net.parameters())
    if continuous:
        log_std = torch.nn.Parameter(torch.tensor(weights["actor.log_std"]))
        parameters.append(log_std)
    optimizer = torch.optim.Adam(parameters, lr=rate)
    loss = torch.zeros(())
    for observations, actions, rewards in batches:
        togo = [sum(0.99**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
        returns = torch.tensor(togo)
        if len(returns) > 1:
            returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        out = net(torch.tensor(observations))
        if continuous:
            log_probs = torch.distributions.Normal(out, log_std.exp()).log_prob(
                torch.tensor(actions)
            )
            log_probs = log_probs.sum(dim=1)
        else:
            chances = torch.softmax(out, dim=1)
            log_probs = torch.distributions.Categorical(chances).log_prob(torch.tensor(actions))
        loss = loss - (log_probs * returns).sum() / len(batches)
    loss.backward()
    optimizer.step()
    found = {}
    for i, linear in enumerate(layers[::2]):
        found[f"actor.{i}.weight"] = linear.weight.detach().numpy().T, linear.weight.grad.numpy().T
        found[f"actor.{i}.bias"] = linear.bias.detach().numpy(), linear.bias.grad.numpy()
    if continuous:
        found["actor.log_std"] = log_std.detach().numpy(), log_std.grad.numpy()
    return found, loss.item()


@pytest.mark.parametrize(
    ("environment", "hidden", "rate"),
    [("CartPole-v1", [128], 1e-2), ("InvertedPendulum-v5", [256, 256], 3e-4)],
)
def test_the_classic_recipe_is_the_textbook_example(environment, hidden, rate):
    preset = resources.files("rlflame.config") / "presets" / "reinforce-classic.toml"
    data = tomllib.loads(preset.read_text("utf-8"))
    continuous = data.pop("continuous")["learning"]
    learning = data["learning"]
    if environment != "CartPole-v1":
        learning["network"] |= continuous["network"]
        learning["reinforce"] |= continuous["reinforce"]
    assert learning["network"]["hidden"] == hidden
    learning["environment"] = {"id": environment}
    learning["rollout"]["num_slots"] = 12
    done = run(data | {"stop_at_iterations": 1})

    (fragments,), after = done.recorded.fragments, done.recorded.snapshots[1]
    played = [
        (f.observations[:n, 0], f.actions[:n, 0], f.rewards[:n, 0].tolist())
        for f in fragments
        for n in f.lengths
    ]
    assert len(played) == 12
    wanted, loss = textbook_step(done.first, played, environment != "CartPole-v1", rate)
    assert wanted.keys() == after.policy.keys()
    for name, (array, gradient) in wanted.items():
        difference = np.abs(array - after.policy[name])
        # Adam's first step is gradient / (|gradient| + 1e-8). This magnifies the rounding errors of
        # the few gradients that are almost zero.
        assert difference[np.abs(gradient) > 1e-5].max() < 1e-6
        assert difference.max() < 1e-2 * rate
        assert np.abs(array - done.first[name]).max() > 0.9 * rate
    assert done.recorded.metrics[0]["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_bandits_gradient_is_its_softmax_gradient(provider):
    """Arms with probabilities 1/2, 1/4, 1/4: -pi_k (r_k - mean reward)."""
    spec = policy_spec("discrete", observations=2, actions=3, hidden=())
    network, parameters = random_network(np.random.default_rng(0), spec, critic=False)
    parameters["actor.0.weight"][:] = 0.0
    parameters["actor.0.bias"][:] = np.log([2.0, 1.0, 1.0])
    pulls, rewards = np.array([0, 0, 1, 2]), np.array([1.0, 2.0, 5.0], np.float32)
    context = np.tile(np.array([0.5, -3.0], np.float32), (4, 1))

    gradient, _ = provider(parameters, network).compute_gradient(
        reinforce.ReinforceMinibatch(context, pulls, rewards[pulls], 0.0), 4
    )

    # The mean reward is 1/2 * 1 + 1/4 * 2 + 1/4 * 5 = 2.25.
    by_arm = [-0.5 * (1 - 2.25), -0.25 * (2 - 2.25), -0.25 * (5 - 2.25)]
    wanted = np.concatenate([np.outer([0.5, -3.0], by_arm).ravel(), by_arm])
    np.testing.assert_allclose(gradient, wanted, atol=1e-6)


@pytest.mark.parametrize("how", ["off", "episode", "batch"])
def test_returns_are_normalised_where_they_count(how):
    rng = np.random.default_rng(1)
    lengths = [4, 1, 7, 2]
    spec = policy_spec("discrete")
    batch = episodes(rng, spec, learner(ReinforceSettings(), spec)[0].get_policy(), lengths)
    returns = rng.standard_normal(batch.rewards.shape) * 5.0 + 2.0

    found = normalise_returns(returns, batch, how)

    columns = [torch.tensor(returns[:n, c]) for c, n in enumerate(lengths)]
    if how == "episode":
        columns = [(x - x.mean()) / x.std() if len(x) > 1 else x for x in columns]
    if how == "batch":
        every = torch.cat(columns)
        columns = [(x - every.mean()) / every.std(correction=0) for x in columns]
    for c, n in enumerate(lengths):
        np.testing.assert_allclose(found[:n, c], columns[c].numpy(), rtol=1e-6)


@pytest.mark.parametrize("how", ["off", "episode", "batch"])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [1, 6]])
def test_an_episode_of_one_step_stays_finite(how, lengths):
    spec = policy_spec("continuous", normalise=True)
    algorithm, parameters, _ = learner(ReinforceSettings(normalise_returns=how), spec)
    batch = episodes(np.random.default_rng(2), spec, algorithm.get_policy(), lengths)

    metrics = algorithm.update(batch, 0.0)

    assert np.isfinite(parameters.data).all()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["refused_minibatches"] == 0.0


@pytest.mark.parametrize("average", ["steps", "episodes"])
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("chunk", [7, 4096])
def test_an_update_is_one_step_along_autograds_gradient(monkeypatch, provider, average, chunk):
    """This includes batches in pieces and normalised observations."""
    monkeypatch.setattr(reinforce, "CHUNK_ROWS", chunk)
    spec = policy_spec("continuous", normalise=True)
    settings = ReinforceSettings(
        average=average,
        discount=0.9,
        entropy_weight=0.02,
        anneal_learning_rate=True,
        max_gradient_norm=0.1,
    )
    algorithm, parameters, _ = learner(settings, spec, provider)
    weights = reference.tensors(parameters)
    adam = torch.optim.Adam(weights.values(), eps=settings.adam_epsilon)
    rng = np.random.default_rng(3)
    for progress in (0.0, 0.25):
        lengths = [9, 1, 5, 12]
        batch = episodes(rng, spec, algorithm.get_policy(), lengths)
        mean, scale = (batch.behaviour[f"normaliser.{n}"] for n in ("mean", "scale"))
        seen, actions, togo = [], [], []
        for c, n in enumerate(lengths):
            seen.append((batch.observations[:n, c] - mean) * scale)
            actions.append(batch.actions[:n, c])
            rewards = batch.rewards[:n, c]
            togo += [sum(0.9 ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]
        togo = (np.array(togo) - np.mean(togo)) / np.std(togo)
        policy = reference.distribution(weights, np.concatenate(seen), True)
        log_probs = policy.log_prob(torch.as_tensor(np.concatenate(actions)).double())
        total = -(log_probs * torch.as_tensor(togo)).sum() - 0.02 * policy.entropy().sum()
        loss = total / (27 if average == "steps" else 4)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.1)
        adam.param_groups[0]["lr"] = 1e-3 * (1.0 - progress)
        adam.step()
        metrics = algorithm.update(batch, progress)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert metrics["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["entropy_loss"] == pytest.approx(-policy.entropy().mean().item(), rel=1e-4)
        assert metrics["learning_rate"] == 1e-3 * (1.0 - progress)

    np.testing.assert_allclose(parameters.data, reference.flat(weights), atol=2e-6)
    assert metrics["n_updates"] == 2.0


def test_what_stands_in_idle_places_does_not_matter():
    """Idle steps contain zeros. Their observations and actions are never used."""
    spec = policy_spec("discrete", normalise=True)
    states = []
    for garbage in (0.0, math.nan):
        algorithm, _, _ = learner(ReinforceSettings(), spec)
        batch: Batch = episodes(np.random.default_rng(4), spec, algorithm.get_policy(), [3, 8, 1])
        batch.observations[~batch.valid] = garbage
        batch.log_probs[~batch.valid] = garbage
        batch.actions[~batch.valid] = 0 if garbage == 0.0 else 2
        algorithm.update(batch, 0.0)
        states.append(algorithm.get_state())

    for name, array in states[0].items():
        np.testing.assert_array_equal(states[1][name], array)


def test_a_bad_gradient_changes_nothing_and_five_in_a_row_end_it():
    spec = policy_spec("continuous")
    algorithm, parameters, _ = learner(ReinforceSettings(), spec, spoil=lambda call: call != 3)
    rng = np.random.default_rng(5)
    batch = episodes(rng, spec, algorithm.get_policy(), [5, 3])
    before = parameters.data.copy()
    for refused in (1.0, 2.0, 3.0):
        metrics = algorithm.update(batch, 0.0)
        assert metrics["refused_minibatches"] == refused
        assert all(math.isfinite(value) for value in metrics.values())
        np.testing.assert_array_equal(parameters.data, before)
    assert algorithm.update(batch, 0.0)["n_updates"] == 1.0
    assert np.any(parameters.data != before)
    for _ in range(4):
        algorithm.update(batch, 0.0)
    with pytest.raises(LearningError, match="5 times in a row") as caught:
        algorithm.update(batch, 0.0)
    assert "reinforce.learning_rate" in caught.value.hint


def test_a_saved_state_goes_on_bit_by_bit():
    spec = policy_spec("continuous", normalise=True)
    straight, first, second = (learner(ReinforceSettings(), spec)[0] for _ in range(3))
    rng = np.random.default_rng(6)
    batches = []
    for _ in range(4):
        batch = episodes(rng, spec, straight.get_policy(), [5, 3, 9])
        batches.append((batch, straight.update(batch, 0.0)))
    for batch, _ in batches[:2]:
        first.update(batch, 0.0)
    second.load_state(first.get_state())

    for batch, metrics in batches[2:]:
        assert second.update(batch, 0.0) == metrics
    for name, array in straight.get_state().items():
        np.testing.assert_array_equal(second.get_state()[name], array)
