"""A page for each algorithm: every metric explained, every number that of its data and command."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median

import numpy as np
import pytest
from commands import TINY, TINY_REINFORCE, TINY_SAC, rlflame

from rlflame.config.resolve import choose_preset
from rlflame.statistics import (
    FEWEST_SEEDS,
    compare,
    compute_iqm_interval,
    compute_mean_std,
    compute_tail_mean,
    find_best_mean,
)
from rlflame.storage import checkpoint
from rlflame.storage.metrics import NAMES
from rlflame.storage.sweep_folder import parse_seeds
from rlflame.terminal_text import format_count

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUNS = {
    "ppo": ("--env", "cartpole", *TINY, "--steps", "256", "--set", "ppo.clip_range_value=0.2"),
    "reinforce": ("--env", "pendulum", "--algo", "reinforce", *TINY_REINFORCE, "--iterations", "2",
                  "--set", "evaluation.every_steps=64", "--set", "evaluation.episodes=2"),
    "sac": ("--env", "pendulum", "--algo", "sac", *TINY_SAC),
}  # fmt: skip


def page(algorithm: str) -> str:
    return (DOCS / "algorithms" / f"{algorithm}.md").read_text("utf-8")


def section(text: str, title: str) -> str:
    _, found, rest = text.partition(f"# {title}\n")
    assert found, f"no section {title}"
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of a page's tables, without heads and rules."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def named(text: str) -> set[str]:
    return {name for first, *_ in rows(text) for name in re.findall(r"`(\w+)`", first)}


def table(name: str) -> list[dict[str, str]]:
    with (DOCS / "results" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def finals(data: str, study: str, column: str = "return_mean", seeds: int = 5) -> list[float]:
    """Of the first seeds, in their order."""
    found = {
        int(row["seed"]): float(row[column])
        for row in table(data)
        if row["study"] == study and row["final"] == "1"
    }
    assert set(found) == {*range(seeds)}, study
    return [found[seed] for seed in range(seeds)]


def middle(five: list[float]) -> float:
    """The middle half of five is the third, and three quarters of its neighbours."""
    _, low, third, high, _ = sorted(five)
    return (0.75 * low + third + 0.75 * high) / 2.5


@pytest.mark.parametrize("algorithm", RUNS)
def test_a_page_has_its_parts(algorithm):
    text = page(algorithm)
    for title in ("Overview", "Metrics", "Details that matter", "Where others differ", "Results"):
        assert section(text, title).strip()
    assert re.search(r"^    \S.* = |^    \S+ +\S.*\(", section(text, "Overview"), re.MULTILINE)


@pytest.mark.parametrize("algorithm", RUNS)
def test_every_metric_that_is_logged_is_explained(algorithm, tmp_path):
    spoken = rlflame("train", *RUNS[algorithm], "--out", tmp_path / "run")
    assert spoken.code == 0, spoken.err
    record = (tmp_path / "run" / "metrics.jsonl").read_text()
    logged = {name for line in record.splitlines() for name in json.loads(line)}
    assert len(logged) > 15
    every = named(section((DOCS / "json.md").read_text("utf-8"), "Metrics of every run"))
    own = named(section(page(algorithm), "Metrics"))
    assert logged - every - own == set()
    # And nothing is explained that is not there; choices have no deviation.
    assert own - logged <= {"std"}
    assert every | own <= {*NAMES, "steps"}


def tails(data: str, study: str) -> np.ndarray:
    """P4 of each seed, in their order."""
    seen: dict[int, list[float]] = {}
    for row in table(data):
        if (row["study"], row["final"]) == (study, "0"):
            seen.setdefault(int(row["seed"]), []).append(float(row["return_mean"]))
    return np.array([compute_tail_mean(np.array(seen[seed])) for seed in sorted(seen)])


def test_what_a_growing_view_is_said_to_do_is_as_recorded() -> None:
    page = " ".join((DOCS / "results.md").read_text("utf-8").split())
    grown, steady = (
        tails("ppo.csv", "ppo-walker2d-1m"),
        tails("ppo_earlier.csv", "ppo-walker2d-1m-steady"),
    )
    before = finals("ppo_earlier.csv", "ppo-walker2d-1m-steady", seeds=10)
    middle = compute_iqm_interval([np.array(before)])
    assert (
        f"had a P4 of {steady.mean():,.0f} ± {steady.std(ddof=1):,.0f} and an IQM of "
        f"{middle.value:,.0f} [{middle.low:,.0f}, {middle.high:,.0f}]"
    ) in page
    ends = finals("ppo.csv", "ppo-walker2d-1m", seeds=10)
    assert f"none ends below {min(ends):,.0f} any more: five of the ten" in page
    assert (grown > steady).sum() == 5
    assert [sum(end > 5_000 for end in each) for each in (ends, before)] == [1, 3]
    now, then = (
        np.concatenate([ten, tails("tuning.csv", f"walker2d-{study}")])
        for ten, study in ((grown, "late300"), (steady, "today"))
    )
    assert (
        f"twenty have a P4 of {now.mean():,.0f} ± {now.std(ddof=1):,.0f} where they had "
        f"{then.mean():,.0f} ± {then.std(ddof=1):,.0f}, eleven of them more"
    ) in page
    assert (now > then).sum() == 11
    drawn = np.random.default_rng(0).integers(0, len(now), (20_000, len(now)))

    def beyond_chance(of: Callable[[np.ndarray], np.ndarray], sign: int) -> str:
        """Of seeds drawn in pairs, as the first half of each is one training."""
        low, high = np.quantile(sign * (of(now[drawn]) - of(then[drawn])), (0.025, 0.975))
        assert low > 0.0
        gained = sign * (of(now[None]) - of(then[None]))[0]
        return f"{gained:,.0f} [{low:,.0f}, {high:,.0f}]"

    def worst_quarter(returns: np.ndarray) -> np.ndarray:
        return np.sort(returns)[:, : len(now) // 4].mean(axis=1)

    def deviation(returns: np.ndarray) -> np.ndarray:
        return returns.std(axis=1, ddof=1)

    assert (
        f"the worst quarter of the twenty has a P4 of {worst_quarter(now[None])[0]:,.0f} in the "
        f"mean where it had {worst_quarter(then[None])[0]:,.0f}, which is "
        f"{beyond_chance(worst_quarter, 1)} more, and their deviation is "
        f"{beyond_chance(deviation, -1)} less"
    ) in page
    error = (now - then).std(ddof=1) / len(now) ** 0.5
    gain = compare(now, then).difference
    assert (
        f"a seed gains {(now - then).mean():.0f} in the mean, with a standard error of "
        f"{error:.0f}, and the IQM of their P4 {gain.value:.0f} [{gain.low:.0f}, {gain.high:.0f}]"
    ) in page
    drawn = np.random.default_rng(0).choice(now, (20_000, len(now))).mean(axis=1)
    low, high = re.search(r"may as well lie between ([\d,]+) and ([\d,]+), and", page).groups()
    said = [float(end.replace(",", "")) for end in (low, high)]
    assert said == pytest.approx(np.quantile(drawn, (0.025, 0.975)), abs=15)
    early = tails("ppo_earlier.csv", "ppo-walker2d-1m")
    assert f"had a P4 of {early.mean():,.0f} ± {early.std(ddof=1):,.0f} (`ppo-walker2d" in page
    cheetah = tails("tuning.csv", "halfcheetah-late300-0to9") - tails(
        "ppo.csv", "ppo-halfcheetah-1m"
    )
    assert (cheetah < 0).sum() == 9
    assert f"nine of ten seeds and {-cheetah.mean():.0f} in the mean of P4" in page


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
def test_returns_over_seeds_are_those_of_the_data_and_each_has_its_command(algorithm):
    found = [row for row in rows(section(page(algorithm), "Results")) if len(row) == 5]
    assert found
    for _, iqm, interval, worst, command in found:
        group, study = re.fullmatch(
            r"`python benchmarks/learning\.py (ppo|long) ([\w-]+) --seeds 0-9`", command
        ).groups()
        record = {"ppo": "ppo.csv", "long": "reinforce_long.csv"}[group]
        ten = finals(record, study, seeds=10)
        assert worst == f"{min(ten):.1f}"
        ends = compute_iqm_interval([np.array(ten)])
        assert iqm == f"{ends.value:.1f}"
        assert interval == f"[{ends.low:.1f}, {ends.high:.1f}]"


def test_what_the_family_had_as_it_began_is_on_record():
    page = " ".join((DOCS / "results.md").read_text("utf-8").split())
    for env in ("Hopper", "HalfCheetah", "Walker2d"):
        five = compute_iqm_interval([np.array(finals("ppo_first.csv", f"ppo-{env.lower()}-1m"))])
        assert f"{five.value:,.0f} [{five.low:,.0f}, {five.high:,.0f}] on {env}" in page


def test_the_default_and_the_classic_of_reinforce_are_those_of_the_data():
    found = [row for row in rows(section(page("reinforce"), "Results")) if len(row) == 4]
    assert len(found) == 6
    for _, study, exploring, without in found:
        name = study.strip("`")
        assert exploring == f"{mean(finals('reinforce.csv', name, 'exploring_return')):.1f}"
        five = finals("reinforce.csv", name)
        assert without == f"{middle(five):.1f} ({min(five):.1f})"


def test_what_is_said_of_sac_is_what_was_recorded():
    text = section(page("sac"), "Results")
    record = checkpoint.load(ROOT / "checkpoints" / "pendulum.safetensors").best
    said = f"{record.mean:.1f}, 95% interval [{record.low:.1f}, {record.high:.1f}]"
    assert said in text
    results = (DOCS / "results.md").read_text("utf-8")
    ratios, shown = [], {cells[0]: cells[1:] for cells in rows(section(results, "Speed"))}
    for environment in ("hopper", "halfcheetah"):
        recorded = table(f"sac_vs_sb3_{environment}.csv")
        for threads in ("1", "2"):
            rates: dict[str, list[float]] = {}
            for row in recorded:
                if row["threads"] == threads:
                    rates.setdefault(row["side"], []).append(float(row["updates_per_s"]))
            ours, one, eight, limit = (
                median(rates[side]) for side in ("rlflame", "sb3 1 env", "sb3 8 envs", "limit")
            )
            ratios.append(ours / max(one, eight))
            assert shown[f"{recorded[0]['env']}, {threads}"] == [
                *(f"{rate:.0f}" for rate in (ours, one, eight)),
                f"{ratios[-1]:.2f}",
                f"{ours / limit:.0%}",
            ]
    said = f"{min(ratios):.1f} to {max(ratios):.1f} times as"
    assert said in text
    assert said in (DOCS / "benchmarks.md").read_text("utf-8")


def test_what_is_said_of_the_pace_of_sac_s_presets_is_what_was_recorded():
    rates: dict[str, dict[str, list[float]]] = {}
    for row in table("sac_pace.csv"):
        sides = rates.setdefault(row["env"].removesuffix("-v5"), {})
        sides.setdefault(row["side"], []).append(float(row["steps_per_s"]))
    ratio = {env: median(s["rlflame"]) / median(s["sb3 1 env"]) for env, s in rates.items()}
    said = (
        f"they take steps {ratio['Hopper']:.1f} (Hopper), {ratio['Walker2d']:.1f} (Walker2d) and "
        f"{ratio['Ant']:.1f} (Ant) times as fast as stable-baselines3, and HalfCheetah, which has "
        f"the family, {ratio['HalfCheetah']:.1f} times."
    )
    assert said in " ".join((DOCS / "results.md").read_text("utf-8").split())
    said = f"steps {min(ratio.values()):.1f} to {max(ratio.values()):.1f} times"
    assert said in section(page("sac"), "Results")
    assert said in (DOCS / "benchmarks.md").read_text("utf-8")


#: Record and section of the page, and the studies of its table in their order.
STUDIES = {
    ("sac", "SAC"): [
        "sac-pendulum-20k",
        "sac-halfcheetah-300k",
        "sac-hopper-300k",
        "sac-ant-300k",
        "sac-walker2d-300k",
    ],
    ("ppo", "PPO on MuJoCo"): [
        "ppo-hopper-1m",
        "ppo-halfcheetah-1m",
        "ppo-walker2d-1m",
        "ppo-ant-1m",
    ],
    ("ppo", "PPO elsewhere"): [
        "ppo-cartpole-100k",
        "ppo-pendulum-100k",
        "ppo-mountaincarcontinuous-100k",
        "ppo-lunarlander-500k",
        "ppo-lunarlander-1m",
        "ppo-swimmer-1m",
    ],
    ("reinforce_long", "REINFORCE for three million steps"): [
        "reinforce-hopper-3m",
        "reinforce-halfcheetah-3m",
        "reinforce-walker2d-3m",
        "reinforce-ant-3m",
        "reinforce-cartpole-200k",
    ],
    ("wide", "PPO for clusters"): ["wide-hopper-3m", "wide-halfcheetah-3m", "wide-walker2d-3m"],
    ("untuned", "PPO where nobody has tuned"): [
        "default-acrobot",
        "default-mountaincarcontinuous",
        "default-swimmer",
        "default-reacher",
        "default-pusher",
        "default-bipedalwalker",
        "family-swimmer",
        "family-reacher",
        "family-pusher",
        "family-bipedalwalker",
    ],
}


@pytest.mark.parametrize(("record", "title"), STUDIES)
def test_a_table_of_studies_is_that_of_its_record(record, title) -> None:
    """And the page of SAC quotes it."""
    studies = STUDIES[record, title]
    body = section((DOCS / "results.md").read_text("utf-8"), title)
    told = list(rows(body[body.index("| environment, steps |") :].partition("\n\n")[0] + "\n"))
    for study, shown in zip(studies, told, strict=True):
        what, preset, seeds, iqm, worst, p4, p2, floor, *_ = shown
        mine = [row for row in table(f"{record}.csv") if row["study"] == study]
        id, length = what.split(", ")
        assert {row["env"] for row in mine} <= {id, id.partition("-")[0].lower()}
        assert {f"`{row['preset']}`" for row in mine} == {preset}
        steps = max(int(row["step"]) for row in mine)
        asked = float(length[:-1]) * {"k": 1e3, "M": 1e6}[length[-1]]
        # It ends with its iteration; those of REINFORCE are whole episodes, and of the wide 32,768.
        assert asked <= steps < asked + (33_000 if asked > 1e6 else 13_000)
        first, last = map(int, seeds.split(" to "))
        ended = {int(row["seed"]): float(row["return_mean"]) for row in mine if row["final"] == "1"}
        assert sorted(ended) == list(range(first, last + 1))
        curves = []
        for seed in ended:
            seen = [row for row in mine if row["final"] == "0" and int(row["seed"]) == seed]
            curves.append(
                tuple(np.array([float(row[n]) for row in seen]) for n in ("step", "return_mean"))
            )
        found = compute_iqm_interval([np.array([ended[seed] for seed in sorted(ended)])])
        tail, best = (
            compute_mean_std(np.array([compute_tail_mean(y) for _, y in curves])),
            find_best_mean(curves)[1],
        )
        interval = f" [{plain(found.low)}, {plain(found.high)}]"
        assert iqm == plain(found.value) + interval * (len(ended) >= FEWEST_SEEDS)
        assert worst == plain(min(ended.values()))
        for cell, value in ((p4, tail), (p2, best)):
            assert cell == f"{plain(value.mean)} ± {plain(value.std, beside=value.mean)}"
        assert not floor or tail.mean >= float(floor.replace(",", "")), what
        if record == "sac":
            places = 1 if abs(found.value) < 1000 else 0
            assert f"{id.partition('-')[0]} {found.value:,.{places}f}" in page("sac")


def plain(value: float, beside: float | None = None) -> str:
    """A return below a hundred has a decimal, and so has what deviates from one."""
    return f"{value:,.{1 if abs(beside if beside is not None else value) < 100 else 0}f}"


def test_the_page_of_results_has_the_control_s_returns_beside_ours() -> None:
    """Means over seeds at the evaluation nearest to each of the control's."""
    control = table("sac_control.csv")
    ours = [row for row in table("sac.csv") if row["final"] == "0"]
    body = section((DOCS / "results.md").read_text("utf-8"), "Beside stable-baselines3")
    told = list(rows(body))
    assert [line[0] for line in told] == [f"{step:,}" for step in range(50_000, 300_001, 50_000)]
    head = ["steps"]
    for name in ("HalfCheetah", "Hopper", "Ant", "Walker2d"):
        here = [row for row in ours if row["study"] == f"sac-{name.lower()}-300k"]
        theirs = [row for row in control if row["env"] == f"{name}-v5"]
        seeds = [len({row["seed"] for row in side}) for side in (here, theirs)]
        head += [f"{name}-v5, rlflame ({seeds[0]})", f"stable-baselines3 ({seeds[1]})"]
        for steps, *cells in told:
            step = int(steps.replace(",", ""))
            near = min((int(row["step"]) for row in here), key=lambda at: abs(at - step))
            assert abs(near - step) < 100
            pair = cells[len(head) - 3 : len(head) - 1]
            for cell, side, at in zip(pair, (here, theirs), (near, step), strict=True):
                found = [float(row["return_mean"]) for row in side if int(row["step"]) == at]
                assert cell == f"{mean(found):,.0f}", (name, steps)
    assert "| " + " | ".join(head) + " |" in body


