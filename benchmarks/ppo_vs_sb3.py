"""Time PPO from start to end, and compare it with stable-baselines3.

    python benchmarks/ppo_vs_sb3.py --sb3-python OTHER/bin/python --env hopper,halfcheetah \
        --steps 1000000 --repeat 5 --csv docs/results/ppo_vs_sb3.csv

Both libraries use their defaults and run in turn (A B A B). The time of a run is from the start of
its process to the end of its final evaluation. The script computes the ratio of each pair. The two
libraries may be in different virtual environments, which should have the same versions of
gymnasium, mujoco, numpy and torch.

With --csv, the script writes each pair when it ends and does not repeat pairs that the file
contains, so an interruption loses one pair at most. For rlflame, the file also contains:

- the share of the time of all cores that the run used
- the share of the time in which all cores were busy
- the peak memory of all its processes (PSS, which counts shared memory once)
- the return of the final evaluation

--no-sb3 measures rlflame alone. --algo, --preset and --set are passed to rlflame and recorded.
stable-baselines3 saves its weights every 50,000 steps, which takes some milliseconds. With
--curves, the script evaluates these policies after the timed run, in the same way as control.py.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy
from script import ended, positive, table

EVALUATION_EPISODES = 20
#: Seconds between two readings of the memory and of the cores.
MEMORY_S, CORES_S = 0.5, 0.02
#: Steps between the saved policies of stable-baselines3, which --curves evaluates.
KEPT_EVERY = 50_000
IDS = {"hopper": "Hopper-v5", "halfcheetah": "HalfCheetah-v5", "walker2d": "Walker2d-v5",
       "ant": "Ant-v5"}  # fmt: skip
COLUMNS = [
    "env", "steps", "set", "pair", "processor", "at_work", "rlflame_s", "rlflame_busy",
    "rlflame_all_busy", "rlflame_pss_mb", "rlflame_return", "sb3_s", "sb3_return",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sb3-python", default=sys.executable)
    parser.add_argument("--no-sb3", action="store_true")
    parser.add_argument("--env", default="hopper", help="environments, separated by commas")
    parser.add_argument("--steps", type=positive, default=100_000)
    parser.add_argument("--repeat", type=positive, default=5)
    for option in ("--algo", "--preset"):
        parser.add_argument(option, help="given to rlflame train")
    parser.add_argument("--set", action="append", default=[], help="given to rlflame train")
    parser.add_argument("--csv", type=table)
    parser.add_argument("--curves", type=table, help="CSV file for stable-baselines3's curves")
    parser.add_argument("--sb3-side", choices=["train", "score"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sb3_side == "train":
        train_sb3(options.env, options.steps, options.seed)
        return
    if options.sb3_side == "score":
        score_sb3(options.env, options.seed, options.curves)
        return
    check(parser, options)
    # With bytecode files, modules are compiled once and not at every start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in options.env.split(","):
        env = IDS.get(name, name)
        words = [word for option in ("algo", "preset") if (value := getattr(options, option))
                 for word in (f"--{option}", value)]  # fmt: skip
        said = " ".join([*words, *options.set])
        words += [word for change in options.set for word in ("--set", change)]
        rows = known(options.csv, env, options.steps, said)
        if not options.no_sb3:
            rows = [row for row in rows if row["sb3_s"]]
        missing = [pair for pair in range(options.repeat)
                   if not any(row["pair"] == str(pair) for row in rows)]  # fmt: skip
        if not missing:
            print(f"{env}: all pairs are in {options.csv}, so nothing is measured.")
        for pair in missing:
            theirs = None if options.no_sb3 else options.sb3_python
            found = {"env": env, "steps": options.steps, "set": said, "pair": pair}
            found |= measured(env, options.steps, pair, words, theirs, options.curves)
            row = {column: str(found.get(column, "")) for column in COLUMNS}
            rows.append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items() if value), flush=True)
            if options.csv:
                keep(options.csv, row)
        print(summary(env, options.steps, rows), flush=True)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that would fail after the measurement."""
    if options.algo not in (None, "ppo") and not options.no_sb3:
        parser.error(f"stable-baselines3 runs PPO; --algo {options.algo} needs --no-sb3")
    if options.csv and options.csv.exists():
        head = options.csv.read_text().splitlines()[:1]
        if head != [",".join(COLUMNS)]:
            parser.error(f"{options.csv} has other columns; name another file with --csv")
    if not options.no_sb3:
        try:
            subprocess.run([options.sb3_python, "-c", "import stable_baselines3"], check=True,
                           capture_output=True)  # fmt: skip
        except (OSError, subprocess.CalledProcessError):
            parser.error(
                f"{options.sb3_python} has no stable_baselines3: use --sb3-python or --no-sb3"
            )


