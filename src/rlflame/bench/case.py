"""Makes and runs benchmark cases: short training runs that are timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflame.config import module_trust, resolve
from rlflame.config.algorithms import TRAITS
from rlflame.config.batch_flags import copy_with_episodes
from rlflame.config.flags import TrainFlags
from rlflame.config.nested_dict import flatten
from rlflame.config.recipe import Recipe
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError
from rlflame.experiment import components
from rlflame.experiment.preflight import check_memory
from rlflame.fleet.base import Fleet, make_policy_id
from rlflame.learning.base import Algorithm
from rlflame.rollout.task import EnvSpec, Fragment
from rlflame.training.trainer import Progress, StopInterrupt, StopRequest

Clock = Callable[[], float]
SLEEPING = str(Path(__file__).with_name("sleeping.py"))
#: An iteration has enough sleeping episodes to occupy one worker for about 5 s, within these
#: limits.
_ITERATION_MS, _FEWEST_EPISODES, _MOST_EPISODES = 5000.0, 8, 100
#: A replay buffer is filled in rounds of 20 fragments of 500 steps and sampled in batches of 64.
_REPLAY_ROUND = ("rollout.num_slots=20", "rollout.envs_per_slot=1", "rollout.steps=500")
_REPLAY_BATCH = 64
#: The time limit for a warm-up that waits until all workers have answered.
_COMPLETE_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """A short training run that consists of the same work on every fleet."""

    name: str
    recipe: Recipe
    env: EnvSpec
    #: The time that an episode sleeps, in milliseconds; None for a real environment.
    episode_ms: float | None = None

    @property
    def tasks(self) -> int:
        """The number of tasks in an iteration, which limits how many workers can be busy."""
        return self.recipe.learning.rollout.num_slots

    @property
    def iterations(self) -> int:
        assert self.recipe.stop_at_iterations is not None
        return self.recipe.stop_at_iterations

    @property
    def work(self) -> dict[str, Any]:
        """The settings that affect the work of a repetition, without seeds and horizons."""
        settings = self.recipe.learning.model_dump(
            mode="json", exclude={"seed", "horizon_steps", "horizon_iterations"}
        )
        # The kwargs stay a single value, so that an argument in only one result counts as a
        # difference.
        return {
            **self.recipe.model_dump(include={"stop_at_iterations", "stop_at_steps"}),
            **dict(flatten(settings, leaves=("environment.kwargs",))),
        }


def make_env_case(
    environment: str,
    *,
    algorithm: str | None = None,
    preset: str | None = None,
    episodes: int | None = None,
    iterations: int | None = None,
    sets: Sequence[str] = (),
) -> tuple[Case, RuntimeSettings]:
    """Make a case that trains with an environment's preset for a few iterations."""
    flags = TrainFlags(env=environment, algo=algorithm, preset=preset, sets=sets)
    config, name = resolve.resolve(flags, components.has_continuous_actions)
    runtime, defaults = config.runtime, RuntimeSettings()
    if (runtime.fleet, runtime.workers) != (defaults.fleet, defaults.workers):
        raise ConfigError(
            "runtime.fleet and runtime.workers are options of a benchmark, not settings.",
            "use --workers, and --fleet or --compare",
        )
    if episodes is not None:
        if config.learning.rollout.unit != "episodes":
            raise ConfigError(
                f"--episodes is {episodes}, but preset {name} collects steps, not whole episodes.",
                "omit --episodes, or use --algo reinforce",
            )
        config = copy_with_episodes(config, episodes)
    recipe = config.recipe.copy_with_horizon()
    evaluation = recipe.evaluation.model_copy(update={"every_steps": None, "until_return": None})
    ends = {"stop_at_steps": None, "stop_at_iterations": iterations or 3, "evaluation": evaluation}
    env = components.make_env_spec(recipe.learning.environment)
    return Case(f"{environment} {name}", recipe.model_copy(update=ends), env), runtime


