"""Whole PPO updates, compared with a plain torch implementation, and errors."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import reference
from batches import PPO_OPTIONS, floats, policy_spec, random_batch, random_network
from reference import ReferencePpo

from rlflame.config.algorithms import PpoSettings
from rlflame.errors import LearningError
from rlflame.learning.buffers.rollout_buffer import concatenate_fragments
from rlflame.learning.optim import Adam, clip, compute_square_norm
from rlflame.learning.ppo.loss import NumpyPpo, compute_norm, find_spans
from rlflame.learning.ppo.ppo import Ppo, compute_discount
from rlflame.learning.torch_gradients import TorchPpo
from rlflame.rollout.task import Fragment

COLUMNS = 8


class Recording(NumpyPpo):
    """Records its calls and results, and damages the results of some calls."""

    def __init__(self, parameters, network, spoil=lambda call: None):
        super().__init__(parameters, network)
        self.asked, self.gradients, self.spoil = [], [], spoil

    def compute_gradient(self, batch, count, networks=("actor", "critic")):
        gradient, sums = super().compute_gradient(batch, count, networks)
        fault = self.spoil(len(self.asked))
        if fault == "gradient":
            gradient[3] = np.nan
        elif fault is not None:
            sums = {**sums, "value_loss": fault}
        self.asked.append(copy.deepcopy(batch))  # the learner uses the memory again
        self.gradients.append(gradient.copy())
        return gradient, sums


def learner(ppo, spec, *, provider=Recording, seed=7, **options):
    rng = np.random.default_rng(0)
    network, parameters = random_network(rng, spec)
    gradients = provider(parameters, network, **options)
    built = Ppo(ppo, network, parameters, gradients, seed=seed, columns=COLUMNS)
    return built, parameters, gradients


def clip_all(gradient, parameters, most):
    """Clip by the norm of the whole gradient, computed from both networks."""
    squares = [compute_square_norm(gradient[part]) for part in find_spans(parameters).values()]
    clip(gradient, compute_norm(squares), most)


def one_minibatch(**settings):
    """Settings with which an update is a single gradient step on the whole batch."""
    plain = {"anneal_learning_rate": False, "scale_rewards": False, "max_gradient_norm": None}
    return PpoSettings(**(plain | {"epochs": 1, "minibatch_size": 10_000} | settings))


def whole_episodes(batch, garbage=0.0):
    """The batch's columns as fragments of single episodes of different lengths."""
    steps, columns = batch.rewards.shape
    lengths = np.array([1 + (5 * c) % steps for c in range(columns)])
    last = np.arange(steps)[:, None] == lengths - 1
    idle = np.arange(steps)[:, None] >= lengths
    truncated = last & (np.arange(columns) % 2 == 1)

    def spoilt(array, value):
        result = array.copy()
        result[idle] = value
        return result

    index = np.argwhere(truncated)
    whole = Fragment(
        iteration=0,
        slot=0,
        observations=spoilt(batch.observations, garbage),
        actions=spoilt(batch.actions, 1 if garbage else 0),
        log_probs=spoilt(batch.log_probs, garbage),
        rewards=spoilt(batch.rewards, garbage),
        terminated=spoilt(last & ~truncated, bool(garbage)),
        truncated=spoilt(truncated, bool(garbage)),
        lengths=lengths,
        last_observations=batch.last_observations,
        boundary_index=index,
        boundary_observations=floats(np.random.default_rng(9), len(index), 5),
        episodes=(),
        states=(),
    )
    return concatenate_fragments([whole], batch.behaviour)


VARIANTS = {
    "hopper": ("continuous", "tanh", {}),
    "baselines": ("discrete", "relu", PPO_OPTIONS),
    "bare": (
        "continuous",
        "relu",
        {
            "normalise_advantages": "batch",
            "anneal_learning_rate": False,
            "scale_rewards": False,
            "max_gradient_norm": None,
            "gae_lambda": 0.7,
            "discount": 0.9,
        },
    ),
    "gsde": ("gsde", "relu", {"entropy_weight": 0.05}),
    "one sample left": (
        "discrete",
        "tanh",
        {"normalise_advantages": "minibatch", "minibatch_size": 5, "clip_range": 0.02},
    ),
}


