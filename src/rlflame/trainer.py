"""The one loop, for all algorithms and all fleets.

Glossary, one word per idea:
  step        one transition of one environment
  fragment    what one task brings back: some steps of one slot's environments
  slot        the unit of work: its place in the batch, its random streams, its environments
  iteration   submit a task for every slot, gather their fragments, learn from the batch
  update      one optimizer step
  version     the weights between two iterations
  staleness   how many versions the acting policy may lag behind the learning one

Must not know: file formats, algorithm names, fleet names, wall clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlflame.evaluate import EvaluationPlan, EvaluationRecord, evaluate
from rlflame.fleet import Fleet, Submission
from rlflame.learner import Algorithm, Experience, Metrics, State
from rlflame.rollout.lockstep import fresh_state
from rlflame.rollout.seeding import Role, reset_seed
from rlflame.rollout.spec import (
    EnvSpec,
    EnvState,
    Fragment,
    PolicyArrays,
    PolicySpec,
    RolloutTask,
)

EnvStates = tuple[tuple[EnvState, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The recipe as the loop needs it."""

    run: str
    seed: int
    env: EnvSpec
    policy: PolicySpec
    unit: str
    num_slots: int
    envs_per_slot: int
    steps: int
    staleness: int
    stop_at_steps: int | None
    stop_at_iterations: int | None
    horizon_steps: int | None
    horizon_iterations: int | None
    evaluation: EvaluationPlan
    evaluate_every_steps: int | None
    until_return: float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of a run; part of what a checkpoint's digest covers."""

    iteration: int = 0
    steps: int = 0
    episodes: int = 0
    evaluations: int = 0
    reached: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything between two iterations: enough to go on as if nothing had happened."""

    progress: Progress
    policy: PolicyArrays
    learner: State
    states: EnvStates
    #: With staleness, the weights that the iteration under way acts with.
    behaviour: PolicyArrays | None


class Recorder(Protocol):
    """Keeps what happened; decides for itself when a snapshot is due."""

    def iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None: ...

    def evaluation(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> None: ...

    def snapshot(self, take: Callable[[], Snapshot], progress: Progress, final: bool) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time spent inside counts as this phase."""


class Stop(Protocol):
    """Somebody's wish that the run should end."""

    @property
    def requested(self) -> bool: ...

    def interruptible(self) -> AbstractContextManager[None]:
        """Inside, a request raises StopNow at once; outside, it waits to be asked about."""


class StopNow(BaseException):
    """Raised into a wait that a stop request cuts short."""


class _Collection:
    """An iteration's rollouts under way, with the weights that act in them."""

    def __init__(self, fleet: Fleet, policy: PolicyArrays, tasks: list[RolloutTask]) -> None:
        self.behaviour = policy
        self._fleet = fleet
        self._name = fleet.put(policy)
        named = [replace(task, policy_id=self._name) for task in tasks]
        self._submission: Submission = fleet.submit(named)

    def gather(self) -> list[Fragment]:
        return sorted(self._submission, key=lambda fragment: fragment.slot)

    def end(self) -> None:
        self._submission.cancel()
        self._fleet.release(self._name)