@pytest.mark.parametrize(
    ("algorithm", "envs"),
    [("sac", {"halfcheetah": "HalfCheetah-v5", "hopper": "Hopper-v5",
              "ant": "Ant-v5", "walker2d": "Walker2d-v5", "pendulum": "Pendulum-v1"}),
     ("ppo", {"hopper": "Hopper-v5", "halfcheetah": "HalfCheetah-v5",
              "walker2d": "Walker2d-v5", "ant": "Ant-v5"})],
)  # fmt: skip
def test_a_picture_has_a_line_for_each_side_of_its_record(algorithm, envs) -> None:
    """Its text is text: how many seeds each line has been drawn from."""
    picture, drawn = (DOCS / "images" / f"{algorithm}.svg").read_text("utf-8"), []
    for env, id in envs.items():
        assert f">{id}<" in picture
        mine = [row for row in table(f"{algorithm}.csv") if row["env"] == env]
        for preset in {row["preset"] for row in mine}:
            ours = {row["seed"] for row in mine if row["preset"] == preset}
            drawn.append(f"rlflame, {preset} ({format_count(len(ours), 'seed')})")
        control = {row["seed"] for row in table(f"{algorithm}_control.csv") if row["env"] == id}
        drawn.append(f"stable-baselines3 ({format_count(len(control), 'seed')})")
    for line in drawn:
        assert picture.count(f">{line}<") == drawn.count(line), line
    assert f"images/{algorithm}.svg" in (DOCS / "results.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("title", "prefix", "steps"),
    [("What Hopper learns first", "300k-", (100_000, 200_000, 300_000)),
     ("Pendulum", "100k-pendulum-", (20_000, 50_000, 100_000)),
     ("MountainCarContinuous", "100k-mountaincarcontinuous-", (20_000, 50_000, 100_000))],
)  # fmt: skip
def test_what_is_learned_by_when_is_as_recorded(title, prefix, steps) -> None:
    """Means over seeds at the evaluation nearest to each step."""
    record = [row for row in table("tuning.csv") if row["final"] == "0"]
    told = list(rows(section((DOCS / "experiments.md").read_text("utf-8"), title)))
    assert len(told) == len({row["study"] for row in record if row["study"].startswith(prefix)})
    for study, _, _, seeds, *means in told:
        mine = [row for row in record if row["study"] == prefix + study]
        assert seeds == str(len({row["seed"] for row in mine}))
        expected = []
        for at in steps:
            near = min((int(row["step"]) for row in mine), key=lambda step: abs(step - at))
            assert abs(near - at) < 4_096
            seen = [float(row["return_mean"]) for row in mine if int(row["step"]) == near]
            assert len(seen) == int(seeds)
            expected.append(f"{mean(seen):.0f}")
        assert means == [*expected, middle_of(seen)], study