@pytest.mark.parametrize("episodes", [False, True])
@pytest.mark.parametrize("provider", [NumpyPpo, TorchPpo])
@pytest.mark.parametrize("variant", VARIANTS)
def test_updates_are_those_of_a_plain_implementation(variant, provider, episodes):
    kind, activation, settings = VARIANTS[variant]
    ppo = PpoSettings(**({"epochs": 3, "minibatch_size": 32, "learning_rate": 2e-3} | settings))
    spec = policy_spec(kind, activation=activation, normalise=variant != "bare")
    algorithm, parameters, _ = learner(ppo, spec, provider=provider)
    expected = ReferencePpo(ppo, spec, parameters, seed=7, columns=COLUMNS)
    start = parameters.data.copy()
    rng = np.random.default_rng(1)
    for progress in (0.0, 0.4, 0.7):
        batch = random_batch(rng, spec, algorithm.get_policy(), columns=COLUMNS)
        batch = whole_episodes(batch) if episodes else batch
        metrics = algorithm.update(batch, progress)
        wanted = expected.update(batch, progress)
        found = {name: metrics[name] for name in wanted}
        assert found == pytest.approx(wanted, rel=2e-3, abs=2e-5)

    assert np.abs(parameters.data - start).max() > 0.01
    np.testing.assert_allclose(parameters.data, reference.flat(expected.weights), atol=2e-5)
    if spec.normalise:
        seen = np.array(expected.observations_seen, np.float64)
        arrays = algorithm.get_policy()
        np.testing.assert_allclose(arrays["normaliser.mean"], seen.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(arrays["normaliser.scale"], 1 / seen.std(axis=0), rtol=1e-5)


def test_the_steps_that_a_discount_looks_ahead_grow_in_a_straight_line_to_the_horizon():
    growing = PpoSettings(discount=0.99, final_discount=0.995)
    for progress, ahead in ((0.0, 100), (0.25, 125), (0.5, 150), (1.0, 200), (1.3, 200)):
        assert 1.0 / (1.0 - compute_discount(growing, progress)) == pytest.approx(ahead)
    late = growing.model_copy(update={"discount_moves_from": 0.5})
    for progress, ahead in ((0.0, 100), (0.5, 100), (0.75, 150), (1.0, 200), (1.3, 200)):
        assert 1.0 / (1.0 - compute_discount(late, progress)) == pytest.approx(ahead)
    rounded = PpoSettings(discount=0.6, final_discount=0.9, discount_moves_from=0.5)
    assert {compute_discount(rounded, at) for at in (0.0, 0.3, 0.5)} == {0.6}  # exactly
    assert [compute_discount(PpoSettings(discount=1.0), at) for at in (0.0, 0.7)] == [1.0, 1.0]
    with pytest.raises(ValueError, match="final_discount needs a discount below 1"):
        PpoSettings(discount=1.0, final_discount=0.99)
    with pytest.raises(
        ValueError, match=r"discount_moves_from is 0\.5, but final_discount is not set"
    ):
        PpoSettings(discount_moves_from=0.5)


def test_one_epoch_of_one_minibatch_is_the_actor_critic_gradient():
    """At ratio 1, the gradient of the clipped objective is that of A log pi."""
    ppo = one_minibatch(entropy_weight=0.01, value_weight=0.5)
    spec = policy_spec("continuous")
    algorithm, parameters, gradients = learner(ppo, spec)
    before = ReferencePpo(ppo, spec, parameters, seed=7, columns=COLUMNS)
    batch = random_batch(np.random.default_rng(2), spec, algorithm.get_policy(), columns=COLUMNS)
    values, gains = before.estimate(batch, batch.rewards)
    observations = batch.observations.reshape(-1, 5)
    policy = reference.distribution(before.weights, observations, True)
    log_probs = policy.log_prob(reference.torch.as_tensor(batch.actions.reshape(-1, 3)).double())
    critic = reference.outputs(before.weights, "critic", observations, True)[:, 0]
    targets = reference.torch.as_tensor((values + gains).ravel())
    actor_loss = -(log_probs * reference.torch.as_tensor(gains.ravel())).mean()
    value_loss = 0.5 * (critic - targets).square().mean()
    (actor_loss + value_loss - 0.01 * policy.entropy().mean()).backward()

    algorithm.update(batch, 0.0)

    (found,) = gradients.gradients
    wanted = reference.flat(before.weights, gradients=True)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["continuous", "gsde", "discrete"])
