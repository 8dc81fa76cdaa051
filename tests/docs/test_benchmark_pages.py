"""What docs/benchmarks.md tells is what the records beside it hold."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from published_figures import COMPARISONS

from rlflame.bench import scaling_model
from rlflame.bench.case import Case, make_sleeping_cases
from rlflame.bench.result import Side
from rlflame.config import resolve

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
PAGE = (DOCS / "benchmarks.md").read_text("utf-8")
SIDES = ("rlflame", "sb3")
#: The least share of bare `mj_step` on all cores; elsewhere of Gymnasium's bare stepping.
LEAST = {
    "hopper": 0.88,
    "halfcheetah": 0.85,
    "walker2d": 0.88,
    "ant": 0.88,
    "lunarlander": 0.75,
    "bipedalwalker": 0.75,
}


def told(head: str) -> dict[str, list[str]]:
    """The rows of the table that begins so."""
    _, found, rest = PAGE.partition(head)
    assert found, head
    body = re.match(r".*\n\|[-|]+\n((?:\|.*\n)+)", rest)[1]
    lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines())
    return {first: cells for first, *cells in lines}


def rates(fleet: str, env: str) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / "rollouts" / f"{env}_{fleet}.json").read_text("utf-8"))
    assert found["complete"]
    assert not found["busy"]
    assert found["at_work"] <= 0.1
    assert [rate["workers"] for rate in found["rates"]] == [1, 2]
    # Of today's preset, or of one with the same rollouts.
    name, _, measured = found["case"].partition(" ")
    today = resolve.read_preset(resolve.choose_preset(resolve.resolve_env_id(env), "ppo"))[
        "learning"
    ]
    then = resolve.read_preset(measured)["learning"]
    assert name == env
    assert all(then.get(part) == today.get(part) for part in ("rollout", "network"))
    assert all(len(rate["steps_per_s"]) == 5 for rate in found["rates"])
    return list(found["rates"])


def between(shares: list[float]) -> str:
    return f"{median(shares):.2f} [{min(shares):.2f}, {max(shares):.2f}]"


@pytest.mark.parametrize("fleet", ["inline", "local"])
def test_rollouts_are_those_of_their_records(fleet: str) -> None:
    head = {"inline": "| of one process alone |", "local": "| through workers |"}[fleet]
    rows = told(head)
    assert [name.partition("-")[0].lower() for name in rows] == list(LEAST)
    for name, cells in rows.items():
        expected = []
        for rate in rates(fleet, name.partition("-")[0].lower()):
            shares = rate["shares"]
            expected += [
                f"{median(rate['steps_per_s']):,.0f}",
                between(shares["gymnasium"]),
                between(shares["mj_step"]) if "mj_step" in shares else "",
            ]
        assert cells == expected, name


@pytest.mark.parametrize("env", LEAST)
def test_a_worker_leaves_the_physics_what_it_has_to(env: str) -> None:
    shares = rates("inline", env)[-1]["shares"]
    assert round(median(shares.get("mj_step", shares["gymnasium"])), 2) >= LEAST[env]


def test_what_a_critic_helper_gains_is_as_recorded() -> None:
    with (RESULTS / "ppo_companion.csv").open(newline="") as file:
        recorded = list(csv.DictReader(file))
    found = {
        kind: [float(row["rlflame_s"]) for row in recorded if row["set"].endswith(f"={kind}")]
        for kind in ("on", "off")
    }
    times = sorted(off / on for on, off in zip(found["on"], found["off"], strict=True))
    assert len(times) == 4
    assert (
        f"{median(times):.2f} times as fast as without, [{times[0]:.2f}, {times[-1]:.2f}]" in PAGE
    )
    assert f"{median(found['on']):.1f} s in the median for {median(found['off']):.1f}" in PAGE


def study(row: dict[str, str]) -> str:
    """What a pair of runs is told under."""
    return f"{row['env']}, {int(row['steps']):,} steps"


@pytest.mark.parametrize(
    ("head", "file"),
    [("| PPO with a critic helper |", "ppo_vs_sb3.csv"),
     ("| PPO before today's |", "ppo_vs_sb3_before.csv")],
)  # fmt: skip
def test_ppo_beside_stable_baselines3_is_as_recorded(head: str, file: str) -> None:
    with (RESULTS / file).open(newline="") as opened:
        recorded = [row for row in csv.DictReader(opened) if row["sb3_s"]]
    rows = told(head)
    assert set(rows) == {study(row) for row in recorded}
    for name, (count, *cells) in rows.items():
        pairs = [row for row in recorded if study(row) == name]
        assert count == str(len(pairs))
        ours, theirs = ([float(row[f"{side}_s"]) for row in pairs] for side in SIDES)
        times = sorted(b / a for a, b in zip(ours, theirs, strict=True))
        assert cells == [
            f"{median(ours):.1f} s",
            f"{median(theirs):.1f} s",
            f"{median(times):.1f}" + (f" [{times[0]:.1f}, {times[-1]:.1f}]" if pairs[1:] else ""),
            f"{median(float(row['rlflame_busy']) for row in pairs):.0%}",
            f"{max(int(row['rlflame_pss_mb']) for row in pairs)} MB",
            *(f"{median(float(r[f'{side}_return']) for r in pairs):,.0f}" for side in SIDES),
        ]
        assert [row["pair"] for row in pairs] == [str(number) for number in range(len(pairs))]
        assert all(float(row["at_work"]) < 0.5 for row in pairs)


def recorded(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_both_cores_are_at_work_for_as_long_as_recorded() -> None:
    said = re.search(
        r"at least ([\d.]+)% of the time on Hopper, ([\d.]+)% on HalfCheetah, "
        r"([\d.]+)% on Walker2d and ([\d.]+)% on Ant",
        " ".join(PAGE.split()),
    )
    shares: dict[str, list[float]] = {}
    for row in recorded("ppo_alone.csv"):
        assert row["steps"] == "1000000"
        shares.setdefault(row["env"], []).append(float(row["rlflame_all_busy"]))
    assert [*shares] == ["Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5"]
    assert {len(each) for each in shares.values()} == {5}
    assert [f"{median(each):.1%}" for each in shares.values()] == [f"{n}%" for n in said.groups()]
    assert all(median(each) >= 0.9 for each in shares.values())
    # The page says of which ones single runs lie across the mark.
    across = " and of ".join(
        f"{env.partition('-')[0]}, [{100 * min(each):.1f}, {100 * max(each):.1f}],"
        for env, each in shares.items()
        if min(each) < 0.9
    )
    assert f"single runs of {across} lie across it" in " ".join(PAGE.split())


def test_what_staleness_saves_is_as_recorded() -> None:
    rows = recorded("ppo_staleness.csv")
    stale, fresh = (
        median(float(row["rlflame_s"]) for row in rows if bool(row["set"]) == changed)
        for changed in (True, False)
    )
    assert f"300,000 steps of Hopper take {stale:.1f} s and not {fresh:.1f} (" in PAGE


def test_scaling_is_as_recorded() -> None:
    def seconds(case: str, fleet: str, workers: int) -> float:
        return median(
            float(row["seconds"])
            for row in recorded("scaling.csv")
            if (row["case"], row["backend"], row["workers"]) == (case, fleet, str(workers))
        )

    shown = told("| episode | 1: local, Flame |")
    assert list(shown) == ["1 ms", "15 ms", "50 ms", "100 ms"]
    for case, cells in shown.items():
        sides = [[seconds(case, fleet, n) for n in (1, 2, 4, 8)] for fleet in ("local", "flame")]
        alone = min(side[0] for side in sides)
        expected = [f"{here:.2f}, {there:.2f}" for here, there in zip(*sides, strict=True)]
        assert cells == expected + [f"{alone / side[-1]:.2f}" for side in sides]
    drawn = (DOCS / "images" / "scaling.svg").read_text("utf-8")
    for cells in shown.values():
        assert all(f">{times}×<" in drawn for times in cells[-2:])


def test_what_was_published_is_run_again_as_recorded() -> None:
    shown = [*told("| published | theirs: local |").values()]
    for cells, (name, theirs) in zip(shown, COMPARISONS.items(), strict=True):
        found = json.loads((RESULTS / "published" / f"{name}.json").read_text("utf-8"))
        assert found["complete"]
        assert found["at_work"] <= 0.1
        assert [side["fleet"] for side in found["cells"]] == ["local", "flame"]
        sides = [side["repetitions"] for side in found["cells"]]
        assert {run["episodes"] for side in sides for run in side} == {theirs.episodes}
        assert len({run["weights"] for side in sides for run in side}) == 1
        ours = [f"{median(run['seconds'] for run in side):.1f}" for side in sides]
        assert cells == [
            f"{theirs.local.seconds:.1f}", f"{theirs.flame.seconds:.1f}",
            f"{theirs.local.reward:.1f}, {theirs.flame.reward:.1f}",
            *ours, f"{sides[0][0]['final_return']:.1f}", str(len(sides[0])),
        ]  # fmt: skip


def test_reinforce_beside_flame_s_example_is_as_recorded() -> None:
    with (RESULTS / "reinforce_vs_flame.csv").open(newline="") as file:
        recorded = list(csv.DictReader(file))
    assert {row["episodes"] for row in recorded} == {"5000"}
    assert all(float(row["at_work"]) < 0.5 for row in recorded)
    names = ("episodes_per_s", "steps_per_s")
    rates = {
        side: [[float(row[name]) for row in recorded if row["side"] == side] for name in names]
        for side in ("example --local", "default-reinforce", "reinforce-classic")
    }
    theirs = rates["example --local"]
    expected = []
    for episodes, steps in rates.values():
        times = []
        for ours, other in zip((episodes, steps), theirs, strict=True):
            found = sorted(a / b for a, b in zip(ours, other, strict=True))
            between = f"{median(found):.1f} [{found[0]:.1f}, {found[-1]:.1f}]"
            times.append("" if ours is other else between)
        lengths = ", ".join(f"{b / a:.0f}" for a, b in zip(episodes, steps, strict=True))
        expected.append([str(len(episodes)), f"{median(episodes):.1f}", times[0],
                         f"{median(steps):,.0f}", times[1], lengths])  # fmt: skip
    shown = told("| REINFORCE, 5,000 episodes of Hopper |")
    assert list(shown) == ["the example, `--local`", "`default-reinforce`", "`reinforce-classic`"]
    assert [*shown.values()] == expected
    like_ours = zip(rates["reinforce-classic"], theirs, strict=True)
    for ours, other in like_ours:
        assert median(a / b for a, b in zip(ours, other, strict=True)) > 12


def test_the_start_is_as_recorded() -> None:
    with (RESULTS / "start.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [float(row["first_rollout_s"]) for row in rows]
    assert [(row["env"], row["start"]) for row in rows] == [("hopper", str(n)) for n in range(5)]
    assert all(float(row["first_rollout_s"]) < float(row["first_iteration_s"]) for row in rows)
    assert all(float(row["at_work"]) < 0.5 for row in rows)
    assert {row["torch"] for row in rows} == {"no"}
    assert (
        f"`rlflame train --env hopper` takes {median(times):.2f} s [{min(times):.2f}, "
        f"{max(times):.2f}], the median of five starts on an idle machine, and none of its "
        "processes has loaded torch by then" in " ".join(PAGE.split())
    )


def test_updates_are_those_of_their_record() -> None:
    with (RESULTS / "ppo_update.csv").open(newline="") as file:
        record = list(csv.DictReader(file))
    rows, saved = told("| environment, minibatch | an update |"), []
    assert len(rows) == len(record) == 6
    for row in record:
        assert float(row["others_before"]) <= 0.1
        name = f"{resolve.resolve_env_id(row['env'])}, {row['minibatch']}"
        parts = ("update_us", "products_us", "matmul_us", "autograd_us")
        update, products, matmul, autograd = (float(row[part]) for part in parts)
        saved.append(1.0 - update / matmul)
        assert rows[name] == [
            f"{update:.0f}", f"{products:.0f}", f"{products / update:.0%}", f"{matmul:.0f}",
            f"{autograd:.0f}", f"{autograd / update:.1f}",
        ]  # fmt: skip
    assert f"saves between {100 * min(saved):.0f} and {max(saved):.0%} of an update" in PAGE


def test_several_learners_are_those_of_their_record() -> None:
    found = json.loads((RESULTS / "learners.json").read_text("utf-8"))
    assert found["complete"]
    assert found["same_bits"]
    assert not found["busy"]
    alone, two = found["sides"]
    assert (alone["learners"], two["learners"]) == (1, 2)
    assert len(two["runs"]) == 5
    gain = two["speedup_learning"]
    exchange = median(run["exchange_s"] / run["learn_s"] for run in two["runs"])
    assert (
        f"{gain['value']:.2f} times as fast [{gain['low']:.2f}, {gain['high']:.2f}]; "
        f"{exchange:.0%} of learning is exchange"
    ) in PAGE


def test_what_a_task_costs_is_fitted_to_the_record() -> None:
    """And from when executors would pay, as far as that is known."""
    cases: dict[str, Case] = {}
    cells: dict[tuple[str, str, int], Side] = {}
    with (RESULTS / "scaling.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            name, fleet, workers = row["case"], row["backend"], int(row["workers"])
            if name not in cases:
                (cases[name],), _ = make_sleeping_cases(
                    [float(name.split()[0])], 8, episodes=int(row["episodes"])
                )
            labels = {"case": name, "fleet": fleet, "workers": workers, "capacity": workers}
            cell = cells.setdefault((name, fleet, workers), Side("", labels))
            cell.repetitions.append({part: float(row[part]) for part in ("seconds", "learn_s")})
    local, flame = scaling_model.fit_overheads([*cases.values()], [*cells.values()])
    found = scaling_model.compute_break_even_s(local, flame, (2, 8), 100)
    assert found is not None
    said = " ".join(PAGE.split())
    assert (
        f"a task costs {1e3 * local.task_s:.1f} ms beside its episode on local workers and "
        f"{1e3 * flame.task_s:.1f} ms on executors, and an iteration "
        f"{1e3 * local.iteration_s:.0f} ms and {1e3 * flame.iteration_s:.0f} ms"
    ) in said
    assert found.low == 0.0
    assert (
        f"from episodes of {1e3 * found.value:.1f} ms on, or from anything up to "
        f"{1e3 * found.high:.1f} ms"
    ) in said