def known(path: Path | None, env: str, steps: int, said: str) -> list[dict[str, str]]:
    """Read the pairs of this measurement that are in the file."""
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file)
                if (row["env"], row["steps"], row["set"]) == (env, str(steps), said)]  # fmt: skip


def keep(path: Path, row: dict[str, str]) -> None:
    begun = path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not begun:
            writer.writeheader()
        writer.writerow(row)


def measured(
    env: str,
    steps: int,
    seed: int,
    words: list[str],
    sb3_python: str | None,
    curves: Path | None = None,
) -> dict[str, object]:
    """Run rlflame, then stable-baselines3, and evaluate the latter's policies."""
    # The stable-baselines3 side of this script runs without rlflame.
    from idle import others, processor

    at_work = [others()]
    ours = rlflame_command(env, steps, seed, words)
    with tempfile.TemporaryDirectory() as folder:
        seconds, cpu_s, all_busy, pss_mb, _ = timed([*ours, "--out", "run"], folder)
        result = json.loads((Path(folder) / "run" / "result.json").read_text())
    row: dict[str, object] = {
        "processor": processor(),
        "rlflame_s": round(seconds, 3),
        "rlflame_busy": round(cpu_s / seconds / len(os.sched_getaffinity(0)), 3),
        "rlflame_all_busy": "" if all_busy is None else round(all_busy, 3),
        "rlflame_pss_mb": round(pss_mb),
        "rlflame_return": round(result["evaluation"]["mean"], 1),
    }
    if sb3_python is not None:
        theirs = [sb3_python, str(Path(__file__).resolve()), "--env", env, "--steps", str(steps),
                  "--seed", str(seed), "--sb3-side"]  # fmt: skip
        at_work.append(others())
        with tempfile.TemporaryDirectory() as folder:
            seconds, _, _, _, said = timed([*theirs, "train"], folder)
            if curves is not None:
                timed([*theirs, "score", "--curves", str(curves.resolve())], folder)
        row["sb3_s"] = round(seconds, 3)
        row["sb3_return"] = round(json.loads(said.splitlines()[-1])["mean"], 1)
    row["at_work"] = max(at_work, key=lambda seen: float(seen or 0))
    return row


def summary(env: str, steps: int, rows: list[dict[str, str]]) -> str:
    def median(name: str) -> float:
        return statistics.median(float(row[name]) for row in rows)

    kinds = collections.Counter(row["processor"] for row in rows)
    machines = ", ".join(f"{number} on {kind}" for kind, number in kinds.items())
    text = (
        f"{env}, {steps:,} steps, {len(rows)} runs ({machines}): "
        f"{median('rlflame_s'):.1f} s ({steps / median('rlflame_s'):,.0f} steps/s), "
        f"{median('rlflame_busy'):.0%} of the cores' time, at most "
        f"{max(float(row['rlflame_pss_mb']) for row in rows):.0f} MB, "
        f"returns {', '.join(row['rlflame_return'] for row in rows)}"
    )
    pairs = [row for row in rows if row["sb3_s"]]
    if pairs:
        ratios = sorted(float(row["sb3_s"]) / float(row["rlflame_s"]) for row in pairs)
        text += (
            f"; {statistics.median(ratios):.2f} times as fast as stable-baselines3 "
            f"(median of {len(ratios)}, {ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"which returned {', '.join(row['sb3_return'] for row in pairs)}"
        )
    return text


def rlflame_command(env: str, steps: int, seed: int, words: list[str]) -> list[str]:
    """Make the `rlflame train` command with these options and the other defaults."""
    return [sys.executable, "-m", "rlflame", "train", "--local", "--env", env,
            "--steps", str(steps), "--seed", str(seed), "--quiet", *words]  # fmt: skip


