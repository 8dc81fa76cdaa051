"""Videos during training: in the background, one at a time, without side effects."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import failpoints
import numpy as np
import pytest
from commands import TINY, rlflame
from drawing import begun
from PIL import Image

from rlflame import api
from rlflame.console.base import NullView
from rlflame.errors import RlflameError
from rlflame.rendering.clip_recorder import ClipRecorder
from rlflame.rendering.job import RenderResult
from rlflame.storage import checkpoint
from rlflame.training.trainer import Progress


def at(steps: int) -> Progress:
    return replace(Progress(), steps=steps)


class Projector:
    """A renderer that runs when the test allows it, and records its jobs."""

    def __init__(self) -> None:
        self.jobs = []
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, job, stopped):
        self.jobs.append(job)
        self.begun.release()
        while not self.go.acquire(timeout=0.01):
            if stopped():
                raise RlflameError("The drawing was cut short.")
        if self.error is not None:
            raise self.error
        return RenderResult(b"video", (), 1, 1, 1, 1.0)


class Nowhere:
    """A Recorder that keeps nothing."""

    def record_iteration(self, *_): ...

    def record_evaluation(self, *_): ...

    def record_snapshot(self, *_): ...


class Studio:
    """A clip recorder with a fake renderer, and its messages."""

    def __init__(self, folder: Path, every_steps: int = 1) -> None:
        self.folder = folder / "videos"
        self.projector = Projector()
        self.heard: list[str] = []
        self.recorder = ClipRecorder(
            Nowhere(), self.folder, begun(), every_steps, self.heard.append, render=self.projector
        )

    def offer(self, steps: int, policy=None) -> None:
        policy = weights(1.0) if policy is None else policy
        self.recorder.record_snapshot(lambda: SimpleNamespace(policy=policy), at(steps), False)

    def wait(self) -> None:
        while self.recorder.is_busy():
            threading.Event().wait(0.01)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def studio(tmp_path) -> Studio:
    return Studio(tmp_path)


def weights(value: float):
    return {name: array * 0 + np.float32(value) for name, array in begun().policy.items()}


def first_number(job) -> float:
    return float(next(iter(job.policies[0].values())).flat[0])


def never() -> bool:
    return False


def test_one_at_a_time_and_of_those_that_wait_the_newest(studio):
    studio.offer(10, weights(1.0))
    projector = studio.projector
    projector.begun.acquire()
    for k in (2, 3, 4):
        studio.offer(10 * k, weights(k))
    assert len(projector.jobs) == 1
    projector.go.release(2)
    studio.recorder.close(never)
    assert studio.names() == ["step-000000010.gif", "step-000000040.gif"]
    assert [first_number(job) for job in projector.jobs] == [1.0, 4.0]
    assert projector.jobs[1].captions == ("PPO, step 40",)
    assert projector.jobs[1].nice > 0
    assert studio.heard[-1] == f"2 of 4 videos rendered: {studio.folder}."


def test_videos_before_a_failure_are_counted(studio):
    studio.projector.go.release(9)
    for steps in (0, 1, 2):
        studio.offer(steps)
        studio.wait()
        studio.projector.error = RlflameError("No paint.", "buy some")
    studio.recorder.close(never)
    assert studio.heard == [
        "No more videos of this run will be rendered: No paint. buy some",
        f"1 of 3 videos rendered: {studio.folder}.",
    ]


def test_the_weights_are_those_of_the_moment(studio):
    moving = weights(1.0)
    studio.offer(0, moving)
    studio.projector.begun.acquire()
    for array in moving.values():
        array += 5.0
    assert first_number(studio.projector.jobs[0]) == 1.0
    studio.projector.go.release()
    studio.recorder.close(never)


@pytest.mark.parametrize("error", [RlflameError("No paint.", "buy some"), ValueError("odd")])
def test_a_failure_is_one_note_and_the_last_attempt(studio, error):
    studio.projector.error = error
    studio.projector.go.release(9)
    for steps in (0, 1, 2):
        studio.offer(steps)
        studio.wait()
        studio.recorder.record_iteration(at(steps), {}, [])
    (note,) = studio.heard
    assert note.startswith("No more videos of this run will be rendered: ")
    assert str(error).rstrip(".") in note
    assert len(studio.projector.jobs) == 1


def test_a_skipped_last_video_is_reported(studio):
    studio.offer(0)
    studio.projector.begun.acquire()
    studio.offer(1)
    assert studio.recorder.is_busy()
    studio.recorder.close(lambda: True)
    assert not studio.recorder.is_busy()
    assert not studio.folder.exists()
    assert studio.heard == [f"0 of 2 videos rendered: {studio.folder}."]
    assert [thread.name for thread in threading.enumerate() if thread.name == "clips"] == []


def test_a_note_is_shown_while_the_last_video_is_rendered(studio):
    studio.offer(0)
    studio.projector.begun.acquire()
    threading.Timer(0.05, studio.projector.go.release).start()
    studio.recorder.close(never)
    assert studio.heard == [
        "The last video is being rendered; press Ctrl-C to skip it.",
        f"1 of 1 video rendered: {studio.folder}.",
    ]
    assert (studio.folder / "step-000000000.gif").read_bytes() == b"video"


def test_a_folder_that_must_not_be_written_gets_no_video(tmp_path):
    def refuse():
        raise RlflameError("It belongs to another process.")

    studio = Studio(tmp_path)
    studio.recorder = ClipRecorder(
        Nowhere(), studio.folder, begun(), 1, studio.heard.append,
        check=refuse, render=studio.projector,
    )  # fmt: skip
    studio.projector.go.release()
    studio.offer(0)
    studio.recorder.close(never)
    assert not studio.folder.exists()


def test_a_video_is_due_when_another_multiple_is_passed(tmp_path):
    studio = Studio(tmp_path, 100)
    studio.projector.go.release(9)
    for steps in (0, 64, 128, 192, 256, 512):
        studio.offer(steps)
        studio.wait()
    assert [int(name[5:14]) for name in studio.names()] == [0, 128, 256, 512]
    silent = Studio(tmp_path, 0)
    silent.offer(0)
    silent.recorder.close(never)
    assert (silent.heard, silent.projector.jobs) == ([], [])


# Real videos.


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_videos_change_no_bit_of_a_run(tmp_path, algorithm):
    env = "easels:Easel-v0"
    learning = {
        "algorithm": algorithm,
        "environment": {"kwargs": {"continuous": algorithm == "sac"}},
    }
    plain = failpoints.config(env, tmp_path / "plain", learning=learning)
    runtime = {"video_every_steps": 32}
    recorded = failpoints.config(env, tmp_path / "recorded", learning=learning, runtime=runtime)
    results = [api.train(config) for config in (plain, recorded)]
    assert results[0].state_digest == results[1].state_digest
    assert results[0].digest == results[1].digest
    for name in failpoints.EQUAL_BYTES:
        assert (tmp_path / "plain" / name).read_bytes() == (
            tmp_path / "recorded" / name
        ).read_bytes()
    videos = sorted((tmp_path / "recorded" / "videos").iterdir())
    steps = {int(video.name[5:14]) for video in videos}
    # The first video begins before the first iteration, and later ones when the machine has time.
    assert min(steps) == 0
    assert steps <= {0, 32, 64, 96}
    with Image.open(videos[0]) as video:
        assert video.size[0] == 240
        assert video.n_frames > 3


class Listener(NullView):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def show_note(self, text: str) -> None:
        self.heard.append(text)


def test_a_run_that_cannot_be_drawn_ends_as_any_other(tmp_path):
    config = failpoints.config("fakes:Fake-v0", tmp_path / "run", runtime={"video_every_steps": 1})
    listener = Listener()
    result = api.train(config, show=listener)
    assert result.complete
    said = [note for note in listener.heard if "videos" in note]
    reason = "No more videos of this run will be rendered: fakes:Fake-v0 cannot be rendered"
    assert said[0].startswith(reason)
    assert len(said) == 2
    assert not (tmp_path / "run" / "videos").exists()


def test_the_option_is_a_setting_of_the_runtime_and_resume_keeps_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("train", "--env", "easels:Easel-v0", *TINY, "--steps", "64", "--out", "run")
    assert rlflame(*words, "--set", "horizon_steps=128", "--video-every", "64").code == 0
    assert "video_every_steps = 64" in (tmp_path / "run" / "config.toml").read_text()
    assert rlflame("resume", "run", "--steps", "128").code == 0
    found = {path.name for path in (tmp_path / "run" / "videos").iterdir()}
    steps = checkpoint.load(tmp_path / "run" / "latest.safetensors").progress.steps
    assert f"step-{steps:09d}.gif" in found
