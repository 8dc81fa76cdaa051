"""An environment in the current folder, as in the README: `--env my_env:Mine-v0`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import rlflame

MINE = """
import gymnasium
import numpy as np


class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(2, self.t / 10, np.float32), float(action), self.t == 10, False, {}


gymnasium.register("Mine-v0", Mine)
"""


@pytest.mark.parametrize("fleet", ["local", "inline"])
def test_it_trains_resumes_and_evaluates_from_its_folder(tmp_path: Path, fleet: str) -> None:
    (tmp_path / "my_env.py").write_text(MINE)
    # The installed command has its own folder on the module path, but not the current folder.
    script = "import sys; sys.path.pop(0); from rlflame.cli.app import main; main()"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def call(*words: str) -> str:
        command = [sys.executable, "-c", script, *words]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    small = ("--set", "rollout.num_slots=2", "--set", "rollout.envs_per_slot=2",
             "--set", "horizon_steps=384")  # fmt: skip
    call("train", "--env", "my_env:Mine-v0", "--steps", "256", "--fleet", fleet, *small,
         "--workers", "1", "--out", "run", "--quiet")  # fmt: skip
    allowed = ("--allow-module", "my_env", "--workers", "1")
    call("resume", "run", "--steps", "384", "--quiet", *allowed)
    assert "best" in call("eval", "run/best.safetensors", "--episodes", "2", *allowed)


def test_a_file_that_a_setting_names_is_known_before_the_recipe_is_chosen(tmp_path: Path) -> None:
    """The environment is inspected first: its actions determine the default preset."""
    numbers = "Box(-1.0, 1.0, (1,), np.float32)"
    (tmp_path / "mine.py").write_text(
        MINE.replace("gymnasium.spaces.Discrete(2)", f"gymnasium.spaces.{numbers}")
    )
    (tmp_path / "mine.toml").write_text('[runtime]\nenv_file = "mine.py"\n')
    for named in (
        ("--set", "runtime.env_file=mine.py"),
        ("--config", "mine.toml", "--env-file", "mine.py"),
    ):
        dry_run = subprocess.run(
            [sys.executable, "-m", "rlflame", "train", "--env", "Mine-v0", *named,
             "--dry-run", "--json"],
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert dry_run.returncode == 0, dry_run.stderr
        learning = json.loads(dry_run.stdout)["config"]["learning"]
        assert learning["ppo"]["normalise_advantages"] == "off"
        assert learning["policy_average"] == 20


def test_a_name_of_gymnasium_s_own_may_be_given_to_another(tmp_path: Path) -> None:
    """An environment file may replace an id of Gymnasium, without the stored spaces."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE.replace("Mine-v0", "Hopper-v5"))
    words = ("train", "--env", "hopper", "--env-file", "mine.py", "--workers", "2", "--steps", "64",
             "--set", "rollout.num_slots=2", "--set", "rollout.envs_per_slot=2",
             "--set", "rollout.steps=16", "--out", "run")  # fmt: skip
    dry_run, trained = (
        subprocess.run(
            [sys.executable, "-m", "rlflame", *words, *more],
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )
        for more in (("--dry-run",), ("--quiet",))
    )  # fmt: skip
    assert "2 observations, 2 discrete actions" in dry_run.stdout, dry_run.stdout + dry_run.stderr
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "run" / "result.json").exists()


def test_a_file_elsewhere_is_named_in_every_command(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    mine = tmp_path / "lib" / "my_env.py"
    mine.write_text(MINE)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        script = "import sys; sys.path.pop(0); from rlflame.cli.app import main; main()"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [sys.executable, "-c", script, *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    small = ("--set", "rollout.num_slots=2", "--set", "rollout.envs_per_slot=2", "--workers", "1")
    words = ("--env", "my_env:Mine-v0", "--env-file", "lib/my_env.py", *small)
    end = ("--steps", "256", "--set", "horizon_steps=512")
    first = call("train", *words, *end, "--out", "run", "--quiet")
    assert first.returncode == 0, first.stderr
    unnamed = call("resume", "run", "--steps", "384", "--workers", "1")
    assert unnamed.returncode == 2
    assert "--env-file FILE.py" in " ".join(unnamed.stderr.split())
    changed = tmp_path / "my_env.py"
    changed.write_text(MINE + "import pathlib; pathlib.Path('ran').touch()")
    other = call("resume", "run", "--steps", "384", "--env-file", "my_env.py")
    assert other.returncode == 2
    assert hashlib.sha256(changed.read_bytes()).hexdigest()[:12] in other.stderr
    assert not (tmp_path / "ran").exists()
    changed.unlink()
    again = ("resume", "run", "--steps", "384", "--quiet", "--env-file", "lib/my_env.py")
    resumed = call(*again)
    assert resumed.returncode == 0, resumed.stderr
    other = ("--steps", "512", "--set", "runtime.env_file=lib/my_env.py")
    named = call("resume", "run", *other, "--plain", "--workers", "1")
    assert named.returncode == 0, named.stderr
    assert f'env_file = "{mine}"' in (tmp_path / "run" / "config.toml").read_text()
    (said,) = re.findall("next +rlflame (.*)", named.stdout)
    by_set = said.partition(" --env-file ")[0] + " --set runtime.env_file=lib/my_env.py"
    for words in (said, by_set):
        scored = call(*shlex.split(words), "--episodes", "2")
        assert scored.returncode == 0, scored.stderr
    # A plain id that is known only from the file. The module's name hides a standard module.
    (tmp_path / "lib" / "random.py").write_text("raise RuntimeError('never to be imported')")
    plain = ("--env", "Mine-v0", "--env-file", "lib/my_env.py", *small, "--fleet", "local")
    third = call("train", *plain, "--steps", "128", "--out", "plain", "--quiet")
    assert third.returncode == 0, third.stderr
    forgotten = call("eval", "plain/best.safetensors", "--episodes", "2")
    assert forgotten.returncode == 2
    assert "--env-file FILE.py" in " ".join(forgotten.stderr.split())


def test_a_file_that_cannot_be_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "bad_env.py").write_text("import nothing_of_this_name")
    (tmp_path / "lib" / "random.py").write_text("raise RuntimeError('never to be imported')")
    (tmp_path / "lib" / "this.py").write_text(MINE)  # a name of the standard library
    (tmp_path / "lib" / "gone_env.py").write_text("raise SystemExit(0)")
    (tmp_path / "lib" / "two words.py").write_text(MINE)
    here = shlex.quote(f"{tmp_path}/lib/two words.py")
    for name, words_said in (
        ("random", "rename it"),
        ("this", "rename it"),
        ("gone_env", "SystemExit"),
        ("bad_env", "cannot be loaded"),
        ("absent", "There is no file"),
        ("two words", f"mv {here} {tmp_path}/lib/my_env.py"),
    ):
        refused = rlflame("train", "--env-file", f"lib/{name}.py", "--env", "my_env:Mine-v0")
        assert refused.code == 2
        assert words_said in " ".join(refused.err.split())
