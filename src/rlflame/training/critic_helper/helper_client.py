"""The run's side of a critic helper: starts it, feeds it, and goes on alone if it is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlflame.config.recipe import LearningSettings, Recipe, can_split_update
from rlflame.config.runtime import RuntimeSettings
from rlflame.fleet.base import Fleet
from rlflame.fleet.factory import is_remote
from rlflame.learning.base import Algorithm, Batch, Metrics, State
from rlflame.learning.factory import as_split_algorithm, compute_fingerprint
from rlflame.learning.parallel.process_group import to_message
from rlflame.rollout import blas, machine, wire
from rlflame.rollout.process.worker_process import WorkerProcess, format_exit_clause
from rlflame.rollout.task import Array, PolicyArrays, PolicySpec
from rlflame.training.critic_helper.connection import (
    ConnectionTimeout,
    LostConnection,
    PeerConnection,
)
from rlflame.training.trainer import Plan, Progress

#: Samples, counted once an epoch, from which on a critic helper saves more than it takes to load.
_MIN_SAMPLES = 300_000
#: For a process that has ended to be seen to have ended.
_GRACE_S = 1.0


def is_helper_worthwhile(
    recipe: Recipe, runtime: RuntimeSettings, fleet: Fleet, progress: Progress, *, is_shared: bool
) -> bool:
    """Whether a run that has come so far has a critic helper from there on.

    Where the machine is `shared`, others learn on the processors that this one leaves idle.
    """
    if runtime.critic_helper != "auto":
        return runtime.critic_helper == "on"
    return (
        can_split_update(recipe.learning, runtime)
        and _count_samples(recipe, progress) >= _MIN_SAMPLES
        # Workers that collect meanwhile leave no processor idle.
        and not recipe.learning.rollout.staleness
        and not is_shared
        and (fleet.capacity > 1 or is_remote(fleet.name))
        and machine.compute_usable_share() >= 2.0
    )


def _count_samples(recipe: Recipe, progress: Progress) -> int:
    """What is still to be learned from, each sample once an epoch."""
    learning = recipe.learning
    remaining = []
    if recipe.stop_at_steps is not None:
        remaining.append(recipe.stop_at_steps - progress.steps)
    if recipe.stop_at_iterations is not None:
        iterations = recipe.stop_at_iterations - progress.iteration
        remaining.append(iterations * learning.rollout.steps_per_iteration)
    return min(remaining) * learning.settings.passes


class CriticHelper:
    """An algorithm whose critic a helper process updates, for as long as it is there.

    The process joins at the first batch after it has loaded.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        learning: LearningSettings,
        policy: PolicySpec,
        runtime: RuntimeSettings,
        note: Callable[[str], None],
    ) -> None:
        self._algorithm = as_split_algorithm(algorithm)
        self._fingerprint = compute_fingerprint(learning)
        self._deadline_s = runtime.learner_deadline_s
        self._note = note
        #: Batches that it has learned half of.
        self.batch_count = 0
        self._has_joined = False
        message = {"learning": learning.model_dump_json(), "policy": policy}
        self._process = WorkerProcess(
            module="rlflame.training.critic_helper.helper_main",
            show_output=runtime.debug,
            environment=blas.make_child_environment(),
        )
        try:
            self._connection: PeerConnection | None = PeerConnection(
                self._process.channel, self._deadline_s
            )
            with self._catch_loss():
                self._connection.send_message(message)
        except BaseException:
            self._process.terminate()
            raise

    @property
    def connection(self) -> PeerConnection | None:
        """To the helper process, if there is one that has joined."""
        return self._connection if self._has_joined else None

    def get_policy(self) -> PolicyArrays:
        return self._algorithm.get_policy()

    def get_state(self) -> State:
        return self._algorithm.get_state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._algorithm.load_state(state)
        self._send_state()

    def update(self, batch: Batch, progress: float) -> Metrics:
        algorithm = self._algorithm
        if self._try_join():
            self._send_state()
        if self.connection is None:
            return algorithm.update(batch, progress)
        previous = algorithm.get_state()
        try:
            with self._catch_loss():
                self.connection.send_message({"update": to_message(batch), "progress": progress})
                algorithm.start_split("actor", self.connection)
                metrics = algorithm.update(batch, progress)
                self.batch_count += 1
                return metrics
        except BaseException:
            self.close()  # it waits for what does not come
            raise
        finally:
            algorithm.stop_split()
        algorithm.load_state(previous)
        return algorithm.update(batch, progress)

    def close(self) -> None:
        """The process is gone afterwards; may be called twice."""
        self._connection = None
        self._process.terminate()

    def _try_join(self) -> bool:
        """Whether the helper process has loaded, and joins now."""
        if self._has_joined or self._connection is None or not self._connection.has_message():
            return False
        with self._catch_loss():
            if self._connection.receive_message() == self._fingerprint:
                self._has_joined = True
            else:
                self._report_loss("computes with other kernels than this process")
        return self._has_joined

    def _send_state(self) -> None:
        """The helper process stands where this process does."""
        if self.connection is not None:
            with self._catch_loss():
                self.connection.send_message({"state": self._algorithm.get_state()})

    @contextmanager
    def _catch_loss(self) -> Iterator[None]:
        """What is not answered inside ends there, and so does the helper process."""
        try:
            yield
        except ConnectionTimeout:
            self._report_loss(f"did not answer for {self._deadline_s:g} s")
        except wire.WireError:
            self._report_loss("cannot be told of numbers that are not finite")
        except LostConnection:
            self._report_loss(format_exit_clause(self._process.terminate(_GRACE_S)))

    def _report_loss(self, reason: str) -> None:
        self.close()
        output = self._process.read_output().strip().rpartition("\n")[2]
        self._note(
            f"The critic helper of this run (process {self._process.pid}) was lost: it {reason}"
            f"{f' ({output})' if output else ''}. "
            "All is learned in this process now, with the same bits."
        )


@contextmanager
def open_critic_helper(
    algorithm: Algorithm[Any],
    plan: Plan,
    progress: Progress,
    runtime: RuntimeSettings,
    fleet: Fleet,
    note: Callable[[str], None],
    *,
    is_shared: bool,
) -> Iterator[CriticHelper | None]:
    """One for a run that has come so far, if it is wanted and can be had."""
    helper = None
    if is_helper_worthwhile(plan.recipe, runtime, fleet, progress, is_shared=is_shared):
        try:
            if blas.can_set_threads():
                learning = plan.recipe.learning
                helper = CriticHelper(algorithm, learning, plan.policy, runtime, note)
            elif runtime.critic_helper == "on":
                # The two processes could add in different orders.
                note("numpy's threads cannot be set on this machine: there is no critic helper.")
        except OSError as error:
            note(f"No critic helper could be started ({error}); all is learned in this process.")
    try:
        yield helper
    finally:
        if helper is not None:
            helper.close()