def test_the_ratio_is_one_before_the_first_step(kind):
    spec = policy_spec(kind, normalise=True)
    algorithm, parameters, gradients = learner(PpoSettings(minibatch_size=40, epochs=2), spec)
    rng = np.random.default_rng(3)
    for _ in range(2):  # in the second iteration, the normaliser has an effect
        gradients.asked.clear()
        weights = reference.tensors(parameters)
        batch = random_batch(rng, spec, algorithm.get_policy(), columns=COLUMNS)
        metrics = algorithm.update(batch, 0.0)
        first, second = gradients.asked[:2]
        ratio = reference.ppo_losses(weights, first, True)["ratio"].detach().numpy()
        assert np.abs(ratio - 1.0).max() < 1e-4
        assert metrics["approx_kl"] > 0.0
        # The weights differ in the next minibatch.
        moved = reference.ppo_losses(reference.tensors(parameters), second, True)["ratio"]
        assert np.abs(moved.detach().numpy() - 1.0).max() > 1e-3


def test_every_epoch_sees_every_sample_once():
    spec = policy_spec("continuous")
    algorithm, _, gradients = learner(PpoSettings(minibatch_size=36, epochs=2), spec)
    batch = random_batch(np.random.default_rng(4), spec, algorithm.get_policy(), columns=COLUMNS)

    metrics = algorithm.update(batch, 0.0)

    sizes = [len(minibatch.returns) for minibatch in gradients.asked]
    assert sizes == [36, 36, 24] * 2
    assert metrics["n_updates"] == 6.0
    whole = np.sort(batch.observations[..., 0].ravel())
    epochs = [
        np.concatenate([m.observations[:, 0] for m in gradients.asked[start : start + 3]])
        for start in (0, 3)
    ]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), whole)
    assert np.any(epochs[0] != epochs[1])
    assert np.any(epochs[0] != batch.observations[..., 0].ravel())


def test_minibatches_are_standardised_but_not_a_single_sample():
    spec = policy_spec("continuous")
    settings = {"recompute_advantages": False, "epochs": 1, "scale_rewards": False}
    plain, _, raw = learner(PpoSettings(minibatch_size=19, **settings), spec)
    normal, _, standard = learner(
        PpoSettings(minibatch_size=19, normalise_advantages="minibatch", **settings), spec
    )
    batch = random_batch(np.random.default_rng(5), spec, plain.get_policy(), columns=COLUMNS)
    for algorithm in (plain, normal):
        algorithm.update(batch, 0.0)

    assert [len(m.returns) for m in standard.asked] == [19] * 5 + [1]
    for before, after in zip(raw.asked[:-1], standard.asked[:-1], strict=True):
        assert after.advantages.mean() == pytest.approx(0.0, abs=1e-6)
        assert after.advantages.std() == pytest.approx(1.0, abs=1e-5)
        assert np.corrcoef(before.advantages, after.advantages)[0, 1] == pytest.approx(1.0)
    np.testing.assert_array_equal(raw.asked[-1].advantages, standard.asked[-1].advantages)


