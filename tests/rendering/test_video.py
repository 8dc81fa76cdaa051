"""Rendered videos: the evaluated episodes, the expected frames, small files."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

import easels
import numpy as np
import pytest
from drawing import begun, job, scored
from PIL import Image, ImageSequence

from rlflame.errors import ConfigError, EnvironmentFailure, RlflameError
from rlflame.rendering import (
    episodes,
    gl_backend,
    policy_render,
    process_main,
    video,
)
from rlflame.rendering.job import RenderError
from rlflame.rollout.process.channel import MessageKind


@pytest.fixture(autouse=True)
def _without_a_screen(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.delenv("DISPLAY", raising=False)


def drawn(job):
    return video.Video(job).draw()


def frames(data: bytes) -> list[tuple[Image.Image, int]]:
    """The frames of a GIF and their milliseconds, read with another library."""
    image = Image.open(io.BytesIO(data))
    assert image.format == "GIF"
    return [
        (frame.convert("RGB"), frame.info["duration"]) for frame in ImageSequence.Iterator(image)
    ]


def shade(picture: Image.Image, left: float = 0.5) -> int:
    """The shade of grey of an easel's image, below the caption."""
    return picture.getpixel((int(left * picture.width), picture.height - 5))[0]


# The episodes.


@pytest.mark.parametrize(
    ("env", "algorithm"),
    [
        ("CartPole-v1", "ppo"),
        ("Pendulum-v1", "ppo"),
        ("LunarLander-v3", "ppo"),
        ("Pendulum-v1", "sac"),
    ],
)
def test_what_is_drawn_is_what_eval_scores(env, algorithm):
    source = begun(env, algorithm=algorithm)
    expected = scored(source, 10, seed=5, most=40)
    asked = job(source, kind="png", width=48, episodes=10, best_of=10, seed=5, max_episode_steps=40)
    drawing = drawn(asked)
    assert [(p.episode_return, p.length) for p in drawing.episodes] == expected


def test_mujoco_draws_what_eval_scores_in_a_process_of_its_own():
    source = begun("Hopper-v5")
    look = episodes.read_render_info(source.env)
    assert (look.steps_per_s, look.uses_mujoco, look.has_tracking_camera) == (125.0, True, True)
    given = {"kind": "png", "width": 48, "max_episode_steps": 9, "uses_mujoco": True}
    asked = job(source, begun("Hopper-v5", seed=1), **given)
    try:
        drawing = policy_render.render_in_subprocess(asked)
    except gl_backend.GraphicsUnavailableError:
        pytest.skip("nothing draws here")
    assert [(p.episode_return, p.length) for p in drawing.episodes] == scored(source, 1, most=9)
    picture = Image.open(io.BytesIO(drawing.data))
    assert len(picture.getcolors(1 << 20)) > 100


def test_the_best_of_many_are_drawn_the_best_first():
    source = begun()
    returns = [episode_return for episode_return, _ in scored(source, 13)]
    drawing = drawn(job(source, kind="png", episodes=3, best_of=13))
    best = sorted(range(13), key=returns.__getitem__, reverse=True)[:3]
    assert [p.episode for p in drawing.episodes] == best
    assert [p.episode_return for p in drawing.episodes] == [returns[k] for k in best]


# Frames and their time.


def test_every_step_at_the_environment_s_own_pace_and_the_last_stays():
    source = begun(length=23)
    drawing = drawn(job(source))
    found = frames(drawing.data)
    # A reset and 23 steps at ten images per second, and one more second to read the return.
    assert [ms for _, ms in found] == [100] * 23 + [1000]
    assert drawing.frames == 24
    assert drawing.seconds == pytest.approx(3.3)
    shades = [shade(picture) for picture, _ in found]
    assert shades == pytest.approx([easels.SHADE_PER_STEP * k for k in range(24)], abs=3)


