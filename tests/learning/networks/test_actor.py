"""Composite and masked actions, compared with an enumeration of all actions and with torch."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from batches import floats, policy_spec, random_network

from rlflame.learning.networks.actor import Actor
from rlflame.learning.networks.flat_vector import FlatVector
from rlflame.learning.parallel.process_group import Shard
from rlflame.learning.ppo.loss import NumpyPpo, PpoMinibatch
from rlflame.learning.reinforce.reinforce import NumpyReinforce, ReinforceMinibatch
from rlflame.learning.torch_gradients import TorchPpo, TorchReinforce
from rlflame.rollout.distributions import draw_noise
from rlflame.rollout.policy import Policy
from rlflame.rollout.task import PolicySpec

ROWS, INPUTS = 24, 5
#: Per action: its number of values, or 0 for a number.
COUNTS = {
    "one choice": (4,),
    "choices": (2, 3, 3),
    "binary": (2, 2, 2, 2),
    "mixed": (3, 0, 0, 2, 0, 2),
    "numbers last": (2, 0),
}


def make_spec(name: str, masked: bool) -> PolicySpec:
    counts = COUNTS[name]
    size = sum(counts) if masked else 0
    if name == "one choice":
        return dataclasses.replace(policy_spec("discrete", INPUTS, counts[0]), mask_size=size)
    spec = policy_spec("continuous", INPUTS, len(counts))
    return dataclasses.replace(spec, action_kind="composite", action_counts=counts, mask_size=size)


def make_rows(rng: np.random.Generator, spec: PolicySpec, counts: tuple[int, ...]) -> np.ndarray:
    """Observations and masks that allow at least one value of each choice."""
    masks = []
    for count in filter(None, counts):
        mask = rng.random((ROWS, count)) < 0.6
        mask[np.arange(ROWS), rng.integers(0, count, ROWS)] = True
        masks.append(mask)
    rows = [floats(rng, ROWS, INPUTS), *(mask.astype(np.float32) for mask in masks)]
    return np.concatenate(rows if spec.mask_size else rows[:1], axis=1)


class Case:
    """A random network, rows, and actions that its policy has sampled."""

    def __init__(self, name: str, masked: bool, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.counts, self.spec = COUNTS[name], make_spec(name, masked)
        _, self.parameters = random_network(rng, self.spec)
        for key in self.parameters.shapes:
            if key.startswith("actor.2.weight"):
                self.parameters[key][...] *= 4.0  # distributions that are far from uniform
        self.rows = make_rows(rng, self.spec, self.counts)
        self.policy = Policy(self.spec, self.parameters.copy_views("actor."))
        parts = [self._sample(rng, first) for first in range(0, ROWS, 8)]
        self.actions = np.concatenate([actions for actions, _ in parts])
        self.log_probs = np.concatenate([density for _, density in parts])
        self.advantages = floats(rng, ROWS)

    def _sample(self, rng: np.random.Generator, first: int) -> tuple[np.ndarray, np.ndarray]:
        noise = draw_noise(self.spec, "sample", rng, 8)
        actions, density = self.policy.sample(self.rows[first : first + 8], noise)
        return actions, density.copy()

    def columns(self) -> np.ndarray:
        return self.actions.reshape(ROWS, -1).astype(np.float64)

    def logits(self, row: int) -> np.ndarray:
        """The network's outputs for a row, in float64 and without a mask."""
        x = self.rows[row, :INPUTS].astype(np.float64)
        for layer in range(3):
            w, b = (self.parameters[f"actor.{layer}.{part}"] for part in ("weight", "bias"))
            x = x @ w.astype(np.float64) + b
            x = np.tanh(x) if layer < 2 else x
        return x

    def enumerate_row(self, row: int) -> tuple[dict[tuple[int, ...], float], list[float]]:
        """The probability of each allowed combination of choices, and the means of the numbers."""
        logits, masks = self.logits(row), self.rows[row, INPUTS:]
        scores: list[dict[int, float]] = []
        means, start, place = [], 0, 0
        for count in self.counts:
            if not count:
                means.append(float(logits[start]))
                start += 1
                continue
            values = range(count)
            if self.spec.mask_size:
                values = [value for value in values if masks[place + value]]
                place += count
            scores.append({value: math.exp(logits[start + value]) for value in values})
            start += count
        weights = {
            combination: math.prod(s[v] for s, v in zip(scores, combination, strict=True))
            for combination in itertools.product(*scores)
        }
        total = sum(weights.values())
        return {key: weight / total for key, weight in weights.items()}, means


CASES = list(itertools.product(COUNTS, [False, True]))


