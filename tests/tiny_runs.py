"""Real training runs of a few iterations in this process, with all results kept."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlflame.config.recipe import Recipe
from rlflame.experiment import components
from rlflame.fleet.base import Fleet
from rlflame.fleet.inline import InlineFleet
from rlflame.learning.parallel.process_group import ProcessGroup
from rlflame.rollout.task import EnvSpec, Fragment, PolicyArrays
from rlflame.storage import checkpoint
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.trainer import Snapshot


@dataclass
class Recording:
    """A Recorder that keeps all calls, and a StopRequest that is never set."""

    fragments: list[list[Fragment]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    #: By number of finished iterations.
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    is_requested: bool = False

    def record_iteration(self, progress, metrics, fragments) -> None:
        self.metrics.append(metrics)
        self.fragments.append(list(fragments))

    def record_evaluation(self, progress, record, policy) -> None:
        pass

    def record_snapshot(self, take, progress, final) -> None:
        self.snapshots[progress.iteration] = take()

    @contextlib.contextmanager
    def time_phase(self, name):
        yield

    @contextlib.contextmanager
    def allow_interrupt(self):
        yield


@dataclass
class Run:
    recipe: Recipe
    env: EnvSpec
    #: The initial weights. `recorded` has the results of each iteration.
    first: PolicyArrays
    recorded: Recording
    beginning: Checkpoint

    @property
    def last(self) -> Snapshot:
        return self.recorded.snapshots[max(self.recorded.snapshots)]

    def state_digest(self, folder: Path) -> str:
        """The state digest of a checkpoint of the last state."""
        last = self.last
        whole = replace(self.beginning, policy=last.policy, progress=last.progress, snapshot=last)
        return checkpoint.save(folder / "checkpoint.safetensors", whole).state_digest


def run(
    data: dict[str, Any],
    start: PolicyArrays | None = None,
    recorded: Recording | None = None,
    *,
    group: ProcessGroup | None = None,
    compare_every: int | None = None,
    saved: Snapshot | None = None,
    fleet: Fleet | None = None,
) -> Run:
    """Train a recipe that is given as plain data. The default fleet is inline.

    With `saved`, the run continues from this state.
    """
    recipe = Recipe.model_validate(data).copy_with_horizon()
    env = components.make_env_spec(recipe.learning.environment)
    beginning = components.make_initial_checkpoint(recipe, env, start)
    recorded = recorded or Recording()
    with InlineFleet() if fleet is None else contextlib.nullcontext(fleet) as fleet:
        begun = replace(beginning, snapshot=saved)
        components.make_trainer(
            begun,
            fleet,
            recorded,
            recorded,
            "tiny",
            components.make_learner(begun, start, group, compare_every),
        ).run()
    return Run(recipe, env, beginning.policy, recorded, beginning)
