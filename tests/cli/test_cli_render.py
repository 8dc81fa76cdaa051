"""`rlflame render` as a user runs it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import easels
import pytest
from commands import finished, process, rlflame
from drawing import begun, policy_file, scored
from PIL import Image

from rlflame.rollout.envs import user_code


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def easel(tmp_path) -> Path:
    return policy_file(tmp_path / "policy.safetensors", begun())


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"policy.safetensors"}


def test_a_video_beside_the_untrained_policy(easel):
    spoken = rlflame("render", easel, "--vs-untrained", "-o", "x.gif", "--seed", "2")
    assert spoken.code == 0, spoken.err
    ((episode_return, length),) = scored(begun(), 1, seed=2, most=20)
    policy, episode, file = spoken.lines
    assert policy == f"  policy   {easel}: easels:Easel-v0, PPO, step 0"
    assert episode == f"  episode  0: return {episode_return:,.1f}, {length} steps"
    assert file.startswith("  file     x.gif: 644 x ")
    with Image.open("x.gif") as image:
        assert image.n_frames == length + 1
        assert image.width == 644
    assert left_in(Path()) == {"x.gif"}


def test_json_output(easel):
    spoken = rlflame("render", easel, "--json", "--best-of", "9", "--episodes", "2", "-o", "x.png")
    said = spoken.json()
    assert (said["file"], said["bytes"]) == ("x.png", os.path.getsize("x.png"))
    best = sorted(scored(begun(), 9, most=20), reverse=True)[:2]
    assert [(one["episode_return"], one["length"]) for one in said["episodes"]] == best
    assert "notes" not in said


def test_a_file_without_a_name_is_named_after_the_environment(tmp_path):
    policy_file(tmp_path / "policy.safetensors", begun("CartPole-v1"))
    assert rlflame("render", "policy.safetensors", "--width", "64").code == 0
    assert left_in(tmp_path) == {"cartpole.gif"}


def test_a_policy_with_choices_is_rendered(tmp_path):
    """The observation and the action of FrozenLake are integers."""
    source = begun("FrozenLake-v1", map_name="8x8")
    spoken = rlflame("render", policy_file(tmp_path / "policy.safetensors", source), "-o", "x.gif")
    assert spoken.code == 0, spoken.err
    ((episode_return, length),) = scored(source, 1, most=20)
    assert spoken.lines[1] == f"  episode  0: return {episode_return:,.1f}, {length} steps"
    with Image.open("x.gif") as image:
        # Frames in which the player does not move are merged.
        assert 1 < image.n_frames <= length + 1


@pytest.mark.parametrize(
    ("words", "code", "said", "hint"),
    [
        (("-o", "x.webm"), 2, "does not end in .gif, .mp4 or .png", "-o x.gif"),
        (("-o", ".."), 2, "does not end in .gif, .mp4 or .png", "-o ../video.gif"),
        (("-o", "absent/x.gif"), 1, "absent/x.gif cannot be written", "a writable folder"),
        (("--human", "-o", "x.gif"), 2, "cannot be combined", "omit one of them"),
        (("--human", "--vs-untrained"), 2, "--human shows only one policy", "-o video.gif"),
        (("--episodes", "3", "--best-of", "2"), 2, "is less than --episodes 3", "--best-of 30"),
        (("--fps", "60"), 2, "--fps 60 is too fast for GIF viewers", "--fps 50"),
    ],
)
def test_invalid_arguments_are_an_error_and_nothing_is_written(easel, words, code, said, hint):
    spoken = rlflame("render", easel, *words)
    assert spoken.code == code
    assert said in spoken.err
    assert hint in spoken.err
    assert left_in(Path()) == set()


def test_what_cannot_be_read_or_drawn(easel, tmp_path):
    assert "does not exist" in rlflame("render", "absent.safetensors").err
    policy_file(tmp_path / "mute.safetensors", begun(modes=["ansi"]))
    spoken = rlflame("render", "mute.safetensors")
    assert spoken.code == 2
    assert "easels:Easel-v0 cannot be rendered" in spoken.err
    (tmp_path / "x.gif").mkdir()
    assert "x.gif cannot be written" in rlflame("render", easel, "-o", "x.gif").err


def test_the_best_policy_of_a_folder_is_rendered(easel, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(easel, tmp_path / "run" / "best.safetensors")
    assert rlflame("render", tmp_path / "run", "-o", "x.png").code == 0
    assert rlflame("render", easel, "-o", "y.png").code == 0
    assert Path("x.png").read_bytes() == Path("y.png").read_bytes()
    (tmp_path / "empty").mkdir()
    assert "does not exist" in rlflame("render", tmp_path / "empty").err


def test_without_the_extra_for_video_there_is_a_sentence(easel, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    spoken = rlflame("render", easel, "-o", "x.mp4")
    assert spoken.code == 2
    assert "pip install 'rlflame[video]'" in spoken.err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_that_cannot_be_written(easel):
    # Even root cannot create files there.
    spoken = rlflame("render", easel, "-o", "/proc/x.gif")
    assert spoken.code == 1
    assert spoken.err.startswith("rlflame: /proc")
    assert "could not be written" in spoken.err or "cannot be written" in spoken.err


def test_no_display_and_no_choice_of_graphics_is_needed(easel):
    bare = {"DISPLAY": "", "WAYLAND_DISPLAY": "", "MUJOCO_GL": "", "SDL_VIDEODRIVER": ""}
    source = policy_file(Path("cart.safetensors").absolute(), begun("CartPole-v1"))
    spoken = finished(process("render", source, "-o", "x.png", environment=bare))
    assert spoken.code == 0, spoken.err


def test_an_environment_s_own_file_goes_along(tmp_path):
    file = tmp_path / "my_easel.py"
    file.write_text(Path(easels.__file__).read_text().replace('"Easel-v0"', '"OwnEasel-v0"'))
    user_code.load(str(file))
    policy_file(tmp_path / "policy.safetensors", begun("OwnEasel-v0"))
    words = ("render", "policy.safetensors", "-o", "x.png")
    spoken = finished(process(*words, "--env-file", file))
    assert spoken.code == 0, spoken.err
    assert "OwnEasel-v0" in spoken.out
    assert "no environment 'OwnEasel-v0'" in finished(process(*words)).err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_an_interrupted_drawing_leaves_nothing_behind(tmp_path, number, code):
    marker = tmp_path / "marker"
    policy_file(tmp_path / "policy.safetensors", begun(fault="slow", marker=str(marker)))
    (tmp_path / "x.gif").write_bytes(b"what was there before")
    running = process("render", "policy.safetensors", "-o", "x.gif")
    while not marker.exists() or not marker.read_text().strip():
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(number)
    spoken = finished(running)
    assert spoken.code == code
    assert (tmp_path / "x.gif").read_bytes() == b"what was there before"
    assert left_in(tmp_path) == {"x.gif", "marker"}
    wait_for_end(int(marker.read_text()))


def wait_for_end(pid: int) -> None:
    """The rendering process ends with its parent."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} lives on")
