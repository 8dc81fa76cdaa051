"""One update of SAC in numpy alone, with slopes by finite differences.

No derivative comes from a formula or from autograd. Each weight is moved a little to both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from test_sac import ACTIONS, learner, networks, owed, transitions

from rlflame.config.algorithms import SacSettings
from rlflame.rollout.seeding import Role, make_stream

ROWS, SEED, MOVE = 33, 7, 1e-6
Weights = dict[str, Any]


def cut(vector: Any, flat: Any) -> Weights:
    """Split a flat vector into its arrays."""
    found, first = {}, 0
    for name, shape in vector.shapes.items():
        size = int(np.prod(shape))
        found[name] = flat[first : first + size].reshape(shape)
        first += size
    assert first == len(flat)
    return found


def network(weights: Weights, prefix: str, x: Any) -> Any:
    for layer in range(3):
        x = x @ weights[f"{prefix}.{layer}.weight"] + weights[f"{prefix}.{layer}.bias"]
        x = np.maximum(x, 0.0) if layer < 2 else x
    return x


def act(weights: Weights, seen: Any, noise: Any) -> tuple[Any, Any]:
    """The action of the squashed Gaussian, and its log-density."""
    out = network(weights, "actor", seen)
    mean, log_std = out[:, :ACTIONS], np.clip(out[:, ACTIONS:], -20.0, 2.0)
    action = np.tanh(mean + np.exp(log_std) * noise)
    normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2.0 * np.pi)
    return action, (normal - np.log(1.0 - action**2)).sum(axis=1)


def judged(weights: Weights, seen: Any, action: Any) -> Any:
    x = np.concatenate((seen, action), axis=1)
    return np.stack([network(weights, f"critic{j}", x)[:, 0] for j in (0, 1)])


def slope(loss: Callable[[Any], float], at: Any) -> Any:
    found = np.empty_like(at)
    for i in range(len(at)):
        move = np.zeros_like(at)
        move[i] = MOVE
        found[i] = (loss(at + move) - loss(at - move)) / (2.0 * MOVE)
    return found


def adam(at: Any, gradient: Any, rate: float) -> Any:
    """Adam's first step: with bias correction, both moments are the gradient's."""
    first, second = 0.1 * gradient, 0.001 * gradient**2
    return at - rate * (first / 0.1) / (np.sqrt(second / 0.001) + 1e-8)


def agrees(found: Any, expected: Any, before: Any, gradient: Any) -> None:
    """Compare steps with a gradient that is not tiny, since float32 may flip signs."""
    steep = np.abs(gradient) > 1e-3 * np.abs(gradient).max()
    assert steep.mean() > 0.3
    np.testing.assert_allclose((found - before)[steep], (expected - before)[steep], rtol=2e-3)


def test_one_update_is_what_numpy_makes_of_the_losses() -> None:
    nets = networks(hidden=(6, 5))
    settings = SacSettings(learning_rate=1e-2, discount=0.97, target_update_rate=0.1)
    sac = learner(settings, nets, seed=SEED)
    drawn = transitions(0, ROWS)
    actor, critics, targets = (
        vector.data.astype(np.float64) for vector in (nets.actor, nets.critics, nets.targets)
    )
    metrics = sac.update(owed(0, 1), 0.0)
    state = sac.get_state()

    seen, following = (
        getattr(drawn, name).astype(np.float64) for name in ("observations", "next_observations")
    )
    noise = make_stream(SEED, Role.LEARN, 0).standard_normal((2, ACTIONS, ROWS), dtype=np.float32)
    here, there = (part.T.astype(np.float64) for part in noise)
    weight = 1.0

    def lowest(flat: Any, seen: Any, action: Any) -> Any:
        return judged(cut(nets.critics, flat), seen, action).min(axis=0)

    next_action, next_log = act(cut(nets.actor, actor), following, there)
    y = drawn.rewards + drawn.bootstrap * (
        lowest(targets, following, next_action) - weight * next_log
    )

    def critic_loss(flat: Any) -> float:
        q = judged(cut(nets.critics, flat), seen, drawn.actions.astype(np.float64))
        return 0.5 * float(((q - y) ** 2).mean(axis=1).sum())

    critic_slope = slope(critic_loss, critics)
    learned = adam(critics, critic_slope, 1e-2)
    log_prob = float(act(cut(nets.actor, actor), seen, here)[1].mean())

    def actor_loss(flat: Any) -> float:
        action, log = act(cut(nets.actor, flat), seen, here)
        return float((weight * log - lowest(learned, seen, action)).mean())

    actor_slope = slope(actor_loss, actor)
    np.testing.assert_allclose(metrics["critic_loss"], critic_loss(critics), rtol=1e-4)
    np.testing.assert_allclose(metrics["actor_loss"], actor_loss(actor), rtol=1e-3)
    for found, expected in (
        (state["critic_adam.first"], 0.1 * critic_slope),
        (state["actor_adam.first"], 0.1 * actor_slope),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    agrees(state["critics"], learned, critics, critic_slope)
    agrees(state["actor"], adam(actor, actor_slope, 1e-2), actor, actor_slope)
    follows = targets + 0.1 * (state["critics"] - targets)
    np.testing.assert_allclose(state["targets"], follows, rtol=1e-5, atol=1e-6)
    # The loss is -log w (log pi + target), so its slope in log w is -(log pi + target).
    expected = adam(np.zeros(1), np.array([-(log_prob - ACTIONS)]), 1e-2)
    np.testing.assert_allclose(state["log_entropy_weight"], expected, rtol=1e-4)
