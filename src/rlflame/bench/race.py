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
from rlflame.bench.learners import RETRY_HINT, TimedProcessGroup
from rlflame.bench.published_dppo import Variant, make_sb3_request
from rlflame.bench.timed_run import Clock, Stopwatch, warm
from rlflame.config.nested import flatten
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import RlflameError
from rlflame.experiment import components
from rlflame.experiment.learners import launcher
from rlflame.fleet.base import Fleet, make_policy_id
from rlflame.learning.factory import count_blas_threads
from rlflame.rollout import blas
from rlflame.rollout.search_path import make_child_path
from rlflame.rollout.spec import Fragment
from rlflame.training.trainer import Progress, StopInterrupt, StopRequest

SB3_NAME = "stable-baselines3"


@dataclass(frozen=True, slots=True)
class RaceRun:
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
    """`variant` is None for stable-baselines3, which is `sb3_request`, and says its `version`."""

    kind: str
    learners: int
    variant: Variant | None
    races: list[RaceRun] = field(default_factory=list)
    version: str = ""
    sb3_request: dict[str, Any] = field(default_factory=dict)

    @property
    def work(self) -> dict[str, Any]:
        """All that a race does, by name; seeds are no part of it."""
        if self.variant:
            return self.variant.case.work
        settings = dict(flatten(self.sb3_request, leaves=("kwargs",)))
        del settings["arguments.seed"]
        return settings


class _EpisodeStopwatch(Stopwatch):
    """A stopwatch that keeps every episode, its time read off its place in the iteration."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.episodes: list[tuple[int, float, float]] = []
        self._start_s = self._iteration_start = clock()

    def record_iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        before, now = self.progress.steps, self._clock()
        episodes = []
        for fragment in fragments:
            length = len(fragment.rewards)
            for episode in fragment.episodes:
                share = (episode.end + 1) / length
                steps = before + round(share * (progress.steps - before))
                ended = (
                    self._iteration_start + share * (now - self._iteration_start) - self._start_s
                )
                episodes.append((steps, ended, episode.episode_return))
        self.episodes += sorted(episodes)
        self._iteration_start = now
        super().record_iteration(progress, metrics, fragments)


@dataclass
class RaceBenchmark:
    """`runners` grows while it runs; they take turns."""

    variants: Sequence[Variant]
    repeat: int
    runtime: RuntimeSettings
    open: Callable[[int], AbstractContextManager[Fleet]]
    stop: StopRequest
    show_status: Callable[[str], None] = lambda text: None
    note: Callable[[str], None] = lambda text: None
    #: Tasks that went to a second worker since the last time.
    take_retried: Callable[[], int] = lambda: 0
    clock: Clock = time.perf_counter
    runners: list[Runner] = field(default_factory=list)

    def run(self) -> bool:
        """False where somebody asked to stop before the end."""
        self.runners += [
            Runner(variant.kind, variant.learners, variant) for variant in self.variants
        ]
        recipe = self.variants[0].case.recipe
        sb3_request = {**make_sb3_request(recipe.learning), "steps": recipe.stop_at_steps}
        self.runners.append(Runner(SB3_NAME, 1, None, sb3_request=sb3_request))
        for number in range(self.repeat):
            for runner in list(self.runners):
                self.show_status(f"{runner.kind}, {runner.learners}: {number + 1} of {self.repeat}")
                try:
                    race_run = (
                        self._train_variant(runner.variant)
                        if runner.variant
                        else self._train_sb3(runner)
                    )
                except StopInterrupt:
                    race_run = None
                if race_run is not None:
                    runner.races.append(race_run)
                elif self.stop.requested:
                    return False
                else:
                    self.runners.remove(runner)
        return True

    def _train_variant(self, variant: Variant) -> RaceRun | None:
        case, learners = variant.case, variant.learners
        runtime = self.runtime.model_copy(update={"learners": learners})
        threads = count_blas_threads(case.recipe.learning)
        with (
            self.open(learners) as fleet,
            launcher.start_learners(runtime, threads, lambda: RETRY_HINT, self.stop) as group,
        ):
            if not warm(_make_warmup_case(case), fleet, self.stop, self.clock):
                return None
            timed = TimedProcessGroup(group, self.clock)
            initial = components.make_initial_checkpoint(case.recipe, case.env)
            watch = _EpisodeStopwatch(self.clock)
            trainer = components.make_trainer(
                initial, fleet, watch, self.stop, "bench", None, timed
            )
            self.take_retried()
            timed.spent_s, start_s = 0.0, self.clock()
            if not trainer.run():
                return None
            seconds, retried = self.clock() - start_s, self.take_retried()
            weights = make_policy_id(trainer.take_snapshot().policy)
        learn_s = watch.spent_s.get("learn", 0.0)
        steps = watch.progress.steps
        return RaceRun(seconds, learn_s, timed.spent_s, steps, watch.episodes, weights, retried)

    def _train_sb3(self, runner: Runner) -> RaceRun | None:
        # One thread, as each of ours has; more of them wait for each other in networks so small.
        environment = {
            **os.environ,
            **blas.make_child_environment(),
            "PYTHONPATH": make_child_path(),
        }
        child = subprocess.Popen(
            [
                sys.executable, "-P", "-m", "rlflame.bench.sb3_main",
                json.dumps(runner.sb3_request),
                str(os.getpid()),
            ],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for its parent, which ends it
        )  # fmt: skip
        try:
            with self.stop.allow_interrupt():
                out, err = child.communicate()
        finally:
            child.kill()
            child.wait()
        answer = (out.strip().splitlines() or [""])[-1]
        if answer == "absent":
            self.note("stable-baselines3 is not installed, so its curve is left out.")
            return None
        if child.returncode:
            raise RlflameError("stable-baselines3 could not train.", "see what it said", err)
        result = json.loads(answer)
        runner.version = result["version"]
        episodes = [(int(a), float(b), float(c)) for a, b, c in result["episodes"]]
        return RaceRun(result["seconds"], None, None, result["steps"], episodes, "")


def _make_warmup_case(case: Case) -> Case:
    """A step of every environment, so that workers are there; nothing is shared."""
    learning = case.recipe.learning
    rollout = learning.rollout.model_copy(update={"steps": 1})
    changes = {"rollout": rollout, "gradient_shards": 1}
    recipe = case.recipe.model_copy(
        update={"learning": learning.model_copy(update=changes), "stop_at_steps": None}
    )
    return replace(case, recipe=recipe)