def timed(command: list[str], folder: str) -> tuple[float, float, float | None, float, str]:
    """Run a command and measure it.

    Returns the wall-clock seconds, the processor seconds of all processes, the share of the time in
    which all cores were busy, the peak memory in MB, and the output.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        memory, cores = Memory(process.pid), Cores()
        output, errors = process.communicate()
        seconds = time.monotonic() - started
        memory.stop()
        cores.stop()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, spent, cores.share(), memory.most_mb, output


class Looks(threading.Thread):
    """A thread that takes a reading at regular intervals until it is stopped."""

    def __init__(self, every_s: float) -> None:
        super().__init__(daemon=True)
        self._every_s, self._over = every_s, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            self.look()

    def look(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._over.set()
        self.join()


class Memory(Looks):
    """The peak memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self.most_mb = 0.0
        self._pid = pid
        super().__init__(MEMORY_S)

    def look(self) -> None:
        self.most_mb = max(self.most_mb, sum(map(pss_mb, family(self._pid))))


class Cores(Looks):
    """The lowest possible share of the time in which all usable cores were busy.

    For each short window, all cores were busy during the window minus the idle times of the cores,
    or longer if idle times overlapped.
    """

    def __init__(self) -> None:
        self._all = self._whole = 0.0
        self._last = self._ticks()
        super().__init__(CORES_S)

    def share(self) -> float | None:
        return self._all / self._whole if self._whole else None

    def look(self) -> None:
        now = self._ticks()
        idle = [rest - before for (_, rest), (_, before) in zip(now, self._last, strict=True)]
        whole = [some - before for (some, _), (before, _) in zip(now, self._last, strict=True)]
        if now and min(whole) > 0:
            self._last = now
            window = sum(whole) / len(whole)
            self._whole += window
            self._all += max(0.0, window - sum(idle))

    def _ticks(self) -> list[tuple[int, int]]:
        """Read the total time and the idle time of each core."""
        usable, found = os.sched_getaffinity(0), []
        with contextlib.suppress(OSError):
            for line in Path("/proc/stat").read_text().splitlines():
                name, *words = line.split()
                if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in usable:
                    values = [int(word) for word in words[:8]]
                    found.append((sum(values), values[3] + values[4]))
        return found


def family(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            words = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
            found += [member for word in words for member in family(int(word))]
    return found


def pss_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def train_sb3(env: str, steps: int, seed: int) -> None:
    """Train as in stable-baselines3's documentation, with its own evaluation."""
    import gymnasium
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy

    started = time.monotonic()

    class Keeper(BaseCallback):
        """Saves the weights without pickle, about every KEPT_EVERY steps."""

        def _on_rollout_start(self) -> None:
            if self.num_timesteps // KEPT_EVERY > self._kept:
                self.keep()

        def _on_training_start(self) -> None:
            self._kept = 0

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            self.keep()

        def keep(self) -> None:
            self._kept = self.num_timesteps // KEPT_EVERY
            weights = {
                name: value.numpy() for name, value in self.model.policy.state_dict().items()
            }
            seconds = time.monotonic() - started
            numpy.savez(f"{self.num_timesteps:012}.npz", seconds=seconds, **weights)

    model = stable_baselines3.PPO("MlpPolicy", env, device="cpu", seed=seed)
    model.learn(steps, callback=Keeper())
    mean, std = evaluate_policy(model, gymnasium.make(env), EVALUATION_EPISODES)
    print(json.dumps({"mean": float(mean), "std": float(std)}))


def score_sb3(env: str, seed: int, path: Path) -> None:
    """Evaluate the weights of `train_sb3` on the episodes of `rlflame eval`."""
    import stable_baselines3
    import torch
    from control import EPISODES, as_it_is, score, write

    model = stable_baselines3.PPO("MlpPolicy", env, device="cpu")
    for kept in sorted(Path.cwd().glob("*.npz")):
        with numpy.load(kept) as arrays:
            seconds = float(arrays["seconds"])
            weights = {name: torch.from_numpy(arrays[name])
                       for name in arrays.files if name != "seconds"}  # fmt: skip
        model.policy.load_state_dict(weights)
        returns = score(model, env, as_it_is)
        write(path, ["ppo-sb3", env, seed, int(kept.stem), returns.mean(), returns.std(),
                     EPISODES, round(seconds, 1)])  # fmt: skip


if __name__ == "__main__":
    ended(main)
