"""Whole PPO iterations on real environments, each part computed twice.

Plain Gymnasium environments repeat the steps, torch repeats the log-densities, and a plain
implementation repeats the learning.
"""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import reference
import torch
from reference import ReferencePpo
from tiny_runs import run

from rlflame.experiment import components
from rlflame.learning.buffers.rollout_buffer import concatenate_fragments
from rlflame.learning.networks.flat_vector import build_network
from rlflame.rollout.seeding import Role, make_reset_seed

SEED, SLOTS, ROWS, STEPS, ITERATIONS = 3, 2, 3, 40, 3


@pytest.fixture(
    scope="module",
    params=[("CartPole-v1", None), ("Pendulum-v1", 25)],
    ids=["CartPole", "Pendulum, cut every 25 steps"],
)
def done(request):
    environment, limit = request.param
    learning = {
        "seed": SEED,
        "environment": {"id": environment, "max_episode_steps": limit},
        "rollout": {"num_slots": SLOTS, "envs_per_slot": ROWS, "steps": STEPS},
        "network": {"hidden": [16, 16]},
        "ppo": {"epochs": 2, "minibatch_size": 50, "learning_rate": 1e-3},
    }
    return run({"stop_at_iterations": ITERATIONS, "learning": learning})


def test_the_same_actions_in_plain_environments_give_the_same_fragments(done):
    settings = done.recipe.learning.environment
    ends = {"terminated": 0, "truncated": 0}
    for slot in range(SLOTS):
        fragments = [iteration[slot] for iteration in done.recorded.fragments]
        for row in range(ROWS):
            env = gymnasium.make(settings.id, max_episode_steps=settings.max_episode_steps)
            episode, total, length = 0, 0.0, 0
            observation, _ = env.reset(seed=make_reset_seed(SEED, Role.RESET, slot, row, 0))
            for fragment in fragments:
                hidden = {
                    (int(t), int(r)): seen
                    for (t, r), seen in zip(
                        fragment.boundary_index, fragment.boundary_observations, strict=True
                    )
                }
                told = [e for e in fragment.episodes if e.row == row]
                for t in range(STEPS):
                    np.testing.assert_array_equal(
                        fragment.observations[t, row], observation.astype(np.float32)
                    )
                    action = fragment.actions[t, row]
                    if isinstance(env.action_space, gymnasium.spaces.Box):
                        action = np.clip(action, env.action_space.low, env.action_space.high)
                    observation, reward, terminated, truncated, _ = env.step(action)
                    total, length = total + float(reward), length + 1
                    assert fragment.rewards[t, row] == float(reward)
                    assert fragment.terminated[t, row] == terminated
                    assert fragment.truncated[t, row] == (truncated and not terminated)
                    assert ((t, row) in hidden) == fragment.truncated[t, row]
                    if (t, row) in hidden:
                        np.testing.assert_array_equal(
                            hidden[t, row], observation.astype(np.float32)
                        )
                    if terminated or truncated:
                        ends["terminated" if terminated else "truncated"] += 1
                        stat = told.pop(0)
                        assert (stat.length, stat.end, stat.episode) == (length, t, episode)
                        assert stat.episode_return == pytest.approx(total)
                        episode, total, length = episode + 1, 0.0, 0
                        seed = make_reset_seed(SEED, Role.RESET, slot, row, episode)
                        observation, _ = env.reset(seed=seed)
                assert told == []
                np.testing.assert_array_equal(
                    fragment.last_observations[row], observation.astype(np.float32)
                )
            env.close()
    kind = "truncated" if settings.max_episode_steps else "terminated"
    assert ends[kind] >= SLOTS * ROWS * 3


def test_log_densities_are_torchs(done):
    """This includes later iterations, whose normaliser has an effect."""
    clip = done.recipe.learning.network.observation_clip
    for iteration, fragments in enumerate(done.recorded.fragments):
        policy = done.recorded.snapshots[iteration].policy
        mean, scale = policy["normaliser.mean"], policy["normaliser.scale"]
        assert bool(mean.any()) == (iteration > 0)
        weights = {
            name: torch.tensor(array, dtype=torch.float64)
            for name, array in policy.items()
            if name.startswith("actor")
        }
        for fragment in fragments:
            seen = np.clip((fragment.observations.astype(float) - mean) * scale, -clip, clip)
            actions = torch.as_tensor(fragment.actions)
            log_probs = reference.distribution(weights, seen, tanh=True).log_prob(actions)
            np.testing.assert_allclose(fragment.log_probs, log_probs.numpy(), atol=2e-5)


def test_actions_follow_the_distribution(done):
    """Fails if actions are always the likeliest ones, or have other densities."""
    log_probs = np.concatenate([f.log_probs.ravel() for i in done.recorded.fragments for f in i])
    policy = done.recorded.snapshots[0].policy
    if "actor.log_std" in policy:
        expected = -0.5 * np.log(2 * np.pi * np.e) - policy["actor.log_std"].sum()
    else:
        expected = np.log(0.5)
    assert log_probs.mean() == pytest.approx(expected, abs=0.15)
    assert log_probs.size == SLOTS * ROWS * STEPS * ITERATIONS


def test_what_is_learned_is_what_a_plain_implementation_learns(done):
    learning = done.recipe.learning
    spec = components.make_policy_spec(learning, done.env)
    parameters = build_network(spec, learning.network, SEED, critic=True)
    expected = ReferencePpo(learning.ppo, spec, parameters, seed=SEED, columns=SLOTS * ROWS)
    for iteration, fragments in enumerate(done.recorded.fragments):
        before = done.recorded.snapshots[iteration]
        batch = concatenate_fragments(fragments, before.policy)
        wanted = expected.update(batch, iteration / ITERATIONS)
        found = done.recorded.metrics[iteration]
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=5e-3, abs=1e-4)
        after = done.recorded.snapshots[iteration + 1].learner["parameters"]
        moved = np.abs(after - before.learner["parameters"]).max()
        assert moved > 1e-3
        assert np.abs(after - reference.flat(expected.weights)).max() < 0.02 * moved