def test_what_each_part_of_the_family_is_worth_is_as_recorded() -> None:
    record = [row for row in table("tuning.csv") if row["final"] == "0"]
    text = (DOCS / "experiments.md").read_text("utf-8")
    told = list(rows(section(text, "The family, and each of its parts otherwise")))
    studies = {row["study"] for row in record if row["study"].startswith("part-")}
    assert studies == {f"part-{env}-{study}" for study, *_ in told
                       for env in ("halfcheetah", "hopper")}  # fmt: skip
    for study, _, _, *means in told:
        expected = []
        for env in ("halfcheetah", "hopper"):
            curves = [
                [float(row["return_mean"]) for row in record
                 if (row["study"], row["seed"]) == (f"part-{env}-{study}", seed)]
                for seed in ("100", "101", "102")
            ]  # fmt: skip
            first, second, third = ([curve[at] for curve in curves] for at in (3, 7, 11))
            expected += [f"{mean(first):.0f}", f"{mean(second):.0f}"]
            expected += [f"{mean(third):.0f} ({', '.join(f'{each:.0f}' for each in third)})"]
        assert means == expected, study


def middle_of(values: list[float]) -> str:
    """As a ledger tells it: the IQM over seeds and its interval, where there are enough of them."""
    found = compute_iqm_interval([np.array(values)])
    enough = len(values) >= FEWEST_SEEDS
    return f"{found.value:.0f} [{found.low:.0f}, {found.high:.0f}]" if enough else "-"


