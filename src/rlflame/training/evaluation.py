"""Runs episodes of a fixed policy, and computes statistics of their returns.

Each episode has its own seed and a fixed row in the batch of a forward pass, so its result does not
depend on the number of workers or episodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rlflame.config.evaluation import EvaluationSettings
from rlflame.fleet.base import Fleet
from rlflame.rollout.task import EnvSpec, EpisodeStat, PolicyArrays, PolicySpec, RolloutTask
from rlflame.statistics import compute_interquartile_means, compute_mean_interval

#: The most episodes that a record in a file may have. `final_episodes` is at most 100,000.
_MAX_EPISODES = 10_000_000


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The episodes of an evaluation: their number, seed and settings."""

    episodes: int
    seed: int = 0
    stochastic: bool = False
    max_episode_steps: int = 10_000


def make_evaluation_plan(settings: EvaluationSettings, *, final: bool) -> EvaluationPlan:
    return EvaluationPlan(
        episodes=settings.final_episodes if final else settings.episodes,
        seed=settings.seed,
        max_episode_steps=settings.max_episode_steps,
    )


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """The returns of an evaluation and their statistics, as printed by `--json`."""

    episodes: int
    seed: int
    stochastic: bool
    max_episode_steps: int
    mean: float
    std: float
    iqm: float
    low: float
    high: float
    min: float
    max: float
    length_mean: float
    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def find_fault(self) -> str | None:
        """Return why a record from a file is invalid, or None if it is valid."""
        counts = (self.episodes, len(self.returns), len(self.lengths))
        if len(set(counts)) != 1 or not 0 < self.episodes <= _MAX_EPISODES:
            return "has {} episodes, but {} returns and {} lengths".format(*counts)
        numbers = (*self.to_metrics().values(), self.min, self.max, *self.returns)
        if (
            not all(map(math.isfinite, numbers))
            or not 0 <= self.seed < 2**63
            or not 1 <= self.max_episode_steps < 2**63
            or not 1 <= min(self.lengths) <= max(self.lengths) <= self.max_episode_steps
            or self.low > self.high
            or self.std < 0.0
            or (self.min, self.max) != (min(self.returns), max(self.returns))
        ):
            return "has values that no evaluation can have"
        return None

    def to_metrics(self) -> dict[str, float]:
        """Return the statistics under their names in the metrics log."""
        return {
            "eval_return_mean": self.mean,
            "eval_return_low": self.low,
            "eval_return_high": self.high,
            "eval_return_std": self.std,
            "eval_return_iqm": self.iqm,
            "eval_length_mean": self.length_mean,
            "eval_episodes": float(self.episodes),
        }


def evaluate(
    fleet: Fleet,
    env: EnvSpec,
    policy_spec: PolicySpec,
    policy: PolicyArrays,
    plan: EvaluationPlan,
    run: str = "evaluation",
) -> EvaluationRecord:
    """Run the plan's episodes and summarise them."""
    name = fleet.put(policy)
    shares = split_episodes(plan.episodes, policy_spec.width, fleet.capacity)
    tasks = [
        replace(
            make_evaluation_task(env, policy_spec, plan, first, count),
            run=run,
            slot=number,
            policy_id=name,
        )
        for number, (first, count) in enumerate(shares)
    ]
    try:
        submission = fleet.submit(tasks)
        try:
            fragments = sorted(submission, key=lambda fragment: fragment.slot)
        finally:
            submission.cancel()
    finally:
        fleet.release(name)
    episodes = [
        episode
        for fragment in fragments
        for episode in sorted(fragment.episodes, key=lambda episode: episode.row)
    ]
    return summarise_episodes(plan, episodes)


def split_episodes(episodes: int, width: int, workers: int) -> list[tuple[int, int]]:
    """Divide episodes into tasks; return each task's first episode and size.

    The result of an episode does not depend on its task, so the tasks may depend on `workers`.
    """
    task_size = max(1, min(width, math.ceil(episodes / workers)))
    return [
        (first, min(task_size, begin + width - first, episodes - first))
        for begin in range(0, episodes, width)
        for first in range(begin, min(begin + width, episodes), task_size)
    ]


def make_evaluation_task(
    env: EnvSpec, policy_spec: PolicySpec, plan: EvaluationPlan, first: int, count: int
) -> RolloutTask:
    """Make a task that runs `count` episodes, beginning with number `first`."""
    group, row = divmod(first, policy_spec.width)
    assert row + count <= policy_spec.width
    return RolloutTask(
        run="evaluation",
        seed=plan.seed,
        purpose="evaluate",
        iteration=group,
        slot=group,
        env=env,
        policy=policy_spec,
        policy_id="",
        unit="episodes",
        steps=plan.max_episode_steps,
        rows=count,
        first_row=row,
        acting="sample" if plan.stochastic else "best",
        record=False,
        states=(),
    )


def summarise_episodes(plan: EvaluationPlan, episodes: Sequence[EpisodeStat]) -> EvaluationRecord:
    returns = np.array([episode.episode_return for episode in episodes], np.float64)
    lengths = [episode.length for episode in episodes]
    low, high = compute_mean_interval(returns)
    return EvaluationRecord(
        episodes=len(episodes),
        seed=plan.seed,
        stochastic=plan.stochastic,
        max_episode_steps=plan.max_episode_steps,
        mean=float(returns.mean()),
        std=float(returns.std()),
        iqm=float(compute_interquartile_means(returns)),
        low=low,
        high=high,
        min=float(returns.min()),
        max=float(returns.max()),
        length_mean=float(np.mean(lengths)),
        returns=tuple(float(value) for value in returns),
        lengths=tuple(lengths),
    )


def compute_paired_difference(a: EvaluationRecord, b: EvaluationRecord) -> dict[str, float]:
    """Compare paired episodes by their difference in return, `a - b`.

    Returns the mean difference and its confidence interval.
    """
    if (a.episodes, a.seed, a.stochastic) != (b.episodes, b.seed, b.stochastic):
        raise ValueError("only evaluations over the same episodes can be paired")
    difference = np.array(a.returns, np.float64) - np.array(b.returns, np.float64)
    low, high = compute_mean_interval(difference)
    return {"mean": float(difference.mean()), "low": low, "high": high}
