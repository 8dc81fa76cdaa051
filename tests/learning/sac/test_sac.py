"""SAC's gradients and updates, compared with torch, and edge cases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from sac_cases import (
    ACTIONS,
    OBSERVATIONS,
    ROWS,
    Plain,
    learner,
    minibatch,
    networks,
    owed,
    providers,
    spec,
    transitions,
)

from rlflame.config.algorithms import CriticNorm, SacSettings
from rlflame.config.recipe import NetworkSettings
from rlflame.errors import LearningError
from rlflame.learning.base import ReplayBatch, Transitions
from rlflame.learning.networks.heads import SquashedGaussianHead
from rlflame.learning.parallel.thread_pair import ThreadPair
from rlflame.learning.sac.loss import NumpySac, SacMinibatch
from rlflame.learning.sac.loss_torch import TorchSac
from rlflame.learning.sac.networks import SacNetworks, build_sac_networks
from rlflame.learning.sac.sac import Sac
from rlflame.rollout.distributions import SquashedGaussian, log_slope_of_tanh
from rlflame.rollout.task import PolicySpec

# The squashed Gaussian


def squashed_gaussian(policy: PolicySpec) -> SquashedGaussian:
    return SquashedGaussian(policy, {}, np.zeros((0, 0), np.float32))


def test_the_slope_of_tanh_is_exact_where_tanh_rounds_to_one() -> None:
    raw = np.linspace(-60.0, 60.0, 241)
    # 1 - tanh(x)^2 = 4 / (e^x + e^-x)^2, which does not round to zero in float64.
    expected = math.log(4.0) - 2.0 * (np.abs(raw) + np.log1p(np.exp(-2.0 * np.abs(raw))))
    np.testing.assert_allclose(log_slope_of_tanh(raw.astype(np.float32)), expected, rtol=2e-6)
    near = np.linspace(-3.0, 3.0, 61)
    np.testing.assert_allclose(
        log_slope_of_tanh(near.astype(np.float32)), np.log(1.0 - np.tanh(near) ** 2), atol=2e-6
    )


def test_log_densities_are_those_of_torchs_transformed_normal() -> None:
    generator = np.random.default_rng(3)
    out = generator.normal(0.0, 1.5, (8, 2 * ACTIONS)).astype(np.float32)
    noise = generator.standard_normal((8, ACTIONS)).astype(np.float32)
    actions, log_probs = squashed_gaussian(spec()).sample(out, (noise[None],), 0)
    mean, log_std = torch.as_tensor(out, dtype=torch.float64).split(ACTIONS, dim=1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
    raw = mean + normal.stddev * torch.as_tensor(noise, dtype=torch.float64)
    squash = torch.distributions.transforms.TanhTransform()
    expected = normal.log_prob(raw) - squash.log_abs_det_jacobian(raw, torch.tanh(raw))
    np.testing.assert_allclose(actions, torch.tanh(raw), atol=1e-6)
    np.testing.assert_allclose(log_probs, expected.sum(dim=1), rtol=1e-5, atol=1e-5)


def test_the_density_of_squashed_actions_integrates_to_one() -> None:
    """Sum the density over a fine grid of one action, made from a grid of noise."""
    narrow = PolicySpec(
        "continuous", 1, 1, (-1.0,), (1.0,), (4,), "tanh", False, 10.0, 20_000, True
    )
    out = np.tile(np.array([[0.4, -0.3]], np.float32), (20_000, 1))
    noise = np.linspace(-7.0, 7.0, 20_000, dtype=np.float32)[:, None]
    actions, log_probs = squashed_gaussian(narrow).sample(out, (noise[None],), 0)
    mass = np.trapezoid(np.exp(log_probs.astype(np.float64)), actions[:, 0].astype(np.float64))
    assert mass == pytest.approx(1.0, abs=1e-3)


def test_learner_and_worker_draw_the_same_actions() -> None:
    generator = np.random.default_rng(5)
    out = generator.normal(0.0, 2.0, (8, 2 * ACTIONS)).astype(np.float32)
    out[0, ACTIONS:] = [5.0, -30.0, 2.0]  # beyond both bounds, and at one
    noise = generator.standard_normal((8, ACTIONS)).astype(np.float32)
    worker, learners = squashed_gaussian(spec()), SquashedGaussianHead(ACTIONS)
    expected = worker.sample(out, (noise[None],), 0)
    for ours, theirs in zip(learners.sample(out.T.copy(), noise.T.copy()), expected, strict=True):
        np.testing.assert_allclose(ours.T, theirs, rtol=1e-6, atol=1e-6)


def test_actions_are_stretched_to_the_bounds_and_never_beyond() -> None:
    policy = squashed_gaussian(spec())
    corners = np.array([[-1, -1, -1], [1, 1, 1], [0, 0, 0], [0.5, -0.5, 0.5]], np.float32)
    expected = [[-1, -2, 0], [1, 2, 4], [0, 0, 2], [0.5, -1, 3]]
    np.testing.assert_array_equal(policy.to_environment(corners), expected)
    awkward = PolicySpec("continuous", 1, 1, (-0.1,), (0.7,), (4,), "tanh", False, 10.0, 8, True)
    ends = squashed_gaussian(awkward).to_environment(np.array([[-1.0], [1.0]], np.float32))
    assert ends.min() >= np.float32(-0.1)
    assert ends.max() <= np.float32(0.7)


def test_bounds_may_be_as_far_apart_as_float32_goes() -> None:
    far = float(np.finfo(np.float32).max)
    widest = PolicySpec("continuous", 1, 1, (-far,), (far,), (4,), "tanh", False, 10.0, 8, True)
    given = squashed_gaussian(widest).to_environment(np.array([[-1], [0], [0.5], [1]], np.float32))
    np.testing.assert_allclose(given[:, 0], [-far, 0.0, 0.5 * far, far], rtol=1e-6)


def test_random_actions_fill_the_whole_range_evenly() -> None:
    wide = PolicySpec(
        "continuous", 1, 2, (-1.0,) * 2, (1.0,) * 2, (4,), "tanh", False, 10.0, 8, True
    )
    noise = np.random.default_rng(0).random((40_000, 2), dtype=np.float32)
    actions, log_probs = squashed_gaussian(wide).sample_uniform(noise)
    counts, _ = np.histogram(actions[:, 0], bins=20, range=(-1.0, 1.0))
    assert counts.sum() == 40_000
    assert np.square(counts - 2000).sum() / 2000 < 43.8  # chi-square, 19 degrees, p = 0.001
    np.testing.assert_allclose(log_probs, math.log(0.25), rtol=1e-6)


# Initialisation


def test_the_critics_begin_apart_and_their_targets_where_they_are() -> None:
    nets = build_sac_networks(spec(), NetworkSettings(), 0)
    for layer in range(3):
        one, other = (nets.critics[f"critic{j}.{layer}.weight"] for j in (0, 1))
        assert not np.isclose(one, other).any()
    np.testing.assert_array_equal(nets.targets.data, nets.critics.data)
    assert nets.targets.data is not nets.critics.data


def test_what_the_actor_begins_with_does_not_touch_the_critics() -> None:
    plain, other = (
        build_sac_networks(spec(), NetworkSettings(**settings), 0)
        for settings in (
            {"last_layer_scale": 1.0, "log_std_init": 0.0},
            {"last_layer_scale": 0.5, "log_std_init": -1.5},
        )
    )
    np.testing.assert_array_equal(plain.critics.data, other.critics.data)
    last = "actor.2."
    np.testing.assert_allclose(2.0 * other.actor[last + "weight"], plain.actor[last + "weight"])
    # Orthogonal networks have no initial biases. The initial log deviation of -1.5 is a bias.
    assert other.actor[last + "bias"].tolist() == [0.0] * ACTIONS + [-1.5] * ACTIONS


# Gradients


def assert_both_agree(nets: SacNetworks, threads: int) -> None:
    batch, count = minibatch(), 50  # as if the batch were one shard of a larger one
    ours, theirs = providers(nets, threads)
    np.testing.assert_allclose(
        ours.sample_actions(batch), theirs.sample_actions(batch), rtol=1e-4, atol=1e-4
    )
    for name in ("compute_critic_gradient", "compute_actor_gradient"):
        found, sums = getattr(ours, name)(batch, 0.37, count)
        expected, expected_sums = getattr(theirs, name)(batch, 0.37, count)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * scale)
        assert sums == pytest.approx(expected_sums, rel=1e-5)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("hidden", [(24, 16), (12,), (8, 8, 8)])
@pytest.mark.parametrize("exploration", ["independent", "gsde"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_hand_derived_gradients_are_those_of_autograd(
    activation: str, hidden: tuple[int, ...], exploration: str, threads: int, norm: CriticNorm
) -> None:
    nets = networks(norm=norm, activation=activation, hidden=hidden, exploration=exploration)
    assert_both_agree(nets, threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize(("quantiles", "dropped"), [(2, 0), (9, 4), (25, 5)])
def test_so_are_those_of_quantiles(
    norm: CriticNorm, threads: int, quantiles: int, dropped: int
) -> None:
    nets = networks(norm=norm, quantiles=quantiles, drop_count=dropped)
    # The values are far enough apart to be on both sides of where the Huber loss becomes linear.
    nets.critics.data[:] *= 3.0
    assert_both_agree(nets, threads)


@pytest.mark.parametrize("shift", [-4.0, 5.0])
def test_the_deviations_of_gsde_have_no_bounds(shift: float) -> None:
    """The values are far beyond the network's own bound, a log deviation of 2."""
    nets, batch = networks(exploration="gsde"), minibatch()
    nets.actor["actor.log_std"][:] += np.float32(shift)
    ours, theirs = NumpySac(nets, ThreadPair(1)), TorchSac(nets)
    np.testing.assert_allclose(
        ours.sample_actions(batch), theirs.sample_actions(batch), rtol=1e-4, atol=1e-3
    )
    found, expected = (p.compute_actor_gradient(batch, 0.37, ROWS)[0] for p in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", [{}, {"quantiles": 6, "drop_count": 2}])
def test_gradients_of_shards_add_up(kind: dict[str, Any]) -> None:
    nets, whole = networks(**kind), minibatch(rows=32)
    provider = NumpySac(nets, ThreadPair(1))

    def gradients(rows: slice) -> tuple[Any, Any]:
        part = SacMinibatch(
            whole.observations[rows],
            whole.actions[rows],
            whole.rewards[rows],
            whole.next_observations[rows],
            whole.bootstrap[rows],
            np.ascontiguousarray(whole.noise[:, :, rows]),
        )
        provider.sample_actions(part)
        critic = provider.compute_critic_gradient(part, 0.2, 32)[0].copy()
        return critic, provider.compute_actor_gradient(part, 0.2, 32)[0].copy()

    expected = gradients(slice(0, 32))
    first, second = gradients(slice(0, 7)), gradients(slice(7, 32))
    for one, other, both in zip(first, second, expected, strict=True):
        np.testing.assert_allclose(one + other, both, rtol=1e-4, atol=1e-6)


# Whole updates


@pytest.mark.parametrize(
    "settings",
    [
        SacSettings(learning_rate=1e-3),
        SacSettings(
            learning_rate=1e-3,
            critic_learning_rate=2e-3,
            entropy_learning_rate=5e-3,
            policy_delay=2,
            target_update_interval=3,
            target_update_rate=0.1,
            max_gradient_norm=0.2,
        ),
    ],
    ids=["default", "everything else"],
)
@pytest.mark.parametrize("exploration", ["independent", "gsde"])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_a_hundred_updates_are_those_of_a_loop_in_plain_torch(
    settings: SacSettings, exploration: str, norm: CriticNorm
) -> None:
    nets = networks(norm=norm, exploration=exploration)
    plain, ours = Plain(nets, settings), learner(settings, nets)
    for number in range(100):
        plain.update(number, transitions(number))
    ours.update(owed(0, 60), 0.0)
    ours.update(owed(60, 40), 0.0)
    for weights, vector in (
        (plain.actor, nets.actor),
        (plain.critics, nets.critics),
        (plain.targets, nets.targets),
        *([(plain.running, nets.moments.running)] if nets.moments else []),
    ):
        for name, tensor in weights.items():
            np.testing.assert_allclose(vector[name], tensor.detach(), atol=2e-4)
    weight = float(plain.log_weight.detach().exp())
    assert ours.update(owed(100, 0), 0.0)["ent_coef"] == pytest.approx(weight, rel=1e-4)


#: The variants of critics.
KINDS: list[dict[str, Any]] = [
    {},
    {"norm": "batch"},
    {"quantiles": 6, "drop_count": 2},
    {"norm": "batch", "quantiles": 6, "drop_count": 2},
]


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_and_hand_lead_to_the_same_weights(kind: dict[str, Any]) -> None:
    settings, one, other = SacSettings(learning_rate=1e-3), networks(**kind), networks(**kind)
    by_hand = learner(settings, one)
    by_torch = Sac(settings, other, [providers(other)[1]], ThreadPair(1), seed=7)
    for first in range(0, 100, 10):
        ours = by_hand.update(owed(first, 10), 0.0)
        theirs = by_torch.update(owed(first, 10), 0.0)
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    np.testing.assert_allclose(one.actor.data, other.actor.data, atol=1e-4)
    np.testing.assert_allclose(one.critics.data, other.critics.data, atol=1e-4)


@pytest.mark.parametrize("exploration", ["independent", "gsde"])
@pytest.mark.parametrize("kind", KINDS)
def test_lanes_change_no_bit(exploration: str, kind: dict[str, Any]) -> None:
    states = []
    for count in (1, 2):
        sac = learner(SacSettings(), networks(exploration=exploration, **kind), count)
        sac.update(owed(0, 30), 0.0)
        states.append(sac.get_state())
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)