def test_what_was_tried_about_walker2d_s_falls_is_as_recorded() -> None:
    record = table("tuning.csv")
    text = (DOCS / "experiments.md").read_text("utf-8")
    for study, _, _, seeds, returns, p4, middle, _ in rows(section(text, "How Walker2d falls")):
        mine = [[row for row in record if (row["study"], row["seed"]) == (study, str(seed))]
                for seed in parse_seeds(seeds.replace(", ", ","))]  # fmt: skip
        assert len(mine) == len({row["seed"] for row in record if row["study"] == study})
        ended = [float(row["return_mean"]) for one in mine for row in one if row["final"] == "1"]
        assert returns == ", ".join(f"{value:.0f}" for value in ended)
        curves = [[float(row["return_mean"]) for row in one if row["final"] == "0"] for one in mine]
        each = [compute_tail_mean(np.array(curve)) for curve in curves]
        assert p4 == ", ".join(f"{value:.0f}" for value in each)
        assert middle == middle_of(each)


def test_what_the_family_was_tuned_by_is_as_recorded() -> None:
    ended = [row for row in table("tuning.csv") if row["final"] == "1"]
    text = (DOCS / "experiments.md").read_text("utf-8")
    told = list(rows(section(text, "PPO on MuJoCo, 1M steps")))
    assert len({study for study, *_ in told}) == len(told) == 29
    for study, _, _, where, returns, iqm, _ in told:
        mine = sorted((int(row["seed"]), float(row["return_mean"]))
                      for row in ended if row["study"] == study)  # fmt: skip
        env, first, last = re.match(r"(\w+), (\d+)-(\d+)", where).groups()
        assert study.startswith(env.lower())
        assert [seed for seed, _ in mine] == list(range(int(first), int(last) + 1))
        assert returns == ", ".join(f"{value:.0f}" for _, value in mine)
        assert iqm == middle_of([value for _, value in mine]), study


