"""State-dependent exploration: the matrix, the noise for a state, its density."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import rollouts
import torch
from pydantic import ValidationError
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from rlflame.config.recipe import LearningSettings, NetworkSettings
from rlflame.errors import ConfigError
from rlflame.experiment import components
from rlflame.learning.networks.flat_vector import build_network
from rlflame.learning.networks.heads import GsdeVariance, SquashedGsdeHead
from rlflame.learning.sac.networks import build_sac_networks
from rlflame.rollout import wire
from rlflame.rollout.distributions import compute_noise_size, draw_noise
from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.policy import Policy, compute_array_shapes
from rlflame.rollout.task import EnvSpec, Float64, Fragment, PolicyArrays, PolicySpec, RolloutTask
from rlflame.rollout.worker import RolloutWorker

HOPPER = read_env_spec("Hopper-v5", {}, 12)
PENDULUM = read_env_spec("Pendulum-v1", {}, 50)
UNITS = 4


def gsde(env: EnvSpec = PENDULUM, **changes: Any) -> PolicySpec:
    wanted = {"hidden": (8, UNITS), "exploration": "gsde", "exploration_interval": 10} | changes
    return rollouts.policy_spec(env, **wanted)


def latent(shape: PolicySpec, arrays: PolicyArrays, observations: Any) -> Float64:
    """The activations of the last hidden layer, in plain float64."""
    x = observations.astype(np.float64)
    x = np.clip((x - arrays["normaliser.mean"]) * arrays["normaliser.scale"], -10.0, 10.0)
    for layer in range(len(shape.hidden)):
        x = np.tanh(x @ arrays[f"actor.{layer}.weight"] + arrays[f"actor.{layer}.bias"])
    return x


def means(shape: PolicySpec, arrays: PolicyArrays, observations: Any) -> Float64:
    last = len(shape.hidden)
    units = latent(shape, arrays, observations)
    mean: Float64 = units @ arrays[f"actor.{last}.weight"] + arrays[f"actor.{last}.bias"]
    return mean


# One step


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("env", [PENDULUM, HOPPER], ids=["pendulum", "hopper"])
def test_an_action_is_what_the_matrix_makes_of_the_units_and_has_torchs_density(
    env: EnvSpec, squash: bool
) -> None:
    shape = gsde(env, squash=squash, width=16)
    arrays, generator = rollouts.weights(shape), np.random.default_rng(1)
    seen = generator.normal(0.0, 2.0, (16, env.observation_size)).astype(np.float32)
    noise = np.stack([draw_noise(shape, "sample", generator, 1)[0] for _ in range(16)])
    actions, log_probs = Policy(shape, arrays).sample(seen, noise)

    units, mean = latent(shape, arrays, seen), means(shape, arrays, seen)
    std = np.exp(arrays["actor.log_std"].astype(np.float64))
    raw = mean.copy()
    for row, h, a in np.ndindex(16, UNITS, env.action_size):
        raw[row, a] += units[row, h] * std[h, a] * noise[row, h * env.action_size + a]
    deviation = np.sqrt(np.einsum("rh,ha->ra", units**2, std**2) + 1e-6)
    normal: Any = Normal(torch.tensor(mean), torch.tensor(deviation))
    if squash:
        normal = TransformedDistribution(normal, TanhTransform(cache_size=1))
    expected = np.tanh(raw) if squash else raw
    np.testing.assert_allclose(actions, expected, atol=2e-6)
    where = torch.tensor(expected)
    np.testing.assert_allclose(log_probs, Independent(normal, 1).log_prob(where), atol=1e-4)


@pytest.mark.parametrize("squash", [False, True])
def test_the_noise_does_not_touch_the_best_action_or_the_random_one(squash: bool) -> None:
    shape = gsde(squash=squash)
    arrays, generator = dict(rollouts.weights(shape)), np.random.default_rng(1)
    seen = generator.normal(0.0, 2.0, (8, 3)).astype(np.float32)
    mean = means(shape, arrays, seen)
    numbers = draw_noise(shape, "uniform", generator, 8)
    plain = Policy(shape, arrays)
    arrays["actor.log_std"] = arrays["actor.log_std"] + np.float32(2.0)
    wild = Policy(shape, arrays)
    assert wild.mode(seen).tobytes() == plain.mode(seen).tobytes()
    np.testing.assert_allclose(plain.mode(seen), np.tanh(mean) if squash else mean, atol=1e-6)
    assert numbers.shape == (8, 1)
    given = wild.to_environment(wild.distribution.sample_uniform(numbers)[0])
    np.testing.assert_allclose(given, -2.0 + 4.0 * numbers, atol=1e-6)  # a torque of at most 2


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("env", [PENDULUM, HOPPER], ids=["pendulum", "hopper"])
def test_a_row_has_the_same_bits_whatever_the_others_hold_and_wherever_it_stands(
    env: EnvSpec, squash: bool
) -> None:
    shape = gsde(env, squash=squash, hidden=(64, 37), width=16)
    policy, generator = Policy(shape, rollouts.weights(shape)), np.random.default_rng(2)
    seen = generator.normal(0.0, 2.0, (16, env.observation_size)).astype(np.float32)
    noise = draw_noise(shape, "sample", generator, 16)
    actions, log_probs = policy.sample(seen, noise)
    for filling in (0.0, 1e30, np.inf, np.nan):
        for row in range(16):
            others, other_noise = np.full_like(seen, filling), np.zeros_like(noise)
            others[row], other_noise[row] = seen[row], noise[row]
            with np.errstate(all="ignore"):
                found, density = policy.sample(others, other_noise)
            assert found[row].tobytes() == actions[row].tobytes()
            assert density[row].tobytes() == log_probs[row].tobytes()


def test_units_of_zero_leave_a_finite_density() -> None:
    shape = gsde(activation="relu", normalise=False)
    arrays = dict(rollouts.weights(shape))
    arrays["actor.1.bias"] = np.full_like(arrays["actor.1.bias"], -1e3)
    noise = draw_noise(shape, "sample", np.random.default_rng(0), 8)
    policy, seen = Policy(shape, arrays), np.zeros((8, 3), np.float32)
    actions, log_probs = policy.sample(seen, noise)
    np.testing.assert_array_equal(actions, policy.mode(seen))
    # A normal distribution with deviation 1e-3, at its mean.
    np.testing.assert_allclose(log_probs, -math.log(1e-3 * math.sqrt(2.0 * math.pi)), rtol=1e-6)


# The matrix in use


def fragment(task: RolloutTask) -> Fragment:
    result = rollouts.run(task)
    assert isinstance(result, Fragment)
    return result


def left(task: RolloutTask, found: Fragment) -> tuple[Float64, Float64]:
    """The units of each step, and its action's distance from the mean: `[T, N, ...]`."""
    arrays = rollouts.weights(task.policy)
    apart = found.actions - means(task.policy, arrays, found.observations)
    return latent(task.policy, arrays, found.observations), apart