def test_what_stands_in_idle_places_does_not_matter():
    spec = policy_spec("continuous", normalise=True)
    ppo = PpoSettings(epochs=2, minibatch_size=8)
    states, metrics = [], []
    for garbage in (0.0, 123.0, math.nan):
        algorithm, _, _ = learner(ppo, spec)
        rng = np.random.default_rng(6)
        for _ in range(2):
            batch = random_batch(rng, spec, algorithm.get_policy(), columns=COLUMNS)
            metrics.append(algorithm.update(whole_episodes(batch, garbage), 0.0))
        states.append(algorithm.get_state())

    for state in states[1:]:
        for name, array in states[0].items():
            np.testing.assert_array_equal(state[name], array)
    assert metrics[:2] == metrics[2:4] == metrics[4:]


def test_a_large_step_of_the_policy_ends_the_epochs():
    spec = policy_spec("continuous")
    ppo = PpoSettings(
        target_kl=0.02, learning_rate=1e-3, minibatch_size=32, epochs=20, anneal_learning_rate=False
    )
    algorithm, parameters, gradients = learner(ppo, spec)
    batch = random_batch(np.random.default_rng(7), spec, algorithm.get_policy(), columns=COLUMNS)
    weights = reference.tensors(parameters)

    metrics = algorithm.update(batch, 0.0)

    # Repeat the recorded gradients, and compute the change of the policy before each step.
    kls = []
    replayed, adam = parameters.data.copy(), Adam(len(parameters.data), ppo.adam_epsilon)
    replayed[:] = reference.flat(weights)
    for minibatch, gradient in zip(gradients.asked, gradients.gradients, strict=True):
        now = dict(zip(weights, split(replayed, weights), strict=True))
        ratio = reference.ppo_losses(now, minibatch, True)["ratio"]
        kls.append((ratio - 1 - ratio.log()).mean().item())
        if kls[-1] <= 0.03:
            clip_all(gradient, parameters, ppo.max_gradient_norm)
            adam.step(replayed, gradient, 1e-3)
    assert max(kls[:-1]) <= 0.03 < kls[-1]
    np.testing.assert_allclose(parameters.data, replayed, atol=1e-6)
    assert 3 < len(kls) < 60
    assert metrics["n_updates"] == len(kls) - 1
    assert metrics["epochs_done"] == (len(kls) - 1) // 3
    assert metrics["approx_kl"] == pytest.approx(np.mean(kls), rel=1e-3)


def split(data, weights):
    sizes = np.cumsum([math.prod(w.shape) for w in weights.values()])[:-1]
    parts = np.split(data.astype(np.float64), sizes)
    return [
        reference.torch.as_tensor(part.reshape(tuple(w.shape)))
        for part, w in zip(parts, weights.values(), strict=True)
    ]


@pytest.mark.parametrize("fault", ["gradient", math.nan, math.inf])
def test_a_bad_minibatch_changes_nothing(fault):
    spec = policy_spec("continuous")
    ppo = PpoSettings(minibatch_size=24, epochs=1)
    algorithm, parameters, _ = learner(ppo, spec, spoil=lambda call: fault)
    before = {name: array for name, array in algorithm.get_state().items() if name != "guard"}
    batch = random_batch(np.random.default_rng(8), spec, algorithm.get_policy(), columns=COLUMNS)

    metrics = algorithm.update(batch, 0.0)

    after = algorithm.get_state()
    for name in ("parameters", "adam.first", "adam.second", "adam.count", "updates"):
        np.testing.assert_array_equal(after[name], before[name])
    assert metrics["refused_minibatches"] == 4.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert "loss" not in metrics
    with pytest.raises(LearningError, match="5 times in a row") as caught:
        algorithm.update(batch, 0.0)
    assert "ppo.learning_rate" in caught.value.hint
    np.testing.assert_array_equal(parameters.data, before["parameters"])


def test_returns_too_large_to_be_squared_end_the_run():
    spec = policy_spec("continuous")
    algorithm, *_ = learner(PpoSettings(minibatch_size=12, scale_rewards=False), spec)
    batch = random_batch(np.random.default_rng(8), spec, algorithm.get_policy(), columns=COLUMNS)
    batch.rewards[:] *= 1e25
    with pytest.raises(LearningError, match="not finite 5 times") as caught:
        algorithm.update(batch, 0.0)
    assert "ppo.scale_rewards" in caught.value.hint