# State, schedules, errors


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_learner_goes_on_as_the_one_that_was_saved(kind: dict[str, Any]) -> None:
    first = learner(SacSettings(), networks(**kind))
    first.update(owed(0, 11), 0.0)
    second = learner(SacSettings(), networks(seed=9, **kind))
    second.load_state(first.get_state())
    for sac in (first, second):
        sac.update(owed(11, 9), 0.0)
    for name, array in first.get_state().items():
        np.testing.assert_array_equal(array, second.get_state()[name], err_msg=name)


def test_learning_rates_fall_to_zero_at_the_horizon() -> None:
    nets = networks()
    sac = learner(SacSettings(anneal_learning_rate=True, learning_rate=1e-3), nets)
    assert sac.update(owed(0, 1), 0.25)["learning_rate"] == pytest.approx(0.75e-3)
    before = nets.actor.data.copy(), nets.critics.data.copy()
    sac.update(owed(1, 3), 1.0)
    np.testing.assert_array_equal(before[0], nets.actor.data)
    np.testing.assert_array_equal(before[1], nets.critics.data)


def test_a_fixed_entropy_coefficient_stays() -> None:
    sac = learner(SacSettings(entropy_coefficient=0.0), networks())
    metrics = sac.update(owed(0, 5), 0.0)
    assert metrics["ent_coef"] == 0.0
    assert "ent_coef_loss" not in metrics
    assert all(np.isfinite(array).all() for array in sac.get_state().values())


