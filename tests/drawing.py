"""Render jobs and policy files for tests of rendering."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import failpoints

from rlflame.experiment import components
from rlflame.fleet.inline import InlineFleet
from rlflame.rendering.job import RenderJob, RenderOptions
from rlflame.storage import checkpoint
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationPlan, evaluate


def begun(
    env: str = "easels:Easel-v0", seed: int = 0, algorithm: str = "ppo", **kwargs: Any
) -> Checkpoint:
    """An initial policy of full width whose weights have an effect."""
    recipe = failpoints.config(
        env,
        learning={
            "seed": seed,
            "algorithm": algorithm,
            "network": {"last_layer_scale": 1.0},
            "rollout": {"envs_per_slot": 4},
            "environment": {"kwargs": kwargs},
        },
    ).recipe
    return components.make_initial_checkpoint(
        recipe, components.make_env_spec(recipe.learning.environment)
    )


OPTIONS = {field.name for field in dataclasses.fields(RenderOptions)}


def job(source: Checkpoint, *others: Checkpoint, **changes: Any) -> RenderJob:
    """A render job. The other policies play to the left of the source."""
    options = {"kind": "gif", "best_of": changes.get("episodes", 1)}
    options |= {name: changes.pop(name) for name in OPTIONS & changes.keys()}
    given: dict[str, Any] = {
        "env": source.env,
        "policy": source.policy_spec,
        "captions": tuple(f"side {k}" for k in range(1 + len(others))),
        "policies": (*(other.policy for other in others), source.policy),
        "options": RenderOptions(**options),
        "max_episode_steps": 10_000,
        "uses_mujoco": False,
    }
    return RenderJob(**{**given, **changes})


def scored(source: Checkpoint, episodes: int, seed: int = 0, most: int = 10_000) -> list[Any]:
    """The return and length of each episode, as in an evaluation."""
    plan = EvaluationPlan(episodes, seed, max_episode_steps=most)
    with InlineFleet() as fleet:
        found = evaluate(fleet, source.env, source.policy_spec, source.policy, plan)
    return list(zip(found.returns, found.lengths, strict=True))


def policy_file(path: Path, source: Checkpoint) -> Path:
    checkpoint.save(path, checkpoint.make_policy_checkpoint(source, None))
    return path
