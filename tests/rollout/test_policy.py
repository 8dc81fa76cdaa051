"""The numpy policy compared with torch, and the independence of its rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import rollouts
import torch
from torch.distributions import Categorical, Independent, Normal

from rlflame.rollout.distributions import compute_noise_size, draw_noise
from rlflame.rollout.policy import Policy, compute_array_shapes, normalise
from rlflame.rollout.task import PolicySpec


def spec(kind: str = "continuous", **changes: Any) -> PolicySpec:
    size = 3 if kind == "continuous" else 4
    default = PolicySpec(
        action_kind=kind,  # type: ignore[arg-type]
        observation_size=5,
        action_size=size,
        action_low=(-1.0,) * size if kind == "continuous" else (),
        action_high=(1.0,) * size if kind == "continuous" else (),
        hidden=(32, 16),
        activation="tanh",
        normalise=False,
        observation_clip=10.0,
        width=16,
    )
    return dataclasses.replace(default, **changes)


def called(shape: PolicySpec) -> str:
    layers = "x".join(map(str, (shape.observation_size, *shape.hidden)))
    return f"{shape.action_kind}-{shape.activation}-{layers}-width-{shape.width}"


def observations(shape: PolicySpec, seed: int = 1) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.normal(0.0, 2.0, (shape.width, shape.observation_size)).astype(np.float32)


def noise(shape: PolicySpec, seed: int = 2) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return draw_noise(shape, "sample", generator, shape.width).reshape(
        shape.width, compute_noise_size(shape)
    )


def torch_head(shape: PolicySpec, arrays: Any, x: np.ndarray) -> torch.Tensor:
    """The same network with torch's modules in float64."""
    layers: list[torch.nn.Module] = []
    for layer in range(len(shape.hidden) + 1):
        weight = torch.tensor(arrays[f"actor.{layer}.weight"]).double()
        linear = torch.nn.Linear(*weight.shape, dtype=torch.float64)
        linear.weight.data = weight.T
        linear.bias.data = torch.tensor(arrays[f"actor.{layer}.bias"]).double()
        layers += [linear, torch.nn.Tanh() if shape.activation == "tanh" else torch.nn.ReLU()]
    hidden = torch.tensor(x).double()
    if shape.normalise:
        mean, scale = (torch.tensor(arrays[f"normaliser.{part}"]) for part in ("mean", "scale"))
        clip = shape.observation_clip
        hidden = torch.clamp((hidden - mean.double()) * scale.double(), -clip, clip)
    return torch.nn.Sequential(*layers[:-1])(hidden).detach()


SHAPES = [
    spec("continuous"),
    spec("continuous", activation="relu", hidden=()),
    spec("continuous", normalise=True, observation_clip=0.7, width=8),
    spec("discrete"),
    spec("discrete", activation="relu", hidden=(64,), normalise=True),
    spec("discrete", action_size=1, width=8),
]


@pytest.mark.parametrize("shape", SHAPES, ids=called)
def test_the_network_is_the_one_torch_computes(shape: PolicySpec) -> None:
    arrays, x = rollouts.weights(shape), observations(shape)
    ours = Policy(shape, arrays).forward(x)
    np.testing.assert_allclose(ours, torch_head(shape, arrays, x).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.action_kind == "continuous"], ids=called)
def test_a_gaussian_draws_what_torch_would_and_knows_its_density(shape: PolicySpec) -> None:
    arrays, x, z = rollouts.weights(shape), observations(shape), noise(shape)
    actions, log_probs = Policy(shape, arrays).sample(x, z)
    mean = torch_head(shape, arrays, x)
    std = torch.tensor(arrays["actor.log_std"]).double().exp()
    theirs = Independent(Normal(mean, std), 1)
    np.testing.assert_allclose(actions, mean + std * torch.tensor(z), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        log_probs, theirs.log_prob(torch.tensor(actions).double()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.action_kind == "discrete"], ids=called)
def test_a_choice_has_the_log_probability_torch_gives_it(shape: PolicySpec) -> None:
    arrays, x = rollouts.weights(shape), observations(shape)
    actions, log_probs = Policy(shape, arrays).sample(x, noise(shape))
    theirs = Categorical(logits=torch_head(shape, arrays, x))
    expected = theirs.log_prob(torch.tensor(actions))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-4, atol=1e-5)