def test_the_entropy_coefficient_rises_while_the_policy_is_too_certain() -> None:
    certain = learner(SacSettings(target_entropy=100.0), networks())
    random = learner(SacSettings(target_entropy=-100.0), networks())
    assert certain.update(owed(0, 20), 0.0)["ent_coef"] > 1.0
    assert random.update(owed(0, 20), 0.0)["ent_coef"] < 1.0


def test_an_update_that_is_not_finite_changes_nothing_and_the_fifth_in_a_row_ends_the_run() -> None:
    sac = learner(SacSettings(), networks())
    sac.update(owed(0, 3), 0.0)
    before = sac.get_state()

    def bad(update: int) -> Transitions:
        drawn = transitions(update)
        drawn.rewards[4] = np.float32(3e38)
        return drawn

    fresh: Any = None
    metrics = sac.update(ReplayBatch(fresh, 3, 4, bad), 0.0)
    assert metrics["refused_minibatches"] == 4.0
    for name in ("actor", "critics", "targets", "log_entropy_weight", "critic_adam.count"):
        np.testing.assert_array_equal(before[name], sac.get_state()[name], err_msg=name)
    restored = learner(SacSettings(), networks(seed=1))
    restored.load_state(sac.get_state())
    for same in (sac, restored):
        with pytest.raises(LearningError, match="not finite 5 times"):
            same.update(ReplayBatch(fresh, 7, 1, bad), 0.0)