def test_one_bad_minibatch_among_good_ones_is_skipped():
    """The other minibatches are used. Only five consecutive bad ones are an error."""
    spec = policy_spec("continuous")
    ppo = PpoSettings(minibatch_size=24, epochs=4, recompute_advantages=False)
    algorithm, parameters, gradients = learner(
        ppo, spec, spoil=lambda call: "gradient" if call % 2 else None
    )
    batch = random_batch(np.random.default_rng(9), spec, algorithm.get_policy(), columns=COLUMNS)
    expected, adam = parameters.data.copy(), Adam(len(parameters.data), ppo.adam_epsilon)

    metrics = algorithm.update(batch, 0.0)

    for gradient in gradients.gradients[::2]:
        clip_all(gradient, parameters, ppo.max_gradient_norm)
        adam.step(expected, gradient, ppo.learning_rate)
    np.testing.assert_array_equal(parameters.data, expected)
    assert metrics["refused_minibatches"] == 8.0
    assert metrics["n_updates"] == 8.0
    assert metrics["value_loss"] > 0.0


@pytest.mark.filterwarnings("error")
def test_a_ratio_beyond_float32_is_refused_without_a_word():
    spec = policy_spec("continuous")
    algorithm, parameters, _ = learner(PpoSettings(minibatch_size=48, epochs=1), spec)
    before = parameters.data.copy()
    batch = random_batch(np.random.default_rng(10), spec, algorithm.get_policy(), columns=COLUMNS)
    far = dataclasses.replace(batch, log_probs=np.full_like(batch.log_probs, -1e30))

    metrics = algorithm.update(far, 0.0)

    assert metrics["refused_minibatches"] == 2.0
    np.testing.assert_array_equal(parameters.data, before)


def test_a_saved_state_goes_on_bit_by_bit():
    spec = policy_spec("discrete", normalise=True)
    ppo = PpoSettings(epochs=2, minibatch_size=20, clip_range_value=0.2)
    straight, first, second = (learner(ppo, spec)[0] for _ in range(3))
    batches = []
    for progress in (0.0, 0.2, 0.4, 0.6):
        batch = random_batch(
            np.random.default_rng(int(10 * progress)), spec, straight.get_policy(), columns=COLUMNS
        )
        batches.append((batch, progress, straight.update(batch, progress)))
    for batch, progress, _ in batches[:2]:
        first.update(batch, progress)
    saved = first.get_state()
    copies = {name: array.copy() for name, array in saved.items()}
    first.update(*batches[2][:2])
    for name, array in copies.items():  # a saved state is a copy, not a view
        np.testing.assert_array_equal(saved[name], array)
    second.load_state(saved)

    for batch, progress, metrics in batches[2:]:
        assert second.update(batch, progress) == metrics
    for name, array in straight.get_state().items():
        np.testing.assert_array_equal(second.get_state()[name], array)


def test_a_policy_is_a_copy():
    spec = policy_spec("continuous", normalise=True)
    algorithm, _, _ = learner(PpoSettings(minibatch_size=32), spec)
    shipped = algorithm.get_policy()
    copies = {name: array.copy() for name, array in shipped.items()}
    assert not any(name.startswith("critic") for name in shipped)
    algorithm.update(random_batch(np.random.default_rng(11), spec, shipped, columns=COLUMNS), 0.0)

    for name, array in copies.items():
        np.testing.assert_array_equal(shipped[name], array)
        assert np.any(algorithm.get_policy()[name] != array)


def test_a_state_of_another_network_is_refused():
    small, large = (
        learner(PpoSettings(), policy_spec(hidden=hidden))[0] for hidden in ((8,), (16,))
    )
    with pytest.raises(LearningError, match=r"parameters is float32 \(\d+,\)"):
        large.load_state(small.get_state())
