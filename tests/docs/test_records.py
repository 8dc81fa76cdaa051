"""The claims of the pages, computed from the records in a second way."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pytest
from records import format_return
from result_tables import GROUPS, compute_tails
from speed_tables import make_scaling_table

from rlflame.config import preset_catalog
from rlflame.statistics import compare
from rlflame.storage import checkpoint
from rlflame.terminal_text import format_count

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
IMAGES = ROOT / "docs" / "images"
#: The lowest allowed share of bare `mj_step` on two cores. For Box2D, of Gymnasium's stepping.
LOWEST_SHARES = {"hopper": 0.88, "halfcheetah": 0.85, "walker2d": 0.88, "ant": 0.88,
                 "lunarlander": 0.75, "bipedalwalker": 0.75}  # fmt: skip
SHIPPED = {
    "cartpole": ("ppo.csv", "ppo-cartpole-100k"),
    "lunarlander": ("ppo.csv", "ppo-lunarlander-500k"),
    "pendulum": ("sac.csv", "sac-pendulum-20k"),
    **{env: ("ppo.csv", f"ppo-{env}-1m") for env in ("hopper", "halfcheetah", "walker2d", "ant")},
}


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def read_ends(record: str, study: str) -> dict[int, float]:
    rows = (row for row in read(record) if (row["study"], row["final"]) == (study, "1"))
    return dict(sorted((int(row["seed"]), float(row["return_mean"])) for row in rows))


def compute_middle(values: list[float]) -> float:
    """The mean of the middle half, for five and for ten seeds."""
    x = sorted(values)
    if len(x) == 5:
        return (0.75 * x[1] + x[2] + 0.75 * x[3]) / 2.5
    return (0.5 * x[2] + sum(x[3:7]) + 0.5 * x[7]) / 5


@pytest.mark.parametrize("name", ["ppo", "elsewhere", "wide", "sac", "reinforce"])
def test_a_preset_reaches_its_floor_and_its_row_is_that_of_its_record(name: str) -> None:
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    group = GROUPS[name]
    for study in group.studies:
        ends = read_ends(group.record, study.name)
        assert [*ends] == list(range(len(ends)))
        rows = [
            row for row in read(group.record) if (row["study"], row["final"]) == (study.name, "0")
        ]
        tails = []
        for seed in ends:
            curve = [float(row["return_mean"]) for row in rows if int(row["seed"]) == seed]
            tails.append(mean(curve[-math.ceil(len(curve) / 20) :]))
        assert mean(tails) >= study.floor
        assert compute_tails(group.record, study) == pytest.approx(tails)
        middle, tail = (
            format_return(value) for value in (compute_middle([*ends.values()]), mean(tails))
        )
        cells = (f"| `{rows[0]['preset']}` | {middle} [", f"| {tail} ± ")
        assert any(all(cell in line for cell in cells) for line in page.splitlines()), cells


def test_claims_about_single_seeds_of_ppo() -> None:
    hopper, cheetah = (read_ends("ppo.csv", f"ppo-{env}-1m") for env in ("hopper", "halfcheetah"))
    best = max(float(row["mean"]) for row in read("peers.csv") if row["study"] == "ppo-hopper-1m")
    assert sum(end > best for end in hopper.values()) == 4
    ends = sorted(cheetah.values())
    assert np.diff(ends).argmax() == 4  # two groups of five
    assert ends[4] < compute_middle(ends) < ends[5]


def test_environments_with_choices_reach_their_goals() -> None:
    for study in GROUPS["spaces"].studies:
        ends = read_ends("spaces.csv", study.name)
        assert [*ends] == [0, 1, 2]
        assert study.floor is not None
        assert mean(ends.values()) >= study.floor


def test_every_tested_environment_is_exact_or_refused_with_a_message() -> None:
    rows = read("environments.csv")
    assert len({row["package"] for row in rows}) == 8
    for row in rows:
        if row["trained"] == "yes":
            assert (row["resumed"], row["evaluated"]) == ("equal", "yes"), row["environment"]
        else:
            assert row["trained"] == "refused" or row["gymnasium"].startswith("fails"), row
            assert "hint: " in row["message"], row["environment"]


def test_reacher_gets_the_better_preset() -> None:
    sides = (read_ends("untuned.csv", f"{kind}-reacher") for kind in ("default", "family"))
    assert compare(*(np.array([*side.values()]) for side in sides)).difference.low > 0
    assert preset_catalog.choose_preset("Reacher-v5", "ppo") == "default-ppo"


def test_every_published_result_has_a_study_and_a_source() -> None:
    studies = {study.name for group in GROUPS.values() for study in group.studies}
    peers = read("peers.csv")
    assert len(peers) > 50
    for peer in peers:
        assert peer["study"] in studies
        assert re.fullmatch(
            r"[\w.-]+/[\w.-]+@[0-9a-f]{7}:\S+|[\w.-]+\.github\.io/\S+", peer["source"]
        )
        assert peer["measure"] in ("final", "there", "P2", "P3", "P4")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_is_one_of_the_seeds_on_record(name: str) -> None:
    """The first twenty episodes are those with which the seed was evaluated."""
    record, study = SHIPPED[name]
    shipped = checkpoint.load(ROOT / "checkpoints" / f"{name}.safetensors")
    seed = shipped.recipe.learning.seed
    ends = read_ends(record, study)
    assert mean(shipped.best.returns[:20]) == pytest.approx(ends[seed], rel=1e-5)
    page = (ROOT / "checkpoints" / "README.md").read_text("utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [{name}.safetensors]"))
    rank = 1 + sum(end > ends[seed] for end in ends.values())
    assert (f"| {rank} of 10 |" in row) == study.endswith("-1m")


@pytest.mark.parametrize("algorithm", ["sac", "ppo"])
def test_a_picture_has_a_line_for_each_side_of_its_record(algorithm: str) -> None:
    """The SVG contains text, so each label shows the number of seeds."""
    picture = (IMAGES / f"{algorithm}.svg").read_text("utf-8")
    group, expected = GROUPS[algorithm], []
    for study in group.studies:
        id = preset_catalog.resolve_env_id(study.env)
        assert f">{id}<" in picture
        rows = [row for row in read(f"{algorithm}.csv") if row["env"] == study.env]
        for preset in {row["preset"] for row in rows}:
            seeds = {row["seed"] for row in rows if row["preset"] == preset}
            expected.append(f"rlflame, {preset} ({format_count(len(seeds), 'seed')})")
        seeds = {row["seed"] for row in read(f"{algorithm}_control.csv") if row["env"] == id}
        expected.append(f"stable-baselines3 ({format_count(len(seeds), 'seed')})")
    for line in expected:
        assert picture.count(f">{line}<") == expected.count(line), line


def read_json(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert result["complete"]
    assert not result["busy"]
    assert result["at_work"] <= 0.1
    return result


@pytest.mark.parametrize("env", LOWEST_SHARES)
@pytest.mark.parametrize("fleet", ["inline", "local"])
def test_rollouts_are_those_of_the_preset_and_fast_enough(fleet: str, env: str) -> None:
    result = read_json(RESULTS / "rollouts" / f"{env}_{fleet}.json")
    name, _, preset = result["case"].partition(" ")
    current = preset_catalog.choose_preset(preset_catalog.resolve_env_id(env), "ppo")
    measured, today = (preset_catalog.read_preset(name)["learning"] for name in (preset, current))
    assert name == env
    assert all(measured.get(part) == today.get(part) for part in ("rollout", "network"))
    assert [rate["workers"] for rate in result["rates"]] == [1, 2]
    assert all(len(rate["steps_per_s"]) == 5 for rate in result["rates"])
    shares = result["rates"][1]["shares"]
    share = median(shares.get("mj_step", shares["gymnasium"]))
    assert fleet == "local" or round(share, 2) >= LOWEST_SHARES[env]


def test_timed_runs_had_the_machine_for_themselves() -> None:
    for name in ("ppo_vs_sb3.csv", "ppo_alone.csv", "minutes.csv", "start.csv",
                 "reinforce_vs_flame.csv", "ppo_update.csv"):  # fmt: skip
        for row in read(name):
            assert float(row.get("at_work") or row["others_before"]) <= 0.1, name
    assert {row["torch"] for row in read("start.csv")} == {"no"}
    for env in {row["env"] for row in read("ppo_alone.csv")}:
        shares = [float(row["rlflame_all_busy"]) for row in read("ppo_alone.csv")
                  if row["env"] == env]  # fmt: skip
        assert len(shares) == 5
        assert median(shares) >= 0.9


def test_flame_is_slower_on_one_machine_and_learns_the_same() -> None:
    seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in read("scaling.csv"):
        sides = seconds.setdefault((row["case"], row["workers"]), {})
        sides.setdefault(row["backend"], []).append(float(row["seconds"]))
    for path in (RESULTS / "published").glob("*.json"):
        local, flame = (side["repetitions"] for side in read_json(path)["cells"])
        assert len({run["weights"] for run in [*local, *flame]}) == 1
        seconds[path.stem, ""] = {"local": [run["seconds"] for run in local],
                                  "flame": [run["seconds"] for run in flame]}  # fmt: skip
    assert len(seconds) == 4 * 4 + 3
    assert all(median(sides["flame"]) > median(sides["local"]) for sides in seconds.values())
    assert read_json(RESULTS / "learners.json")["same_bits"]


def test_the_picture_of_scaling_has_the_speed_ups_of_the_table() -> None:
    picture = (IMAGES / "scaling.svg").read_text("utf-8")
    for row in make_scaling_table().splitlines()[2:]:
        for speed_up in row.strip("| ").split(" | ")[-2:]:
            assert f">{speed_up}×<" in picture