@pytest.mark.parametrize("number", [0, 1], ids=["by hand", "autograd"])
def test_a_batch_whose_variance_is_infinite_leaves_no_trace_in_the_moments(number: int) -> None:
    nets = networks(norm="batch")
    sac = Sac(SacSettings(), nets, [providers(nets)[number]], ThreadPair(1), seed=7)
    sac.update(owed(0, 3), 0.0)
    before = sac.get_state()

    def bad(update: int) -> Transitions:
        drawn = transitions(update)
        drawn.observations[4, 1] = np.float32(1e21)
        return drawn

    fresh: Any = None
    assert sac.update(ReplayBatch(fresh, 3, 4, bad), 0.0)["refused_minibatches"] == 4.0
    for name in ("actor", "critics", "moments", "critic_adam.second"):
        np.testing.assert_array_equal(before[name], sac.get_state()[name], err_msg=name)
    with pytest.raises(LearningError, match="not finite 5 times") as caught:
        sac.update(ReplayBatch(fresh, 7, 1, bad), 0.0)
    assert "normalise_observations" in caught.value.hint


@pytest.mark.parametrize("given", [{"target_update_rate": 0.01}, {"target_update_interval": 2}])
def test_how_targets_follow_is_refused_where_there_are_none(given: dict[str, Any]) -> None:
    SacSettings(**given)
    with pytest.raises(ValueError, match=", but critic_norm=batch uses no target critics"):
        SacSettings(critic_norm="batch", **given)


