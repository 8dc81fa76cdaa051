"""How fast a fleet collects with a policy that acts and does not learn, beside bare stepping.

Rounds are iterations of the case's recipe: its slots, its environments, its fragments.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

from rlflame.analysis.report.bench_comparison import Measurement
from rlflame.analysis.report.document import Section, Table
from rlflame.bench.case import Case, Clock
from rlflame.bench.machine_load import MachineConditions
from rlflame.bench.raw_stepping import (
    WAYS,
    ActionTrace,
    SteppingProcesses,
    StepServer,
    make_raw_processes,
    sum_rates,
)
from rlflame.bench.result import BenchResult, compute_median, make_table
from rlflame.bench.runner import BenchSession
from rlflame.config.recipe import Recipe
from rlflame.config.runtime import RuntimeSettings
from rlflame.experiment import components
from rlflame.fleet import factory as fleet_factory
from rlflame.fleet.base import ContextManagerMixin, Fleet
from rlflame.learning import factory as learning_factory
from rlflame.rollout.envs import user_file
from rlflame.rollout.policy import Policy
from rlflame.rollout.spec import Fragment, RolloutTask
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import Progress, StopRequest, make_initial_states, make_tasks

_WARM_ROUNDS = 2
#: A script ends after these seconds and two rounds, if it is not long enough before.
_RECORD_S = 5.0


@dataclass(slots=True)
class RolloutRate:
    """What one number of workers did, repetition by repetition."""

    name: str
    fleet: str
    workers: int
    steps_per_s: list[float] = field(default_factory=list)
    #: Bare stepping after each repetition, by its way.
    limits: dict[str, list[float]] = field(default_factory=dict)
    #: Tasks that went to a second worker, of each repetition.
    retried: list[int] = field(default_factory=list)
    steps: int = 0
    episodes: int = 0
    #: The steps of these episodes, also of those before the time was taken.
    episode_steps: int = 0

    @property
    def ms_per_episode(self) -> float | None:
        """The time of one worker for an episode as long as those that ended."""
        if not self.episodes:
            return None
        return 1000.0 * self.workers * self.episode_steps / self.episodes / median(self.steps_per_s)

    def compute_shares(self) -> dict[str, list[float]]:
        """The share of each limit that the repetition before it reached."""
        return {
            way: [rate / most for rate, most in zip(self.steps_per_s, limits, strict=False)]
            for way, limits in self.limits.items()
        }

    def add(self, counts: Sequence[dict[str, Any]], retried: int = 0) -> None:
        """Add a repetition: what each of the processes counted."""
        self.steps_per_s.append(sum_rates(counts))
        self.retried.append(retried)
        self.steps += sum(count["steps"] for count in counts)
        self.episodes += sum(count["episodes"] for count in counts)
        self.episode_steps += sum(count["episode_steps"] for count in counts)


class RolloutRounds(ContextManagerMixin):
    """Iterations of rollouts on an open fleet, from the first episode on, with nothing learned."""

    def __init__(
        self, case: Case, fleet: Fleet, stop: StopRequest, acting: Literal["sample", "uniform"]
    ) -> None:
        self._fleet, self._stop = fleet, stop
        plan = components.make_plan(case.recipe, case.env, "bench")
        algorithm = learning_factory.make_algorithm(case.recipe.learning, plan.policy)
        self.spec, self.policy = plan.policy, algorithm.get_policy()
        self._policy_id = fleet.put(self.policy)
        self._tasks: list[RolloutTask] = [
            replace(task, policy_id=self._policy_id, acting=acting)
            for task in make_tasks(plan, Progress(), make_initial_states(plan))
        ]

    def collect(self) -> list[Fragment]:
        """The fragments of the next round, by slot."""
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


def record_trace(case: Case, rounds: RolloutRounds, clock: Clock) -> ActionTrace:
    """Record rounds until the script is long enough, which also warms up."""
    trace = ActionTrace(case.env, Policy(rounds.spec, rounds.policy).to_environment)
    start_s = clock()
    for number in itertools.count():
        if number >= _WARM_ROUNDS and (trace.is_full or clock() - start_s >= _RECORD_S):
            break
        trace.add(rounds.collect())
    return trace


def measure_rounds(rounds: RolloutRounds, seconds: float, clock: Clock) -> dict[str, Any]:
    """Collect whole rounds for at least this time, and count."""
    start_s, steps, lengths = clock(), 0, list[int]()
    while (elapsed := clock() - start_s) < seconds or not steps:
        fragments = rounds.collect()
        steps += sum(int(fragment.lengths.sum()) for fragment in fragments)
        lengths += [episode.length for fragment in fragments for episode in fragment.episodes]
    counts = {"episodes": len(lengths), "episode_steps": sum(lengths)}
    return {"steps": steps, "seconds": elapsed, **counts}


def make_collectors(case: Case, workers: int, stop: StopRequest) -> SteppingProcesses:
    """Processes that each collect their own rounds, as several seeds side by side do."""
    recipe = case.recipe.model_dump_json()
    return SteppingProcesses(
        "rlflame.bench.rollouts",
        [{"recipe": recipe, "number": number} for number in range(workers)],
        "A process could not collect on its own.",
        "the same command with --workers 1 is this process alone",
        stop,
    )


def make_collector_case(recipe_json: str, number: int) -> Case:
    """The case of one of several collecting processes: each has another seed."""
    recipe = Recipe.model_validate_json(recipe_json)
    learning = recipe.learning.model_copy(update={"seed": recipe.learning.seed + number})
    env = components.make_env_spec(learning.environment)
    return Case("alone", recipe.model_copy(update={"learning": learning}), env)


@dataclass
class RolloutsBenchmark:
    """The rates of one fleet with several numbers of workers."""

    case: Case
    fleet: str
    workers: Sequence[int]
    seconds: float
    repeat: int
    #: Whether bare stepping is measured too, after each repetition.
    has_limits: bool = True
    rates: list[RolloutRate] = field(default_factory=list)
    name: ClassVar[str] = "rollouts"

    @property
    def fleets(self) -> list[str]:
        return [self.fleet]

    def measure(self, session: BenchSession) -> Iterator[None]:
        for count in self.workers:
            name = f"{self.case.name}, {self.fleet} with {count}"
            rate = RolloutRate(name, self.fleet, count)
            self.rates.append(rate)
            with ExitStack() as stack:
                self._measure_rate(session, rate, stack)
            message = f"{median(rate.steps_per_s):,.0f} steps/s"
            session.show_note(f"{name}: {message} (median of {len(rate.steps_per_s)})")
            yield

    def _measure_rate(self, session: BenchSession, rate: RolloutRate, stack: ExitStack) -> None:
        stop, clock = session.stop, session.clock
        fleet = stack.enter_context(session.open_fleet(rate.fleet, rate.workers))
        # The policy acts, also where training would begin with random actions.
        rounds = stack.enter_context(RolloutRounds(self.case, fleet, stop, "sample"))
        limits = dict[str, SteppingProcesses]()
        if self.has_limits:
            trace = record_trace(self.case, rounds, clock)
            script = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "script.npz"
            trace.save(script)
            for way in WAYS:
                processes = stack.enter_context(make_raw_processes(script, way, rate.workers, stop))
                if processes.is_possible:
                    limits[way] = processes
        collectors = None
        if rate.fleet == "inline" and rate.workers > 1:
            collectors = stack.enter_context(make_collectors(self.case, rate.workers, stop))
        elif not self.has_limits:
            rounds.warm_up()
        for _ in session.take_turns([rate], self.repeat):
            if collectors is None:
                counts = [measure_rounds(rounds, self.seconds, clock)]
            else:
                counts = collectors.step(self.seconds)
            rate.add(counts, session.take_retried())
            for way, processes in limits.items():
                rate.limits.setdefault(way, []).append(sum_rates(processes.step(self.seconds)))

    def make_result(self, conditions: MachineConditions, complete: bool) -> BenchResult | None:
        rates = [rate for rate in self.rates if rate.steps_per_s]
        if not rates:
            return None
        keys = ("fleet", "workers", "steps_per_s", "limits", "ms_per_episode", "steps", "episodes")
        facts = [
            {**{key: getattr(rate, key) for key in keys}, "shares": rate.compute_shares()}
            for rate in rates
        ]
        work = self.case.rollout_work
        return BenchResult(
            self.name,
            f"Benchmark: rollouts of {self.case.env.id}",
            {"environment": self.case.env.id, "case": self.case.name, "rates": facts},
            [Section("Rate", (*self._format_notes(rates), _make_rate_table(rates)))],
            [
                Measurement(
                    rate.name, "steps/s", True, tuple(rate.steps_per_s), work, tuple(rate.retried)
                )
                for rate in rates
            ],
            conditions,
            complete,
        )

    def _format_notes(self, rates: Sequence[RolloutRate]) -> list[str]:
        notes = [
            f"{self.case.name}: environment steps a second, with an untrained policy that does "
            f"not learn, in rounds of {self.case.tasks} tasks. The limits are bare stepping: as "
            "many processes repeat recorded resets and actions, in turn with the workers. A share "
            "is the median over these pairs."
        ]
        if any(rate.fleet == "inline" and rate.workers > 1 for rate in rates):
            notes.append(
                "One worker inline is this process; several are as many processes, each with "
                "rounds of its own, as several seeds have them."
            )
        return notes + [
            f"Of {rate.workers} workers of {rate.fleet} {rate.workers - self.case.tasks} never "
            f"had a task: --set rollout.num_slots={rate.workers} has one for each."
            for rate in rates
            if rate.fleet != "inline" and rate.workers > self.case.tasks
        ]


def _make_rate_table(rates: Sequence[RolloutRate]) -> Table:
    columns = [("fleet", "fleet", ""), ("workers", "workers", ""), ("times", "times", "")]
    columns.append(("steps/s", "rate", ",.0f"))
    for way in dict.fromkeys(way for rate in rates for way in rate.limits):
        columns += [(f"bare {way}", f"{way}_limit", ",.0f"), ("share", f"{way}_share", ".3f")]
    columns.append(("ms an episode", "ms_per_episode", ",.2f"))
    rows = []
    for rate in rates:
        row = dict.fromkeys((key for _, key, _ in columns), None)
        row |= {key: getattr(rate, key) for key in ("fleet", "workers", "ms_per_episode")}
        row |= {"times": len(rate.steps_per_s), "rate": compute_median(rate.steps_per_s)}
        row |= {f"{way}_limit": median(limits) for way, limits in rate.limits.items()}
        row |= {f"{way}_share": median(shares) for way, shares in rate.compute_shares().items()}
        rows.append(row)
    return make_table(rows, columns)


def main() -> None:
    server = StepServer()
    user_file.load_from_environment()
    case = make_collector_case(server.order["recipe"], server.order["number"])
    with (
        fleet_factory.make_fleet(RuntimeSettings(fleet="inline")) as fleet,
        RolloutRounds(case, fleet, NullStop(), "sample") as rounds,
    ):
        rounds.warm_up()
        server.serve(lambda seconds: measure_rounds(rounds, seconds, time.perf_counter))


if __name__ == "__main__":
    main()