def test_choices_come_as_often_as_their_probabilities_say() -> None:
    shape = spec("discrete", width=200_000, hidden=())
    arrays = rollouts.weights(shape)
    x = np.repeat(observations(spec("discrete"))[:1], shape.width, axis=0)
    actions, _ = Policy(shape, arrays).sample(x, noise(shape))
    expected = Categorical(logits=torch_head(shape, arrays, x[:1])).probs[0].numpy()
    seen = np.bincount(actions, minlength=4) / shape.width
    error = np.sqrt(expected * (1 - expected) / shape.width)
    assert (np.abs(seen - expected) < 4.5 * error).all()


def chooser(probabilities: list[float], width: int) -> Policy:
    """A policy that has these action probabilities for all observations."""
    shape = spec("discrete", action_size=len(probabilities), width=width, hidden=())
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(np.array(probabilities)), -300.0).astype(np.float32)
    zeros = np.zeros((shape.observation_size, len(probabilities)), np.float32)
    return Policy(shape, {"actor.0.weight": zeros, "actor.0.bias": logits})


def test_a_uniform_number_picks_the_choice_in_whose_share_of_the_unit_interval_it_lies() -> None:
    uniform = np.array([0.0, 0.05, 0.15, 0.25, 0.35, 0.55, 0.65, 1.0 - 2.0**-24], np.float32)
    policy = chooser([0.1, 0.2, 0.3, 0.4], 8)
    picked, _ = policy.sample(np.zeros((8, 5), np.float32), uniform[:, None])
    assert picked.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_has_no_probability_is_never_chosen_not_even_by_zero() -> None:
    uniform = np.array([0.0, 2.0**-24, 0.5, 1.0 - 2.0**-24] * 2, np.float32)
    picked, log_probs = chooser([0.0, 0.5, 0.0, 0.5], 8).sample(
        np.zeros((8, 5), np.float32), uniform[:, None]
    )
    assert set(picked.tolist()) == {1, 3}
    np.testing.assert_allclose(log_probs, np.log(0.5), rtol=1e-6)


def test_what_rounding_leaves_of_the_unit_interval_is_the_last_that_has_a_share() -> None:
    """Three thirds in float32 may add up to less than the largest uniform number."""
    generator = np.random.default_rng(0)
    largest = np.full((8, 1), 1.0 - 2.0**-24, np.float32)
    for _ in range(200):
        shares = generator.dirichlet(np.ones(3))
        policy = chooser([*shares, 0.0, 0.0], 8)
        picked, log_probs = policy.sample(np.zeros((8, 5), np.float32), largest)
        assert set(picked.tolist()) <= {0, 1, 2}
        assert log_probs.min() > -20.0


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_the_best_action_is_the_mean_or_the_likeliest(kind: str) -> None:
    shape = spec(kind)
    arrays, x = rollouts.weights(shape), observations(shape)
    policy = Policy(shape, arrays)
    best, head = policy.mode(x), torch_head(shape, arrays, x)
    if kind == "continuous":
        np.testing.assert_allclose(best, head, rtol=1e-4, atol=1e-5)
        policy.mode(observations(shape, seed=9))
        np.testing.assert_allclose(best, head, rtol=1e-4, atol=1e-5)  # not a view of a buffer
    else:
        assert best.tolist() == head.argmax(dim=1).tolist()


def test_an_environment_is_given_actions_inside_its_bounds_and_the_learner_those_drawn() -> None:
    shape = spec("continuous", action_low=(-0.5, -np.inf, 0.0), action_high=(0.5, 0.1, np.inf))
    drawn = np.array([[-9.0, -9.0, -9.0], [9.0, 9.0, 9.0], [0.1, 0.1, 0.1]], np.float32)
    given = Policy(shape, rollouts.weights(shape)).to_environment(drawn)
    np.testing.assert_allclose(given, [[-0.5, -9.0, 0.0], [0.5, 0.1, 9.0], [0.1, 0.1, 0.1]])
    assert drawn[0, 0] == -9.0


WIDE = [
    spec("continuous", observation_size=size, hidden=hidden, width=width, normalise=True)
    for size, hidden, width in [
        (3, (16,), 8),
        (11, (64, 64), 8),
        (11, (64, 64), 32),
        (348, (256, 256), 8),
        (27, (40, 24), 16),
    ]
]
WIDE += [dataclasses.replace(s, action_kind="discrete", activation="relu") for s in WIDE]