def matrix(units: Float64, apart: Float64) -> tuple[Float64, float]:
    """The matrix that fits these steps best, and its largest error."""
    solved, *_ = np.linalg.lstsq(units, apart, rcond=None)
    return solved, float(np.abs(units @ solved - apart).max())


def test_one_matrix_explains_an_interval_of_an_episode_and_no_longer() -> None:
    """Pendulum has a time limit of 50 steps: 10 + 10 + 10 + 10 + 10 in each episode."""
    task = rollouts.task(PENDULUM, steps=200, rows=3, policy=gsde())
    units, apart = left(task, fragment(task))
    for row, start in itertools.product(range(3), range(0, 200, 10)):
        part = slice(start, start + 10)
        assert matrix(units[part, row], apart[part, row])[1] < 1e-4
        longer = slice(max(start - 3, 0), start + 8) if start else slice(2, 13)
        assert matrix(units[longer, row], apart[longer, row])[1] > 1e-3


def test_without_an_interval_a_matrix_is_held_for_an_episode() -> None:
    policy = gsde(exploration_interval=None)
    for unit in ("steps", "episodes"):
        task = rollouts.task(PENDULUM, steps=100, rows=2, policy=policy, unit=unit)
        units, apart = left(task, fragment(task))
        for row in range(2):
            assert matrix(units[:50, row], apart[:50, row])[1] < 1e-4
            if unit == "steps":
                assert matrix(units[50:, row], apart[50:, row])[1] < 1e-4
                assert matrix(units[:, row], apart[:, row])[1] > 1e-3


