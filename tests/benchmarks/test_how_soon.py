"""How soon a return is reached: the script on records made by hand, and the pages by the script."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "docs" / "results.md").read_text("utf-8")


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "time_to_return.py"))


def curve(*returns: float) -> tuple[Any, Any]:
    return np.arange(1, 1 + len(returns)) * 1000, np.array(returns)


def write(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)


def records(folder: Path, ours: dict[int, list[float]]) -> None:
    """Theirs has 20 at 200,000 in the mean of its seeds, and 15 in the end."""
    control = {0: [10, 24, 14], 1: [6, 16, 16]}
    write(folder, "ppo_control.csv", [
        {"algo": algo, "env": "Ant-v5", "seed": seed, "step": 100_000 * (1 + at),
         "return_mean": value + 100 * (algo != "ppo-sb3")}
        for algo in ("ppo-sb3", "ppo-zoo") for seed, values in control.items()
        for at, value in enumerate(values)
    ])  # fmt: skip
    write(folder, "ppo.csv", [
        {"study": "ppo-ant-1m", "final": final, "seed": seed, "step": 100_000 * (1 + at),
         "return_mean": value - 50 * final}
        for final in (0, 1) for seed, values in ours.items() for at, value in enumerate(values)
    ])  # fmt: skip
    # 10 s and 60 s for 100,000 steps, 100 s and 960 s for a million.
    write(folder, "ppo_vs_sb3.csv", [
        {"env": "Ant-v5", "steps": steps, "set": changed, "rlflame_s": ours_s, "sb3_s": theirs_s}
        for steps, changed, ours_s, theirs_s in (
            (100_000, "", 9, 60), (100_000, "", 11, 60), (100_000, "", 10, 61),
            *[(100_000, "ppo.epochs=1", 999, 999)] * 3,
            (1_000_000, "", 100, 960), (1_000_000, "", 100, ""),
        )
    ])  # fmt: skip


def test_for_good_is_after_the_last_evaluation_below(script) -> None:
    reached_at = script["reached_at"]
    passes_falls_and_passes = [curve(1, 5, 2, 6, 7), curve(3, 5, 2, 4, 7)]
    assert reached_at(passes_falls_and_passes, 4.0) == 4000
    assert reached_at(passes_falls_and_passes, 5.0) == 4000  # 5 is not below 5
    assert reached_at(passes_falls_and_passes, 2.0) == 1000
    assert reached_at(passes_falls_and_passes, 7.5) is None
    with pytest.raises(SystemExit, match="different steps"):
        reached_at([curve(1, 2), curve(1, 2, 3)], 1.0)


def test_a_row_of_records_made_by_hand(script, tmp_path) -> None:
    records(tmp_path, {0: [12, 20, 40], 1: [12, 26, 40]})
    script["row"].__globals__["RESULTS"] = tmp_path
    # Theirs is best at 200,000: 60 s and a ninth of the 900 s to a million; ours 10 s and 10 s.
    assert script["row"]("Ant-v5") == (
        "Ant-v5", "20 (2)", "200,000", "2.7 min", "200,000", "20 s", "8", "1.7 min", "16.0 min",
    )  # fmt: skip


def test_a_return_that_is_not_kept_is_not_there(script, tmp_path) -> None:
    records(tmp_path, {0: [30, 20, 19]})
    script["row"].__globals__["RESULTS"] = tmp_path
    assert script["row"]("Ant-v5")[4:7] == ("not yet", "", "")
    with pytest.raises(SystemExit, match="Hopper-v5 has no evaluations on record"):
        script["row"]("Hopper-v5")


@pytest.mark.parametrize("words", [[], ["--late"]])
def test_the_page_has_what_the_script_prints(script, capsys, monkeypatch, words) -> None:
    monkeypatch.setattr(sys, "argv", ["time_to_return.py", *words])
    script["main"]()
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 6
    assert printed in RESULTS


def test_late_is_the_last_twentieth_of_ours_and_of_theirs_what_comes_after(script) -> None:
    for env in script["ENVS"]:
        theirs, ours = script["both"](env)
        assert (len(ours), len(theirs)) == (10, 5)
    ours = [(np.arange(1, 41) * 25_000, np.array([0.0] * 38 + [39.0, 41.0]))] * 3
    theirs = [(np.array([900_000, 950_000, 950_272, 1_000_000]), np.array([9.0, 9.0, 1.0, 3.0]))]
    script["late"].__globals__["both"] = lambda env: (theirs * 3, ours)
    assert script["late"]("Ant-v5") == ("Ant-v5", "40 [40, 40]", "2 [2, 2]")


def test_seeds_come_in_order_whichever_was_over_first(script) -> None:
    lines = [{"seed": seed, "step": "1", "return_mean": seed} for seed in ("10", "2", "0")]
    assert [y[0] for _, y in script["curves"](lines)] == [0.0, 2.0, 10.0]
