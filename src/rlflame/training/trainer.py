"""The training loop, which is the same for all algorithms and fleets.

Glossary:
  step        one transition of one environment
  slot        a group of environments with its own random streams and a fixed position in the batch
  fragment    the result of one task: the steps of the environments of one slot
  iteration   one task per slot, then learning from the fragments of all slots
  update      learning from one batch, in one or more optimizer steps
  version     the weights between two iterations
  staleness   the number of versions by which the acting policy lags behind the latest weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from rlflame.config.recipe import Recipe, RolloutSettings
from rlflame.errors import CheckpointError, EnvironmentFailure, FleetError
from rlflame.fleet.base import Fleet, Submission
from rlflame.learning.base import Algorithm, Buffer, Metrics, Segment, State
from rlflame.learning.policy_average import PolicyAverage
from rlflame.rollout.seeding import Role, make_reset_seed
from rlflame.rollout.task import (
    EnvSpec,
    EnvState,
    Fragment,
    PolicyArrays,
    PolicySpec,
    RolloutTask,
    make_fresh_state,
)
from rlflame.training.evaluation import (
    EvaluationPlan,
    EvaluationRecord,
    evaluate,
    make_evaluation_plan,
)

EnvStates = tuple[tuple[EnvState, ...], ...]
#: The type of the batches that a buffer yields and an algorithm learns from.
BatchT = TypeVar("BatchT")
#: The prefixes of the arrays of the buffer and of the policy average in `Snapshot.learner`.
BUFFER_PREFIX, AVERAGE_PREFIX = "experience.", "average."


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's name and recipe, and the specs of its environment and policy."""

    run: str
    recipe: Recipe
    env: EnvSpec
    policy: PolicySpec

    @property
    def rollout(self) -> RolloutSettings:
        return self.recipe.learning.rollout


