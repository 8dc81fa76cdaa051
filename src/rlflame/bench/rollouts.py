"""How fast a fleet collects with a policy that acts and does not learn, beside bare stepping.

Rounds are iterations of the case's recipe: its slots, its environments, its fragments. Must not
know: how a limit is measured, how anything is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from rlflame.bench.action_trace import ActionTrace
from rlflame.bench.base import Case
from rlflame.bench.stepping_processes import SteppingProcesses, sum_rates
from rlflame.bench.timed_run import Clock
from rlflame.experiment import components
from rlflame.fleet.base import ContextManagerMixin, Fleet
from rlflame.learning import factory
from rlflame.rollout.policy import Policy
from rlflame.rollout.spec import EnvState, Fragment, RolloutTask
from rlflame.training.trainer import (
    Progress,
    StopInterrupt,
    StopRequest,
    make_initial_states,
    make_tasks,
)

#: Steps a second of as many bare processes as there are workers.
Limit = Callable[[], float]
_WARM_ROUNDS = 2
#: No longer than this, and two rounds, for a script that is long enough.
_RECORD_S = 5.0


@dataclass(slots=True)
class RolloutRate:
    """What one number of workers did, repetition by repetition."""

    fleet: str
    workers: int
    steps_per_s: list[float] = field(default_factory=list)
    #: Bare stepping in between, by its way; of the same processors.
    limits: dict[str, list[float]] = field(default_factory=dict)
    #: Tasks that went to a second worker meanwhile, which takes longer; of each repetition.
    retried: list[int] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    episodes: int = 0
    #: Of those episodes, from their beginnings on, which may lie before what was timed.
    episode_steps: int = 0

    @property
    def ms_per_episode(self) -> float | None:
        """Of one worker's time, for an episode as long as those that ended."""
        if not self.episodes:
            return None
        return 1000.0 * self.workers * self.episode_steps / self.episodes / median(self.steps_per_s)

    def compute_shares(self, way: str) -> list[float]:
        """Of the limit measured next to it, pair by pair."""
        return [rate / most for rate, most in zip(self.steps_per_s, self.limits[way], strict=False)]


class RolloutRounds(ContextManagerMixin):
    """Iterations of rollouts on an open fleet, from the first episode on, with nothing learned."""

    def __init__(
        self, case: Case, fleet: Fleet, stop: StopRequest, acting: Literal["sample", "uniform"]
    ) -> None:
        self._fleet, self._stop = fleet, stop
        plan = components.make_plan(case.recipe, case.env, "bench")
        self.policy = factory.make_algorithm(case.recipe.learning, plan.policy).get_policy()
        self.spec = plan.policy
        self._policy_id = fleet.put(self.policy)
        self._tasks: list[RolloutTask] = [
            replace(task, policy_id=self._policy_id, acting=acting)
            for task in make_tasks(plan, Progress(), make_initial_states(plan))
        ]

    def collect(self) -> list[Fragment]:
        """By slot; StopNow where somebody asks to stop meanwhile."""
        with self._stop.allow_interrupt():
            submission = self._fleet.submit(self._tasks)
            try:
                fragments = sorted(submission, key=lambda fragment: fragment.slot)
            finally:
                submission.cancel()
        self._tasks = [
            replace(task, iteration=task.iteration + 1, states=_find_next_states(task, fragment))
            for task, fragment in zip(self._tasks, fragments, strict=True)
        ]
        return fragments

    def close(self) -> None:
        self._fleet.release(self._policy_id)


class TimedRounds(ContextManagerMixin):
    """Rounds that are timed and remembered."""

    def __init__(
        self, case: Case, fleet: Fleet, stop: StopRequest, clock: Clock = time.perf_counter
    ) -> None:
        self._clock = clock
        # The policy acts, also where training would begin with random actions.
        self._rounds = RolloutRounds(case, fleet, stop, "sample")
        to_environment = Policy(self._rounds.spec, self._rounds.policy).to_environment
        self.trace = ActionTrace(case.env, to_environment)

    def record_trace(self) -> None:
        """Some rounds, written down as the script, which takes time that is not measured."""
        start_s = self._clock()
        self.warm_up()
        while not self.trace.is_full and self._clock() - start_s < _RECORD_S:
            self.record_round()

    def warm_up(self) -> None:
        """The first rounds, in which everything is made."""
        for _ in range(_WARM_ROUNDS):
            self.record_round()

    def measure(self, seconds: float, into: RolloutRate) -> None:
        """Whole rounds for at least so long."""
        start_s, steps = self._clock(), 0
        while (elapsed := self._clock() - start_s) < seconds or not steps:
            fragments = self._rounds.collect()
            steps += sum(int(fragment.lengths.sum()) for fragment in fragments)
            ended = [episode.length for fragment in fragments for episode in fragment.episodes]
            into.episodes += len(ended)
            into.episode_steps += sum(ended)
        into.steps_per_s.append(steps / elapsed)
        into.seconds += elapsed
        into.steps += steps

    def close(self) -> None:
        self._rounds.close()

    def record_round(self) -> None:
        """A round, as part of the script."""
        self.trace.add(self._rounds.collect())


def _find_next_states(task: RolloutTask, fragment: Fragment) -> tuple[EnvState, ...]:
    return fragment.states if task.unit == "steps" else ()


class CollectorProcesses(SteppingProcesses):
    """As many processes as workers, each with rounds and a fleet of its own, as seeds have them."""

    def __init__(self, case: Case, workers: int, stop: StopRequest) -> None:
        recipe = case.recipe.model_dump_json()
        super().__init__(
            "rlflame.bench.policy_process",
            [{"recipe": recipe, "number": number} for number in range(workers)],
            "A process could not collect on its own.",
            "the same command with --workers 1 is this process alone",
            stop,
        )

    def measure(self, seconds: float, into: RolloutRate) -> None:
        answers = self.step(seconds)
        into.steps_per_s.append(sum_rates(answers))
        into.seconds += sum(answer["seconds"] for answer in answers) / len(answers)
        into.steps += sum(answer["steps"] for answer in answers)
        into.episodes += sum(answer["episodes"] for answer in answers)
        into.episode_steps += sum(answer["episode_steps"] for answer in answers)


def alternate(
    measure: Callable[[], None],
    rate: RolloutRate,
    limits: Mapping[str, Limit],
    repeat: int,
    show_status: Callable[[str], None],
    take_retried: Callable[[], int] = lambda: 0,
) -> bool:
    """Workers and bare stepping in turn; False where somebody asked to stop."""
    try:
        for number in range(repeat):
            show_status(f"{rate.fleet} with {rate.workers}: {number + 1} of {repeat}")
            take_retried()
            measure()
            rate.retried.append(take_retried())
            for way, limit in limits.items():
                rate.limits.setdefault(way, []).append(limit())
    except StopInterrupt:
        return False
    return True
