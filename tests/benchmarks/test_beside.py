"""What others have beside the presets: the page is what the script prints from the records."""

from __future__ import annotations

import csv
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text("utf-8")


@pytest.fixture
def script(monkeypatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return runpy.run_path(str(ROOT / "benchmarks" / "beside.py"))


@pytest.mark.parametrize("group", ["ppo", "elsewhere", "untuned", "wide", "sac", "reinforce"])
def test_the_page_has_what_the_script_prints(group, script) -> None:
    lines, quoted = script["table"](group), script["quoted"](group)
    assert len(lines) > 4
    assert "\n".join(lines) + "\n\n" in PAGE
    if quoted:
        assert "\n".join(quoted) + "\n\n" in PAGE
    several = {
        study.name for study in script["GROUPS"][group].studies if len(script["peers"](study)) > 1
    }
    assert len(quoted) == (len(several) + 2 if several else 0)


@pytest.mark.parametrize("group", ["ppo", "elsewhere", "wide", "sac", "reinforce"])
def test_every_preset_says_its_minutes_and_those_of_the_peer(group, script) -> None:
    head, _, *lines = script["table"](group)
    columns = [place for place, name in enumerate(head.split(" | ")) if "minutes" in name]
    assert len(columns) == (1 if group == "reinforce" else 2)
    for line in lines:
        assert all(float(line.split(" | ")[place]) > 0 for place in columns)


def test_minutes_are_on_the_line_through_the_shortest_and_the_longest_runs(script) -> None:
    runs = [("100", "60"), ("500", "9999"), ("1000", "300"), ("1000", "180"), ("1000", "240")]
    rows = [{"steps": steps, "s": seconds} for steps, seconds in runs]
    assert script["extended"](rows, "s", 1000) == "4.0"
    assert script["extended"](rows, "s", 100) == "1.0"
    assert script["extended"](rows, "s", 550) == "2.5"
    assert script["extended"](rows, "s", 10_000) == "34"
    assert script["extended"](rows[-3:], "s", 100) == "0.40"
    assert script["extended"]([], "s", 100) == ""


def test_minutes_are_of_what_the_group_names_and_theirs_of_their_pairs(script) -> None:
    made = [
        {"env": env, "steps": "1000000", "set": words, "rlflame_s": ours, "sb3_s": theirs}
        for env, words, ours, theirs in (
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
    groups, taken = script["GROUPS"], script["taken"]
    taken.__globals__["records"] = {"minutes.csv": made, "sac_pace.csv": rates}.__getitem__
    (wide,) = (study for study in groups["wide"].studies if study.name == "wide-hopper-3m")
    assert taken(groups["wide"], wide, "hopper-ppo-wide") == ("6.0", "30")
    assert taken(groups["reinforce"], wide, "default-reinforce") == ("9.0", "30")
    assert taken(groups["elsewhere"], wide, "hopper-ppo") == ("3.0", "30")
    (pendulum,) = (study for study in groups["sac"].studies if study.name == "sac-pendulum-20k")
    assert taken(groups["sac"], pendulum, "pendulum-sac") == ("3.2", "6.6")


def test_the_page_has_the_way_of_sac_that_the_script_prints(script) -> None:
    assert "\n".join(script["along"]()) + "\n\n" in PAGE


def test_every_published_figure_is_in_a_table_and_has_a_source(script) -> None:
    with (ROOT / "docs" / "results" / "peers.csv").open(newline="") as file:
        peers = list(csv.DictReader(file))
    assert len(peers) > 50
    assert {peer["study"] for peer in peers} <= {
        study.name for group in script["GROUPS"].values() for study in group.studies
    }
    for peer in peers:
        assert re.fullmatch(
            r"[\w.-]+/[\w.-]+@[0-9a-f]{7}:\S+|[\w.-]+\.github\.io/\S+", peer["source"]
        )
        assert peer["measure"] in ("final", "there", "P2", "P3", "P4")
        assert script["peer"](peer) in PAGE


def test_the_mean_of_a_control_is_of_the_last_twentieth_of_the_steps(script) -> None:
    made = [
        {"algo": "x", "env": "e", "seed": str(seed), "step": str(step), "return_mean": str(mean)}
        for seed, shift in ((0, 0.0), (1, 10.0))
        for step, mean in ((50, 900.0), (95, 800.0), (96, 10.0 + shift), (101, 30.0 + shift))
    ]
    script["control"].__globals__["records"] = lambda name: made
    assert script["control"]("", "x", "e", 100) == "25.0 ± 7.1 (2)"
    assert script["control"]("", "x", "another", 100) == ""


def test_how_many_of_hoppers_seeds_pass_the_best_published(script) -> None:
    best = max(
        float(peer["mean"])
        for peer in script["records"]("peers.csv")
        if peer["study"] == "ppo-hopper-1m"
    )
    ends = [
        float(row["return_mean"])
        for row in script["records"]("ppo.csv")
        if (row["study"], row["final"]) == ("ppo-hopper-1m", "1")
    ]
    assert len(ends) == 10
    assert np.mean(ends) < best
    assert sum(end > best for end in ends) == 4
    assert "above the mean of ours, and four of our ten end above it" in " ".join(PAGE.split())


def test_what_the_best_of_theirs_has_is_on_record(script) -> None:
    said = re.search(
        r"has ([\d,]+) on Hopper, ([\d,]+) on Walker2d, ([\d,]+) on Ant and ([\d,]+) on Half",
        " ".join(PAGE.split()),
    )
    assert said is not None
    best = []
    for env in ("Hopper-v5", "Walker2d-v5", "Ant-v5", "HalfCheetah-v5"):
        lines = [row for row in script["records"]("ppo_control.csv") if row["env"] == env]
        late = [y[x > 950_000].mean() for x, y in script["curves"](lines)]
        best.append(f"{max(late):,.0f}")
    assert list(said.groups()) == best


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
    for row in rows:
        row["preset"] = "lunarlander-ppo" if row["study"].endswith("1m") else "default-ppo"
    before, today = script["panel"](rows, "LunarLander-v3", "rlflame, ").series
    assert (before.name, today.name) == ("rlflame, default-ppo", "rlflame, ")
    assert alone.name == "rlflame, "  # beside others ours has one colour in all panels
    assert (short.name, long.name) == ("lunarlander-ppo", "lunarlander-ppo")
