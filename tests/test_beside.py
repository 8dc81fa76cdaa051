"""What others have beside the presets: the page is what the script prints from the records."""

from __future__ import annotations

import csv
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
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
    assert "\n".join(quoted) + "\n\n" in PAGE
    several = {
        study.name for study in script["GROUPS"][group].studies if len(script["peers"](study)) > 1
    }
    assert len(quoted) == (len(several) + 2 if several else 0)


@pytest.mark.parametrize("group", ["ppo", "elsewhere", "wide", "sac", "reinforce"])
def test_every_preset_says_its_minutes_and_those_of_the_peer(group, script) -> None:
    head, _, *lines = script["table"](group)
    columns = [place for place, name in enumerate(head.split(" | ")) if name.endswith("minutes")]
    assert len(columns) == (1 if group == "reinforce" else 2)
    for line in lines:
        assert all(float(line.split(" | ")[place]) > 0 for place in columns)


def test_minutes_are_those_of_the_longest_runs_as_many_times_as_there_are_steps(script) -> None:
    runs = [("100", "60"), ("1000", "300"), ("1000", "180"), ("1000", "240")]
    rows = [{"steps": steps, "s": seconds} for steps, seconds in runs]
    assert script["scaled"](rows, "s", 1000) == "4.0"
    assert script["scaled"](rows, "s", 10_000) == "40"
    assert script["scaled"](rows, "s", 100) == "0.40"


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
