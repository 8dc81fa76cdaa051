"""Episodes played before a camera: the very ones that an evaluation scores.

The rollout worker plays them, with rows that draw themselves. Must not know: files, captions,
processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlflame.fleet.base import environment_failure
from rlflame.rendering.job import Job, Played
from rlflame.rollout.envs.gymnasium_env import EnvRow
from rlflame.rollout.envs.make import make
from rlflame.rollout.envs.vector_env import GymnasiumRows
from rlflame.rollout.spec import (
    Array,
    EnvironmentFault,
    EnvSpec,
    Float32,
    PolicyArrays,
    RolloutFailure,
)
from rlflame.rollout.worker import RolloutWorker
from rlflame.training.evaluation import EvaluationPlan, task

#: What environments that say nothing are taken for, in frames a second.
USUAL_FPS = 30.0
_TRACKING = "track"


@dataclass(frozen=True, slots=True)
class Shot:
    """A picture `[height, width, 3]` after a step, and the return until then."""

    step: int
    episode_return: float
    picture: Array


@dataclass(frozen=True, slots=True)
class Looks:
    """How an environment can be drawn."""

    modes: tuple[str, ...]
    steps_per_s: float
    #: Whether MuJoCo draws it; and whether it is one of Gymnasium's own, which draw at any size.
    mujoco: bool
    any_size: bool
    #: Whether its model has a camera that follows the body. Gymnasium's default stays behind.
    follows: bool


def looks(spec: EnvSpec) -> Looks:
    """What an environment says of its drawing, and whether MuJoCo draws it."""
    env = make(spec)
    try:
        inner: Any = env.unwrapped
        modes = tuple(str(mode) for mode in inner.metadata.get("render_modes") or ())
        rate = inner.metadata.get("render_fps") or USUAL_FPS
        own = type(inner).__module__.startswith("gymnasium.envs.mujoco.")
        cameras = [inner.model.camera(i).name for i in range(inner.model.ncam)] if own else []
        return Looks(
            modes,
            float(rate) if math.isfinite(rate) and rate > 0 else USUAL_FPS,
            own or any(_is_mujoco(value) for value in vars(inner).values()),
            own,
            _TRACKING in cameras,
        )
    finally:
        env.close()


def drawn_at(spec: EnvSpec, look: Looks, width: int | None, height: int | None) -> EnvSpec:
    """The environment as MuJoCo draws it, at that very size, from a camera that goes along.

    What the recipe's own arguments say of either is left as it is.
    """
    own = spec.kwargs
    seen: dict[str, Any] = {}
    if (width or height) and look.any_size and not {"width", "height"} & own.keys():
        seen |= {"width": width or height, "height": height or width}
    if look.follows and not {"camera_name", "camera_id", "default_camera_config"} & own.keys():
        seen["camera_name"] = _TRACKING
    return replace(spec, kwargs={**own, **seen}) if seen else spec


def _is_mujoco(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "mujoco"


@dataclass
class Camera:
    """Takes a picture after each of the steps it is told of; step 0 is the reset."""

    develop: Callable[[Array], Array]
    wanted: Collection[int] = ()
    shots: list[Shot] = field(default_factory=list)

    def see(self, row: EnvRow) -> None:
        if row.elapsed not in self.wanted:
            return
        picture = np.asarray(row.render())
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise EnvironmentFault(
                f"environment {row.spec.id} drew {picture.dtype} of shape {picture.shape}, "
                "no picture of red, green and blue bytes",
                row.row,
                row.seed,
                row.elapsed,
            )
        self.shots.append(Shot(row.elapsed, row.episode_return, self.develop(picture)))


class FilmedRow(EnvRow):
    """A row of the worker that stands before a camera."""

    def __init__(self, spec: EnvSpec, row: int, camera: Camera, mode: str) -> None:
        super().__init__(spec, row, mode)
        self._camera = camera

    def begin(self, episode: int, seed: int, out: Float32) -> None:
        super().begin(episode, seed, out)
        self._camera.see(self)

    def step(self, action: Any, out: Float32) -> tuple[float, bool, bool]:
        result = super().step(action, out)
        self._camera.see(self)
        return result


class Stage:
    """Where a job's policies play, with or without a camera."""

    def __init__(
        self, job: Job, env: EnvSpec, mode: str, develop: Callable[[Array], Array]
    ) -> None:
        self._job = job
        #: As it is drawn; as it is played it is the job's own.
        self._drawn_env = env
        self._camera = Camera(develop)
        self._plain = RolloutWorker()
        self._filming = RolloutWorker(
            lambda spec, count: GymnasiumRows(
                spec, count, lambda spec, row: FilmedRow(spec, row, self._camera, mode)
            )
        )

    def scored(self, episodes: int) -> list[Played]:
        """The first episodes of an evaluation of the last policy, without pictures."""
        width, found = self._job.policy.width, []
        for first in range(0, episodes, width):
            count = min(width, episodes - first)
            found += self._play(self._plain, self._job.env, -1, first, count, None)
        return found

    def filmed(
        self, side: int, episode: int, wanted: Collection[int], cap: int | None = None
    ) -> tuple[Played, list[Shot]]:
        """One episode of a policy, with pictures after the wanted steps."""
        self._camera.wanted, self._camera.shots = wanted, []
        (played,) = self._play(self._filming, self._drawn_env, side, episode, 1, cap)
        return played, self._camera.shots

    def close(self) -> None:
        self._plain.close()
        self._filming.close()

    def _play(
        self,
        worker: RolloutWorker,
        env: EnvSpec,
        side: int,
        first: int,
        count: int,
        cap: int | None,
    ) -> list[Played]:
        job = self._job
        limit = job.max_episode_steps if cap is None else min(cap, job.max_episode_steps)
        plan = EvaluationPlan(count, job.seed, max_episode_steps=limit)
        policy: PolicyArrays = job.policies[side]
        given = replace(
            task(env, job.policy, plan, first, count), policy_id=str(side % len(job.policies))
        )
        found = worker.run(given, lambda: policy)
        if isinstance(found, RolloutFailure):
            raise environment_failure(given, found)
        episodes = sorted(found.episodes, key=lambda episode: episode.row)
        return [Played(e.episode, e.episode_return, e.length) for e in episodes]


def beside(
    film: Callable[[int, Collection[int], int], tuple[Played, list[Shot]]],
    episode: int,
    ticks: Sequence[int],
) -> list[Shot]:
    """Shots for each tick of a policy that starts over whenever its episode ends.

    `film(episode, steps, cap)` plays one; the state after a reset lasts one tick, as any other.
    """
    shots: list[Shot] = []
    last, begun = ticks[-1], 0
    while begun <= last:
        wanted = {tick - begun for tick in ticks if tick >= begun}
        played, taken = film(episode, wanted, max(1, last - begun))
        shots += [shot for shot in taken if shot.step + begun <= last]
        begun += played.length + 1
        episode += 1
    return shots
