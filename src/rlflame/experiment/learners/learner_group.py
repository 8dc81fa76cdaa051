"""The learners of a run on this machine: starts the other processes and replaces lost ones.

The other learners join at the first batch after they have loaded. If one of them dies, hangs or is
late, this process restores the state before the batch, computes the batch alone, and starts the
remaining number of learners anew. All of this changes the speed and no bit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rlflame.config.recipe import LearningSettings, Recipe, count_units, count_useful_learners
from rlflame.config.runtime import RuntimeSettings
from rlflame.experiment.learners.launcher import LOST_EXIT_CODE
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
from rlflame.training.trainer import Progress

#: With fewer samples to learn from, a second process takes longer to load than it saves.
_MIN_SAMPLES = 300_000
#: Batches of a trial by each side, in turns.
_TRIAL_BATCHES = 3


class LearnerGroup:
    """An algorithm on rank 0 whose batches the other learners share while they are there."""

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
        #: Batches that several learners have computed.
        self.batch_count = 0
        self._processes: list[WorkerProcess] = []
        self._waiting: list[WorkerProcess] = []
        self._group: SharedMemoryGroup | None = None
        self._replicator: ReplicatedAlgorithm | None = None
        self._trial = _Trial(size) if is_trial else None
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
        self._broadcast_state()

    def update(self, batch: Batch | ReplayBatch, progress: float) -> Metrics:
        if not self.is_joined:
            self._join()
        if self._trial is not None and self.is_joined:
            return self._update_in_trial(self._trial, batch, progress)
        return self._update(batch, progress)

    def wait_for_others(self, timeout_s: float) -> bool:
        """Whether the other learners have joined within the time."""
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
        """Start the other learners, which load meanwhile."""
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
        self._group = SharedMemoryGroup(
            0,
            descriptors,
            deadline_s=self._runtime.learner_deadline_s,
            child_pipes=[process.channel.fileno() for process in self._processes],
        )

    def _join(self) -> None:
        """Form the group once all learners have loaded."""
        for process in [*self._waiting]:
            try:
                if not process.channel.poll():
                    continue
                message = process.channel.receive()
            except (EOFError, ProtocolError) as error:
                self._replace(f"Learner process {process.pid} {process.explain_loss(error)}.")
                return
            self._waiting.remove(process)
            if message.value != self._fingerprint:
                self._note("The other learners compute with other kernels than this process.")
                self.close()
                return
        if self._group is None or self._waiting:
            return
        group = self._wrap(self._group)
        self._algorithm.shards.use_group(group)
        try:
            self._replicator = ReplicatedAlgorithm(self._algorithm, group)
        except LostLearner as error:
            self._handle_loss(error)

    def _update(self, batch: Batch | ReplayBatch, progress: float) -> Metrics:
        """One batch by all learners, or by this one if another one is lost meanwhile."""
        if self._replicator is None:
            return self._algorithm.update(batch, progress)
        previous = self._algorithm.get_state()
        try:
            metrics = self._replicator.update(batch, progress)
            self.batch_count += 1
            return metrics
        except LostLearner as error:
            self._handle_loss(error)
        except BaseException:
            self.close()  # the others wait for a message that does not come
            raise
        self._algorithm.load_state(previous)
        return self._algorithm.update(batch, progress)

    def _update_in_trial(
        self, trial: _Trial, batch: Batch | ReplayBatch, progress: float
    ) -> Metrics:
        """One batch by all learners or by this one alone, in turns; then the faster side stays."""
        start_s = time.perf_counter()
        if trial.is_alone_next:
            metrics = self._update_alone(batch, progress)
        else:
            metrics = self._update(batch, progress)
        if self.is_joined:
            trial.add(time.perf_counter() - start_s)
        if trial.is_complete:
            self._note(trial.format_result())
            if trial.is_alone_faster:
                self.close()
        if trial.is_complete or not self.is_joined:
            self._trial = None
        return metrics

    def _update_alone(self, batch: Batch | ReplayBatch, progress: float) -> Metrics:
        """One batch without the other learners, which receive the result."""
        group = self._algorithm.shards.group
        self._algorithm.shards.use_group(SingleProcessGroup())
        metrics = self._algorithm.update(batch, progress)
        self._algorithm.shards.use_group(group)
        self._broadcast_state()
        return metrics

    def _broadcast_state(self) -> None:
        if self._replicator is not None:
            try:
                self._replicator.broadcast_state()
            except LostLearner as error:
                self._handle_loss(error)

    def _handle_loss(self, error: LostLearner) -> None:
        """End the others, and start those anew that were not lost."""
        if error.is_hung:
            reason = f"did not answer for {self._runtime.learner_deadline_s:g} s"
            self._replace(f"A learner process {reason}.")
            return
        codes = {item: item.terminate() for item in self._processes if item.has_exited}
        dead = [item for item, code in codes.items() if code != LOST_EXIT_CODE]
        texts = [f"Learner process {item.pid} {describe_exit(codes[item])}" for item in dead]
        self._replace(f"{'; '.join(texts) or 'A learner process ended'}.", max(1, len(dead)))

    def _replace(self, message: str, lost_count: int = 1) -> None:
        size = 1 + len(self._processes) - lost_count
        outputs = [process.read_output().strip() for process in self._processes]
        detail = next((f" ({text.splitlines()[-1]})" for text in outputs if text), "")
        self.close()
        self._trial = None
        self._note(f"{message}{detail} Learning continues with {size}, to the same bits.")
        self._start(size)


class _Trial:
    """The time of batches by several learners and by one, in turns."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._times_s: list[float] = []

    @property
    def is_alone_next(self) -> bool:
        return len(self._times_s) % 2 == 1

    @property
    def is_complete(self) -> bool:
        return len(self._times_s) >= 2 * _TRIAL_BATCHES

    @property
    def is_alone_faster(self) -> bool:
        return min(self._times_s[1::2]) <= min(self._times_s[::2])

    def add(self, time_s: float) -> None:
        self._times_s.append(time_s)

    def format_result(self) -> str:
        shared_ms, alone_ms = (1000.0 * min(self._times_s[start::2]) for start in (0, 1))
        count = format_count(1 if self.is_alone_faster else self._size, "learner")
        return (
            f"Learning with {count}: an update of the policy takes {shared_ms:.1f} ms with "
            f"{self._size} and {alone_ms:.1f} ms with 1."
        )


