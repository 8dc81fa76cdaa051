"""Random networks, minibatches and batches for tests of learners."""

from __future__ import annotations

import numpy as np

from rlflame.config.recipe import NetworkSettings
from rlflame.learning.base import Batch
from rlflame.learning.networks.flat_vector import FlatVector, build_network
from rlflame.rollout.distributions import compute_noise_size
from rlflame.rollout.policy import Policy
from rlflame.rollout.task import PolicySpec

#: Settings of PPO that differ from the defaults as much as possible.
PPO_OPTIONS = {
    "normalise_advantages": "minibatch",
    "recompute_advantages": False,
    "clip_range_value": 0.1,
    "entropy_weight": 0.05,
    "anneal_clip_range": True,
    "final_discount": 0.97,
    "discount_moves_from": 0.2,
    "minibatch_size": 19,
}


def policy_spec(
    kind: str = "continuous",
    observations: int = 5,
    actions: int = 3,
    hidden: tuple[int, ...] = (16, 16),
    activation: str = "tanh",
    normalise: bool = False,
) -> PolicySpec:
    """A spec for `continuous`, `discrete` or `gsde` (state-dependent noise)."""
    return PolicySpec(
        action_kind="discrete" if kind == "discrete" else "continuous",
        observation_size=observations,
        action_size=actions,
        action_low=(-1.0,) * actions,
        action_high=(1.0,) * actions,
        hidden=hidden,
        activation=activation,
        normalise=normalise,
        observation_clip=10.0,
        width=8,
        exploration="gsde" if kind == "gsde" else "independent",
    )


def random_network(
    rng: np.random.Generator, spec: PolicySpec, critic: bool = True
) -> tuple[PolicySpec, FlatVector]:
    """A network in which each weight, bias and deviation has an effect."""
    parameters = build_network(spec, NetworkSettings(), 0, critic=critic)
    for name in parameters.shapes:
        view = parameters[name]
        scale = 0.3 if "bias" in name or "log_std" in name else 1.0 / np.sqrt(len(view))
        view[...] = scale * rng.standard_normal(view.shape)
    return spec, parameters


def random_actions(rng: np.random.Generator, spec: PolicySpec, *shape: int) -> np.ndarray:
    if spec.action_kind == "discrete":
        return rng.integers(0, spec.action_size, shape)
    return floats(rng, *shape, spec.action_size)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def random_batch(
    rng: np.random.Generator,
    spec: PolicySpec,
    arrays: dict[str, np.ndarray],
    steps: int = 12,
    columns: int = 8,
    ends: float = 0.1,
) -> Batch:
    """Steps of a simulated environment, with these weights and both kinds of ends."""
    policy = Policy(spec, arrays)
    observations = 2.0 * floats(rng, steps, columns, spec.observation_size) + 0.5
    full = np.zeros((spec.width, spec.observation_size), np.float32)
    actions, log_probs = random_actions(rng, spec, steps, columns), floats(rng, steps, columns)
    for t in range(steps):
        for first in range(0, columns, spec.width):
            part = slice(first, min(first + spec.width, columns))
            full[: part.stop - first] = observations[t, part]
            if spec.action_kind == "continuous":
                noise = floats(rng, spec.width, compute_noise_size(spec))
            else:
                noise = rng.random((spec.width, 1), np.float32)
            acted, density = policy.sample(full, noise)
            actions[t, part] = acted[: part.stop - first]
            log_probs[t, part] = density[: part.stop - first]
    chance = rng.random((steps, columns))
    terminated, truncated = chance < ends, (chance >= ends) & (chance < 2 * ends)
    index = np.argwhere(truncated)
    return Batch(
        observations=observations,
        actions=actions,
        log_probs=log_probs,
        rewards=rng.standard_normal((steps, columns)),
        terminated=terminated,
        truncated=truncated,
        valid=np.ones((steps, columns), bool),
        last_observations=floats(rng, columns, spec.observation_size),
        boundary_index=index,
        boundary_observations=floats(rng, len(index), spec.observation_size),
        behaviour=arrays,
    )