@pytest.mark.parametrize("shape", WIDE, ids=called)
def test_a_row_has_the_same_bits_whatever_the_other_rows_hold(shape: PolicySpec) -> None:
    policy = Policy(shape, rollouts.weights(shape))
    x, z = observations(shape), noise(shape)
    actions, log_probs = policy.sample(x, z)
    best = policy.mode(x)
    junk = np.random.default_rng(3)
    for filling in (0.0, 1e30, -1e30, np.inf, np.nan, "other observations"):
        for row in range(shape.width):
            if isinstance(filling, str):
                others = junk.normal(0.0, 5.0, x.shape).astype(np.float32)
                other_noise = np.abs(junk.normal(0.0, 0.2, z.shape)).astype(np.float32) % 1
            else:
                others, other_noise = np.full_like(x, filling), np.zeros_like(z)
            others[row], other_noise[row] = x[row], z[row]
            with np.errstate(all="ignore"):
                other_actions, other_log_probs = policy.sample(others, other_noise)
                other_best = policy.mode(others)
            assert other_actions[row].tobytes() == actions[row].tobytes()
            assert other_log_probs[row].tobytes() == log_probs[row].tobytes()
            assert other_best[row].tobytes() == best[row].tobytes()


@pytest.mark.parametrize("shape", WIDE[:4], ids=called)
def test_bits_do_not_depend_on_where_in_memory_weights_and_observations_lie(
    shape: PolicySpec,
) -> None:
    """Weights are views into a message, at any address that is valid for a float."""
    x, z, arrays = observations(shape), noise(shape), rollouts.weights(shape)
    expected = Policy(shape, arrays).sample(x, z)[0].tobytes()
    for offset in (4, 8, 12, 20, 32, 36, 60):
        moved = {name: displaced(array, offset) for name, array in arrays.items()}
        assert Policy(shape, moved).sample(displaced(x, offset), z)[0].tobytes() == expected


def displaced(array: np.ndarray, offset: int) -> np.ndarray:
    room = np.zeros(array.nbytes + 128, np.uint8)
    start = (-room.ctypes.data) % 64 + offset
    view = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def test_the_bits_are_those_of_one_blas_thread() -> None:
    """Results are identical in one process and in many because of this."""
    from rlflame.rollout import blas

    shape = spec("continuous", observation_size=348, hidden=(256, 256), width=64)
    policy, x = Policy(shape, rollouts.weights(shape)), observations(shape)
    with blas.limit_to_one_thread():
        expected = policy.mode(x).tobytes()
        inside = threads()
    blas.set_threads(2)
    try:
        with blas.limit_to_one_thread():
            assert policy.mode(x).tobytes() == expected
            assert threads() == inside
        after = threads()
    finally:
        blas.set_threads(1)
    assert (inside, after) in ((1, 2), (None, None))  # None: numpy does not use OpenBLAS


def threads() -> int | None:
    from rlflame.rollout import blas

    count = blas._find_symbol("get_num_threads")
    return count() if count is not None else None


def test_the_normaliser_subtracts_scales_and_clips() -> None:
    out = np.zeros((2, 2), np.float32)
    x = np.array([[1.0, 100.0], [3.0, -100.0]], np.float32)
    result = normalise(
        x, np.array([2.0, 0.0], np.float32), np.array([0.5, 1.0], np.float32), -5.0, 5.0, out
    )
    assert result.tolist() == [[-0.5, 5.0], [0.5, -5.0]]
    assert x.tolist() == [[1.0, 100.0], [3.0, -100.0]]


def test_noise_is_normal_for_a_gaussian_and_uniform_for_a_choice() -> None:
    generator = np.random.default_rng(0)
    normal = draw_noise(spec("continuous"), "sample", generator, 20_000)
    assert normal.shape == (20_000, 3)
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1.0) < 0.02
    uniform = draw_noise(spec("discrete"), "sample", generator, 20_000)
    assert uniform.shape == (20_000, 1)
    assert 0.0 <= uniform.min() < 0.001
    assert 0.999 < uniform.max() < 1.0


def test_a_policy_consists_of_what_it_says_it_does() -> None:
    shape = spec("continuous", normalise=True)
    assert compute_array_shapes(shape) == {
        "actor.0.weight": (5, 32),
        "actor.0.bias": (32,),
        "actor.1.weight": (32, 16),
        "actor.1.bias": (16,),
        "actor.2.weight": (16, 3),
        "actor.2.bias": (3,),
        "actor.log_std": (3,),
        "normaliser.mean": (5,),
        "normaliser.scale": (5,),
    }
    assert "actor.log_std" not in compute_array_shapes(spec("discrete"))
    for name in compute_array_shapes(shape):
        arrays = dict(rollouts.weights(shape))
        del arrays[name]
        with pytest.raises(KeyError):
            Policy(shape, arrays)
