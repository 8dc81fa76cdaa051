"""The run's side of a companion: starts it, has it follow, and goes on alone where it is lost.

Must not know: what is learned beyond that it comes in halves, how anything is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rlflame.companion.link import Gone, Link, Silent
from rlflame.config import LearningSettings, Recipe
from rlflame.errors import ConfigError
from rlflame.fleet import Fleet
from rlflame.learner import Batch, Metrics, State
from rlflame.learner.halves import InHalves
from rlflame.learner.leading import message_of
from rlflame.learners import fingerprint
from rlflame.rollout import blas, wire
from rlflame.rollout.process import WorkerProcess, what_became_of_it
from rlflame.rollout.spec import Array, PolicyArrays, PolicySpec
from rlflame.runtime import RuntimeSettings
from rlflame.trainer import Progress

#: Samples, counted once an epoch, from which on a companion saves more than it takes to load.
_WORTH = 300_000
_GRACE_S = 1.0


def wanted(recipe: Recipe, runtime: RuntimeSettings, fleet: Fleet, progress: Progress) -> bool:
    """Whether a run that has come so far has a companion from there on."""
    refusal = _refusal(recipe, runtime)
    if runtime.companion == "on" and refusal:
        raise ConfigError(
            f"This recipe does not go with a companion: {refusal}.",
            "--set runtime.companion=auto, which has one where it can",
        )
    if runtime.companion != "auto" or refusal:
        return runtime.companion == "on"
    return (
        _samples(recipe, progress) >= _WORTH
        # Workers that collect meanwhile leave no processor idle.
        and not recipe.learning.rollout.staleness
        and fleet.name != "inline"
        and fleet.capacity > 1
        and blas.usable_cores() > 1
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


def _refusal(recipe: Recipe, runtime: RuntimeSettings) -> str:
    learning = recipe.learning
    if learning.ppo is None:
        return f"{learning.algorithm} does not learn in two halves that are independent"
    if learning.provider != "numpy":
        return f"the gradients of provider {learning.provider} are not made in halves"
    if runtime.learners > 1 or learning.gradient_shards > 1:
        return "minibatches are shared among learners already"
    if learning.threads > 1:
        return f"its {learning.threads} threads have the processors that a companion would use"
    return ""


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
        self._joined = False
        self._process = WorkerProcess(
            module="rlflame.companion.child",
            show_output=runtime.debug,
            environment=blas.child_environment(),
        )
        self._link: Link | None = Link(
            self._process.answers, self._process.requests, self._deadline_s
        )
        with self.lost_if_gone():
            self._link.tell({"learning": learning.model_dump_json(), "policy": policy})

    @property
    def link(self) -> Link | None:
        """To the companion, if there is one that has joined."""
        return self._link if self._joined else None

    def joins(self) -> bool:
        """Whether it does so now."""
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
        except (Gone, wire.WireError):
            self._lost(what_became_of_it(self._process.retire(_GRACE_S)))

    def end(self) -> None:
        """It is of no use any more."""
        self._link = None
        self._process.retire()

    def _lost(self, how: str) -> None:
        self.end()
        self._note(
            f"The companion of this run (process {self._process.pid}) was lost: it {how}. "
            "All is learned in this process now, with the same bits."
        )


class Accompanied:
    """An algorithm that a companion goes through as well."""

    def __init__(self, algorithm: InHalves, companion: Companion) -> None:
        self._algorithm = algorithm
        self._companion = companion

    def policy(self) -> PolicyArrays:
        return self._algorithm.policy()

    def update(self, batch: Batch, progress: float) -> Metrics:
        companion, algorithm = self._companion, self._algorithm
        if companion.joins():
            self._stand()
        if companion.link is None:
            return algorithm.update(batch, progress)
        before = algorithm.state()
        try:
            with companion.lost_if_gone():
                companion.link.tell({"update": message_of(batch), "progress": progress})
                algorithm.share("actor", companion.link)
                return algorithm.update(batch, progress)
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
        self._stand()

    def _stand(self) -> None:
        """The companion begins where this process stands."""
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
) -> Iterator[Companion | None]:
    """One for a run that has come so far, if it is wanted and can be had."""
    if not wanted(recipe, runtime, fleet, progress):
        yield None
        return
    try:
        found = Companion(recipe.learning, policy, runtime, note)
    except OSError as error:
        note(f"No companion could be started ({error}); all is learned in this process.")
        yield None
        return
    try:
        yield found
    finally:
        found.end()
