"""A simulated world for replay buffer tests, and a list of all its transitions.

Each observation is a unique number, so that a test can identify each sample. This module also has
`LEARNING`, the settings of small runs that learn from a replay buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from rlflame.learning.buffers import replay_buffer
from rlflame.learning.buffers.replay_buffer import ReplayBuffer, ReplayShape
from rlflame.rollout.task import Fragment

#: Forty transitions in rows of four. Time limits end all episodes and hide the last observations.
LEARNING = {
    "algorithm": "sac",
    "environment": {
        "id": "fakes:Fake-v0",
        "kwargs": {"continuous": True},
        "max_episode_steps": 5,
    },
    "network": {"hidden": [8]},
    "sac": {
        "buffer_size": 40,
        "batch_size": 6,
        "n_step": 2,
        "updates_per_step": 0.5,
        "learning_starts": 20,
    },
}


def small_segments(transitions=12):
    """Make replay segments a few rows long, as a context or from `start()` on."""
    return mock.patch.object(replay_buffer, "SEGMENT_TRANSITIONS", transitions)


@dataclass
class Step:
    observation: float
    action: float
    reward: float
    terminated: bool
    truncated: bool
    #: What the environment returned, even if a reset replaced it.
    seen_next: float


@dataclass
class World:
    """Columns that step side by side; `history[column]` has a column's steps."""

    slots: int
    rows: int
    rng: np.random.Generator
    ends: float = 0.3
    observation_size: int = 2
    action_size: int = 2
    history: list[list[Step]] = field(default_factory=list)
    now: list[float] = field(default_factory=list)
    count: int = 0

    def __post_init__(self):
        self.history = [[] for _ in range(self.columns)]
        self.now = [self.new() for _ in range(self.columns)]

    @property
    def columns(self):
        return self.slots * self.rows

    def new(self):
        self.count += 1
        return float(self.count)

    def step(self, column):
        chance = self.rng.random()
        # Some steps are terminated and truncated at the same time.
        terminated, truncated = chance < self.ends / 2, self.ends / 3 <= chance < self.ends
        seen = self.new()
        action, reward = self.new(), float(np.float32(self.rng.standard_normal()))
        step = Step(self.now[column], action, reward, terminated, truncated, seen)
        self.history[column].append(step)
        self.now[column] = self.new() if terminated or truncated else seen
        return step

    def iteration(self, steps):
        """The fragments of `steps` steps in each column, sorted by slot."""
        return [self.fragment(slot, steps) for slot in range(self.slots)]

    def fragment(self, slot, steps):
        columns = range(slot * self.rows, (slot + 1) * self.rows)
        taken = [[self.step(column) for column in columns] for _ in range(steps)]
        hidden = [
            (t, row, step.seen_next)
            for t, line in enumerate(taken)
            for row, step in enumerate(line)
            if step.truncated
        ]

        def of(name, dtype):
            values = [[getattr(s, name) for s in line] for line in taken]
            return np.array(values, dtype).reshape(steps, self.rows)

        wide = np.ones(self.observation_size, np.float32)
        return Fragment(
            iteration=0,
            slot=slot,
            observations=of("observation", np.float32)[..., None] * wide,
            actions=of("action", np.float32)[..., None] * np.ones(self.action_size, np.float32),
            log_probs=np.zeros((steps, self.rows), np.float32),
            rewards=of("reward", np.float64),
            terminated=of("terminated", bool),
            truncated=of("truncated", bool),
            lengths=np.full(self.rows, steps),
            last_observations=np.array([self.now[c] for c in columns], np.float32)[:, None] * wide,
            boundary_index=np.array([h[:2] for h in hidden], np.int64).reshape(-1, 2),
            boundary_observations=np.array([h[2] for h in hidden], np.float32)[:, None] * wide,
            episodes=(),
            states=(),
        )

    def transitions(self, newest_rows, n_step, discount):
        """The transitions to sample: {observation: (action, reward, next, bootstrap)}."""
        found = {}
        for steps in self.history:
            for t in range(max(0, len(steps) - newest_rows), len(steps)):
                total, k = 0.0, 0
                while True:
                    step = steps[t + k]
                    total += discount**k * step.reward
                    k += 1
                    if step.terminated or step.truncated or k == n_step or t + k == len(steps):
                        break
                bootstrap = 0.0 if step.terminated else discount**k
                following = None if step.terminated else step.seen_next
                found[steps[t].observation] = (steps[t].action, total, following, bootstrap)
        return found


def buffer_for(world, capacity, **changes):
    wanted = {
        "seed": 3,
        "batch_size": 32,
        "discount": 0.9,
        "n_step": 1,
        "updates_per_step": 1.0,
        "learning_starts": 0,
    }
    shape = ReplayShape(capacity, world.columns, world.observation_size, world.action_size)
    return ReplayBuffer(shape, **{**wanted, **changes})


def copied(drawn):
    """Copies of sampled arrays, by name."""
    return {name: getattr(drawn, name).copy() for name in drawn.__slots__}