@pytest.mark.parametrize(
    ("title", "studies"),
    [("SAC", ["sac-ant-batch-b128", "sac-walker2d-tianshou", "sac-walker2d-nstep3",
      "sac-walker2d-nstep3-ent3", "sac-walker2d-nstep3-twice", "sac-hopper-three-steps",
      "sac-hopper-layer", "sac-hopper-three-steps-layer", "sac-hopper-fixed",
      "sac-hopper-tianshou", "sac-hopper-q25"]),
     ("Swimmer", ["swimmer-g999", "swimmer-g9999", "swimmer-4x1024", "swimmer-8x512"]),
     ("The wide family", ["wide-walker2d-clip4", "wide-hopper-clip4", "wide-halfcheetah-clip4",
      "wide-hopper-family", "wide-hopper-raw", "wide-walker2d-lam95", "wide-halfcheetah-lam95",
      "wide-hopper-raw-lam95"])],
)  # fmt: skip
def test_returns_of_single_seeds_are_those_recorded(title, studies) -> None:
    ended = [row for row in table("tuning.csv") if row["final"] == "1"]
    returns = {
        study: [float(row["return_mean"]) for row in ended if row["study"] == study]
        for study in studies
    }
    text = section((DOCS / "experiments.md").read_text("utf-8"), title)
    named = re.findall(r"`([a-z]+-[\w-]+)`", text.partition("\n|")[0])
    assert named == studies
    cells = [cells[2] for cells in rows(text)]
    told = [cell for cell in cells if not cell.startswith("stopped")]
    assert told == [", ".join(f"{one:.0f}" for one in found) for found in returns.values()]


