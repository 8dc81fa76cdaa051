"""Measures how fast a fleet collects steps, compared to bare stepping.

A round is one iteration of the case's recipe, with its slots, environments and fragments.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from rlflame.analysis.report.document import Column, make_table
from rlflame.bench.case import Case, Clock
from rlflame.bench.raw_stepping import (
    WAYS,
    Step,
    SteppingProcesses,
    make_raw_processes,
    serve_steps,
    sum_rates,
)
from rlflame.bench.result import BenchResult, Side
from rlflame.bench.runner import Benchmark, BenchSession
from rlflame.config.recipe import Recipe
from rlflame.experiment import components
from rlflame.fleet.base import ContextManagerMixin, Fleet
from rlflame.fleet.factory import has_workers, make_inline_fleet
from rlflame.learning.factory import make_algorithm
from rlflame.rollout.task import Fragment, RolloutTask
from rlflame.statistics import compute_median_interval
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import Progress, StopRequest, make_initial_states, make_tasks

_COLUMNS = (
    *("fleet", "workers", ("repetitions", "times", "")),
    ("steps/s", "rate", ",.0f"),
    ("ms per episode", "ms_per_episode", ",.2f"),
)
_WARM_ROUNDS = 2


class RolloutRounds(ContextManagerMixin):
    """Runs the rollouts of consecutive iterations, without learning."""

    def __init__(
        self, case: Case, fleet: Fleet, stop: StopRequest, acting: Literal["sample", "uniform"]
    ) -> None:
        self._fleet, self._stop = fleet, stop
        plan = components.make_plan(case.recipe, case.env, "bench")
        algorithm = make_algorithm(case.recipe.learning, plan.policy)
        self.spec, self.policy = plan.policy, algorithm.get_policy()
        self._policy_id = fleet.put(self.policy)
        self._tasks: list[RolloutTask] = [
            replace(task, policy_id=self._policy_id, acting=acting)
            for task in make_tasks(plan, Progress(), make_initial_states(plan))
        ]

    def collect(self) -> list[Fragment]:
        """Collect the fragments of the next round, sorted by slot."""
        with self._stop.allow_interrupt():
            submission = self._fleet.submit(self._tasks)
            try:
                fragments = sorted(submission, key=lambda fragment: fragment.slot)
            finally:
                submission.cancel()
        self._tasks = [
            replace(
                task,
                iteration=task.iteration + 1,
                states=fragment.states if task.unit == "steps" else (),
            )
            for task, fragment in zip(self._tasks, fragments, strict=True)
        ]
        return fragments

    def warm_up(self) -> None:
        for _ in range(_WARM_ROUNDS):
            self.collect()

    def close(self) -> None:
        self._fleet.release(self._policy_id)


def measure_rounds(rounds: RolloutRounds, seconds: float, clock: Clock) -> dict[str, Any]:
    """Collect whole rounds for at least `seconds` and return the counts.

    `episode_steps` counts all steps of the episodes that ended, including steps before the
    measurement.
    """
    start_s, steps, lengths = clock(), 0, list[int]()
    while (elapsed := clock() - start_s) < seconds or not steps:
        fragments = rounds.collect()
        steps += sum(int(fragment.lengths.sum()) for fragment in fragments)
        lengths += [episode.length for fragment in fragments for episode in fragment.episodes]
    counts = {"episodes": len(lengths), "episode_steps": sum(lengths)}
    return {"steps": steps, "seconds": elapsed, **counts}


def make_collectors(case: Case, workers: int, stop: StopRequest) -> SteppingProcesses:
    """Start processes that collect rounds with their own seeds, as in a sweep."""
    learning = case.recipe.learning
    seeds = [learning.model_copy(update={"seed": learning.seed + n}) for n in range(workers)]
    recipes = [case.recipe.model_copy(update={"learning": learning}) for learning in seeds]
    return SteppingProcesses(
        "rlflame.bench.rollouts",
        [{"recipe": recipe.model_dump_json()} for recipe in recipes],
        "use --workers 1 to measure in this process",
        stop,
    )


def sum_counts(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the total counts and rate of processes that worked at the same time."""
    names = ("steps", "episodes", "episode_steps")
    totals = {name: sum(count[name] for count in counts) for name in names}
    return {"steps_per_s": sum_rates(counts), **totals}


