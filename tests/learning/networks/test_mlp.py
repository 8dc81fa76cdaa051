"""The networks' gradients, compared with autograd and finite differences."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import reference
from batches import floats, policy_spec, random_actions, random_network
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflame.learning import optim
from rlflame.learning.networks import heads, mlp
from rlflame.learning.optim import Adam, clip_by_norm
from rlflame.learning.parallel.process_group import Shards
from rlflame.learning.ppo import loss
from rlflame.learning.ppo.loss import NumpyPpo
from rlflame.learning.reinforce import reinforce
from rlflame.learning.reinforce.reinforce import NumpyReinforce
from rlflame.learning.torch_gradients import TorchPpo, TorchReinforce

#: Ratios well inside and well outside a clip range of 0.2, on both sides.
RATIOS = (0.4, 0.7, 0.9, 1.0, 1.1, 1.4, 2.5)
KINDS = ("continuous", "gsde", "discrete")
PPO, REINFORCE = (NumpyPpo, TorchPpo), (NumpyReinforce, TorchReinforce)


def ppo_minibatch(rng, spec, weights, rows, *, value_clip=None, entropy_weight=0.0):
    """Samples with the ratios RATIOS, each with advantages of both signs."""
    observations = floats(rng, rows, spec.observation_size)
    actions = random_actions(rng, spec, rows)
    tanh = spec.activation == "tanh"
    now = reference.distribution(weights, observations, tanh)
    ratios = np.resize(np.array(RATIOS), rows)
    signs = np.where(np.arange(rows) // len(RATIOS) % 2, -1.0, 1.0)
    values = reference.outputs(weights, "critic", observations, tanh)[:, 0].detach().numpy()
    moves = np.resize([-0.5, -0.05, 0.05, 0.5], rows)
    return loss.PpoMinibatch(
        observations=observations,
        actions=actions,
        log_probs=(
            now.log_prob(reference.torch.as_tensor(actions)).detach().numpy() - np.log(ratios)
        ).astype(np.float32),
        advantages=(signs * (0.1 + rng.random(rows))).astype(np.float32),
        returns=(values + rng.standard_normal(rows)).astype(np.float32),
        old_values=(values - moves).astype(np.float32),
        clip_range=0.2,
        clip_range_value=value_clip,
        value_weight=0.25,
        entropy_weight=entropy_weight,
    )


def reinforce_minibatch(rng, spec, rows, entropy_weight):
    return reinforce.ReinforceMinibatch(
        floats(rng, rows, spec.observation_size),
        random_actions(rng, spec, rows),
        floats(rng, rows),
        entropy_weight,
    )


def assert_close(found, expected, tolerance=1e-5):
    """Compare relative to the largest entry, because rounding is absolute."""
    scale = np.abs(expected).max() + 1e-12
    assert np.abs(found - expected).max() <= tolerance * scale


@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize("value_clip", [None, 0.2])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("provider", PPO)
def test_ppo_gradient_is_autograds(provider, kind, activation, value_clip, entropy_weight):
    rng = np.random.default_rng(1)
    spec = policy_spec(kind, activation=activation)
    network, vector = random_network(rng, spec)
    weights = reference.tensors(vector)
    batch = ppo_minibatch(
        rng, spec, weights, 140, value_clip=value_clip, entropy_weight=entropy_weight
    )
    losses = reference.ppo_losses(weights, batch, spec.activation == "tanh")
    reference.ppo_loss(losses, batch).backward()

    gradient, sums = provider(vector, network).compute_gradient(batch, 140)

    assert gradient.dtype == np.float32
    assert_close(gradient, reference.flat(weights, gradients=True))
    ratio = losses["ratio"].detach().numpy()
    expected = {
        "policy_gradient_loss": -losses["objective"].sum().item(),
        "value_loss": losses["value_error"].sum().item(),
        "entropy_loss": -losses["entropy"].sum().item(),
        "approx_kl": float(np.sum(ratio - 1 - np.log(ratio))),
        "clip_fraction": 80.0,  # four of seven ratios are outside
    }
    assert sums == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("provider", REINFORCE)
def test_reinforce_gradient_is_autograds(provider, kind, activation, entropy_weight):
    rng = np.random.default_rng(2)
    spec = policy_spec(kind, activation=activation)
    network, vector = random_network(rng, spec, critic=False)
    weights = reference.tensors(vector)
    batch = reinforce_minibatch(rng, spec, 50, entropy_weight)
    policy = reference.distribution(weights, batch.observations, spec.activation == "tanh")
    log_probs = policy.log_prob(reference.torch.as_tensor(batch.actions))
    loss = -(log_probs * reference.torch.as_tensor(batch.weights)).sum()
    ((loss - entropy_weight * policy.entropy().sum()) / 7).backward()

    gradient, sums = provider(vector, network).compute_gradient(batch, 7)

    assert gradient.dtype == np.float32
    assert_close(gradient, reference.flat(weights, gradients=True))
    assert sums["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    assert sums["entropy_loss"] == pytest.approx(-policy.entropy().sum().item(), rel=1e-5)


@pytest.mark.parametrize("provider", PPO)
@pytest.mark.parametrize(
    ("ratio", "advantage", "flat"),
    [
        (1.5, 1.0, True),
        (1.5, -1.0, False),
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (1.1, 1.0, False),
        (0.9, -1.0, False),
    ],
)
def test_only_gains_beyond_the_clip_have_no_gradient(provider, ratio, advantage, flat):
    rng = np.random.default_rng(3)
    spec = policy_spec("continuous")
    network, vector = random_network(rng, spec)
    batch = ppo_minibatch(rng, spec, reference.tensors(vector), 10)
    at_one = batch.log_probs + np.log(np.resize(np.array(RATIOS), 10)).astype(np.float32)
    batch.log_probs = at_one - np.float32(math.log(ratio))
    batch.advantages = np.full(10, advantage, np.float32)

    gradient, _ = provider(vector, network).compute_gradient(batch, 10)

    actor = sum(math.prod(s) for n, s in vector.shapes.items() if n.startswith("actor"))
    assert bool(np.any(gradient[:actor])) is not flat
    assert np.any(gradient[actor:])


def plain_loss(vector, data, batch, discrete):
    """PPO's loss sample by sample with `math`, for tanh and one hidden layer."""
    view = dict(zip(vector.shapes, np.split(data, split_points(vector)), strict=True))

    def net(prefix, x):
        def layer(i, x):
            weight = view[f"{prefix}.{i}.weight"].reshape(len(x), -1)
            return [
                sum(x[k] * weight[k, j] for k in range(len(x))) + view[f"{prefix}.{i}.bias"][j]
                for j in range(weight.shape[1])
            ]

        return layer(1, [math.tanh(h) for h in layer(0, x)])

    total = 0.0
    columns = (batch.log_probs, batch.advantages, batch.returns, batch.old_values)
    samples = zip(*(column.tolist() for column in columns), strict=True)
    limit = batch.clip_range_value
    for i, (behaviour, gain, target, old) in enumerate(samples):
        out = net("actor", batch.observations[i].astype(float))
        if discrete:
            partition = sum(math.exp(o) for o in out)
            chances = [math.exp(o) / partition for o in out]
            log_prob = math.log(chances[batch.actions[i]])
            entropy = -sum(p * math.log(p) for p in chances)
        else:
            log_prob = entropy = 0.0
            for mean, log_std, action in zip(
                out, view["actor.log_std"], batch.actions[i].astype(float), strict=True
            ):
                std = math.exp(log_std)
                density = math.exp(-0.5 * ((action - mean) / std) ** 2) / (
                    std * math.sqrt(2 * math.pi)
                )
                log_prob += math.log(density)
                entropy += 0.5 * math.log(2 * math.pi * math.e * std**2)
        ratio = math.exp(log_prob - behaviour)
        bounded = min(max(ratio, 1 - batch.clip_range), 1 + batch.clip_range)
        (value,) = net("critic", batch.observations[i].astype(float))
        near = old + min(max(value - old, -limit), limit)
        total += -min(ratio * gain, bounded * gain) - batch.entropy_weight * entropy
        total += batch.value_weight * max((value - target) ** 2, (near - target) ** 2)
    return total / len(batch.returns)


