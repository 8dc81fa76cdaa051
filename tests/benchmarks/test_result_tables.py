"""The tables of results, made from small example records."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records
import result_tables as tables

ROOT = Path(__file__).parents[2]


def make_curve(*returns: float) -> tuple[Any, Any]:
    return np.arange(1, 1 + len(returns)) * 1000, np.array(returns)


def write(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)


@pytest.mark.parametrize("group", ["ppo", "elsewhere", "wide", "sac", "reinforce"])
def test_every_preset_has_its_minutes_and_those_of_the_peer(group: str) -> None:
    head, _, *lines = tables.make_group_table(group).splitlines()
    columns = [place for place, name in enumerate(head.split(" | ")) if "minutes" in name]
    assert len(columns) == (1 if group == "reinforce" else 2)
    for line in lines:
        assert all(float(line.split(" | ")[place]) > 0 for place in columns)


def test_minutes_lie_on_the_line_through_the_shortest_and_the_longest_runs() -> None:
    runs = [("100", "60"), ("500", "9999"), ("1000", "300"), ("1000", "180"), ("1000", "240")]
    rows = [{"steps": steps, "s": seconds} for steps, seconds in runs]
    assert tables.extend_minutes(rows, "s", 1000) == "4.0"
    assert tables.extend_minutes(rows, "s", 100) == "1.0"
    assert tables.extend_minutes(rows, "s", 550) == "2.5"
    assert tables.extend_minutes(rows, "s", 10_000) == "34"
    assert tables.extend_minutes(rows[-3:], "s", 100) == "0.40"
    assert tables.extend_minutes([], "s", 100) == ""


def test_minutes_are_those_of_the_options_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = [
        {"env": env, "steps": "1000000", "set": options, "rlflame_s": ours, "sb3_s": theirs}
        for env, options, ours, theirs in (
            ("Hopper-v5", "", "60", "600"),
            ("Hopper-v5", "--preset hopper-ppo-wide", "120", ""),
            ("Hopper-v5", "--preset mujoco-ppo-wide", "7", ""),
            ("Hopper-v5", "--algo reinforce", "180", ""),
            ("Ant-v5", "--preset hopper-ppo-wide", "1", "1"),
        )
    ]
    rates = [
        {"env": "Pendulum-v1", "side": side, "steps_per_s": rate}
        for side, rate in (("rlflame", "100"), ("sb3 1 env", "50"), ("sb3 8 envs", "1"))
    ]
    made = {"minutes.csv": minutes, "sac_pace.csv": rates}
    monkeypatch.setattr(tables, "read_records", made.__getitem__)
    groups = tables.GROUPS
    (wide,) = tables.select(groups["wide"].studies, "wide-hopper-3m")
    assert tables.measure_minutes(groups["wide"], wide, "hopper-ppo-wide") == ["6.0", "30"]
    assert tables.measure_minutes(groups["reinforce"], wide, "default-reinforce") == ["9.0"]
    assert tables.measure_minutes(groups["elsewhere"], wide, "hopper-ppo") == ["3.0", "30"]
    (pendulum,) = tables.select(groups["sac"].studies, "sac-pendulum-20k")
    assert tables.measure_minutes(groups["sac"], pendulum, "pendulum-sac") == ["3.2", "6.6"]


def test_a_control_is_the_mean_of_the_last_twentieth_of_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        {"algo": "x", "env": env, "seed": str(seed), "step": str(step), "return_mean": str(mean)}
        for seed, shift in ((0, 0.0), (1, 10.0))
        for env, step, mean in (
            ("Ant-v5", 500_000, 900.0), ("Ant-v5", 950_000, 800.0),
            ("Ant-v5", 960_000, 10.0 + shift), ("Ant-v5", 1_010_000, 30.0 + shift),
            ("Hopper-v5", 960_000, 7.0),
        )
    ]  # fmt: skip
    monkeypatch.setattr(tables, "read_records", lambda name: rows)
    (ant,) = tables.select(tables.GROUPS["ppo"].studies, "ppo-ant-1m")
    assert tables.compute_control(("", "x"), ant) == [20.0, 30.0]
    assert tables.format_mean_of_seeds([20.0, 30.0]) == "25.0 ± 7.1 (2)"


def test_a_return_is_reached_after_the_last_evaluation_below_it() -> None:
    curves = [make_curve(1, 5, 2, 6, 7), make_curve(3, 5, 2, 4, 7)]
    assert tables.find_lasting_step(curves, 4.0) == 4000
    assert tables.find_lasting_step(curves, 5.0) == 4000  # 5 is not below 5
    assert tables.find_lasting_step(curves, 2.0) == 1000
    with pytest.raises(ValueError, match="does not stay"):
        tables.find_lasting_step(curves, 7.5)
    with pytest.raises(ValueError, match="different steps"):
        tables.find_lasting_step([make_curve(1, 2), make_curve(1, 2, 3)], 1.0)


def test_the_time_to_a_return_of_records_made_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    control = {0: [10, 24, 14], 1: [6, 16, 16]}
    ours = {0: [12, 20, 40], 1: [12, 26, 40]}
    write(tmp_path, "ppo_control.csv", [
        {"algo": algo, "env": "Ant-v5", "seed": seed, "step": 100_000 * (1 + at),
         "return_mean": value + 100 * (algo != "ppo-sb3")}
        for algo in ("ppo-sb3", "ppo-zoo") for seed, values in control.items()
        for at, value in enumerate(values)
    ])  # fmt: skip
    write(tmp_path, "ppo.csv", [
        {"study": "ppo-ant-1m", "final": final, "seed": seed, "step": 100_000 * (1 + at),
         "return_mean": value - 50 * final}
        for final in (0, 1) for seed, values in ours.items() for at, value in enumerate(values)
    ])  # fmt: skip
    # 10 s and 60 s for 100,000 steps, 100 s and 960 s for a million.
    write(tmp_path, "ppo_vs_sb3.csv", [
        {"env": "Ant-v5", "steps": steps, "set": changed, "rlflame_s": ours_s, "sb3_s": theirs_s}
        for steps, changed, ours_s, theirs_s in (
            (100_000, "", 9, 60), (100_000, "", 11, 60), (100_000, "", 10, 61),
            *[(100_000, "ppo.epochs=1", 999, 999)] * 3,
            (1_000_000, "", 100, 960), (1_000_000, "", 100, ""),
        )
    ])  # fmt: skip
    # The peer reaches its best return at step 200,000, after 60 s and a ninth of the remaining 900
    # s.
    assert tables.compute_time_to_return("Ant-v5") == (20.0, 200_000, 200_000, 160.0, 20.0, 8.0)


def test_curves_come_in_the_order_of_the_seeds() -> None:
    rows = [{"seed": seed, "step": "1", "return_mean": seed} for seed in ("10", "2", "0")]
    assert [y[0] for _, y in records.group_curves(rows)] == [0.0, 2.0, 10.0]


def test_numbers_are_aligned_right_and_minus_zero_is_zero() -> None:
    rows = [("a", "-1", "1 run"), ("b", "", "none")]
    assert records.format_table(("x", "y", "z"), rows).splitlines()[1] == "|---|--:|---|"
    assert records.format_return(-0.01) == "0.0"


def test_two_studies_of_a_preset_are_two_lines_and_two_seeds_have_no_band() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "curves.py"))
    rows = [
        {"study": f"ppo-lunarlander-{steps}", "env": "lunarlander", "algo": "ppo",
         "preset": "lunarlander-ppo", "seed": str(seed), "step": str(at), "return_mean": str(seed)}
        for steps, seeds in (("500k", 2), ("1m", 3)) for seed in range(seeds) for at in (1, 2)
    ]  # fmt: skip
    short, long = script["panel"](rows, "LunarLander-v3", "").series
    assert short.label == "lunarlander-ppo, 500k (2 seeds)"
    assert (short.low, short.high) == (None, None)
    assert long.label == "lunarlander-ppo, 1m (3 seeds)"
    assert long.low is not None
    (alone,) = script["panel"](rows[:4], "LunarLander-v3", "rlflame, ").series
    assert alone.label == "rlflame, lunarlander-ppo (2 seeds)"
