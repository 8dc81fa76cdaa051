"""Train, kill, resume, evaluate and render the environments of Gymnasium and of other packages.

    python benchmarks/environments.py --folder ENVS --csv docs/results/environments.csv
    python benchmarks/environments.py --folder ENVS FrozenLake-v1 minigrid   # IDs or packages
    python benchmarks/environments.py --folder ENVS --install                # only install

The script makes virtual environments in the folder, with the packages that PACKAGES names and the
rlflame of this checkout, without torch and Flame, which these runs do not use. For each
environment, it trains two runs with two workers. It kills all processes of the second run in the
middle, resumes it and compares both runs to the last bit. Then it repeats the recorded evaluation
of the first run in new processes and renders an episode. It also steps each environment with
Gymnasium alone.

The CSV file gets a row for each environment. Environments that have a row are skipped. Slow
environments are trained for fewer steps.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos import kill_tree
from chaos import last as count_iterations
from script import ended, table

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ["environment", "package", "version", "options", "algorithm", "episodes", "ignored",
           "masks", "steps", "trained", "resumed", "evaluated", "rendered", "gymnasium", "seconds",
           "message"]  # fmt: skip
#: The dependencies of rlflame that these runs do not need.
UNUSED = ("torch", "flamepy")
WORKERS = 2
#: The steps of a run and its rollout steps, by the lowest number of steps per second.
LENGTHS = ((300.0, 20_000, 32), (0.0, 1_000, 2))
#: Seconds after which a command is stopped.
LIMIT_S = 400.0
POLL_S = 0.005
#: Small evaluations, because this script tests environments and not policies.
SETTINGS = ("evaluation.final_episodes=3", "evaluation.max_episode_steps=300",
            "runtime.checkpoint_every_steps=1")  # fmt: skip

GRAY = ("--wrap", "gymnasium.wrappers:GrayscaleObservation")
SMALL = ("--wrap", "gymnasium.wrappers:ResizeObservation,shape=[42, 42]")


@dataclass(frozen=True)
class Package:
    """A package with environments."""

    name: str
    requirements: tuple[str, ...]
    #: Code that registers the environments.
    setup: str
    #: The environments to test, and options of `rlflame train`. If empty, all newest versions.
    ids: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    #: The form of `--env`. `{game}` is the name inside an ID, such as Breakout in Breakout-v1.
    env: str = "{id}"
    #: More tests, with other options.
    variants: tuple[tuple[str, tuple[str, ...]], ...] = ()
    #: The virtual environment, for packages whose requirements conflict.
    venv: str = "venv"


def split(text: str, suffix: str = "") -> tuple[str, ...]:
    return tuple(f"{word}{suffix}" for word in text.split())


PACKAGES = (
    Package(
        "gymnasium",
        ("gymnasium[box2d,classic-control,jax,mujoco,toy-text]", "opencv-python-headless"),
        "",
        variants=(
            ("CarRacing-v3", (*GRAY, *SMALL)),
            ("FrozenLake-v1", ("--algo", "reinforce")),
            ("Pendulum-v1", ("--algo", "sac", "--set", "sac.updates_per_step=0.1")),
            ("Taxi-v4", ("--set", "environment.action_mask=off")),
        ),
    ),
    Package(
        "minigrid",
        ("minigrid",),
        "import minigrid",
        split("BlockedUnlockPickup LavaCrossingS9N1 DoorKey-5x5 DoorKey-16x16 "
              "Dynamic-Obstacles-6x6 Empty-5x5 Fetch-5x5-N2 FourRooms GoToDoor-5x5 KeyCorridorS3R1 "
              "MemoryS7 MultiRoom-N2-S4 ObstructedMaze-1Dl PutNear-6x6-N2 RedBlueDoors-6x6 "
              "BabyAI-GoToLocal BabyAI-BossLevel", "-v0"),
        env="minigrid:{id}",
    ),
    Package(
        "gymnasium-robotics",
        ("gymnasium-robotics", "mujoco<3.4"),
        "import gymnasium_robotics",
        split("FetchReach FetchPickAndPlace HandReach HandManipulateBlock_BooleanTouchSensors "
              "AdroitHandDoor PointMaze_UMaze AntMaze_UMaze FrankaKitchen"),
        env="gymnasium_robotics:{id}",
        variants=(("FetchReach", ("--algo", "sac", "--set", "sac.updates_per_step=0.1")),),
        venv="mujoco3",
    ),
    Package(
        "panda-gym",
        ("panda-gym",),
        "import panda_gym",
        split("PandaReach PandaReachJoints PandaPickAndPlace PandaStack"),
        env="panda_gym:{id}",
    ),
    Package(
        "ale-py",
        ("ale-py",),
        "import ale_py",
        split("ALE/Breakout-v5 ALE/MsPacman-v5 ALE/Pong-v5 ALE/SpaceInvaders-v5"),
        ("--env-kwargs", "obs_type=ram"),
        "ale_py:{id}",
        variants=(("ALE/Breakout-v5", ()), ("ALE/Breakout-v5", (*GRAY, *SMALL))),
    ),
    Package(
        "MinAtar",
        ("MinAtar",),
        "import minatar.gym\nminatar.gym.register_envs()",
        split("MinAtar/Asterix-v1 MinAtar/Breakout-v1 MinAtar/SpaceInvaders-v1"),
        ("--env-kwargs", "game={game}"),
        "minatar.gym:BaseEnv",
    ),
    Package(
        "pybullet_envs_gymnasium",
        ("pybullet_envs_gymnasium",),
        "import pybullet_envs_gymnasium",
        split("InvertedPendulumSwingup Reacher Walker2D Ant HumanoidFlagrunHarder", "BulletEnv-v0"),
        env="pybullet_envs_gymnasium:{id}",
    ),
    Package(
        "highway-env",
        ("highway-env",),
        "import highway_env",
        split("exit-v1 highway-fast-v0 intersection-v1 intersection-multi-agent-v0 "
              "intersection-multi-agent-v2 merge-v1 parking-v0 racetrack-v1"),
        env="highway_env:{id}",
    ),
)  # fmt: skip

#: Prints the newest version of each environment that importing a package registers, as JSON.
_LIST = """
import json, gymnasium
from gymnasium.envs import registration
before = {{}} if not {setup!r} else dict(gymnasium.registry)
{setup}
newest = {{}}
for id, spec in gymnasium.registry.items():
    if id not in before:
        name = (spec.namespace, spec.name)
        newest[name] = max(newest.get(name, (-1, "")), (spec.version or 0, id))
