"""The run's side of a companion: starts it, has it follow, and goes on alone where it is lost.

Must not know: what is learned beyond that it comes in halves, how anything is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlflame.config.recipe import LearningSettings, Recipe
from rlflame.config.runtime import RuntimeSettings
from rlflame.fleet.base import Fleet
from rlflame.learning.base import Algorithm, Batch, Metrics, State
from rlflame.learning.factory import fingerprint, in_halves
from rlflame.learning.parallel.replicated import message_of
from rlflame.learning.ppo.split_update import InHalves
from rlflame.rollout import blas, wire
from rlflame.rollout.process.worker_process import WorkerProcess, what_became_of_it
from rlflame.rollout.spec import Array, PolicyArrays, PolicySpec
from rlflame.training.critic_helper import conditions
from rlflame.training.critic_helper.connection import Gone, Link, Silent
from rlflame.training.trainer import Progress

#: Samples, counted once an epoch, from which on a companion saves more than it takes to load.
_WORTH = 300_000
#: For a process that has ended to be seen to have ended.
_GRACE_S = 1.0


def wanted(
    recipe: Recipe, runtime: RuntimeSettings, fleet: Fleet, progress: Progress, *, shared: bool
) -> bool:
    """Whether a run that has come so far has a companion from there on.

    Where the machine is `shared`, others learn on the processors that this one leaves idle.
    """
    if runtime.companion != "auto":
        return runtime.companion == "on"
    return (
        not conditions.refusal(recipe.learning, runtime)
        and _samples(recipe, progress) >= _WORTH
        # Workers that collect meanwhile leave no processor idle.
        and not recipe.learning.rollout.staleness
        and not shared
        and (fleet.capacity > 1 or fleet.name == "flame")
        and blas.usable_share() >= 2.0
    )


def _samples(recipe: Recipe, progress: Progress) -> int:
    """What is still to be learned from, each sample once an epoch."""
    rollout, ppo = recipe.learning.rollout, recipe.learning.ppo
    left = []
    if recipe.stop_at_steps is not None:
        left.append(recipe.stop_at_steps - progress.steps)
    if recipe.stop_at_iterations is not None:
        iterations = recipe.stop_at_iterations - progress.iteration
        left.append(iterations * rollout.columns * rollout.steps)
    return 0 if ppo is None else min(left) * ppo.epochs


class Companion:
    """The process, for as long as it is there.

    It joins at the first batch after it has loaded.
    """

    def __init__(
        self,
        learning: LearningSettings,
        policy: PolicySpec,
        runtime: RuntimeSettings,
        note: Callable[[str], None],
    ) -> None:
        self._fingerprint = fingerprint(learning)
        self._deadline_s = runtime.learner_deadline_s
        self._note = note
        #: Batches that it has learned half of.
        self.batches = 0
        self._joined = False
        order = {"learning": learning.model_dump_json(), "policy": policy}
        self._process = WorkerProcess(
            module="rlflame.training.critic_helper.helper_main",
            show_output=runtime.debug,
            environment=blas.child_environment(),
        )
        try:
            self._link: Link | None = Link(
                self._process.answers, self._process.requests, self._deadline_s
            )
            with self.lost_if_gone():
                self._link.tell(order)
        except BaseException:
            self._process.retire()
            raise

    def beside(self, found: Algorithm[Any]) -> Algorithm[Any]:
        """The same algorithm, which this goes through as well."""
        return Accompanied(in_halves(found), self)

    @property
    def link(self) -> Link | None:
        """To the companion, if there is one that has joined."""
        return self._link if self._joined else None

    def try_join(self) -> bool:
        """Whether it has loaded, and joins now."""
        if self._joined or self._link is None or not self._link.arrived():
            return False
        with self.lost_if_gone():
            if self._link.hear() == self._fingerprint:
                self._joined = True
            else:
                self._lost("computes with other kernels than this process")
        return self._joined

    @contextmanager
    def lost_if_gone(self) -> Iterator[None]:
        """What is not answered inside ends there, and so does the companion."""
        try:
            yield
        except Silent:
            self._lost(f"did not answer for {self._deadline_s:g} s")
        except wire.WireError:
            self._lost("cannot be told of numbers that are not finite")
        except Gone:
            self._lost(what_became_of_it(self._process.retire(_GRACE_S)))

    def end(self) -> None:
        """The process is gone afterwards; may be called twice."""
        self._link = None
        self._process.retire()

    def _lost(self, how: str) -> None:
        self.end()
        said = self._process.printed().strip().rpartition("\n")[2]
        self._note(
            f"The companion of this run (process {self._process.pid}) was lost: it {how}"
            f"{f' ({said})' if said else ''}. "
            "All is learned in this process now, with the same bits."
        )


class Nobody:
    """No companion: all is learned in this process."""

    batches = 0

    def beside(self, found: Algorithm[Any]) -> Algorithm[Any]:
        return found


class Accompanied:
    """An algorithm that a companion goes through as well."""

    def __init__(self, algorithm: InHalves, companion: Companion) -> None:
        self._algorithm = algorithm
        self._companion = companion

    def policy(self) -> PolicyArrays:
        return self._algorithm.policy()

    def update(self, batch: Batch, progress: float) -> Metrics:
        companion, algorithm = self._companion, self._algorithm
        if companion.try_join():
            self._send_state()
        if companion.link is None:
            return algorithm.update(batch, progress)
        before = algorithm.state()
        try:
            with companion.lost_if_gone():
                companion.link.tell({"update": message_of(batch), "progress": progress})
                algorithm.share("actor", companion.link)
                metrics = algorithm.update(batch, progress)
                companion.batches += 1
                return metrics
        except BaseException:
            companion.end()  # it waits for what does not come
            raise
        finally:
            algorithm.stay_alone()
        algorithm.load_state(before)
        return algorithm.update(batch, progress)

    def state(self) -> State:
        return self._algorithm.state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._algorithm.load_state(state)
        self._send_state()

    def _send_state(self) -> None:
        """The companion stands where this process does."""
        if self._companion.link is not None:
            with self._companion.lost_if_gone():
                self._companion.link.tell({"state": self._algorithm.state()})


@contextmanager
def companion(
    recipe: Recipe,
    policy: PolicySpec,
    runtime: RuntimeSettings,
    fleet: Fleet,
    progress: Progress,
    note: Callable[[str], None],
    *,
    shared: bool,
) -> Iterator[Companion | Nobody]:
    """One for a run that has come so far, if it is wanted and can be had."""
    if not wanted(recipe, runtime, fleet, progress, shared=shared):
        yield Nobody()
        return
    if not blas.can_set_threads():
        # Where the two cannot be held to one thread, they may add in different orders.
        if runtime.companion == "on":
            note("numpy's linear algebra here cannot be told its threads: there is no companion.")
        yield Nobody()
        return
    try:
        found = Companion(recipe.learning, policy, runtime, note)
    except OSError as error:
        note(f"No companion could be started ({error}); all is learned in this process.")
        yield Nobody()
        return
    try:
        yield found
    finally:
        found.end()