@pytest.mark.parametrize(("norm", "missing"), [("none", "targets"), ("batch", "moments")])
def test_a_state_of_other_critics_is_refused(norm: CriticNorm, missing: str) -> None:
    other: CriticNorm = "batch" if norm == "none" else "none"
    saved = learner(SacSettings(), networks(norm=other)).get_state()
    with pytest.raises(LearningError, match=f"saved learner's {missing} is missing"):
        learner(SacSettings(), networks(norm=norm)).load_state(saved)


def test_batches_of_many_sizes_have_the_values_that_each_has_alone() -> None:
    nets = networks(norm="batch")
    used, _ = providers(nets)
    for rows in (32, 8, 20, 32, 8):
        batch = minibatch(rows, rows)
        fresh, _ = providers(nets)
        found = []
        for provider in (used, fresh):
            provider.sample_actions(batch)
            critics = provider.compute_critic_gradient(batch, 0.37, rows)[0].copy()
            found.append((critics, provider.compute_actor_gradient(batch, 0.37, rows)[0].copy()))
        np.testing.assert_array_equal(found[0][0], found[1][0])
        np.testing.assert_array_equal(found[0][1], found[1][1])


def test_where_what_is_learned_from_is_small_the_learning_rate_is_blamed() -> None:
    nets = networks()
    nets.critics["critic1.2.bias"][:] = np.float32(3e38)
    sac = learner(SacSettings(), nets)
    with pytest.raises(LearningError, match=r"gradient norm (inf|nan)\)") as caught:
        sac.update(owed(0, 5), 0.0)
    assert "--set sac.learning_rate=1e-4" in caught.value.hint


