"""Runs several learners on this machine, and continues if processes are lost.

This process is the first learner. The others join at the first batch after they have loaded. If one
of them dies or does not answer in time, this process restores its state from before the batch,
processes the batch alone, and restarts the remaining learners. The results stay bit-identical; only
the speed changes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rlflame.config.recipe import (
    LearningSettings,
    Recipe,
    count_units,
    count_useful_learners,
    find_shards,
)
from rlflame.config.runtime import RuntimeSettings
from rlflame.experiment.learners.launcher import LOST_EXIT_CODE
from rlflame.experiment.learners.learner_trial import LearnerTrial
from rlflame.learning.base import Batch, Metrics, ReplayBatch, State
from rlflame.learning.factory import compute_fingerprint, count_blas_threads
from rlflame.learning.parallel.process_group import (
    ProcessGroup,
    ReplicatedAlgorithm,
    ShardedAlgorithm,
    SingleProcessGroup,
)
from rlflame.learning.parallel.shared_memory_group import (
    GroupDescriptors,
    LostLearner,
    SharedMemoryGroup,
)
from rlflame.rollout import blas, machine
from rlflame.rollout.process.channel import MessageKind, ProtocolError
from rlflame.rollout.process.worker_process import WorkerProcess, describe_exit
from rlflame.rollout.task import Array, PolicyArrays, PolicySpec
from rlflame.terminal_text import format_count
from rlflame.training.trainer import Plan, Progress

#: The time that learners have to load, if `runtime.learner_deadline_s` is shorter.
_LOADING_S = 60.0
#: With fewer samples, a second process takes more time to load than it saves.
_MIN_SAMPLES = 300_000


class LearnerGroup:
    """An algorithm that shares its batches with other learners on this machine."""

    def __init__(
        self,
        algorithm: ShardedAlgorithm,
        learning: LearningSettings,
        policy: PolicySpec,
        runtime: RuntimeSettings,
        size: int,
        note: Callable[[str], None],
        *,
        is_trial: bool = False,
        wrap: Callable[[ProcessGroup], ProcessGroup] = lambda group: group,
    ) -> None:
        self._algorithm = algorithm
        self._learning, self._policy, self._runtime = learning, policy, runtime
        self._note, self._wrap = note, wrap
        self._fingerprint = compute_fingerprint(learning)
        #: The number of batches that several learners have processed together.
        self.batch_count = 0
        self._processes: list[WorkerProcess] = []
        #: The processes that have not loaded yet, and the time when this is too late.
        self._waiting: list[WorkerProcess] = []
        self._loading_end_s = 0.0
        self._group: SharedMemoryGroup | None = None
        self._replicator: ReplicatedAlgorithm | None = None
        #: The trial that finds the fastest number of learners, until it is over.
        self._trial = LearnerTrial() if is_trial else None
        #: The number of optimizer steps after the latest batch, if it is known.
        self._update_count: float | None = None
        if runtime.compare_learners_every is not None:
            algorithm.shards.compare_every(runtime.compare_learners_every, algorithm.get_state)
        self._start(size)

    @property
    def is_joined(self) -> bool:
        return self._replicator is not None

    def get_policy(self) -> PolicyArrays:
        return self._algorithm.get_policy()

    def get_state(self) -> State:
        return self._algorithm.get_state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._algorithm.load_state(state)
        self._update_count = None
        self._broadcast_state()

    def update(self, batch: Batch | ReplayBatch, progress: float) -> Metrics:
        if not self.is_joined:
            self._join()
        trial, size = self._trial, 1 + len(self._processes)
        if trial is None or not self.is_joined:
            metrics = self._update(batch, progress)
            self._update_count = metrics["n_updates"]
            return metrics
        is_alone, start_s = trial.is_alone_due(size), time.perf_counter()
        metrics = (self._update_alone if is_alone else self._update)(batch, progress)
        elapsed_s, updates = time.perf_counter() - start_s, metrics["n_updates"]
        if self.is_joined:
            if self._update_count is not None:
                trial.add(1 if is_alone else size, elapsed_s, int(updates - self._update_count))
            if trial.is_complete(size):
                self._update_trial(trial, size)
        self._update_count = updates
        return metrics

    def wait_for_others(self, timeout_s: float) -> bool:
        """Wait for the other learners; return whether they have joined."""
        end_s = time.monotonic() + timeout_s
        while self._processes and not self.is_joined and time.monotonic() < end_s:
            self._join()
            time.sleep(0.01)
        return self.is_joined

    def close(self) -> None:
        """End the other learners. May be called twice."""
        self._algorithm.shards.use_group(SingleProcessGroup())
        self._replicator = None
        for process in self._processes:
            process.terminate()
        self._processes, self._waiting = [], []
        if self._group is not None:
            self._group.close()
            self._group = None

    def _start(self, size: int) -> None:
        """Start the other learners, which load in the background."""
        if size < 2:
            return
        descriptors = GroupDescriptors.create(size)
        order = {
            "size": size,
            "descriptors": tuple(descriptors),
            "learning": self._learning.model_dump_json(),
            "policy": self._policy,
            "compare_every": self._runtime.compare_learners_every or 0,
        }
        try:
            for rank in range(1, size):
                process = WorkerProcess(
                    module="rlflame.experiment.learners.learner_main",
                    show_output=self._runtime.debug,
                    environment=blas.make_child_environment(count_blas_threads(self._learning)),
                    inherited_fds=descriptors.list_all(),
                )
                self._processes.append(process)
                process.channel.send(MessageKind.ORDER, {"rank": rank, **order})
        except BaseException:
            for process in self._processes:
                process.terminate()
            for descriptor in descriptors.list_all():
                os.close(descriptor)
            raise
        self._waiting = [*self._processes]
        self._loading_end_s = time.monotonic() + self._compute_loading_limit()
        self._group = SharedMemoryGroup(
            0,
            descriptors,
            deadline_s=self._runtime.learner_deadline_s,
            child_pipes=[process.channel.fileno() for process in self._processes],
        )

    def _compute_loading_limit(self) -> float:
        return max(_LOADING_S, self._runtime.learner_deadline_s)

    def _join(self) -> None:
        """Form the group if all other learners have loaded."""
        for process in [*self._waiting]:
            try:
                if not process.channel.poll():
                    continue
                message = process.channel.receive()
            except (EOFError, ProtocolError) as error:
                self._replace(f"Learner process {process.pid}: {process.explain_loss(error)}.")
                return
            self._waiting.remove(process)
            if message.value != self._fingerprint:
                self._note("Learning uses one process: the others would give different results.")
                self.close()
                return
        if self._waiting and time.monotonic() > self._loading_end_s:
            count = len(self._waiting)
            text = f"did not load within {self._compute_loading_limit():g} s."
            self._replace(f"{format_count(count, 'learner')} {text}", count)
        if self._group is None or self._waiting:
            return
        group = self._wrap(self._group)
        self._algorithm.shards.use_group(group)
        try:
            self._replicator = ReplicatedAlgorithm(self._algorithm, group)
        except (LostLearner, OSError) as error:
            self._handle_loss(error)

    def _update(self, batch: Batch | ReplayBatch, progress: float) -> Metrics:
        """Process a batch with all learners, or with this one if another is lost."""
        if self._replicator is None:
            return self._algorithm.update(batch, progress)
        previous = self._algorithm.get_state()
        try:
            metrics = self._replicator.update(batch, progress)
            self.batch_count += 1
            return metrics
        except (LostLearner, OSError) as error:
            self._handle_loss(error)
        except BaseException:
            self.close()  # the other learners would wait for this one
            raise
        self._algorithm.load_state(previous)
        return self._algorithm.update(batch, progress)

    def _update_trial(self, trial: LearnerTrial, size: int) -> None:
        """Try the next number of learners, or continue with the fastest one."""
        half = (size + 1) // 2 if size > 2 else 1
        smaller = count_useful_learners(count_units(self._learning), half)
        next_size = trial.choose_next(size, smaller)
        times_s = trial.compute_times()
        if next_size in times_s:
            self._trial = None
            texts = [f"{1e3 * times_s[number]:.3g} ms with {number}" for number in times_s]
            self._note(
                f"Learning with {format_count(next_size, 'learner')}: an optimizer step takes "
                f"{', '.join(texts)}."
            )
        if next_size != size:
            self.close()
            self._start_or_note(next_size)

    def _start_or_note(self, size: int) -> None:
        """Start learners after others have ended; without them, this process learns alone."""
        try:
            self._start(size)
        except OSError as error:
            self._processes = []
            self._note(f"Learning uses one process: no other learner could be started ({error}).")

    def _update_alone(self, batch: Batch | ReplayBatch, progress: float) -> Metrics:
        """Process a batch with this learner only, and send its state to the others."""
        with self._algorithm.shards.use_one_learner():
            metrics = self._algorithm.update(batch, progress)
        self._broadcast_state()
        return metrics

    def _broadcast_state(self) -> None:
        if self._replicator is not None:
            try:
                self._replicator.broadcast_state()
            except (LostLearner, OSError) as error:
                self._handle_loss(error)

    def _handle_loss(self, error: LostLearner | OSError) -> None:
        """End the other learners, and restart as many as were not lost."""
        if isinstance(error, OSError):  # for example, no file descriptor is left
            self._replace(f"Learners cannot exchange arrays ({error}).", len(self._processes))
            return
        codes = {item: item.terminate() for item in self._processes if item.has_exited}
        dead = [item for item, code in codes.items() if code != LOST_EXIT_CODE]
        texts = [f"Learner process {item.pid}: {describe_exit(codes[item])}" for item in dead]
        if error.is_hung:
            texts = [f"A learner did not answer for {self._runtime.learner_deadline_s:g} s"]
        self._replace(f"{'; '.join(texts) or 'A learner process ended'}.", max(1, len(dead)))

    def _replace(self, message: str, lost_count: int = 1) -> None:
        units, remaining = count_units(self._learning), 1 + len(self._processes) - lost_count
        size = count_useful_learners(units, remaining)
        outputs = [process.read_output().strip() for process in self._processes]
        detail = next((f" ({text.splitlines()[-1]})" for text in outputs if text), "")
        self.close()
        self._trial = None
        count = format_count(size, "learner")
        if size < remaining:  # fewer learners finish the units as soon
            count = f"{size} of the {remaining} remaining learners"
        self._note(f"{message}{detail} Learning continues with {count}, bit-identically.")
        self._start_or_note(size)


def choose_size(
    recipe: Recipe, runtime: RuntimeSettings, progress: Progress, *, has_idle_cores: bool
) -> int:
    """Return the number of learners for the rest of a run.

    `has_idle_cores` is True if the cores of the workers are idle during an update.
    """
    learning = recipe.learning
    units = count_units(learning)
    if runtime.learners != "auto":
        return count_useful_learners(units, runtime.learners)
    cores = int(machine.compute_usable_share())
    is_worthwhile = (
        learning.provider == "numpy"
        and learning.threads == 1
        and units > 1
        and _count_samples(recipe, progress) >= _MIN_SAMPLES
        # With staleness, workers also collect during an update.
        and not learning.rollout.staleness
        and has_idle_cores
    )
    return count_useful_learners(units, cores) if is_worthwhile and cores > 1 else 1


def _count_samples(recipe: Recipe, progress: Progress) -> int:
    """Return the number of samples left to learn from, counted once per epoch."""
    learning = recipe.learning
    remaining = []
    if recipe.stop_at_steps is not None:
        remaining.append(recipe.stop_at_steps - progress.steps)
    if recipe.stop_at_iterations is not None:
        iterations = recipe.stop_at_iterations - progress.iteration
        remaining.append(iterations * learning.rollout.steps_per_iteration)
    return min(remaining) * learning.settings.passes


@contextmanager
def open_learner_group(
    algorithm: ShardedAlgorithm,
    plan: Plan,
    progress: Progress,
    runtime: RuntimeSettings,
    note: Callable[[str], None],
    *,
    has_idle_cores: bool,
) -> Iterator[LearnerGroup | None]:
    """Yield a group of local learners, or None if this process learns alone."""
    learning, maximum, group = plan.recipe.learning, runtime.learners, None
    size = choose_size(plan.recipe, runtime, progress, has_idle_cores=has_idle_cores)
    if maximum != "auto" and maximum > size:
        text = (
            f"Only {format_count(size, 'learner')} can share this recipe, not {maximum}: it has "
            f"{format_count(count_units(learning), 'unit')} of work."
        )
        shards = find_shards(learning, maximum)
        if shards > learning.gradient_shards:
            setting = f"--set learning.gradient_shards={shards}"
            text += f" For more learners, start a new run with {setting}."
        note(text)
    cores = machine.count_usable_cores()
    if maximum != "auto" and size > cores:
        note(f"{size} learners share {format_count(cores, 'core')}, which makes the run slower.")
    if size > 1 and not blas.can_set_threads():
        note("Learning uses one process: numpy's threads cannot be set on this machine.")
    elif size > 1:
        try:
            spec, is_trial = plan.policy, maximum == "auto"
            group = LearnerGroup(algorithm, learning, spec, runtime, size, note, is_trial=is_trial)
        except OSError as error:
            note(f"Learning uses one process: no other learner could be started ({error}).")
    try:
        yield group
    finally:
        if group is not None:
            group.close()