print(json.dumps([id for _, id in newest.values()]))
"""
#: Steps an environment with random actions for half a second, and prints the speed as JSON.
_STEP = """
import json, sys, time, gymnasium
{setup}
id, kwargs = json.loads(sys.argv[1])
begin = time.perf_counter()
env = gymnasium.make(id, disable_env_checker=True, **kwargs)
ready, steps = time.perf_counter(), 0
_, info = env.reset(seed=0)
env.action_space.seed(0)
while steps < 3 or time.perf_counter() < ready + 0.5:
    mask = info.get("action_mask")
    action = env.action_space.sample(mask) if mask is not None else env.action_space.sample()
    _, _, terminated, truncated, info = env.step(action)
    steps += 1
    if terminated or truncated:
        _, info = env.reset()
print()
print(json.dumps([ready - begin, steps / (time.perf_counter() - ready)]))
"""


@dataclass(frozen=True)
class Case:
    """An environment and the options of `rlflame train`."""

    package: Package
    id: str
    options: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.id, shlex.join(self.options)

    @property
    def kwargs(self) -> dict[str, Any]:
        pairs = [word for word in self.options if re.fullmatch(r"\w+=\w+", word)]
        items = [pair.split("=") for pair in pairs]
        return {name: True if value == "true" else value for name, value in items}

    @property
    def train_options(self) -> list[str]:
        return ["--env", self.package.env.format(id=self.id), *self.options]


class Venv:
    """A virtual environment with rlflame and packages of environments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = self.folder / "bin" / "python"

    def install(self, package: Package) -> str:
        """Install a package; return pip's error, or "" if there is none."""
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
            project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
            self._pip(*(item for item in project["dependencies"] if not item.startswith(UNUSED)))
            (site,) = self.folder.glob("lib/python*/site-packages")
            (site / "rlflame.pth").write_text(f"{ROOT / 'src'}\n")
        result = self._pip(*package.requirements)
        if result.returncode == 0:
            return ""
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        return (lines or [f"pip exited with code {result.returncode}"])[0]

    def _pip(self, *requirements: str) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                   "--only-binary", ":all:", *requirements]  # fmt: skip
        return subprocess.run(command, text=True, stderr=subprocess.PIPE, check=False)

    def run(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), "-c", code, *arguments]
        return run_command(command)

    def list_cases(self, package: Package) -> Iterator[Case]:
        result = self.run(_LIST.format(setup=package.setup))
        if result.returncode:
            raise RuntimeError(result.stderr)
        ids = json.loads(result.stdout.splitlines()[-1])
        pairs = [(name, package.options) for name in package.ids or ids]
        for name, options in [*pairs, *package.variants]:
            id = find_id(name, ids)
            game = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", id.split("/")[-1].split("-")[0]).lower()
            yield Case(package, id, tuple(word.format(game=game) for word in options))

    def find_version(self, package: Package) -> str:
        code = f"from importlib.metadata import version; print(version({package.name!r}))"
        return self.run(code).stdout.strip()