@pytest.mark.parametrize(
    ("fps", "asked", "steps", "total_ms"),
    [
        (100, None, [0, 4, 8, 12, 16, 20, 23], 1230),
        (100, 50, [*range(0, 23, 2), 23], 1230),
        (10, 5, [*range(0, 23, 2), 23], 3300),
        (30, None, list(range(24)), 1770),
    ],
)
def test_steps_are_left_out_and_time_stays_real(fps, asked, steps, total_ms):
    drawing = drawn(job(begun(length=23, fps=fps), fps=asked))
    found = frames(drawing.data)
    shades = [shade(picture) / easels.SHADE_PER_STEP for picture, _ in found]
    assert shades == pytest.approx(steps, abs=0.4)
    # Frame times are rounded to hundredths of a second, and the errors do not add up.
    assert sum(ms for _, ms in found) == pytest.approx(total_ms, abs=10)


def test_the_left_side_starts_over_until_the_right_one_has_ended():
    source, other = begun(length=23), begun(length=5)
    asked = job(source, other)
    # Both sides have the same environment; this test shortens the episodes of the left one.
    ends = []

    def play_five(episode, wanted, cap):
        ends.append((episode, cap))
        length = min(5, cap)
        return episodes.PlayedEpisode(episode, 0.0, length), [
            episodes.StepImage(step, 10.0 * episode + step, np.zeros((1, 1, 3), np.uint8))
            for step in range(length + 1)
            if step in wanted
        ]

    shots = episodes.render_repeated_episodes(play_five, 7, [0, 4, 8, 12, 16, 20, 23])
    # Six states per episode: frames 0-5 show the first episode, 6-11 the second, and so on.
    expected = [(tick // 6, tick % 6) for tick in (0, 4, 8, 12, 16, 20, 23)]
    assert [(shot.step, shot.episode_return) for shot in shots] == [
        (step, 10.0 * (7 + attempt) + step) for attempt, step in expected
    ]
    assert ends == [(7, 23), (8, 17), (9, 11), (10, 5)]
    assert len(frames(drawn(asked).data)) == 24


def test_both_sides_of_a_video_are_there_under_their_captions():
    drawing = drawn(job(begun(), begun(seed=3), width=200))
    first, _ = frames(drawing.data)[3]
    assert first.size == (drawing.width, drawing.height)
    assert first.width == 2 * 200 + 4
    assert shade(first, 0.25) == shade(first, 0.75) == pytest.approx(24, abs=3)
    head = np.asarray(first)[: drawing.height - 130]
    left, right = head[:, :200], head[:, 204:]
    # There is text on a dark background on both sides.
    for side in (left, right):
        assert (side > 180).all(axis=2).sum() > 40
        assert np.median(side) < 60


def test_a_caption_and_the_return_each_have_a_line_above_the_picture():
    picture = np.full((30, 200, 3), 99, np.uint8)
    one, two = video.add_caption(picture, ["A"]), video.add_caption(picture, ["A", "return 1.0"])
    assert two.height - 30 == 2 * (one.height - 30)
    assert (np.asarray(two)[-30:] == picture).all()
    lines = np.asarray(two)[:-30].reshape(2, -1)
    assert all(line.max() > 180 for line in lines)
    # Episode 10 has a longer caption than episode 9, but all frames have the same size.
    drawing = drawn(job(begun(length=1), width=105, episodes=11, best_of=11))
    assert len({frame.size for frame, _ in frames(drawing.data)}) == 1


def test_a_strip_spans_the_episode():
    drawing = drawn(job(begun(length=28), kind="png", width=60))
    strip = Image.open(io.BytesIO(drawing.data))
    assert (strip.format, drawing.frames) == ("PNG", 8)
    assert strip.width == 8 * 60 + 7 * 4
    shades = [strip.getpixel((30 + 64 * k, strip.height - 5))[0] for k in range(8)]
    # Eight images, of steps 0, 4, ..., 28.
    assert shades == [32 * k for k in range(8)]


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ({"width": 120}, (120, 80)),
        ({"height": 20}, (30, 20)),
        ({"width": 50, "height": 90}, (50, 90)),
    ],
)
def test_one_number_keeps_the_proportions(asked, size):
    picture = np.zeros((easels.HEIGHT, easels.WIDTH, 3), np.uint8)
    assert video.resize_image(picture, asked.get("width"), asked.get("height")).size == size