@dataclass
class RolloutsBenchmark(Benchmark):
    """Measures the steps per second of one fleet with different numbers of workers."""

    name = "rollouts"
    seconds: float = 2.0
    #: Whether bare stepping is also measured, after each repetition.
    has_limits: bool = True

    def measure(self, session: BenchSession) -> Generator[None, None, None]:
        for count in self.workers:
            name = f"{self.case.name}, {self.fleets[0]} with {count}"
            side = Side(name, {"fleet": self.fleets[0], "workers": count})
            self.sides.append(side)
            with ExitStack() as stack:
                self._measure_side(session, side, count, stack)
            yield

    def _measure_side(
        self, session: BenchSession, side: Side, workers: int, stack: ExitStack
    ) -> None:
        stop, clock = session.stop, session.clock
        fleet = stack.enter_context(session.open_fleet(self.fleets[0], workers))
        # The policy acts even if training would begin with random actions.
        rounds = stack.enter_context(RolloutRounds(self.case, fleet, stop, "sample"))
        limits = dict[str, SteppingProcesses]()
        for way in WAYS if self.has_limits else ():
            processes = make_raw_processes(self.case.env, way, workers, stop)
            if stack.enter_context(processes).is_possible:
                limits[way] = processes
        if workers > 1 and not has_workers(self.fleets[0]):
            step = stack.enter_context(make_collectors(self.case, workers, stop)).step
        else:
            rounds.warm_up()
            step = lambda seconds: [measure_rounds(rounds, seconds, clock)]  # noqa: E731
        for _ in session.take_turns([side], self.repeat):
            counts = step(self.seconds)
            repetition = {**sum_counts(counts), "retried": session.take_retried()}
            for way, processes in limits.items():
                repetition[way] = sum_rates(processes.step(self.seconds))
            side.repetitions.append(repetition)

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        rates = [describe_rate(side) for side in sides]
        columns: list[Column] = [*_COLUMNS]
        for way in rates[0]["limits"]:
            columns += [(f"bare {way}", f"limits {way}", ",.0f"), ("share", f"shares {way}", ".3f")]
        rows = [
            {
                **rate,
                "rate": compute_median_interval(rate["steps_per_s"]),
                **{
                    f"{part} {way}": median(values)
                    for part in ("limits", "shares")
                    for way, values in rate[part].items()
                },
            }
            for rate in rates
        ]
        note = (
            f"{self.case.name}: environment steps per second with an untrained policy that does "
            f"not learn, in rounds of {self.case.tasks} tasks, each run by one worker. The "
            "limits are bare stepping: the same number of processes repeat episodes of random "
            "actions, in turn with the workers. A share is the median of the workers' speed "
            "divided by the limit."
        )
        if not has_workers(self.fleets[0]) and max(self.workers) > 1:
            note += " With several workers, each is a separate process with its own seed."
        work = self.case.work
        return BenchResult(
            self.name,
            {"environment": self.case.env.id, "case": self.case.name, "rates": rates},
            [note, make_table(rows, columns)],
            [side.make_measurement("steps_per_s", "steps/s", work, "higher") for side in sides],
        )


def describe_rate(side: Side) -> dict[str, Any]:
    """Return one worker count's results; `shares` are rates / limits."""
    rates, episodes = side.list_values("steps_per_s"), sum(side.list_values("episodes"))
    limits = {way: side.list_values(way) for way in WAYS if way in side.repetitions[0]}
    shares = {
        way: [rate / limit for rate, limit in zip(rates, values, strict=True)]
        for way, values in limits.items()
    }
    ms_per_episode = None
    if episodes:
        # The time that one worker needs for an episode of mean length.
        ms_per_step = 1000.0 * side.labels["workers"] / median(rates)
        ms_per_episode = ms_per_step * sum(side.list_values("episode_steps")) / episodes
    return {
        **side.labels,
        "times": len(side.repetitions),
        "steps_per_s": rates,
        "limits": limits,
        "shares": shares,
        "ms_per_episode": ms_per_episode,
        "steps": sum(side.list_values("steps")),
        "episodes": episodes,
    }


def make_collecting_step(order: dict[str, str]) -> Step:
    """Return a `Step` function that collects a recipe's rollouts in this process."""
    recipe = Recipe.model_validate_json(order["recipe"])
    case = Case("alone", recipe, components.make_env_spec(recipe.learning.environment))
    rounds = RolloutRounds(case, make_inline_fleet(), NullStop(), "sample")
    rounds.warm_up()
    return lambda seconds: measure_rounds(rounds, seconds, time.perf_counter)


if __name__ == "__main__":
    serve_steps(make_collecting_step)