def test_an_interval_begins_anew_with_an_episode() -> None:
    """Episodes of 16 steps have intervals of 10 and 6 steps."""
    env = dataclasses.replace(PENDULUM, max_episode_steps=16)
    task = rollouts.task(env, steps=48, rows=1, policy=gsde())
    units, apart = left(task, fragment(task))
    for start, end in ((0, 10), (10, 16), (16, 26), (26, 32), (32, 42)):
        assert matrix(units[start:end, 0], apart[start:end, 0])[1] < 1e-4
    assert matrix(units[10:20, 0], apart[10:20, 0])[1] > 1e-3


@pytest.mark.parametrize("env", [PENDULUM, HOPPER], ids=["pendulum", "hopper"])
def test_however_an_episode_is_cut_into_tasks_its_actions_have_the_same_bits(env: EnvSpec) -> None:
    for interval in (10, None):
        first = rollouts.task(env, rows=2, policy=gsde(env, exploration_interval=interval))
        whole = fragment(dataclasses.replace(first, steps=40))
        for cuts in ((7, 13, 20), (25, 15), (1, 39)):
            task, parts = dataclasses.replace(first, steps=cuts[0]), []
            for steps in (*cuts[1:], None):
                parts.append(fragment(task))
                if steps is not None:
                    task = rollouts.following(task, parts[-1], steps=steps)
            for name in ("actions", "log_probs", "rewards", "observations"):
                joined = np.concatenate([getattr(part, name) for part in parts])
                assert joined.tobytes() == getattr(whole, name).tobytes()
            ends = [[state.token for state in part.states] for part in (parts[-1], whole)]
            assert ends[0] == ends[1]


def test_a_task_tried_again_in_the_middle_of_an_interval_has_the_same_bytes() -> None:
    first = rollouts.task(HOPPER, rows=2, steps=7, policy=gsde(HOPPER))
    worker = RolloutWorker()
    second = rollouts.following(first, rollouts.run(first, worker))
    answers = [wire.encode(rollouts.run(second, w)) for w in (worker, worker, RolloutWorker())]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"slot": 1}, {"purpose": "evaluate", "unit": "episodes"}], ids=str
)
def test_a_matrix_has_a_name_of_its_own(change: dict[str, Any]) -> None:
    task = rollouts.task(PENDULUM, unit="episodes", steps=10, rows=2, policy=gsde())
    other = dataclasses.replace(task, **change)
    found = [matrix(*(part[:, row] for part in left(t, fragment(t))))[0]
             for t in (task, other) for row in range(2)]  # fmt: skip
    for one, another in itertools.combinations(found, 2):
        assert np.abs(one - another).max() > 0.1


def test_rows_and_episodes_are_left_by_unrelated_noise_of_the_promised_size() -> None:
    """The noise of two rows, episodes and actions, over many one-step episodes."""
    env = rollouts.fake(length=1, continuous=True)
    shape = gsde(env, exploration_interval=None)
    task = rollouts.task(env, rows=4, steps=500, policy=shape)
    units, apart = left(task, fragment(task))
    std = np.exp(rollouts.weights(shape)["actor.log_std"].astype(np.float64))
    z = apart / np.sqrt(np.einsum("tnh,ha->tna", units**2, std**2))
    near = 4.0 / math.sqrt(len(z))
    assert np.abs(z.mean(axis=0)).max() < near
    assert np.abs(z.std(axis=0) - 1.0).max() < near
    columns = z.reshape(len(z), -1)
    correlations = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlations).max() < near
    assert np.abs((z[1:] * z[:-1]).mean(axis=0)).max() < near


def test_equal_units_within_an_interval_are_left_in_the_same_direction() -> None:
    """The network ignores its input: the noise is constant for ten steps."""
    shape = gsde()
    arrays = dict(rollouts.weights(shape))
    arrays["actor.0.weight"] = np.zeros_like(arrays["actor.0.weight"])
    task = rollouts.task(PENDULUM, steps=50, rows=2, policy=shape)
    found = RolloutWorker().run(task, lambda: arrays)
    assert isinstance(found, Fragment)
    by_interval = found.actions.reshape(5, 10, 2)
    assert (by_interval == by_interval[:, :1]).all()
    assert len(np.unique(by_interval[:, 0])) == 10


def evaluated(count: int, first_row: int = 0) -> dict[int, float]:
    task = rollouts.task(
        PENDULUM, purpose="evaluate", unit="episodes", rows=count, first_row=first_row, steps=30,
        record=False, policy=gsde(),
    )  # fmt: skip
    return {episode.episode: episode.episode_return for episode in fragment(task).episodes}