class Trainer:
    """Collect, learn, record, until the budget is spent or somebody asks to stop."""

    def __init__(
        self,
        plan: Plan,
        algorithm: Algorithm,
        experience: Experience,
        fleet: Fleet,
        recorder: Recorder,
        stop: Stop,
    ) -> None:
        self._plan = plan
        self._algorithm = algorithm
        self._experience = experience
        self._fleet = fleet
        self._recorder = recorder
        self._stop = stop
        self.progress = Progress()
        self._states: EnvStates = _first_states(plan)
        self._behaviour: PolicyArrays | None = None

    def restore(self, snapshot: Snapshot) -> None:
        self.progress = snapshot.progress
        self._states = snapshot.states
        self._behaviour = snapshot.behaviour
        learner = dict(snapshot.learner)
        self._experience.load_state(
            {key[11:]: learner.pop(key) for key in list(learner) if key.startswith("experience.")}
        )
        self._algorithm.load_state(learner)

    def run(self) -> bool:
        """True when training is complete, False when a stop request ended it early."""
        current: _Collection | None = None
        try:
            self._evaluate_if_due()
            current = self._collect(self._behaviour)
            while current is not None:
                with self._recorder.phase("collect"), self._stop.interruptible():
                    fragments = current.gather()
                behaviour, done = current.behaviour, current
                done.end()
                before, current = self.progress, None
                self._advance(fragments)
                # With staleness, the next iteration is collected while this one is learned from.
                if self._plan.staleness:
                    current = self._collect(None)
                metrics = self._learn(fragments, behaviour, self._fraction(before))
                if not self._plan.staleness:
                    current = self._collect(None)
                self._behaviour = current.behaviour if current and self._plan.staleness else None
                self._recorder.iteration(self.progress, metrics, fragments)
                self._evaluate_if_due()
                if self.progress.reached and current is not None:
                    current.end()
                    current = None
                self._recorder.snapshot(self.snapshot, self.progress, final=False)
                if self._stop.requested:
                    break
        except StopNow:
            pass
        finally:
            if current is not None:
                current.end()
        complete = self._finished()
        self._recorder.snapshot(self.snapshot, self.progress, final=True)
        return complete

    def snapshot(self) -> Snapshot:
        experience = self._experience.state()
        learner = {
            **self._algorithm.state(),
            **{f"experience.{name}": array for name, array in experience.items()},
        }
        return Snapshot(
            self.progress, self._algorithm.policy(), learner, self._states, self._behaviour
        )

    def _collect(self, behaviour: PolicyArrays | None) -> _Collection | None:
        """Start the next iteration's rollouts, or nothing when the budget is spent."""
        if self._finished():
            return None
        policy = behaviour if behaviour is not None else self._algorithm.policy()
        return _Collection(self._fleet, policy, self._tasks())

    def _tasks(self) -> list[RolloutTask]:
        plan = self._plan
        whole = plan.unit == "episodes"
        return [
            RolloutTask(
                run=plan.run,
                seed=plan.seed,
                purpose="train",
                iteration=self.progress.iteration,
                slot=slot,
                env=plan.env,
                policy=plan.policy,
                policy_id="",
                unit="episodes" if whole else "steps",
                steps=plan.steps,
                rows=plan.envs_per_slot,
                first_row=0,
                stochastic=True,
                record=True,
                states=() if whole else self._states[slot],
            )
            for slot in range(plan.num_slots)
        ]

    def _advance(self, fragments: Sequence[Fragment]) -> None:
        self._states = tuple(fragment.states for fragment in fragments)
        self.progress = replace(
            self.progress,
            iteration=self.progress.iteration + 1,
            steps=self.progress.steps + sum(int(f.lengths.sum()) for f in fragments),
            episodes=self.progress.episodes + sum(len(f.episodes) for f in fragments),
        )

    def _learn(
        self, fragments: Sequence[Fragment], behaviour: PolicyArrays, progress: float
    ) -> Metrics:
        with self._recorder.phase("learn"):
            self._experience.add(fragments, behaviour)
            metrics: Metrics = {}
            for batch in self._experience.batches():
                metrics = self._algorithm.update(batch, progress)
        return metrics

    def _evaluate_if_due(self) -> None:
        """Also on the way back from a stop that had cut an evaluation short."""
        every, progress = self._plan.evaluate_every_steps, self.progress
        if every is None or progress.steps // every <= progress.evaluations:
            return
        policy = self._algorithm.policy()
        with self._recorder.phase("evaluate"), self._stop.interruptible():
            record = self.evaluate(self._plan.evaluation, policy)
        target = self._plan.until_return
        reached = progress.reached or (target is not None and record.low > target)
        self.progress = replace(progress, evaluations=progress.steps // every, reached=reached)
        self._recorder.evaluation(self.progress, record, policy)

    def evaluate(self, plan: EvaluationPlan, policy: PolicyArrays) -> EvaluationRecord:
        return evaluate(
            self._fleet, self._plan.env, self._plan.policy, policy, plan, f"{self._plan.run}-eval"
        )

    def _finished(self) -> bool:
        plan, progress = self._plan, self.progress
        return (
            progress.reached
            or (plan.stop_at_steps is not None and progress.steps >= plan.stop_at_steps)
            or (
                plan.stop_at_iterations is not None
                and progress.iteration >= plan.stop_at_iterations
            )
        )

    def _fraction(self, before: Progress) -> float:
        """How far along the schedules an iteration is that began with this progress."""
        plan = self._plan
        parts = [0.0]
        if plan.horizon_steps is not None:
            parts.append(before.steps / plan.horizon_steps)
        if plan.horizon_iterations is not None:
            parts.append(before.iteration / plan.horizon_iterations)
        return min(1.0, max(parts))


def _first_states(plan: Plan) -> EnvStates:
    """Episode 0 of every environment, not begun yet."""
    if plan.unit == "episodes":
        return tuple(() for _ in range(plan.num_slots))
    return tuple(
        tuple(
            fresh_state(0, reset_seed(plan.seed, Role.RESET, slot, row, 0))
            for row in range(plan.envs_per_slot)
        )
        for slot in range(plan.num_slots)
    )
