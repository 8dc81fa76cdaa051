"""Runs and sweeps with artificial times, for tests of displays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from rlflame import statistics
from rlflame.config import resolve, toml_io
from rlflame.config.flags import TrainFlags
from rlflame.config.recipe import Recipe
from rlflame.console.base import RunResult, RunStart, SweepResources, SweepResult
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.errors import RlflameError
from rlflame.experiment import components
from rlflame.storage.sweep_folder import SeedOutcome, SeedResult, SweepSummary
from rlflame.training.evaluation import EvaluationRecord
from rlflame.training.trainer import Progress

#: The shape of the runs. The expected screens must not depend on presets.
SHAPE = {
    "learning.rollout.num_slots": 8,
    "learning.rollout.envs_per_slot": 8,
    "learning.rollout.steps": 32,
    "learning.network.hidden": (64, 64),
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_checkpoint(environment=None, algorithm=None, preset=None, flags=None):
    """The first checkpoint of a run and the name of its preset."""
    settings = dict(flags or {})
    if preset != "reinforce-classic":
        settings = {"stop_at_steps": 1_000_000, **SHAPE, **settings}
    sets = [f"{name}={toml_io.format_value(value)}" for name, value in settings.items()]
    config, preset = resolve.resolve(
        TrainFlags(env=environment, algo=algorithm, preset=preset, sets=sets),
        components.has_continuous_actions,
    )
    recipe = config.recipe.copy_with_horizon()
    env = components.make_env_spec(recipe.learning.environment)
    return components.make_initial_checkpoint(recipe, env), preset


def make_start(
    folder="runs/x", workers=2, fleet="local", is_resume=False, progress=None, **words
) -> RunStart:
    checkpoint, preset = make_checkpoint(**words)
    summary = RecipeSummary(checkpoint.recipe, checkpoint.env, "" if is_resume else preset)
    if progress is not None:
        checkpoint = replace(checkpoint, progress=progress)
    return RunStart(Path(folder), summary, {0: checkpoint}, fleet, workers, is_resume)


def make_record(mean: float, spread: float = 10.0) -> EvaluationRecord:
    low, high = mean - spread, mean + spread
    numbers = (mean, spread, mean, low, high, low, high, 200.0)
    return EvaluationRecord(3, 0, False, 500, *numbers, (low, mean, high), (100, 200, 300))


def make_result(steps: int, episodes: int, **words) -> RunResult:
    fields = {
        "folder": Path("runs/x"),
        "progress": Progress(7, steps, episodes),
        "complete": True,
        "has_trained": True,
        "state_digest": "a" * 64,
        "digest": "b" * 64,
        "evaluation": make_record(450.0),
        "best": make_record(480.0),
        "resume_command": "rlflame resume runs/x --steps 40960",
        "evaluation_command": "rlflame eval runs/x/best.safetensors",
    }
    return RunResult(**{**fields, **words})


def make_metrics(iteration: int, steps: int, episodes: int, **more):
    return {"iteration": iteration, "steps": steps, "episodes": episodes, **more}


def make_event(iteration: int, steps: int) -> dict:
    return {"event": "iteration", **make_metrics(iteration, steps, iteration)}


def make_sweep_start(**changes) -> RunStart:
    """Four seeds. An earlier process has finished seed 2 with a mean return of 30."""
    recipe = Recipe(stop_at_steps=1000)
    env = components.make_env_spec(recipe.learning.environment)
    first = components.make_initial_checkpoint(recipe, env)
    finished = replace(first, progress=Progress(10, 1000, 40), best=make_record(30.0))
    fields = {
        "folder": Path("runs/x"),
        "summary": RecipeSummary(recipe, env, "cartpole-ppo"),
        "checkpoints": {0: None, 1: None, 2: finished, 3: None},
        "fleet": "inline",
        "workers": 0,
        "is_resume": False,
        "resources": SweepResources(2, 0),
        "finished_seeds": frozenset({2}),
    }
    return RunStart(**{**fields, **changes})


def play_seeds(display, clock: Clock) -> None:
    """Play events: seed 0 is half done after 5 s, seed 1 has failed, seed 3 waits."""
    display.show_seed_event(0, {"event": "start", "steps": 0})
    evaluation = {"event": "evaluation", "steps": 250, "best": True, **make_record(10.0).as_dict()}
    display.show_seed_event(0, evaluation)
    clock.now += 5.0
    display.show_seed_event(0, make_event(5, 500))
    display.show_seed_event(1, {"event": "note", "text": "A video is left out."})
    retry = {"event": "retried", "slot": 3, "purpose": "train", "reason": "killed by signal 9"}
    display.show_seed_event(1, retry)
    error = RlflameError("Its process was killed.", detail="What it printed.\n")
    display.show_seed_end(1, SeedOutcome("failed", error))


def make_sweep_result(**changes) -> SweepResult:
    def make_seed(seed: int, mean: float) -> SeedResult:
        record = {"mean": mean, "low": mean - 1, "high": mean + 1, "std": 1.0, "episodes": 20}
        return SeedResult(seed, Path(f"runs/x/seed-{seed}"), "finished", 1000, 10, 20, record)

    finals = np.array([10.0, 20.0, 30.0])
    summary = SweepSummary(
        "CartPole-v1", "ppo", tuple(make_seed(seed, mean) for seed, mean in enumerate(finals)),
        statistics.summarise(finals), 0,
    )  # fmt: skip
    fields = {"has_trained": True, "plot": None, **changes}
    return SweepResult(Path("runs/x"), summary, {}, **fields)