def test_a_sampled_evaluation_s_episode_has_its_return_whatever_runs_beside_it() -> None:
    expected = evaluated(8)
    assert len(set(expected.values())) == 8
    assert evaluated(3) == {k: expected[k] for k in range(3)}
    assert evaluated(1, first_row=5) == {5: expected[5]}


# Learning


def test_samples_of_independent_rows_have_the_gradient_that_matrices_have_on_average() -> None:
    """The learner draws each row's noise from its distribution, never a matrix.

    This test compares both ways for one state and 200,000 samples. The expected gradient of a
    function of the action and its log-density must be the same.
    """
    generator, rows, actions = np.random.default_rng(3), 200_000, 2
    units = generator.normal(0.0, 1.0, (UNITS, 1)).astype(np.float32)
    mean = generator.normal(0.0, 0.5, (actions, 1)).astype(np.float32)
    log_std = generator.normal(-1.0, 0.3, (UNITS, actions)).astype(np.float32)
    slope = np.array([[0.7], [-1.3]], np.float32)
    gradient = np.empty_like(log_std)
    head = SquashedGsdeHead(
        actions, GsdeVariance(lambda: np.repeat(units, rows, axis=1), log_std, gradient)
    )
    noise = generator.standard_normal((actions, rows), dtype=np.float32)
    head.sample(np.repeat(mean, rows, axis=1), noise)
    d_mean, d_units = head.backward(np.repeat(slope, rows, axis=1) / rows, 0.4 / rows)
    assert d_units is not None

    h, m, s = (
        torch.tensor(array.squeeze().astype(np.float64), requires_grad=True)
        for array in (units, mean, log_std)
    )
    matrices = torch.tensor(generator.standard_normal((rows, UNITS, actions)))
    raw = m + torch.einsum("h,rha->ra", h, s.exp() * matrices)
    normal = Normal(m, ((h[:, None] * s.exp()).square().sum(dim=0) + 1e-6).sqrt())
    log_prob = (normal.log_prob(raw) - torch.log(1.0 - torch.tanh(raw).square())).sum(dim=1)
    (torch.tanh(raw) @ torch.tensor(slope[:, 0]).double() + 0.4 * log_prob).mean().backward()
    found = (d_units.sum(axis=1), d_mean.sum(axis=1), gradient)
    for ours, theirs in zip(found, (h, m, s), strict=True):
        assert theirs.grad is not None
        np.testing.assert_allclose(ours, theirs.grad, atol=0.01)


@pytest.mark.parametrize("squash", [False, True])
def test_actions_begin_with_the_deviation_that_is_asked_for(squash: bool) -> None:
    shape = gsde(HOPPER, squash=squash, hidden=(8, 100))
    asked = NetworkSettings(exploration="gsde", log_std_init=-0.7)
    log_std = (
        build_sac_networks(shape, asked, 0).actor["actor.log_std"]
        if squash
        else build_network(shape, asked, 0, critic=True)["actor.log_std"]
    )
    assert log_std.shape == (100, 3)
    # The deviation of a hundred units that are all 1.
    np.testing.assert_allclose(np.square(np.exp(log_std)).sum(axis=0), math.exp(-1.4), rtol=1e-5)


def test_a_policy_consists_of_a_matrix_of_deviations_and_a_squashed_one_of_no_second_output() -> (
    None
):
    shapes = compute_array_shapes(gsde(HOPPER, squash=True))
    assert shapes["actor.log_std"] == (UNITS, 3)
    assert shapes["actor.2.weight"] == (UNITS, 3)
    assert compute_noise_size(gsde(HOPPER)) == 3 * UNITS
    assert compute_noise_size(gsde(HOPPER), "uniform") == 3


# Errors


def test_what_gsde_cannot_be_made_of_is_refused() -> None:
    with pytest.raises(ValidationError, match="set hidden"):
        NetworkSettings(exploration="gsde", hidden=())
    with pytest.raises(ValidationError, match="set exploration to gsde"):
        NetworkSettings(exploration_interval=4)
    learning = LearningSettings(network=NetworkSettings(exploration="gsde"))
    with pytest.raises(ConfigError, match="CartPole-v1 has 2 discrete"):
        components.make_policy_spec(learning, components.make_env_spec(learning.environment))