def test_mp4_has_the_frames_and_even_sides():
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    # Render in another process: the threads of gRPC in this one would disturb a fork.
    drawing = policy_render.render_in_subprocess(job(begun(length=23), kind="mp4", width=61))
    assert drawing.data[4:8] == b"ftyp"
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(drawing.data)
        file.flush()
        count, seconds = ffmpeg.count_frames_and_secs(file.name)
    # 24 frames, and the last one for a second at ten a second.
    assert (count, seconds) == (33, pytest.approx(3.3, abs=0.05))


# Files.


def noisy(count: int, size: int = 32) -> list[video.Frame]:
    """Images that cannot be compressed."""
    generator = np.random.default_rng(0)
    return [
        video.Frame(Image.fromarray(generator.integers(0, 256, (size, size, 3), np.uint8)), 0.04)
        for _ in range(count)
    ]


def test_a_video_that_is_too_large_loses_colours_and_then_frames():
    given = noisy(30)
    whole, count = video.encode_gif(given, None)
    assert count == 30
    fewer, count = video.encode_gif(given, int(0.9 * len(whole)))
    assert len(fewer) <= 0.9 * len(whole)
    assert (count, len(frames(fewer))) == (30, 30)
    half, count = video.encode_gif(given, int(0.5 * len(whole)))
    assert len(half) <= 0.5 * len(whole)
    assert count < 30
    assert sum(ms for _, ms in frames(half)) == sum(ms for _, ms in frames(whole)) == 1200
    # The frame rate does not fall below eight per second, even if the file becomes larger.
    _, count = video.encode_gif(given, 1)
    assert count > 8 * 1.2 / 2


def test_one_palette_for_the_whole_video_and_one_colour_to_spare():
    whole, _ = video.encode_gif(noisy(6), None)
    image = Image.open(io.BytesIO(whole))
    palettes = set()
    for frame in ImageSequence.Iterator(image):
        assert len(frame.convert("RGB").getcolors(1 << 16)) <= 255
        palettes.add(bytes(image.global_palette.palette) if image.global_palette else b"")
    assert len(palettes) == 1


def test_hundredths_of_a_second_keep_pace():
    assert video.round_to_centiseconds([1 / 30] * 6) == [3, 4, 3, 3, 4, 3]
    assert sum(video.round_to_centiseconds([1 / 125 * 5] * 200)) == 800
    assert video.round_to_centiseconds([0.001, 0.001]) == [2, 2]


# Errors.


def test_an_environment_without_pictures_is_named_with_what_it_offers():
    with pytest.raises(ConfigError, match=r"modes \(ansi\) do not include rgb_array"):
        drawn(job(begun(modes=["ansi"])))


@pytest.mark.parametrize(
    ("fault", "said"),
    [("nothing", r"object and shape \(\)"), ("raises", "cannot be rendered: OSError: no paint")],
)
def test_a_bad_picture_is_the_environment_s_fault(fault, said):
    with pytest.raises(EnvironmentFailure, match=said):
        drawn(job(begun(fault=fault)))


# The rendering process.


def test_errors_come_back_in_words_and_crashes_as_what_they_are():
    with pytest.raises(RlflameError, match="no paint") as caught:
        policy_render.render_in_subprocess(job(begun(fault="raises")))
    assert caught.value.exit_code == 1
    assert "OSError" in caught.value.detail
    with pytest.raises(RlflameError, match="do not include rgb_array") as caught:
        policy_render.render_in_subprocess(job(begun(modes=[])))
    assert caught.value.exit_code == 2
    with pytest.raises(RenderError, match="killed by signal 11, SIGSEGV"):
        policy_render.render_in_subprocess(job(begun(fault="crash")))


