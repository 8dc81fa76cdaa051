"""Whole trainings by several recipes and numbers of learners, in turn, with what they earned.

Must not know: words, files, what the recipes are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from rlflame.bench.base import Case
from rlflame.bench.learners import AGAIN, Timed
from rlflame.bench.published_dppo import Variant, theirs
from rlflame.bench.timing import Clock, Stopwatch, warm
from rlflame.config.nested import named
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import RlflameError
from rlflame.experiment import components
from rlflame.experiment.learners import launcher
from rlflame.fleet.base import Fleet, policy_id
from rlflame.learning.factory import blas_threads
from rlflame.rollout import blas
from rlflame.rollout.search_path import child_path
from rlflame.rollout.spec import Fragment
from rlflame.training.trainer import Progress, Stop, StopNow

THEIRS = "stable-baselines3"


@dataclass(frozen=True, slots=True)
class Race:
    """One training from its beginning to its end; an episode is its last step, when, its return."""

    seconds: float
    learn_s: float | None
    exchange_s: float | None
    steps: int
    episodes: list[tuple[int, float, float]]
    weights: str
    #: Tasks that went to a second worker meanwhile, which takes longer.
    retried: int = 0


@dataclass(slots=True)
class Runner:
    """`variant` is None for stable-baselines3, which is `asked`, and says its `version`."""

    kind: str
    learners: int
    variant: Variant | None
    races: list[Race] = field(default_factory=list)
    version: str = ""
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def work(self) -> dict[str, Any]:
        """All that a race does, by name; seeds are no part of it."""
        if self.variant:
            return self.variant.case.work
        found = dict(named(self.asked, whole=("kwargs",)))
        del found["arguments.seed"]
        return found


class _Watch(Stopwatch):
    """A stopwatch that keeps every episode, its time read off its place in the iteration."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.episodes: list[tuple[int, float, float]] = []
        self._began = self._then = clock()

    def iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        before, now = self.progress.steps, self._clock()
        found = []
        for fragment in fragments:
            length = len(fragment.rewards)
            for episode in fragment.episodes:
                share = (episode.end + 1) / length
                steps = before + round(share * (progress.steps - before))
                ended = self._then + share * (now - self._then) - self._began
                found.append((steps, ended, episode.episode_return))
        self.episodes += sorted(found)
        self._then = now
        super().iteration(progress, metrics, fragments)


@dataclass
class Racing:
    """`runners` grows while it runs; they take turns."""

    variants: Sequence[Variant]
    repeat: int
    runtime: RuntimeSettings
    open: Callable[[int], AbstractContextManager[Fleet]]
    stop: Stop
    tell: Callable[[str], None] = lambda text: None
    note: Callable[[str], None] = lambda text: None
    #: Tasks that went to a second worker since the last time.
    retried: Callable[[], int] = lambda: 0
    clock: Clock = time.perf_counter
    runners: list[Runner] = field(default_factory=list)

    def run(self) -> bool:
        """False where somebody asked to stop before the end."""
        self.runners += [Runner(one.kind, one.learners, one) for one in self.variants]
        recipe = self.variants[0].case.recipe
        asked = {**theirs(recipe.learning), "steps": recipe.stop_at_steps}
        self.runners.append(Runner(THEIRS, 1, None, asked=asked))
        for number in range(self.repeat):
            for runner in list(self.runners):
                self.tell(f"{runner.kind}, {runner.learners}: {number + 1} of {self.repeat}")
                try:
                    found = self._one(runner.variant) if runner.variant else self._theirs(runner)
                except StopNow:
                    found = None
                if found is not None:
                    runner.races.append(found)
                elif self.stop.requested:
                    return False
                else:
                    self.runners.remove(runner)
        return True

    def _one(self, variant: Variant) -> Race | None:
        case, learners = variant.case, variant.learners
        runtime = self.runtime.model_copy(update={"learners": learners})
        threads = blas_threads(case.recipe.learning)
        with (
            self.open(learners) as fleet,
            launcher.learners(runtime, threads, lambda: AGAIN, self.stop) as group,
        ):
            if not warm(_short(case), fleet, self.stop, self.clock):
                return None
            timed = Timed(group, self.clock)
            begun = components.beginning(case.recipe, case.env)
            watch = _Watch(self.clock)
            trainer = components.trainer(begun, fleet, watch, self.stop, "bench", None, timed)
            self.retried()
            timed.spent_s, began = 0.0, self.clock()
            if not trainer.run():
                return None
            seconds, retried = self.clock() - began, self.retried()
            weights = policy_id(trainer.snapshot().policy)
        learn_s = watch.spent_s.get("learn", 0.0)
        steps = watch.progress.steps
        return Race(seconds, learn_s, timed.spent_s, steps, watch.episodes, weights, retried)

    def _theirs(self, runner: Runner) -> Race | None:
        # One thread, as each of ours has; more of them wait for each other in networks so small.
        environment = {**os.environ, **blas.child_environment(), "PYTHONPATH": child_path()}
        child = subprocess.Popen(
            [
                sys.executable, "-P", "-m", "rlflame.bench.sb3_main", json.dumps(runner.asked),
                str(os.getpid()),
            ],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for its parent, which ends it
        )  # fmt: skip
        try:
            with self.stop.interruptible():
                out, err = child.communicate()
        finally:
            child.kill()
            child.wait()
        said = (out.strip().splitlines() or [""])[-1]
        if said == "absent":
            self.note("stable-baselines3 is not installed, so its curve is left out.")
            return None
        if child.returncode:
            raise RlflameError("stable-baselines3 could not train.", "see what it said", err)
        found = json.loads(said)
        runner.version = found["version"]
        episodes = [(int(a), float(b), float(c)) for a, b, c in found["episodes"]]
        return Race(found["seconds"], None, None, found["steps"], episodes, "")


def _short(case: Case) -> Case:
    """A step of every environment, so that workers are there; nothing is shared."""
    learning = case.recipe.learning
    rollout = learning.rollout.model_copy(update={"steps": 1})
    changes = {"rollout": rollout, "gradient_shards": 1}
    recipe = case.recipe.model_copy(
        update={"learning": learning.model_copy(update=changes), "stop_at_steps": None}
    )
    return replace(case, recipe=recipe)