@dataclass(frozen=True, slots=True)
class Progress:
    """The counters of a run. They are part of a checkpoint's digest."""

    iteration: int = 0
    steps: int = 0
    episodes: int = 0
    evaluations: int = 0
    reached: bool = False

    def is_spent(self, stop_at_steps: int | None, stop_at_iterations: int | None) -> bool:
        """Return whether the budget is spent or the requested return was reached."""
        return (
            self.reached
            or (stop_at_steps is not None and self.steps >= stop_at_steps)
            or (stop_at_iterations is not None and self.iteration >= stop_at_iterations)
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The complete state of a run between two iterations."""

    progress: Progress
    policy: PolicyArrays
    learner: State
    states: EnvStates
    #: With staleness, the acting policy of the next iteration, which is already being collected.
    behaviour: PolicyArrays | None
    #: The segments of the replay buffer, which do not change and are not in `learner`.
    segments: tuple[Segment, ...] = ()


class Recorder(Protocol):
    """Records a run, and decides when a snapshot is due."""

    def record_iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None: ...

    def record_evaluation(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> None: ...

    def record_snapshot(
        self, take: Callable[[], Snapshot], progress: Progress, final: bool
    ) -> None: ...

    def time_phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time that the block takes to the named phase."""


class StopRequest(Protocol):
    """A request to end the run."""

    @property
    def is_requested(self) -> bool: ...

    def allow_interrupt(self) -> AbstractContextManager[None]:
        """Raise StopInterrupt as soon as a stop is requested inside the block."""


class StopInterrupt(KeyboardInterrupt):
    """Raised when a stop request ends a wait; never raised by environments."""


class _PendingRollouts:
    """Rollouts in progress, and the weights of the policy that acts in them."""

    def __init__(self, fleet: Fleet, policy: PolicyArrays, tasks: list[RolloutTask]) -> None:
        self.behaviour = policy
        self._fleet = fleet
        self._name = fleet.put(policy)
        tasks_of_policy = [replace(task, policy_id=self._name) for task in tasks]
        try:
            self._submission: Submission = fleet.submit(tasks_of_policy)
        except BaseException:
            fleet.release(self._name)
            raise

    def gather(self) -> list[Fragment]:
        return sorted(self._submission, key=lambda fragment: fragment.slot)

    def close(self) -> None:
        self._submission.cancel()
        self._fleet.release(self._name)


def restore_components(
    snapshot: Snapshot,
    staleness: int,
    algorithm: Algorithm[Any],
    buffer: Buffer[Any],
    average: PolicyAverage,
) -> None:
    """Load a snapshot into the algorithm, the buffer and the policy average.

    Raises an error if the snapshot does not fit the recipe.
    """
    has_behaviour = bool(staleness and snapshot.progress.iteration)
    if has_behaviour != (snapshot.behaviour is not None):
        raise CheckpointError(
            "The checkpoint does not match its recipe: the acting weights of the next iteration "
            f"are {'missing' if has_behaviour else 'present, but staleness is 0'}.",
            "resume an earlier checkpoint of the same run",
        )
    learner = snapshot.learner
    buffer.load_state(_select_prefix(BUFFER_PREFIX, learner), snapshot.segments)
    algorithm.load_state(learner)
    average.load_state(_select_prefix(AVERAGE_PREFIX, learner), algorithm.get_policy())


def _add_prefix(prefix: str, state: State) -> State:
    return {prefix + name: array for name, array in state.items()}


def _select_prefix(prefix: str, learner: State) -> State:
    """Select the entries with a prefix, and remove the prefix from their names."""
    return {n.removeprefix(prefix): a for n, a in learner.items() if n.startswith(prefix)}


class Trainer(Generic[BatchT]):
    """Collects, learns and evaluates until training is complete or stopped."""

    def __init__(
        self,
        plan: Plan,
        algorithm: Algorithm[BatchT],
        buffer: Buffer[BatchT],
        fleet: Fleet,
        recorder: Recorder,
        stop: StopRequest,
    ) -> None:
        self._plan = plan
        self._algorithm = algorithm
        self._buffer = buffer
        self._fleet = fleet
        self._recorder = recorder
        self._stop = stop
        self.progress = Progress()
        self._states: EnvStates = make_initial_states(plan)
        self._behaviour: PolicyArrays | None = None
        self._average = PolicyAverage(plan.recipe.learning.policy_average, algorithm.get_policy())

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; raise an error if it does not fit the recipe."""
        staleness = self._plan.rollout.staleness
        restore_components(snapshot, staleness, self._algorithm, self._buffer, self._average)
        self.progress = snapshot.progress
        self._states = snapshot.states
        self._behaviour = snapshot.behaviour

    def run(self) -> bool:
        """Train; return True if training is complete, or False if it was stopped."""
        try:
            self._recorder.record_snapshot(self.take_snapshot, self.progress, final=False)
            self._run_loop()
        except StopInterrupt:
            pass  # raised only while the state is still that of the last complete iteration
        except (EnvironmentFailure, FleetError):
            # A failed collection has not changed the state.
            self._recorder.record_snapshot(self.take_snapshot, self.progress, final=True)
            raise
        complete = self._is_finished(self.progress)
        self._recorder.record_snapshot(self.take_snapshot, self.progress, final=True)
        return complete

    def _run_loop(self) -> None:
        current: _PendingRollouts | None = None
        try:
            self._evaluate_if_due()
            policy = self._behaviour or self._algorithm.get_policy()
            current = self._collect(policy, self.progress, self._states)
            while current is not None:
                with self._recorder.time_phase("collect"), self._stop.allow_interrupt():
                    fragments = current.gather()
                current.close()
                behaviour, current = current.behaviour, None
                progress, states = self._compute_progress(fragments)
                if self._plan.rollout.staleness:
                    # Collect the next iteration while learning from this one.
                    policy = self._algorithm.get_policy()
                    current = self._collect(policy, progress, states)
                metrics = self._learn(fragments, behaviour, self._compute_schedule_progress())
                self.progress, self._states = progress, states
                try:
                    if self._plan.rollout.staleness:
                        self._behaviour = policy
                    else:
                        current = self._collect(self._algorithm.get_policy(), progress, states)
                finally:
                    # Record after the workers have started, or failed to start, the next iteration.
                    self._recorder.record_iteration(self.progress, metrics, fragments)
                self._evaluate_if_due()
                self._recorder.record_snapshot(self.take_snapshot, self.progress, final=False)
                if self._stop.is_requested or self.progress.reached:
                    break
        finally:
            if current is not None:
                current.close()

    def take_snapshot(self) -> Snapshot:
        learner = {
            **self._algorithm.get_state(),
            **_add_prefix(BUFFER_PREFIX, self._buffer.get_state()),
            **_add_prefix(AVERAGE_PREFIX, self._average.get_state()),
        }
        return Snapshot(
            self.progress,
            self._get_evaluation_policy(),
            learner,
            self._states,
            self._behaviour,
            self._buffer.list_segments(),
        )

    def _collect(
        self, policy: PolicyArrays, progress: Progress, states: EnvStates
    ) -> _PendingRollouts | None:
        """Start the rollouts of an iteration; return None if the budget is spent."""
        with self._recorder.time_phase("transfer"):
            if self._is_finished(progress):
                return None
            return _PendingRollouts(self._fleet, policy, make_tasks(self._plan, progress, states))

    def _compute_progress(self, fragments: Sequence[Fragment]) -> tuple[Progress, EnvStates]:
        """Return the progress and the environment states after these fragments."""
        progress = replace(
            self.progress,
            iteration=self.progress.iteration + 1,
            steps=self.progress.steps + sum(int(f.lengths.sum()) for f in fragments),
            episodes=self.progress.episodes + sum(len(f.episodes) for f in fragments),
        )
        return progress, tuple(fragment.states for fragment in fragments)

    def _learn(
        self, fragments: Sequence[Fragment], behaviour: PolicyArrays, progress: float
    ) -> Metrics:
        with self._recorder.time_phase("learn"):
            self._buffer.add(fragments, behaviour)
            metrics: Metrics = {}
            for batch in self._buffer.take_batches():
                metrics = self._algorithm.update(batch, progress)
            self._average.update(self._algorithm.get_policy())
        return metrics

    def _get_evaluation_policy(self) -> PolicyArrays:
        """Return the policy to evaluate and save, averaged if averaging is enabled."""
        return self._average.get_policy(self._algorithm.get_policy())

    def _evaluate_if_due(self) -> None:
        """Evaluate if an evaluation is due, including one that a stop interrupted."""
        settings, progress = self._plan.recipe.evaluation, self.progress
        interval = settings.every_steps
        if interval is None or progress.steps // interval <= progress.evaluations:
            return
        policy = self._get_evaluation_policy()
        with self._recorder.time_phase("evaluate"), self._stop.allow_interrupt():
            record = self.evaluate(make_evaluation_plan(settings, final=False), policy)
        target = settings.until_return
        reached = progress.reached or (target is not None and record.low > target)
        self.progress = replace(progress, evaluations=progress.steps // interval, reached=reached)
        self._recorder.record_evaluation(self.progress, record, policy)

    def evaluate(self, plan: EvaluationPlan, policy: PolicyArrays) -> EvaluationRecord:
        return evaluate(
            self._fleet, self._plan.env, self._plan.policy, policy, plan, f"{self._plan.run}-eval"
        )

    def _is_finished(self, progress: Progress) -> bool:
        recipe = self._plan.recipe
        return progress.is_spent(recipe.stop_at_steps, recipe.stop_at_iterations)

    def _compute_schedule_progress(self) -> float:
        """Return the position of this iteration in the schedules, from 0 to 1."""
        learning, parts = self._plan.recipe.learning, [0.0]
        if learning.horizon_steps is not None:
            parts.append(self.progress.steps / learning.horizon_steps)
        if learning.horizon_iterations is not None:
            parts.append(self.progress.iteration / learning.horizon_iterations)
        return min(1.0, max(parts))


def make_tasks(plan: Plan, progress: Progress, states: EnvStates) -> list[RolloutTask]:
    """Make one task per slot for an iteration; the `policy_id` is set later."""
    rollout, replay = plan.rollout, plan.recipe.learning.replay
    acts_randomly = replay is not None and progress.steps < replay.learning_starts
    return [
        RolloutTask(
            run=plan.run,
            seed=plan.recipe.learning.seed,
            purpose="train",
            iteration=progress.iteration,
            slot=slot,
            env=plan.env,
            policy=plan.policy,
            policy_id="",
            unit=rollout.unit,
            steps=rollout.steps,
            rows=rollout.envs_per_slot,
            first_row=0,
            acting="uniform" if acts_randomly else "sample",
            record=True,
            states=states[slot] if rollout.unit == "steps" else (),
        )
        for slot in range(rollout.num_slots)
    ]


def make_initial_states(plan: Plan) -> EnvStates:
    """Return the states of all environments before their first reset."""
    rollout, seed = plan.rollout, plan.recipe.learning.seed
    if rollout.unit == "episodes":
        return tuple(() for _ in range(rollout.num_slots))
    return tuple(
        tuple(
            make_fresh_state(0, make_reset_seed(seed, Role.RESET, slot, row, 0))
            for row in range(rollout.envs_per_slot)
        )
        for slot in range(rollout.num_slots)
    )