def split_points(vector):
    return np.cumsum([math.prod(shape) for shape in vector.shapes.values()])[:-1]


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_ppo_gradient_is_the_slope_of_the_loss(kind):
    rng = np.random.default_rng(4)
    spec = policy_spec(kind, observations=2, actions=2, hidden=(3,))
    network, vector = random_network(rng, spec)
    batch = ppo_minibatch(
        rng, spec, reference.tensors(vector), 14, value_clip=0.2, entropy_weight=0.1
    )
    data = vector.data.astype(np.float64)
    slopes = np.empty_like(data)
    for i in range(len(data)):
        step = np.zeros_like(data)
        step[i] = 1e-6
        discrete = kind == "discrete"
        above = plain_loss(vector, data + step, batch, discrete)
        slopes[i] = (above - plain_loss(vector, data - step, batch, discrete)) / 2e-6

    assert_close(NumpyPpo(vector, network).compute_gradient(batch, 14)[0], slopes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
def test_the_providers_stay_together_over_a_hundred_updates(kind, algorithm):
    rng = np.random.default_rng(5)
    spec = policy_spec(kind)
    critic = algorithm == "ppo"
    providers = PPO if critic else REINFORCE
    network, first = random_network(rng, spec, critic)
    _, second = random_network(rng, spec, critic)
    second.data[:] = first.data
    start = first.data.copy()
    if critic:
        batch = ppo_minibatch(
            rng, spec, reference.tensors(first), 70, value_clip=0.2, entropy_weight=0.01
        )
    else:
        batch = reinforce_minibatch(rng, spec, 70, 0.01)
    for vector, provider in zip((first, second), providers, strict=True):
        gradients, adam = provider(vector, network), Adam(len(vector.data), 1e-5)
        for _ in range(100):
            gradient, _ = gradients.compute_gradient(batch, 70)
            clip_by_norm(gradient, 0.5)
            adam.step(vector.data, gradient, 1e-3)

    assert np.abs(first.data - start).max() > 0.03
    assert np.abs(first.data - second.data).max() < 1e-4
    if critic:
        observations = floats(rng, 9, spec.observation_size)
        ours, theirs = (p(first, network).compute_values(observations) for p in providers)
        assert ours == pytest.approx(theirs, abs=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    activation=st.sampled_from(["tanh", "relu"]),
    observations=st.integers(1, 7),
    actions=st.integers(1, 5),
    hidden=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    rows=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_any_shape(kind, activation, observations, actions, hidden, rows, seed):
    rng = np.random.default_rng(seed)
    if kind == "gsde":
        # If all units are near zero, the density is very narrow, and rounding dominates.
        hidden, activation = (*hidden, 8), "tanh"
    spec = policy_spec(kind, observations, actions, hidden, activation)
    network, vector = random_network(rng, spec)
    weights = reference.tensors(vector)
    batch = ppo_minibatch(rng, spec, weights, rows, value_clip=0.2, entropy_weight=0.1)
    reference.ppo_loss(
        reference.ppo_losses(weights, batch, spec.activation == "tanh"), batch
    ).backward()

    gradient, _ = NumpyPpo(vector, network).compute_gradient(batch, rows)

    assert_close(gradient, reference.flat(weights, gradients=True), 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_a_hundred_thousand_samples(kind):
    rng = np.random.default_rng(10)
    spec = policy_spec(kind, hidden=(8,))
    network, vector = random_network(rng, spec)
    weights = reference.tensors(vector)
    batch = ppo_minibatch(rng, spec, weights, 100_000, entropy_weight=0.1)
    losses = reference.ppo_losses(weights, batch, spec.activation == "tanh")
    reference.ppo_loss(losses, batch).backward()

    gradient, sums = NumpyPpo(vector, network).compute_gradient(batch, 100_000)

    assert_close(gradient, reference.flat(weights, gradients=True))
    assert sums["value_loss"] == pytest.approx(losses["value_error"].sum().item(), rel=1e-5)
    assert sums["entropy_loss"] == pytest.approx(-losses["entropy"].sum().item(), rel=1e-5)


def part_of(batch, part):
    arrays = {
        name: getattr(batch, name)[part] if isinstance(getattr(batch, name), np.ndarray) else None
        for name in batch.__slots__
    }
    rest = {name: getattr(batch, name) for name, a in arrays.items() if a is None}
    return type(batch)(**{name: a for name, a in arrays.items() if a is not None}, **rest)


@pytest.mark.parametrize("provider", PPO + REINFORCE)
def test_shards_add_up(provider):
    rng = np.random.default_rng(6)
    spec = policy_spec("discrete", actions=4)
    network, vector = random_network(rng, spec, critic=provider in PPO)
    if provider in PPO:
        batch = ppo_minibatch(rng, spec, reference.tensors(vector), 64, entropy_weight=0.1)
    else:
        batch = reinforce_minibatch(rng, spec, 64, 0.1)
    gradients = provider(vector, network)
    whole, sums = gradients.compute_gradient(batch, 64)
    whole = whole.copy()
    added, counted = np.zeros_like(whole), dict.fromkeys(sums, 0.0)
    for part in (slice(0, 10), slice(10, 37), slice(37, 64)):
        gradient, shard = gradients.compute_gradient(part_of(batch, part), 64)
        added += gradient
        for name, value in shard.items():
            counted[name] += value

    assert_close(added, whole)
    assert counted == pytest.approx(sums, rel=1e-4, abs=1e-4)


SPECS = {
    "gaussian": {},
    "one action": {"actions": 1, "activation": "relu", "hidden": (5,)},
    "many actions": {"actions": 17, "hidden": (64, 64)},
    "categorical": {"kind": "discrete", "actions": 4, "activation": "relu"},
    "linear": {"kind": "discrete", "actions": 2, "hidden": ()},
    "gsde": {"kind": "gsde"},
}


@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize(("rows", "count"), [(64, 4), (512, 8), (66, 4), (9, 8), (6, 6), (2, 2)])
@pytest.mark.parametrize("networks", [("actor", "critic"), ("critic",)])
def test_shards_computed_together_have_the_bits_of_shards_computed_apart(
    case, rows, count, networks
):
    rng = np.random.default_rng(rows)
    spec = policy_spec(**SPECS[case])
    network, vector = random_network(rng, spec)
    batch = ppo_minibatch(rng, spec, reference.tensors(vector), rows, entropy_weight=0.1)
    shards = Shards(count).split(rows)
    together, apart = NumpyPpo(vector, network), NumpyPpo(vector, network)
    for _ in range(2):  # the second time, the buffers are not new
        groups = together.compute_shards(batch, rows, networks, shards)
        pairs = (pair for group in groups for pair in zip(*group, strict=True))
        for shard, (gradient, sums) in zip(shards, pairs, strict=True):
            expected, expected_sums = apart.compute_gradient(
                batch.select_rows(shard.rows), rows, networks
            )
            assert sums == expected_sums
            for name in networks:
                span = vector.find_span(f"{name}.")
                assert gradient[span].tobytes() == expected[span].tobytes()


def test_buffers_leave_no_trace():
    """Calls with other sizes leave results identical to a new provider's."""
    rng = np.random.default_rng(7)
    spec = policy_spec("continuous", activation="relu")
    network, vector = random_network(rng, spec)
    batch = ppo_minibatch(rng, spec, reference.tensors(vector), 30)
    used = NumpyPpo(vector, network)
    for rows in range(1, 40):
        used.compute_values(floats(rng, rows, spec.observation_size))
        used.compute_gradient(part_of(batch, slice(rows % 29, 30)), 30)

    fresh = NumpyPpo(vector, network).compute_gradient(batch, 30)[0]
    np.testing.assert_array_equal(used.compute_gradient(batch, 30)[0], fresh)


def test_values_of_a_long_batch_are_those_of_its_pieces():
    rng = np.random.default_rng(8)
    spec = policy_spec("continuous")
    network, vector = random_network(rng, spec)
    observations = floats(rng, 2 * mlp.CHUNK_ROWS + 5, spec.observation_size)
    expected = reference.outputs(reference.tensors(vector), "critic", observations, True)

    for provider in PPO:
        values = provider(vector, network).compute_values(observations)
        assert values == pytest.approx(expected[:, 0].detach().numpy(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_becomes_float64_on_the_hot_path(kind):
    """Inspect the local variables of all functions from minibatch to weights."""
    rng = np.random.default_rng(9)
    spec = policy_spec(kind)
    network, vector = random_network(rng, spec)
    batch = ppo_minibatch(
        rng, spec, reference.tensors(vector), 20, value_clip=0.2, entropy_weight=0.1
    )
    provider, adam = NumpyPpo(vector, network), Adam(len(vector.data), 1e-5)
    files = {module.__file__ for module in (mlp, heads, loss, optim)}
    seen, wide = set(), []

    def watch(frame, event, value):
        if event == "return":
            for name, held in {**frame.f_locals, "return value": value}.items():
                if isinstance(held, np.ndarray | np.generic):
                    seen.add(frame.f_code.co_name)
                    if held.dtype == np.float64:
                        wide.append(f"{frame.f_code.co_name}: {name}")
        return watch

    previous = sys.gettrace()
    sys.settrace(lambda frame, event, _: watch if frame.f_code.co_filename in files else None)
    try:
        gradient, _ = provider.compute_gradient(batch, 20)
        clip_by_norm(gradient, 0.01)
        adam.step(vector.data, gradient, 1e-3)
    finally:
        sys.settrace(previous)

    assert wide == []
    assert seen >= {
        "forward",
        "backward",
        "log_prob",
        "_compute_policy_gradient",
        "_compute_value_gradient",
        "step",
    }