@pytest.mark.parametrize(("name", "masked"), CASES)
def test_log_probabilities_and_entropies_are_those_of_an_enumeration(name, masked):
    case = Case(name, masked)
    actor = Actor(case.parameters, FlatVector(case.parameters.shapes), case.spec)
    actual = actor.log_prob(case.rows, case.actions)
    entropy = actor.sum_entropy()
    is_number = np.array(case.counts) == 0
    log_std = [] if not is_number.any() else case.parameters["actor.log_std"].astype(np.float64)
    expected_entropy = 0.0
    for row in range(ROWS):
        probabilities, means = case.enumerate_row(row)
        columns = case.columns()[row]
        # A choice that the mask forbids would raise a KeyError.
        expected = math.log(probabilities[tuple(columns[~is_number].astype(int))])
        expected_entropy -= sum(p * math.log(p) for p in probabilities.values())
        for number, mean, log in zip(columns[is_number], means, log_std, strict=True):
            z = (number - mean) / math.exp(log)
            expected -= 0.5 * z * z + log + 0.5 * math.log(2.0 * math.pi)
            expected_entropy += log + 0.5 * math.log(2.0 * math.pi * math.e)
        assert actual[row] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert case.log_probs[row] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert entropy == pytest.approx(expected_entropy, rel=1e-5)


@pytest.mark.parametrize("name", COUNTS)
def test_samples_are_distributed_as_enumerated_and_never_masked(name):
    case, draws = Case(name, True, seed=3), 4000
    generator = np.random.default_rng(1)
    rows = np.repeat(case.rows[:1], 8, axis=0)
    probabilities, _ = case.enumerate_row(0)
    is_choice = np.array(case.counts) > 0
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(draws // 8):
        actions, _ = case.policy.sample(rows, draw_noise(case.spec, "sample", generator, 8))
        for action in actions.reshape(8, -1)[:, is_choice].astype(int):
            key = tuple(action.tolist())
            seen[key] = seen.get(key, 0) + 1
    assert seen.keys() <= probabilities.keys()
    for key, probability in probabilities.items():
        error = math.sqrt(probability * (1 - probability) / draws)
        assert abs(seen.get(key, 0) / draws - probability) < 5 * error + 1e-6
    mode = case.policy.mode(rows).reshape(8, -1)[0, is_choice].astype(int)
    assert probabilities[tuple(mode.tolist())] == pytest.approx(max(probabilities.values()))


def ppo_minibatch(case: Case) -> PpoMinibatch:
    old = case.log_probs + np.float32(0.1) * case.advantages
    values = [case.advantages[::-1].copy(), np.zeros(ROWS, np.float32)]
    return PpoMinibatch(
        case.rows, case.actions, old, case.advantages, *values, 0.2, None, 0.5, 0.03
    )


@pytest.mark.parametrize(("name", "masked"), CASES)
def test_gradients_are_those_of_autograd(name, masked):
    case = Case(name, masked)
    batch = ppo_minibatch(case)
    weights = ReinforceMinibatch(case.rows, case.actions, case.advantages, 0.03)
    for ours, theirs, minibatch in (
        (NumpyPpo, TorchPpo, batch),
        (NumpyReinforce, TorchReinforce, weights),
    ):
        provider = ours(case.parameters, case.spec)
        gradient, sums = provider.compute_gradient(minibatch, ROWS)
        expected, expected_sums = theirs(case.parameters, case.spec).compute_gradient(
            minibatch, ROWS
        )
        np.testing.assert_allclose(gradient, expected, atol=2e-5 * np.abs(expected).max())
        for key, value in expected_sums.items():
            assert sums[key] == pytest.approx(value, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("name", "masked"), CASES)
def test_shards_in_one_pass_have_the_bits_of_separate_shards(name, masked):
    case = Case(name, masked)
    batch = ppo_minibatch(case)
    shards = [Shard(number, slice(8 * number, 8 * number + 8)) for number in range(3)]
    provider = NumpyPpo(case.parameters, case.spec)
    ((gradients, sums),) = provider.compute_shards(batch, ROWS, ("actor", "critic"), shards)
    for shard, gradient, shard_sums in zip(shards, gradients, sums, strict=True):
        expected, expected_sums = provider.compute_gradient(batch.select_rows(shard.rows), ROWS)
        assert gradient.tobytes() == expected.tobytes()
        assert shard_sums == pytest.approx(expected_sums, rel=1e-6)


@pytest.mark.parametrize("name", COUNTS)
def test_a_masked_choice_has_no_gradient(name):
    case = Case(name, True)
    place = INPUTS  # the first value of the first choice
    case.rows[:, place] = 0.0
    case.rows[:, place + 1] = 1.0
    columns = case.actions.reshape(ROWS, -1)
    columns[:, 0] = 1
    provider = NumpyPpo(case.parameters, case.spec)
    gradient, _ = provider.compute_gradient(ppo_minibatch(case), ROWS)
    vector = FlatVector(case.parameters.shapes)
    vector.data[:] = gradient
    assert not vector["actor.2.weight"][:, 0].any()
    assert vector["actor.2.bias"][0] == 0.0
    assert vector["actor.2.weight"].any()
