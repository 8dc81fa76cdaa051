"""The contract of a benchmark: what is timed, and what was seen.

A case is a piece of training that is the same work wherever it runs, to the last bit; a cell is
one case on one fleet with one number of workers; a repetition is one run of it. Must not know: how
anything is timed, worded or written.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rlflame.config.nested import flatten
from rlflame.config.recipe import Recipe
from rlflame.rollout.spec import EnvSpec


@dataclass(frozen=True, slots=True)
class Case:
    """`episode_ms` is what an episode sleeps; None where a real environment decides."""

    name: str
    recipe: Recipe
    env: EnvSpec
    episode_ms: float | None = None

    @property
    def tasks(self) -> int:
        """Of an iteration; at most so many workers can be busy."""
        return self.recipe.learning.rollout.num_slots

    @property
    def iterations(self) -> int:
        assert self.recipe.stop_at_iterations is not None
        return self.recipe.stop_at_iterations

    @property
    def rollout_settings(self) -> dict[str, Any]:
        """The settings that make its rollouts as long as they are, wherever they run, by name."""
        return {
            name: value
            for name, value in self._list_settings().items()
            if name.startswith(("environment.", "rollout.", "network."))
        }

    @property
    def work(self) -> dict[str, Any]:
        """All that a repetition does; two that differ in it are not to be compared."""
        until = {
            "stop_at_iterations": self.recipe.stop_at_iterations,
            "stop_at_steps": self.recipe.stop_at_steps,
        }
        return {**until, **self._list_settings()}

    def _list_settings(self) -> dict[str, Any]:
        decided = self.recipe.learning.model_dump(
            mode="json", exclude={"seed", "horizon_steps", "horizon_iterations"}
        )
        # One value, so that an argument that only one of two has is a difference of what both have.
        return dict(flatten(decided, leaves=("environment.kwargs",)))


@dataclass(frozen=True, slots=True)
class Repetition:
    """One run of a case, learning included; `weights` names what was learned by its content."""

    seconds: float
    collect_s: float
    learn_s: float
    steps: int
    episodes: int
    final_return: float | None
    weights: str
    #: Tasks that went to a second worker meanwhile, which takes longer.
    retried: int = 0


@dataclass(slots=True)
class Cell:
    """One case on one fleet."""

    case: str
    fleet: str
    workers: int
    #: How many tasks the fleet says it can run at one moment, and workers that have answered.
    capacity: int
    answered: int
    #: From opening the fleet to the end of its first iteration; of its first case alone.
    start_s: float | None
    repetitions: list[Repetition] = field(default_factory=list)

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(repetition.seconds for repetition in self.repetitions)

    @property
    def name(self) -> str:
        return f"{self.case}, {self.fleet} with {self.workers}"

    @property
    def retried(self) -> list[int]:
        return [repetition.retried for repetition in self.repetitions]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MachineConditions:
    """What a number measured here has to be read with."""

    machine: dict[str, Any]
    threads: dict[str, str]
    load_before: tuple[float, float, float] | None
    #: Processors at work at the beginning, where the system says so.
    at_work: float | None
    busy: bool
    #: Processors that others kept at work from then on until the end, where that can be told.
    others: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
