"""Replays the episodes of an evaluation and records images of them.

The episodes run in a rollout worker whose environments can render.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlflame.fleet.base import make_environment_failure
from rlflame.rendering.job import PlayedEpisode, RenderJob
from rlflame.rollout.envs.gymnasium_env import GymnasiumVectorEnv, RestorableEnv
from rlflame.rollout.envs.make import discard_output, has_mujoco_object, make_env
from rlflame.rollout.task import Array, EnvironmentFault, EnvSpec, Float32, RolloutFailure
from rlflame.rollout.worker import RolloutWorker
from rlflame.training.evaluation import EvaluationPlan, make_evaluation_task

#: The frame rate of environments that declare none.
DEFAULT_FPS = 30.0
_TRACKING = "track"


@dataclass(frozen=True, slots=True)
class StepImage:
    """An image `[height, width, 3]` after a step, and the return so far."""

    step: int
    episode_return: float
    picture: Array


@dataclass(frozen=True, slots=True)
class RenderInfo:
    """The rendering capabilities of an environment."""

    modes: tuple[str, ...]
    steps_per_s: float
    #: Whether MuJoCo draws the environment, and whether its class is one of Gymnasium's MuJoCo
    #: classes, which can draw at any size.
    uses_mujoco: bool
    is_resizable: bool
    #: Whether its model has a camera that follows the body.
    has_tracking_camera: bool


def read_render_info(spec: EnvSpec) -> RenderInfo:
    """Read the rendering capabilities from an instance of an environment."""
    with discard_output():
        env = make_env(spec)
    try:
        inner: Any = env.unwrapped
        rate = inner.metadata.get("render_fps") or DEFAULT_FPS
        is_gymnasium = type(inner).__module__.startswith("gymnasium.envs.mujoco.")
        cameras = (
            [inner.model.camera(i).name for i in range(inner.model.ncam)] if is_gymnasium else []
        )
        return RenderInfo(
            tuple(map(str, inner.metadata.get("render_modes") or ())),
            float(rate) if math.isfinite(rate) and rate > 0 else DEFAULT_FPS,
            is_gymnasium or has_mujoco_object(inner),
            is_gymnasium,
            _TRACKING in cameras,
        )
    finally:
        env.close()


def make_render_spec(
    spec: EnvSpec, info: RenderInfo, width: int | None, height: int | None
) -> EnvSpec:
    """Return the spec with an image size and a tracking camera, where supported.

    Arguments that the recipe sets are not changed.
    """
    kwargs = dict(spec.kwargs)
    if (width or height) and info.is_resizable and not {"width", "height"} & kwargs.keys():
        kwargs |= {"width": width or height, "height": height or width}
    cameras = {"camera_name", "camera_id", "default_camera_config"}
    if info.has_tracking_camera and not cameras & kwargs.keys():
        kwargs["camera_name"] = _TRACKING
    return replace(spec, kwargs=kwargs)


class Camera:
    """Records an image after each of `steps`; step 0 is the reset."""

    def __init__(self, resize: Callable[[Array], Array]) -> None:
        self._resize = resize
        self.steps: Collection[int] = ()
        self.images: list[StepImage] = []
        #: Called after each image.
        self.report_image: Callable[[], None] = lambda: None

    def capture(self, env: RestorableEnv) -> None:
        if env.elapsed not in self.steps:
            return
        picture = np.asarray(env.render())
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise EnvironmentFault(
                f"Environment {env.spec.id} rendered an array of {picture.dtype} and shape "
                f"{picture.shape}, not an RGB image of bytes",
                env.row,
                env.seed,
                env.elapsed,
            )
        self.images.append(StepImage(env.elapsed, env.episode_return, self._resize(picture)))
        self.report_image()


class CameraEnv(RestorableEnv):
    """An environment that a camera records."""

    def __init__(self, spec: EnvSpec, row: int, camera: Camera, mode: str) -> None:
        super().__init__(spec, row, mode)
        self._camera = camera

    def reset(self, episode: int, seed: int, out: Float32) -> None:
        super().reset(episode, seed, out)
        self._camera.capture(self)

    def step(self, action: Any, out: Float32) -> tuple[float, bool, bool]:
        result = super().step(action, out)
        self._camera.capture(self)
        return result


class EpisodePlayer:
    """Plays episodes with the policies of a job, with or without a camera."""

    def __init__(
        self, job: RenderJob, env: EnvSpec, mode: str, resize: Callable[[Array], Array]
    ) -> None:
        self._job = job
        #: The spec for recording images. Without images, the spec of the job is used.
        self._render_env = env
        self.camera = Camera(resize)
        self._worker = RolloutWorker()
        self._camera_worker = RolloutWorker(
            lambda spec, count: GymnasiumVectorEnv(
                spec, count, lambda spec, row: CameraEnv(spec, row, self.camera, mode)
            )
        )

    def score_episodes(self, episodes: int) -> list[PlayedEpisode]:
        """Play the first episodes of an evaluation of the last policy, without images."""
        width, results = self._job.policy.width, []
        for first in range(0, episodes, width):
            count = min(width, episodes - first)
            results += self._play(self._worker, self._job.env, -1, first, count)
        return results

    def render_episode(
        self, side: int, episode: int, steps: Collection[int], cap: int | None = None
    ) -> tuple[PlayedEpisode, list[StepImage]]:
        """Play an episode and render an image after each of `steps`; step 0 is the reset."""
        self.camera.steps, self.camera.images = steps, []
        (played_episode,) = self._play(self._camera_worker, self._render_env, side, episode, 1, cap)
        return played_episode, self.camera.images

    def close(self) -> None:
        self._worker.close()
        self._camera_worker.close()

    def _play(
        self,
        worker: RolloutWorker,
        env: EnvSpec,
        side: int,
        first: int,
        count: int,
        cap: int | None = None,
    ) -> list[PlayedEpisode]:
        job = self._job
        limit = job.max_episode_steps if cap is None else min(cap, job.max_episode_steps)
        plan = EvaluationPlan(count, job.options.seed, max_episode_steps=limit)
        rollout_task = replace(
            make_evaluation_task(env, job.policy, plan, first, count),
            policy_id=str(side % len(job.policies)),
        )
        fragment = worker.run(rollout_task, lambda: job.policies[side])
        if isinstance(fragment, RolloutFailure):
            raise make_environment_failure(rollout_task, fragment)
        episodes = sorted(fragment.episodes, key=lambda episode: episode.row)
        return [PlayedEpisode(e.episode, e.episode_return, e.length) for e in episodes]


def render_repeated_episodes(
    render: Callable[[int, Collection[int], int], tuple[PlayedEpisode, list[StepImage]]],
    episode: int,
    ticks: Sequence[int],
) -> list[StepImage]:
    """Return an image for each of `ticks`, from consecutive episodes of a policy.

    `render(episode, steps, cap)` plays one episode. A tick is an environment step, counted over all
    episodes; the state after a reset also lasts one tick.
    """
    images: list[StepImage] = []
    last, start = ticks[-1], 0
    while start <= last:
        steps = {tick - start for tick in ticks if tick >= start}
        played_episode, latest = render(episode, steps, max(1, last - start))
        images += [image for image in latest if image.step + start <= last]
        start += played_episode.length + 1
        episode += 1
    return images