@pytest.mark.parametrize("provider", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_targets_that_are_not_finite_are_seen_among_quantiles(provider: int, bad: float) -> None:
    """The bad value is a high quantile of a target critic, which all rows drop."""
    nets = networks(quantiles=6, drop_count=2)
    nets.targets["critic1.2.bias"][5] = bad
    sac = Sac(SacSettings(), nets, [providers(nets)[provider]], ThreadPair(1), seed=7)
    before = nets.critics.data.copy()
    assert sac.update(owed(0, 2), 0.0)["refused_minibatches"] == 2.0
    np.testing.assert_array_equal(nets.critics.data, before)


def test_an_actor_whose_loss_is_not_finite_stays_while_the_critics_learn() -> None:
    class Spoiled(NumpySac):
        def compute_actor_gradient(self, *given: Any) -> Any:
            gradient, sums = super().compute_actor_gradient(*given)
            gradient[3] = np.nan
            return gradient, sums

    nets, lanes = networks(), ThreadPair(1)
    sac = Sac(SacSettings(policy_delay=2), nets, [Spoiled(nets, lanes)], lanes, seed=7)
    before = sac.get_state()
    metrics = sac.update(owed(0, 4), 0.0)
    after = sac.get_state()
    for name in ("actor", "actor_adam.first", "actor_adam.second", "actor_adam.count"):
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    assert int(after["critic_adam.count"]) == 4
    # The first and the third of four updates train the actor.
    assert metrics["refused_minibatches"] == 2.0
    assert "actor_loss" not in metrics
    # Updates of the critics do not reset the count of consecutive failures, nor does a resume.
    restored = Sac(SacSettings(policy_delay=2), nets, [Spoiled(nets, lanes)], lanes, seed=7)
    restored.load_state(after)
    for same in (sac, restored):
        assert same.update(owed(4, 4), 0.0)["refused_minibatches"] == 4.0
        with pytest.raises(LearningError, match="not finite 5 times in a row"):
            same.update(owed(8, 1), 0.0)


def normalising() -> SacNetworks:
    wanted = dataclasses.replace(spec(), normalise=True)
    return build_sac_networks(wanted, NetworkSettings(), 0)


def just_seen(seed: int = 0) -> Any:
    """The new steps of an iteration: fifty in each of four columns."""
    generator = np.random.default_rng(seed)
    seen = generator.normal(3.0, 2.0, (50, 4, OBSERVATIONS)).astype(np.float32)
    return type("Fresh", (), {"observations": seen, "valid": np.ones((50, 4), bool)})


def test_the_normaliser_learns_from_what_is_fresh_and_acts_in_the_policy() -> None:
    sac, fresh = learner(SacSettings(), normalising()), just_seen()
    sac.update(ReplayBatch(fresh, 0, 0, transitions), 0.0)
    policy = sac.get_policy()
    rows = fresh.observations.reshape(-1, OBSERVATIONS).astype(np.float64)
    np.testing.assert_allclose(policy["normaliser.mean"], rows.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(policy["normaliser.scale"], 1.0 / rows.std(axis=0), rtol=1e-5)


def test_what_is_drawn_is_normalised_by_the_statistics_of_now() -> None:
    """The result is that of a learner without a normaliser on normalised transitions."""
    fresh, plain = just_seen(), build_sac_networks(spec(), NetworkSettings(), 0)
    rows = fresh.observations.reshape(-1, OBSERVATIONS).astype(np.float64)

    def by_hand(update: int) -> Transitions:
        drawn = transitions(update)
        for name in ("observations", "next_observations"):
            raw = getattr(drawn, name)
            raw[:] = np.clip((raw - rows.mean(axis=0)) / rows.std(axis=0), -10.0, 10.0)
        return drawn

    nets = normalising()
    learner(SacSettings(), nets).update(ReplayBatch(fresh, 0, 5, transitions), 0.0)
    learner(SacSettings(), plain).update(ReplayBatch(fresh, 0, 5, by_hand), 0.0)
    np.testing.assert_allclose(nets.actor.data, plain.actor.data, atol=2e-5)
    np.testing.assert_allclose(nets.critics.data, plain.critics.data, atol=2e-5)


def test_a_restored_normaliser_goes_on_as_the_one_that_was_saved() -> None:
    first, second = (learner(SacSettings(), normalising()) for _ in range(2))
    first.update(ReplayBatch(just_seen(0), 0, 2, transitions), 0.0)
    second.load_state(first.get_state())
    for sac in (first, second):
        sac.update(ReplayBatch(just_seen(1), 2, 2, transitions), 0.0)
    for name, array in first.get_state().items():
        np.testing.assert_array_equal(array, second.get_state()[name], err_msg=name)