def make_sleeping_cases(
    episode_ms: Sequence[float],
    most_workers: int,
    *,
    episodes: int | None = None,
    iterations: int | None = None,
    sets: Sequence[str] = (),
) -> tuple[list[Case], RuntimeSettings]:
    """Make a REINFORCE case for each episode length, with one task per episode."""
    module_trust.load_env_file(SLEEPING)
    cases, runtime = [], RuntimeSettings()
    for length_ms in episode_ms:
        fitting = min(_MOST_EPISODES, int(_ITERATION_MS / max(length_ms, 1.0)))
        case, runtime = make_env_case(
            "sleeping:Sleeping-v0",
            preset="reinforce-classic",
            episodes=episodes or max(_FEWEST_EPISODES, 2 * most_workers, fitting),
            iterations=iterations or 1,
            sets=[f"environment.kwargs.episode_ms={float(length_ms)!r}", *sets],
        )
        if case.env.kwargs["episode_ms"] != length_ms:
            raise ConfigError("--set changes the episode length.", "use --episode-ms instead")
        name = f"{float(length_ms)} ms".replace(".0 ", " ")
        cases.append(replace(case, name=name, episode_ms=length_ms))
    return cases, runtime.model_copy(update={"env_file": SLEEPING})


def make_replay_case(
    environment: str, transitions: int, *, sets: Sequence[str] = ()
) -> tuple[Case, RuntimeSettings]:
    """Make a case whose rollouts fill a replay buffer that holds all `transitions`."""
    algorithm = next(name for name, traits in TRAITS.items() if traits.uses_replay)
    sizes = (f"{algorithm}.batch_size={_REPLAY_BATCH}", f"{algorithm}.buffer_size={transitions}")
    settings = [*_REPLAY_ROUND, *sizes, *sets]
    case, runtime = make_env_case(environment, algorithm=algorithm, sets=settings)
    rollout = case.recipe.learning.rollout
    iterations = max(1, -(-transitions // (rollout.columns * rollout.steps)))
    recipe = case.recipe.model_copy(update={"stop_at_iterations": iterations})
    components.make_policy_spec(recipe.learning, case.env)
    check_memory(recipe, case.env)
    return replace(case, recipe=recipe), runtime


class Stopwatch:
    """A recorder that measures the time of each phase of a run and writes no files."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.spent_s: dict[str, float] = {}
        self.progress = Progress()
        self.mean_return: float | None = None
        #: Cumulative times and counts at the end of each iteration.
        self.marks: list[dict[str, float]] = []

    def record_iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        returns = [e.episode_return for fragment in fragments for e in fragment.episodes]
        self.progress = progress
        self.mean_return = sum(returns) / len(returns) if returns else None
        counts = {"steps": progress.steps, "updates": metrics.get("n_updates", 0)}
        self.marks.append({"clock": self.clock(), **self.spent_s, **counts})

    def record_evaluation(self, *_: Any) -> None:
        """Do nothing, because a case has no evaluations."""

    def record_snapshot(self, *_: Any, final: bool = False) -> None:
        """Do nothing, because benchmarks write no snapshots."""

    @contextlib.contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        start_s = self.clock()
        try:
            yield
        finally:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + self.clock() - start_s


def run_case(
    case: Case,
    fleet: Fleet,
    stop: StopRequest,
    watch: Stopwatch,
    learner: Algorithm[Any] | None = None,
) -> dict[str, Any]:
    """Run a complete case; return its times, its counts and a digest of the weights.

    Raises StopInterrupt if the user stops the run before it is complete.
    """
    initial = components.make_initial_checkpoint(case.recipe, case.env)
    trainer = components.make_trainer(initial, fleet, watch, stop, "bench", learner)
    watch.spent_s.clear()
    with watch.time_phase("run"):
        complete = trainer.run()
    if not complete:
        raise StopInterrupt
    return {
        "seconds": watch.spent_s["run"],
        "collect_s": watch.spent_s.get("collect", 0.0),
        "learn_s": watch.spent_s.get("learn", 0.0),
        "steps": watch.progress.steps,
        "episodes": watch.progress.episodes,
        "final_return": watch.mean_return,
        "weights": make_policy_id(trainer.take_snapshot().policy),
    }


def warm_up(
    case: Case,
    fleet: Fleet,
    stop: StopRequest,
    clock: Clock = time.perf_counter,
    *,
    wait_for_all: bool = False,
) -> None:
    """Run an untimed iteration.

    With `wait_for_all`, repeat it until all workers have answered or `_COMPLETE_S` seconds have
    passed.
    """
    start_s, recipe = clock(), case.recipe.model_copy(update={"stop_at_iterations": 1})
    short = replace(case, recipe=recipe)
    run_case(short, fleet, stop, Stopwatch(clock))
    while (
        wait_for_all
        and len(fleet.probe()) < min(fleet.capacity, case.tasks)
        and clock() - start_s <= _COMPLETE_S
    ):
        run_case(short, fleet, stop, Stopwatch(clock))
