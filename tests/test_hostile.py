"""Forged, damaged and special files are refused (see benchmarks/hostile.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hostile import SHIPPED, Forgery

from rlflame.config import resolve as config_resolve
from rlflame.config import toml_io, validation
from rlflame.config.flags import RuntimeFlags, TrainFlags
from rlflame.config.recipe import EnvironmentSettings, RunConfig
from rlflame.errors import ConfigError, LearningError
from rlflame.experiment.recorded_config import resolve_resumed_runtime
from rlflame.learning.base import restore_count
from rlflame.learning.buffers.replay_buffer import ReplayBuffer, ReplayShape
from rlflame.rollout.envs.make import make_env
from rlflame.rollout.task import EnvSpec

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "hostile.py"


def attack(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)


def test_no_attempt_of_a_part_ends_in_a_fault() -> None:
    done = attack("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| .+ \| (\d+) \| \d+ \| \d+ \| (\d+) \|$", done.stdout, re.MULTILINE)
    assert len(rows) == 8
    assert all(int(attempts) > 0 and faults == "0" for attempts, faults in rows)


@pytest.mark.slow
def test_no_attempt_ends_in_a_fault() -> None:
    done = attack()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "text",
    [
        f"x = 0x{'f' * 5000}",
        f"x = {'[' * 300}{']' * 300}",
        "a." * 40 + "b = 1",
        "'a' . " * 40 + "b = 1",
        f"[{'.'.join(['a'] * 40)}]",
        f'"\\"" = 1\n{"a." * 40}b = 1',
    ],
    ids=["digits", "depth", "dotted", "quoted", "header", "second line"],
)
def test_a_config_is_bounded_before_anything_is_made_of_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(text)
    with pytest.raises(ConfigError):
        toml_io.read_file(tmp_path / "f.toml")


def test_dots_outside_keys_are_no_parts_of_a_key() -> None:
    text = f'x = [{", ".join(["1.5"] * 100)}]\ny = "{"a." * 100}" # {"a." * 100}\n'
    assert len(toml_io.parse(text)["x"]) == 100


@pytest.mark.parametrize(
    "setting",
    ["evaluation.max_episode_steps", "learning.policy_average", "learning.environment.kwargs.x"],
)
def test_a_number_that_no_checkpoint_holds_is_no_setting(setting: str) -> None:
    with pytest.raises(ConfigError):
        config_resolve.resolve(TrainFlags(sets=[f"{setting}={2**63}"]), lambda config: False)
    assert 2**62 in validation.parse_set(f"{setting}={2**62}")


def test_arguments_of_an_environment_are_bounded() -> None:
    EnvironmentSettings(kwargs={"desc": ["F" * 100] * 100})
    with pytest.raises(ValueError, match="65,536 characters"):
        EnvironmentSettings(kwargs={"desc": ["F" * 300] * 300})


def test_a_config_does_not_choose_what_executors_install(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[runtime.flame]\nextra_dependencies = ['evil']\n")

    def resolve(*sets: str) -> RunConfig:
        flags = TrainFlags(config=path, sets=sets)
        return config_resolve.resolve(flags, lambda config: False)[0]

    with pytest.raises(ConfigError, match="evil") as refused:
        resolve()
    assert "--set" in refused.value.hint
    named = resolve("runtime.flame.extra_dependencies=['mine']")
    assert named.runtime.flame.extra_dependencies == ("mine",)

    recorded = toml_io.read_file(path)
    with pytest.raises(ConfigError, match="evil"):
        resolve_resumed_runtime(tmp_path, recorded, RuntimeFlags())
    flags = RuntimeFlags(sets=["runtime.flame.extra_dependencies=['evil']"])
    again = resolve_resumed_runtime(tmp_path, recorded, flags)
    assert again.flame.extra_dependencies == ("evil",)


def test_a_pipe_is_no_model_of_mujoco(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.xml")
    kwargs = {"xml_file": str(tmp_path / "pipe.xml")}
    spec = EnvSpec("Hopper-v5", kwargs, None, 0, "discrete", 0, 0, (), (), ())
    with pytest.raises(OSError, match="regular"):
        make_env(spec)


@pytest.mark.parametrize("count", [-1, 2**53, np.iinfo(np.int64).min, np.iinfo(np.int64).max])
def test_a_counter_is_one_that_a_run_can_reach(count: int) -> None:
    with pytest.raises(LearningError, match=str(count)):
        restore_count("adam.count", {"adam.count": np.array(count, np.int64)})


def test_a_replay_of_another_shape_is_refused() -> None:
    experience = ReplayBuffer(
        ReplayShape(64, 2, 3, 1), seed=0, learning_starts=8, updates_per_step=1.0, batch_size=4,
        n_step=1, discount=0.99,
    )  # fmt: skip
    state = dict(experience.get_state())
    name = next(name for name in state if name.endswith("boundary_index"))
    state[name] = np.zeros((), state[name].dtype)
    with pytest.raises(LearningError):
        experience.load_state(state, ())


def test_a_forgery_is_signed() -> None:
    """Without a valid checksum, each attempt would end at the checksum."""
    from rlflame.storage import checkpoint

    path = Path(os.environ["HOME"]) / "forged.safetensors"
    Forgery(SHIPPED / "cartpole.safetensors").change("progress", "episodes", 7).write(path)
    assert checkpoint.load(path).progress.episodes == 7
