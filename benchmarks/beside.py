"""What rlflame's presets reach and others beside them: from the records, for docs/results.md.

    python benchmarks/beside.py ppo
    python benchmarks/beside.py elsewhere | untuned | wide | sac | reinforce

Trains nothing. The IQM, its interval and the worst are of the final evaluations, P4 is the mean of
the last twentieth of the evaluations in training and P2 the best mean over seeds that they have. Of
stable-baselines3, run by `control.py` and `ppo_vs_sb3.py` here, it is the mean of all evaluations
after 95% of the steps. Minutes are those of the runs that `ppo_vs_sb3.py` timed, where they had
other steps on the line through the shortest and the longest, and of SAC of as many steps at the
rates of `sac_vs_sb3.py --own` on two threads each. Published figures are those of
docs/results/peers.csv, which says where each is from; where an environment has several, a second
table has them all. Of SAC a third has the way there.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from statistics import median

import numpy as np
from learning import LONG, PPO, SAC, UNTUNED, WIDE, Study
from script import ended
from time_to_return import curves, records

from rlflame.statistics import (
    FEWEST_SEEDS,
    compute_iqm_interval,
    compute_mean_std,
    compute_tail_mean,
    find_best_mean,
)

MUJOCO = ("hopper", "halfcheetah", "walker2d", "ant")


@dataclass(frozen=True)
class Group:
    """A table: its record, which studies are in it, the record of the times (if there is one),
    what was given to rlflame for them, and whether theirs were taken."""

    record: str
    studies: list[Study]
    timed: str | None = None
    words: str = ""
    peer_timed: bool = True


def chosen(studies: list[Study], *names: str) -> list[Study]:
    """In this order."""
    found = {study.name: study for study in studies}
    return [found[name] for name in names]


GROUPS = {
    "ppo": Group("ppo", chosen(PPO, *(f"ppo-{env}-1m" for env in MUJOCO)), "ppo_vs_sb3"),
    "elsewhere": Group(
        "ppo",
        chosen(
            PPO,
            *(f"ppo-{env}-100k" for env in ("cartpole", "pendulum", "mountaincarcontinuous")),
            "ppo-lunarlander-500k",
            "ppo-lunarlander-1m",
            "ppo-swimmer-1m",
        ),
        "minutes",
    ),
    "untuned": Group("untuned", UNTUNED),
    "wide": Group("wide", WIDE, "minutes", "--preset {preset}"),
    "sac": Group(
        "sac",
        chosen(
            SAC,
            "sac-pendulum-20k",
            *(f"sac-{env}-300k" for env in ("halfcheetah", "hopper", "ant", "walker2d")),
        ),
        "sac_pace",
    ),
    "reinforce": Group("reinforce_long", LONG, "minutes", "--algo reinforce", peer_timed=False),
}
NAMES = {
    env.partition("-")[0].lower(): env
    for env in ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5", "Swimmer-v5",
                "CartPole-v1", "Pendulum-v1", "LunarLander-v3", "MountainCarContinuous-v0",
                "Acrobot-v1", "Reacher-v5", "Pusher-v5", "BipedalWalker-v3")
}  # fmt: skip
#: Below this a return's first decimal is told.
SMALL = 100
#: From the one on whole minutes are told, and below the other hundredths.
LONG_S, SHORT_S = 20 * 60, 30
#: Both SACs learn after 10,000 steps but for these, and what comes before takes next to nothing.
LEARN_AFTER = {"sac-pendulum-20k": {"rlflame": 1_000, "sb3 1 env": 100}}
#: Steps of the studies whose curves are told in numbers.
ALONG = 300_000
#: Those of stable-baselines3 that were run here: the column, the record and its name for them.
CONTROLS = {
    "ppo": [("its defaults", "ppo_control.csv", "ppo-sb3"),
            ("as its zoo tuned it", "ppo_zoo_control.csv", "ppo-zoo-sb3")],
    "sac": [("its defaults", "sac_control.csv", "sac-sb3")],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", choices=GROUPS)
    name = parser.parse_args().group
    tables = (table(name), quoted(name), along() if name == "sac" else [])
    print("\n\n".join("\n".join(lines) for lines in tables if lines))


def table(name: str) -> list[str]:
    """What was measured, and the best of what others have published."""
    group, controls = GROUPS[name], CONTROLS.get(name, [])
    head = ["environment, steps", "preset", "seeds", "IQM [95% interval]", "worst seed",
            "P4", "P2", "floor"]  # fmt: skip
    if group.timed:
        head.append("minutes, ours")
    if controls:
        head.append(f"stable-baselines3 here, {controls[0][0]}")
    if group.timed and group.peer_timed:
        head.append("minutes, theirs" if controls else "minutes, stable-baselines3's")
    head += [column for column, *_ in controls[1:]]
    head.append("best published")
    ours = records(f"{group.record}.csv")
    lines = [head]
    for study in group.studies:
        cells = reached(study, [row for row in ours if row["study"] == study.name])
        reached_there = [
            control(record, label, environment(study), study.steps) for _, record, label in controls
        ]
        if group.timed:
            preset = next(row["preset"] for row in ours if row["study"] == study.name)
            ours_min, theirs_min = taken(group, study, preset)
            cells += [ours_min, *reached_there[:1]]
            if group.peer_timed:
                cells.append(theirs_min)
            cells += reached_there[1:]
        best = max(peers(study), key=lambda row: float(row["mean"]), default=None)
        lines.append([*cells, peer(best) if best else ""])
    return marked(lines)


def quoted(name: str) -> list[str]:
    """All that others have published, where that is more than the best of it."""
    lines = [["environment", "published"]]
    for study in GROUPS[name].studies:
        if len(said := [peer(row) for row in peers(study)]) > 1:
            lines.append([environment(study), "; ".join(said)])
    return marked(lines) if len(lines) > 1 else []


def along() -> list[str]:
    """Of SAC, the means over seeds at each of their evaluations, and ours nearest to it."""
    ((_, record, label),) = CONTROLS["sac"]
    lines: dict[int, list[str]] = {}
    head = ["steps"]
    for study in GROUPS["sac"].studies:
        env = environment(study)
        theirs = curves(row for row in records(record) if (row["algo"], row["env"]) == (label, env))
        if study.steps != ALONG or not theirs:
            continue
        ours = curves(
            row for row in records("sac.csv") if row["study"] == study.name and row["final"] == "0"
        )
        head += [f"{env}, rlflame ({len(ours)})", f"stable-baselines3 ({len(theirs)})"]
        for place, step in enumerate(theirs[0][0]):
            near = np.mean([y[np.abs(x - step).argmin()] for x, y in ours])
            there = np.mean([y[place] for _, y in theirs])
            lines.setdefault(int(step), [f"{step:,}"]).extend([told(near), told(there)])
    return marked([head, *lines.values()])


def marked(lines: list[list[str]]) -> list[str]:
    head, *rest = lines
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rest)]


def reached(study: Study, rows: list[dict[str, str]]) -> list[str]:
    """Over the seeds of a study, in their order, as an interval is drawn by place."""
    ends = {int(row["seed"]): float(row["return_mean"]) for row in rows if row["final"] == "1"}
    seeds = sorted(ends)
    finals = np.array([ends[seed] for seed in seeds])
    found = curves(row for row in rows if row["final"] == "0")
    tails, best = np.array([compute_tail_mean(y) for _, y in found]), find_best_mean(found)
    assert best is not None
    middle = compute_iqm_interval([finals])
    iqm = told(middle.value)
    if len(seeds) >= FEWEST_SEEDS:
        iqm += f" [{told(middle.low)}, {told(middle.high)}]"
    length = (
        f"{study.steps // 1_000_000}M" if study.steps >= 1_000_000 else f"{study.steps // 1000}k"
    )
    return [
        f"{environment(study)}, {length}",
        f"`{rows[0]['preset']}`",
        f"{seeds[0]} to {seeds[-1]}",
        iqm,
        told(finals.min()),
        spread(tails),
        said(best[1].mean, best[1].std),
        "" if study.floor is None else told(study.floor),
    ]


def environment(study: Study) -> str:
    return NAMES[study.name.split("-")[1]]


def peers(study: Study) -> list[dict[str, str]]:
    return [row for row in records("peers.csv") if row["study"] == study.name]


def spread(values: np.ndarray) -> str:
    found = compute_mean_std(values)
    if len(values) == 1:  # which deviates from nothing
        return told(found.mean)
    return said(found.mean, found.std)


def said(mean: float, deviation: float) -> str:
    return f"{told(mean)} ± {deviation:,.{places(mean)}f}"


def told(mean: float) -> str:
    return f"{mean:,.{places(mean)}f}"


def places(mean: float) -> int:
    """A decimal for small returns, for which published ones are told as they were."""
    return 1 if abs(mean) < SMALL else 0


def control(name: str, label: str, env: str, steps: int) -> str:
    found = curves(row for row in records(name) if (row["algo"], row["env"]) == (label, env))
    late = np.array([returns[x > 0.95 * steps].mean() for x, returns in found])
    return f"{spread(late)} ({len(late)})" if found else ""


def taken(group: Group, study: Study, preset: str) -> tuple[str, str]:
    """Minutes of its steps on two idle cores: with this preset where the group names it, else with
    what the environment had when it was timed; and of theirs with its defaults."""
    rows = [row for row in records(f"{group.timed}.csv") if row["env"] == environment(study)]
    if group.timed == "sac_pace":
        return paced(rows, study, "rlflame"), paced(rows, study, "sb3 1 env")
    words = group.words.format(preset=preset)
    return (
        extended([row for row in rows if row["set"] == words], "rlflame_s", study.steps),
        extended([row for row in rows if row["sb3_s"]], "sb3_s", study.steps),
    )


def paced(rows: list[dict[str, str]], study: Study, side: str) -> str:
    """Of the steps that this side learns from, at its rate."""
    learned = study.steps - LEARN_AFTER.get(study.name, {}).get(side, 10_000)
    return minutes(learned / median(float(r["steps_per_s"]) for r in rows if r["side"] == side))


def extended(rows: list[dict[str, str]], side: str, steps: int) -> str:
    """For so many steps: on the line through the medians of the shortest and the longest runs, and
    of one length as many times as long."""
    times: dict[int, list[float]] = {}
    for row in rows:
        times.setdefault(int(row["steps"]), []).append(float(row[side]))
    if not times:
        return ""
    if steps in times:
        return minutes(median(times[steps]))
    longest, shortest = max(times), min(times)
    seconds = median(times[longest])
    if longest == shortest:
        return minutes(seconds * steps / longest)
    slope = (seconds - median(times[shortest])) / (longest - shortest)
    return minutes(seconds + slope * (steps - longest))


def minutes(seconds: float) -> str:
    places = 0 if seconds >= LONG_S else 1 if seconds >= SHORT_S else 2
    return f"{seconds / 60:.{places}f}"


def peer(row: dict[str, str]) -> str:
    rounded = str if places(float(row["mean"])) else whole
    deviation = f" ± {rounded(row['deviation'])}" if row["deviation"] else ""
    seeds = {"": "", "1": ", 1 run"}.get(row["seeds"], f", {row['seeds']} seeds")
    measure = "" if row["measure"] in ("final", "there") else f"{row['measure']}, "
    _, _, version = row["environment"].partition("-")
    return f"{row['project']} {rounded(row['mean'])}{deviation} ({measure}{version}{seeds})"


def whole(number: str) -> str:
    """As one rounds by hand."""
    return f"{Decimal(number).quantize(Decimal(1), ROUND_HALF_UP):,}"


if __name__ == "__main__":
    ended(main)