def test_what_the_default_recipe_was_tuned_by_is_as_recorded() -> None:
    ended: dict[str, list[float]] = {}
    for row in table("tuning.csv"):
        if row["study"].startswith("default-") and row["final"] == "1":
            ended.setdefault(row["study"], []).append(float(row["return_mean"]))
    text = section((DOCS / "experiments.md").read_text("utf-8"), "The default recipe")
    of_numbers = ("pendulum", "hopper", "halfcheetah", "walker2d", "lunarlandercontinuous")
    shown = {}
    for what, _, *cells in rows(text):
        envs = of_numbers if len(cells) == len(of_numbers) else ("cartpole", "lunarlander")
        told = zip(envs, cells, strict=True)
        shown |= {f"default-{env}-{what}": cell for env, cell in told if cell != "-"}
    assert shown == {
        study: f"{mean(returns):.0f} (worst {min(returns):.0f})" for study, returns in ended.items()
    }


@pytest.mark.parametrize(
    ("name", "record", "study"),
    [
        ("cartpole", "ppo", "ppo-cartpole-100k"),
        ("lunarlander", "ppo", "ppo-lunarlander-500k"),
        ("pendulum", "sac", "sac-pendulum-20k"),
        ("hopper", "ppo", "ppo-hopper-1m"),
        ("halfcheetah", "ppo", "ppo-halfcheetah-1m"),
        ("walker2d", "ppo", "ppo-walker2d-1m"),
        ("ant", "ppo", "ppo-ant-1m"),
    ],
)
def test_a_policy_to_try_is_one_of_the_seeds_on_record(name, record, study) -> None:
    """Its first twenty episodes are those that the seed was scored on."""
    shipped = checkpoint.load(ROOT / "checkpoints" / f"{name}.safetensors")
    (row,) = [
        row
        for row in table(f"{record}.csv")
        if (row["study"], row["final"]) == (study, "1")
        and int(row["seed"]) == shipped.recipe.learning.seed
    ]
    assert mean(shipped.best.returns[:20]) == pytest.approx(float(row["return_mean"]), rel=1e-5)
    assert shipped.progress.steps == int(row["step"])


@pytest.mark.parametrize("name", ["ant", "hopper", "walker2d", "halfcheetah"])
def test_a_shipped_policy_has_its_rank_among_the_seeds(name: str) -> None:
    ends = finals("ppo.csv", f"ppo-{name}-1m", seeds=10)
    shipped = checkpoint.load(ROOT / "checkpoints" / f"{name}.safetensors")
    above = sum(end > ends[shipped.recipe.learning.seed] for end in ends)
    page = (ROOT / "checkpoints" / "README.md").read_text("utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [{name}.safetensors]"))
    assert f"| {above + 1} of 10 |" in row


def test_reacher_gets_what_is_better_there() -> None:
    sides = [
        np.array(finals("untuned.csv", f"{recipe}-reacher", seeds=5))
        for recipe in ("default", "family")
    ]
    found = compare(*sides).difference
    assert found.low > 0.0
    said = f"the family by {found.value:.2f} [{found.low:.2f}, {found.high:.2f}] in the IQM"
    assert said in " ".join((DOCS / "results.md").read_text("utf-8").split())
    assert choose_preset("Reacher-v5", "ppo") == "default-ppo"
