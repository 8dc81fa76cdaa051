"""The scripts in `benchmarks/`: that they start, and which arguments they refuse."""

from __future__ import annotations

import csv
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import card
import idle
import pytest

from rlflame.learning import torch_gradients
from rlflame.learning.device.graph import UpdateGraph

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
RUN = sorted(
    path.name for path in SCRIPTS.glob("*.py") if "ArgumentParser(" in path.read_text("utf-8")
)


def ended(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / str(words[0])), *map(str, words[1:])]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_waits: None
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in this process."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(SCRIPTS / str(words[0])), run_name="__main__")
        return subprocess.CompletedProcess(words, exit.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for no idle machine, because other tests keep the machine busy."""
    monkeypatch.setattr(idle, "_WAITS_S", ())


def loaded(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


@pytest.mark.parametrize("name", RUN)
def test_each_says_what_it_takes(name) -> None:
    found = ended(name, "--help")
    assert found.returncode == 0, found.stderr
    assert "usage:" in found.stdout


def test_an_update_is_timed_beside_its_products_and_autograd(tmp_path, run_here) -> None:
    kept = tmp_path / "updates.csv"
    found = run_here("ppo_update.py", "--env", "hopper", "--minibatch", "512", "--csv", kept)
    assert found.returncode == 0, found.stderr
    head, row = found.stdout.splitlines()[-2:]
    assert head.split() == ["environment", "minibatch", "update", "us", "products", "us", "share",
                            "matmul", "us", "autograd", "us", "times", "iteration",
                            "ms"]  # fmt: skip
    env, size, update, products, _, matmul, autograd, times, _ = row.split()
    assert (env, size) == ("hopper", "512")
    assert 0.0 < float(products) < float(update)
    assert 0.0 < float(products) < float(matmul)
    assert float(times) == pytest.approx(float(autograd) / float(update), abs=0.06)
    (line,) = csv.DictReader(kept.read_text().splitlines())
    assert (line["env"], line["minibatch"]) == ("hopper", "512")
    assert float(line["update_us"]) == pytest.approx(float(update), abs=0.06)
    assert float(line["autograd_us"]) == pytest.approx(float(autograd), abs=0.06)


def test_every_step_of_the_gpu_script_runs_on_a_cpu(tmp_path) -> None:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = ("--device", "cpu", "--small", "--csv", tmp_path / "gpu.csv")
    found = ended("card.py", *words, **threads)
    assert found.returncode == 0, found.stdout + found.stderr
    with (tmp_path / "gpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    results = [row["result"] for row in rows if row["what"].startswith("same bits")]
    # Thirteen recipes, twice each, six with a replay, and a run that was killed.
    assert len(results) == 33
    assert set(results) == {"equal"}
    for what, limit in (
        ("captured and not", 1e-6),
        ("beside numpy, one update", 1e-5),
        ("beside numpy", 1e-3),
    ):
        differences = [float(row["result"]) for row in rows if row["what"] == what]
        assert len(differences) == 13
        assert max(differences) < limit
    assert len(rows) == 81


@pytest.mark.parametrize("name", ["PPO", "PPO, KL limit", "PPO, whole batch", "SAC"])
def test_the_gpu_script_notices_an_update_that_does_nothing(name, monkeypatch) -> None:
    monkeypatch.setattr(torch_gradients, "select_device", lambda kind, rank: "cpu")
    monkeypatch.setattr(UpdateGraph, "run", lambda graph, function, state: None)
    for one in (True, False):
        assert card.compare_with_numpy(*card.CHECKS[name], one=one) == "different"
    assert card.compare_with_eager(*card.CHECKS[name]) == "different"


def test_the_gpu_script_keeps_a_result_whose_comparison_runs_out_of_time() -> None:
    def hang() -> float:
        raise subprocess.TimeoutExpired("numpy", 1.0)

    def find(work: Callable[[], float], base: Callable[[], float], limit_s: float) -> object:
        row = card.Row("SAC updates", "", "updates/s", work, base, is_run=True)
        return card.measure(row, None, time.monotonic() + limit_s)

    assert find(lambda: 2.0, lambda: 1.0, 60.0) == (2.0, 1.0)
    assert find(lambda: 2.0, hang, 60.0) == (2.0, "out of time")
    assert find(hang, lambda: 1.0, 60.0) == ("out of time", None)
    assert find(lambda: 2.0, lambda: 1.0, -1.0) == ("out of time", None)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("ppo_update.py", "--env", "nope"), 2, "There is no environment 'nope'."),
        (("ppo_update.py", "--env", "cartpole"), 2, "cartpole has no continuous actions"),
        (("flame_overhead.py",), 3, "No Flame cluster is configured"),
    ],
)
def test_what_rlflame_refuses_is_a_sentence(words, code, said, run_here, monkeypatch) -> None:
    monkeypatch.delenv("FLAME_ENDPOINT", raising=False)
    found = run_here(*words)
    assert found.returncode == code, found.stderr
    assert said in found.stderr
    assert "\n  hint: " in found.stderr


def test_without_a_gpu_the_gpu_script_ends_with_a_sentence() -> None:
    found = ended("card.py", CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 2, found.stderr
    assert "finds no CUDA device here." in found.stderr
    assert "\n  hint: " in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ppo_vs_sb3.py", "--repeat", "0", "--no-sb3"), "0 is not a positive integer"),
        (("ppo_vs_sb3.py", "--csv", "nowhere/x.csv", "--no-sb3"), "nowhere/x.csv cannot be wr"),
        (("ppo_vs_sb3.py", "--csv", "other.csv", "--no-sb3"), "other.csv has other columns"),
        (("ppo_vs_sb3.py", "--sb3-python", "nowhere"), "nowhere has no stable_baselines3"),
        (("ppo_vs_sb3.py", "--algo", "sac"), "--algo sac needs --no-sb3"),
        (("reinforce_vs_flame.py", "--example", "nowhere"), "nowhere has no main.py"),
        (("start.py", "--repeat", "-1"), "-1 is not a positive integer"),
        (("start.py", "--csv", "nowhere/x.csv"), "nowhere/x.csv cannot be written"),
        (("chaos.py", "--kills", "0"), "0 is not a positive integer"),
        (("learning.py", "ppo", "nothing"), "ppo has no study nothing; it has ppo-hopper-1m"),
        (("learning.py", "ppo", "--report", "--csv", "not.csv"), "not.csv does not exist"),
        (("curves.py", "not.csv", "--envs", "hopper", "-o", "x.svg"), "not.csv does not exist"),
        (("ppo_update.py", "--minibatch", "x"), "--minibatch is x, not numbers"),
    ],
)
def test_what_comes_to_nothing_is_refused_before_it_is_measured(words, said, tmp_path, monkeypatch):
    (tmp_path / "other.csv").write_text("a,b\n")
    monkeypatch.chdir(tmp_path)
    found = ended(*words)
    assert found.returncode == 2, found.stderr
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    assert (tmp_path / "other.csv").read_text() == "a,b\n"


def test_pairs_on_record_are_not_passed_off_as_measured(tmp_path) -> None:
    script = loaded("ppo_vs_sb3")
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, script["COLUMNS"])
        writer.writeheader()
        for pair, kind in enumerate(("Old", "Old", "New")):
            writer.writerow({"env": "Hopper-v5", "steps": 1000, "pair": pair, "processor": kind,
                             "rlflame_s": 1.0, "rlflame_busy": 0.9, "rlflame_pss_mb": 100 + pair,
                             "rlflame_return": 5.0})  # fmt: skip
    found = ended("ppo_vs_sb3.py", "--no-sb3", "--steps", "1000", "--repeat", "3", "--csv",
                  tmp_path / "pairs.csv")  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "all pairs are in" in found.stdout
    assert "3 runs (2 on Old, 1 on New)" in found.stdout
    assert "at most 102 MB" in found.stdout


def test_what_is_on_record_beside_a_time_is_what_rlflame_was_given(
    tmp_path, no_waits, monkeypatch
) -> None:
    script = loaded("ppo_vs_sb3")
    given: list[list[str]] = []

    def stood_for(command: list[str], folder: str) -> tuple[float, float, None, float, str]:
        given.append(command)
        (Path(folder) / "run").mkdir()
        (Path(folder) / "run" / "result.json").write_text('{"evaluation": {"mean": 1.0}}')
        return 2.0, 1.0, None, 3.0, ""

    monkeypatch.setitem(script["measured"].__globals__, "timed", stood_for)
    monkeypatch.setattr(sys, "argv", [
        "ppo_vs_sb3.py", "--no-sb3", "--algo", "reinforce", "--preset", "ant-reinforce",
        "--set", "network.hidden=[8]", "--env", "ant", "--steps", "9", "--repeat", "1",
        "--csv", str(tmp_path / "times.csv"),
    ])  # fmt: skip
    script["main"]()
    (command,) = given
    words = "--algo reinforce --preset ant-reinforce --set network.hidden=[8]"
    assert words in " ".join(command)
    (row,) = csv.DictReader((tmp_path / "times.csv").open(newline=""))
    assert (row["env"], row["set"]) == ("Ant-v5", words.replace("--set ", ""))
    assert row["sb3_s"] == ""


def test_a_run_is_timed_with_what_its_processes_held_and_did(tmp_path) -> None:
    """Two processes that work keep two cores busy, if the machine has two."""
    timed = loaded("ppo_vs_sb3")["timed"]
    code = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 1.5: pass"
    both = f"import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', {code!r}])\n{code}"
    seconds, spent, all_busy, most_mb, said = timed(
        [sys.executable, "-c", f"{both}\np.wait()\nprint('over')"], str(tmp_path)
    )
    assert spent >= 2.9
    assert seconds > 1.4
    assert 0.0 <= all_busy <= 1.0
    assert most_mb > 1.0
    assert said == "over\n"


def test_all_cores_are_at_work_for_as_long_as_none_rests(monkeypatch) -> None:
    """Windows of ten ticks: both busy, one idle for four, both idle for half."""
    script = loaded("ppo_vs_sb3")
    looks = iter([[(0, 0)] * 2, [(10, 0)] * 2, [(20, 4), (20, 0)], [(30, 9), (30, 5)]])
    monkeypatch.setattr(script["Cores"], "_ticks", lambda self: next(looks))
    monkeypatch.setattr(script["Cores"], "start", lambda self: None)
    cores = script["Cores"]()
    assert cores.share() is None
    for _ in range(3):
        cores.look()
    assert cores.share() == pytest.approx((10 + 6 + 0) / 30)
