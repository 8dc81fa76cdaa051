"""What others have published of the same work on Flame, with what is known of their hardware.

From the README of Flame's REINFORCE example and the report on it. Must not know: what is measured
here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run of theirs: seconds in all, and the mean reward of its last iteration."""

    seconds: float
    reward: float


@dataclass(frozen=True, slots=True)
class PublishedComparison:
    """Theirs, one trial a side; the two sides are two programs, not one on two fleets."""

    source: str
    hardware: str
    environment: str
    iterations: int
    episodes_per_iteration: int
    local: PublishedRun
    flame: PublishedRun

    @property
    def episodes(self) -> int:
        return self.iterations * self.episodes_per_iteration


_REPORT = (
    "the report on Flame's RL example",
    "Apple M4, 8 cores; Podman with 5 virtual processors and 8 GB; 3 executor managers",
)
RECIPES = {
    "flame-readme-ant": PublishedComparison(
        "the README of Flame's RL example",
        "not stated",
        "ant", 20, 100, PublishedRun(106.45, -91.6), PublishedRun(85.23, -122.4),
    ),
    "flame-report-ant": PublishedComparison(
        *_REPORT, "ant", 100, 100, PublishedRun(481.70, -166.1), PublishedRun(335.71, -252.6)
    ),
    "flame-report-cartpole": PublishedComparison(
        *_REPORT, "cartpole", 100, 100, PublishedRun(1230.12, 193.4), PublishedRun(517.94, 499.8)
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublishedReplay:
    """Transitions a second of an example that collects into a replay, by where and how."""

    source: str
    hardware: str
    environment: str
    iterations: int
    collections: int
    steps: int
    batch: int
    local: float
    incremental: float
    full: float

    @property
    def rates(self) -> dict[str, float]:
        return {
            "local, one process": self.local,
            "Flame, incremental reads": self.incremental,
            "Flame, forced full reads": self.full,
        }

    @property
    def share(self) -> float:
        """Of the local rate that is left on Flame, at best."""
        return self.incremental / self.local


REPLAY = PublishedReplay(
    "the README of Flame's replay buffer example",
    "not stated",
    "CartPole-v1", 50, 20, 500, 64, 223_376.4, 76_016.1, 6_959.5,
)  # fmt: skip

#: Their speed-up at 100 episodes an iteration, by executors.
SPEEDUPS = {1: "1x", 5: "~4x", 10: "7-8x", 20: "12-15x"}
#: From so many milliseconds an episode, what they say distribution does.
_BENEFITS = (
    (1000.0, "essential"),
    (100.0, "near-linear"),
    (50.0, "from 50 episodes on"),
    (15.0, "marginal"),
    (0.0, "overhead dominates"),
)


def find_benefit(episode_ms: float) -> str:
    """What their README says distribution does for episodes of this length."""
    return next(text for least, text in _BENEFITS if episode_ms >= least)


#: Milliseconds an episode, of their table.
EPISODE_MS = {"CartPole-v1": 1.0, "Hopper-v5": 15.0, "HalfCheetah-v5": 20.0, "Ant-v5": 50.0}