def find_id(name: str, ids: Sequence[str]) -> str:
    """Return the ID of a name, which may lack its version or MiniGrid's prefix."""
    ids = sorted(ids)
    for pattern in (re.escape(name), rf"MiniGrid-{re.escape(name)}", rf"{re.escape(name)}-v\d+"):
        matches = [id for id in ids if re.fullmatch(pattern, id)]
        if matches:
            return matches[-1]
    return name


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; a command that takes too long is killed with all its processes."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        output, errors = process.communicate()
        errors += f"\nstopped after {LIMIT_S:.0f} seconds\n"
    return subprocess.CompletedProcess([*command], process.returncode, output, errors)


class Survey:
    """Tests one environment after the other."""

    def __init__(self, venv: Venv, folder: Path) -> None:
        self.venv, self._folder = venv, folder

    def test(self, case: Case) -> dict[str, Any]:
        """Test an environment; return a row without the columns of its package."""
        begin = time.monotonic()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        row: dict[str, Any] = {"environment": case.id, "options": shlex.join(case.options)}
        row |= dict.fromkeys(("resumed", "evaluated", "rendered", "message"), "")
        rate, row["gymnasium"] = self._measure_rate(case)
        steps, length = next(item[1:] for item in LENGTHS if rate >= item[0])
        row["steps"] = steps
        row |= self._train(case, steps, length)
        if row["trained"] == "yes":
            row |= self._resume(case, steps, length)
            run, image = str(self._folder / "whole"), str(self._folder / "episode.png")
            row |= self._check("evaluated", case, "eval", run, "--local", "--expect-recorded")
            row |= self._check("rendered", case, "render", run, "-o", image)
        row["seconds"] = round(time.monotonic() - begin)
        return row

    def _measure_rate(self, case: Case) -> tuple[float, str]:
        """Step the environment without rlflame; return steps per second and the result."""
        code = _STEP.format(setup=case.package.setup)
        result = self.venv.run(code, json.dumps([case.id, case.kwargs]))
        if result.returncode:
            return math.inf, f"fails: {result.stderr.strip().splitlines()[-1]}"
        return json.loads(result.stdout.splitlines()[-1])[1], "works"

    def _train(self, case: Case, steps: int, length: int) -> dict[str, Any]:
        result = run_command(self._make_command(case, "whole", steps, length))
        if result.returncode:
            return describe_failure("trained", result)
        config = tomllib.loads((self._folder / "whole" / "config.toml").read_text("utf-8"))
        environment = config["learning"]["environment"]
        start = json.loads(result.stdout.splitlines()[0])
        return {
            "trained": "yes",
            "algorithm": config["learning"]["algorithm"],
            "episodes": environment.get("episodes", ""),
            "ignored": " ".join(environment.get("ignore", ())),
            "masks": "yes" if start.get("action_mask") else "",
        }

    def _resume(self, case: Case, steps: int, length: int) -> dict[str, Any]:
        """Kill a second run in the middle, resume it and compare it with the first."""
        whole, killed = self._folder / "whole", self._folder / "killed"
        middle = count_iterations(whole) // 2
        process = subprocess.Popen(
            self._make_command(case, "killed", steps, length),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and count_iterations(killed) < middle:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        kill_tree(process.pid)
        if process.wait() != -signal.SIGKILL or count_iterations(killed) < middle:
            return {"resumed": "not killed"}
        words = ["resume", str(killed), "--workers", str(WORKERS), *trust(case)]
        result = run_command(self._make_rlflame_command(*words))
        if result.returncode:
            return describe_failure("resumed", result)
        # The result contains digests of the policy and of the whole state.
        files = [
            name
            for name in ("result.json", "metrics.jsonl", "episodes.csv")
            if (whole / name).read_bytes() != (killed / name).read_bytes()
        ]
        if files:
            return {"resumed": "different", "message": f"{' and '.join(files)} differ"}
        return {"resumed": "equal"}

    def _check(self, column: str, case: Case, command: str, *words: str) -> dict[str, str]:
        """Run a command on the first run."""
        result = run_command(self._make_rlflame_command(command, *words, *trust(case)))
        if result.returncode == 0:
            return {column: "yes"}
        return describe_failure(column, result)

    def _make_command(self, case: Case, name: str, steps: int, length: int) -> list[str]:
        settings = [f"rollout.steps={length}"] if length < LENGTHS[0][2] else []
        words = ["train", *case.train_options, "--steps", str(steps), "--json", "--local"]
        words += ["--workers", str(WORKERS), "--out", str(self._folder / name)]
        for setting in (*SETTINGS, *settings):
            words += ["--set", setting]
        return self._make_rlflame_command(*words)

    def _make_rlflame_command(self, *words: str) -> list[str]:
        return [str(self.venv.python), "-m", "rlflame", *words]


def trust(case: Case) -> list[str]:
    """The options that allow the module of an environment, for commands that read a file."""
    module, colon, _ = case.package.env.partition(":")
    modules = [module] * bool(colon) + ["gymnasium.wrappers"] * ("--wrap" in case.options)
    return [word for name in modules for word in ("--allow-module", name)]


def describe_failure(column: str, result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return "refused" for an error with a hint, "failed" for all other errors, and the message."""
    message = find_message(result.stderr)
    return {column: "refused" if "hint: " in message else "failed", "message": message}


def find_message(text: str) -> str:
    """Return rlflame's message and hint, or the last line of other errors."""
    match = re.search(r"^rlflame: (.*)\n(?:  (hint: .*))?", text, re.M)
    if match:
        return " ".join(part for part in match.groups() if part)
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, row: dict[str, Any]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="IDs or packages (default: all)")
    parser.add_argument("--csv", type=table, default=Path("environments.csv"))
    parser.add_argument("--folder", type=Path, help="folder of the virtual environment")
    parser.add_argument("--install", action="store_true", help="only install the packages")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        for package in PACKAGES:
            venv = Venv(folder / package.venv)
            names = {package.name, *package.ids}
            if options.names and package.ids and not names & {*options.names}:
                continue
            error = venv.install(package)
            print(f"{package.name} {error or 'is installed'}", flush=True)
            if not options.install:
                survey = Survey(venv, Path(temporary, "runs"))
                test_package(survey, package, error, options.names, options.csv)


def test_package(
    survey: Survey, package: Package, error: str, names: list[str], path: Path
) -> None:
    """Test the environments of a package that have no row yet."""
    tested = {(row["environment"], row["options"]) for row in read_rows(path)}
    if error:
        if (package.name, "") not in tested:
            row = {"environment": package.name, "package": package.name, "message": error}
            append_row(path, row | {"trained": "not installed"})
        return
    version = survey.venv.find_version(package)
    for case in survey.venv.list_cases(package):
        is_wanted = not names or package.name in names or case.id in names
        if case.key in tested or not is_wanted:
            continue
        row = survey.test(case) | {"package": package.name, "version": version}
        append_row(path, row)
        print(", ".join(f"{name} {row[name]}" for name in COLUMNS if row.get(name)), flush=True)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    ended(main)