def choose_size(
    recipe: Recipe, runtime: RuntimeSettings, progress: Progress, *, has_idle_cores: bool
) -> int:
    """The number of learners that a run starts at this point.

    `has_idle_cores` says that workers which wait during an update leave their cores to learners.
    """
    units = count_units(recipe.learning)
    if runtime.learners != "auto":
        return count_useful_learners(units, runtime.learners)
    cores = int(machine.compute_usable_share())
    is_worthwhile = (
        recipe.learning.provider == "numpy"
        and recipe.learning.threads == 1
        and recipe.learning.traits.independent_networks > 1
        and _count_samples(recipe, progress) >= _MIN_SAMPLES
        # Workers that collect during an update leave no core idle.
        and not recipe.learning.rollout.staleness
        and has_idle_cores
    )
    return count_useful_learners(units, cores) if is_worthwhile and cores > 1 else 1


def _count_samples(recipe: Recipe, progress: Progress) -> int:
    """The samples that remain to be learned from, counted once per epoch."""
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
    learning: LearningSettings,
    policy: PolicySpec,
    runtime: RuntimeSettings,
    size: int,
    note: Callable[[str], None],
) -> Iterator[LearnerGroup | None]:
    """A group of this size, or None where one process learns."""
    group = None
    maximum = runtime.learners
    if maximum != "auto" and maximum > size:
        note(
            f"{format_count(size, 'learner')} can share this recipe, not {maximum}: it has "
            f"{format_count(count_units(learning), 'unit')} of work. A new run has more with "
            f"--set learning.gradient_shards={maximum}."
        )
    if size > 1 and not blas.can_set_threads():
        note("One process learns: numpy's threads cannot be set on this machine.")
        size = 1
    if size > 1:
        try:
            group = LearnerGroup(
                algorithm, learning, policy, runtime, size, note, is_trial=maximum == "auto"
            )
        except OSError as error:
            note(f"One process learns: no other learner could be started ({error}).")
    try:
        yield group
    finally:
        if group is not None:
            group.close()