def test_a_drawing_travels_whole():
    asked = job(begun(), begun(seed=1))
    heard = []
    there = policy_render.render_in_subprocess(
        asked, report_progress=lambda text: heard.append(text)
    )
    assert there == drawn(asked)
    # The last text is repeated while the process is busy.
    stages = [text for text, _ in itertools.groupby(heard)]
    assert stages[:3] == ["starting the renderer", "making the environment", "playing 1 episode"]
    assert stages[3] == "rendering episode 1 of 1, image 1"
    assert stages[-1] == "encoding the images"


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The file in which the working renderer is stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    return tmp_path / "cache" / "rlflame" / "renderer"


@pytest.fixture
def broken_child(tmp_path, monkeypatch):
    """A rendering process in which only one renderer works."""

    def make(working: str) -> None:
        code = f"""
import os, sys
from rlflame.rendering import process_main
def probe():
    if os.environ["MUJOCO_GL"] != {working!r}:
        sys.exit("no paper")
process_main.probe_renderer = probe
process_main.main()
"""
        (tmp_path / "child.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(gl_backend, "CHILD_MODULE", "child")

    return make


def test_the_renderer_that_draws_is_remembered_and_others_are_tried(memory, broken_child):
    last = gl_backend.BACKENDS[-1]
    broken_child(last)
    asked = job(begun(), kind="png", uses_mujoco=True)
    assert policy_render.render_in_subprocess(asked) == drawn(asked)
    assert memory.read_text() == last
    assert gl_backend.list_backends()[0] == last


def test_an_error_of_the_environment_is_no_failure_of_the_renderer(memory, broken_child):
    broken_child(gl_backend.BACKENDS[0])
    with pytest.raises(RlflameError, match="no paint"):
        policy_render.render_in_subprocess(job(begun(fault="raises"), uses_mujoco=True))


def test_where_no_graphics_work_each_reason_is_given_and_none_remembered(memory, broken_child):
    broken_child("none")
    with pytest.raises(gl_backend.GraphicsUnavailableError) as caught:
        policy_render.render_in_subprocess(job(begun(), uses_mujoco=True))
    for backend in gl_backend.BACKENDS:
        assert f"{backend}: no paper" in caught.value.message
    assert caught.value.hint == gl_backend.find_install_command()
    assert not memory.exists()


def test_a_renderer_that_hangs_is_given_up(memory, tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text("import time; time.sleep(100)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gl_backend, "CHILD_MODULE", "child")
    monkeypatch.setattr(gl_backend, "PROBE_TIMEOUT_S", 0.0)
    with pytest.raises(gl_backend.GraphicsUnavailableError, match="egl: no answer"):
        policy_render.render_in_subprocess(job(begun(), uses_mujoco=True))


def test_a_window_needs_a_display():
    for shown in ({"DISPLAY": ":0"}, {"WAYLAND_DISPLAY": "wayland-0"}):
        policy_render.check_display(shown)
    if gl_backend.BACKENDS[0] != "cgl":
        with pytest.raises(RenderError, match="There is no display here"):
            policy_render.render_in_subprocess(job(begun(), kind="window"))


def test_a_window_shows_every_step(tmp_path):
    marker = tmp_path / "seen"
    source = begun(length=6, marker=str(marker))
    drawing = drawn(job(source, kind="window"))
    assert (drawing.data, drawing.frames) == (b"", 0)
    assert marker.read_text().split() == [word for k in range(1, 7) for word in ("shown", str(k))]


def test_a_drawing_that_memory_does_not_hold_is_a_sentence(monkeypatch):
    def too_large(*_):
        raise MemoryError

    monkeypatch.setattr(video.Video, "draw", too_large)
    asked = job(begun("CartPole-v1"), kind="gif")
    channel = SimpleNamespace(send=lambda *message: None)
    kind, answer = process_main.run_job(asked.as_dict(), channel)
    assert kind is MessageKind.FAILURE
    assert "not enough memory" in answer["message"]
    assert "--width" in answer["hint"]
