"""What others have where rlflame's presets were measured: from the records, for docs/results.md.

    python benchmarks/beside.py ppo
    python benchmarks/beside.py elsewhere | untuned | wide | sac | reinforce

Trains nothing. P4 is the mean of the last twentieth of the evaluations in training and P2 the best
mean over seeds that its evaluations have. Of stable-baselines3, run by `control.py` and
`ppo_vs_sb3.py` here, it is the mean of all evaluations after 95% of the steps. Minutes are those of
the timed pairs with its defaults and, of SAC, of as many steps at the rates of
`sac_vs_sb3.py --own` on two threads each. Published figures are those of docs/results/peers.csv,
which says where each is from.
"""

from __future__ import annotations

import argparse
from decimal import ROUND_HALF_UP, Decimal
from statistics import median

import numpy as np
from script import ended
from time_to_return import curves, records

from rlflame.estimates import best_mean, over, tail_mean

#: The record of each group, and its studies.
GROUPS = {
    "ppo": ("ppo", [f"ppo-{env}-1m" for env in ("hopper", "halfcheetah", "walker2d", "ant")]),
    "elsewhere": (
        "ppo",
        [
            "ppo-cartpole-100k",
            "ppo-pendulum-100k",
            "ppo-mountaincarcontinuous-100k",
            "ppo-lunarlander-1m",
            "ppo-swimmer-1m",
        ],
    ),
    "untuned": (
        "untuned",
        [
            f"default-{env}"
            for env in (
                "acrobot",
                "mountaincarcontinuous",
                "swimmer",
                "reacher",
                "pusher",
                "bipedalwalker",
            )
        ],
    ),
    "wide": ("wide", [f"wide-{env}-3m" for env in ("hopper", "walker2d", "halfcheetah")]),
    "sac": (
        "sac",
        [
            "sac-pendulum-20k",
            *(f"sac-{env}-300k" for env in ("halfcheetah", "hopper", "ant", "walker2d")),
        ],
    ),
    "reinforce": (
        "reinforce_long",
        [
            *(f"reinforce-{env}-3m" for env in ("hopper", "halfcheetah", "walker2d", "ant")),
            "reinforce-cartpole-200k",
        ],
    ),
}
NAMES = {
    env.partition("-")[0].lower(): env
    for env in ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5", "Swimmer-v5",
                "CartPole-v1", "Pendulum-v1", "LunarLander-v3", "MountainCarContinuous-v0",
                "Acrobot-v1", "Reacher-v5", "Pusher-v5", "BipedalWalker-v3")
}  # fmt: skip
#: The steps of the groups that have one.
STEPS = {"ppo": 1_000_000, "sac": 300_000}
#: Below this a return's first decimal is told.
SMALL = 100
#: Those of stable-baselines3 that were run here: the column, the record and its name for them.
CONTROLS = {
    "ppo": [("its defaults, here", "ppo_control.csv", "ppo-sb3"),
            ("as its zoo tuned it, here", "ppo_zoo_control.csv", "ppo-zoo-sb3")],
    "sac": [("its defaults, here", "sac_control.csv", "sac-sb3")],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", choices=GROUPS)
    print("\n".join(table(parser.parse_args().group)))


def table(group: str) -> list[str]:
    record, studies = GROUPS[group]
    controls = CONTROLS.get(group, [])
    timed = group in CONTROLS
    head = ["environment", "rlflame: P4, P2"]
    if timed:
        (first, *_), *others = controls
        head += ["minutes", f"stable-baselines3, {first}", "minutes"]
        head += [column for column, *_ in others]
    head.append("published")
    lines = [head, ["---"] * len(head)]
    published = records("peers.csv")
    ours = records(f"{record}.csv")
    for study in studies:
        env = NAMES[study.split("-")[1]]
        found = curves(row for row in ours if (row["study"], row["final"]) == (study, "0"))
        tails, best = np.array([tail_mean(y) for _, y in found]), best_mean(found)
        assert best is not None
        cells = [env, f"{spread(tails)}, {told(best[1].mean)} ({len(found)} seeds)"]
        if timed:
            ours_min, theirs_min = taken(group, env)
            first, *others = (
                control(name, label, env, STEPS[group]) for _, name, label in controls
            )
            cells += [ours_min, first, theirs_min, *others]
        said = [peer(row) for row in published if row["study"] == study]
        lines.append([*cells, "; ".join(said)])
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def spread(values: np.ndarray) -> str:
    found = over(values)
    if len(values) == 1:  # which deviates from nothing
        return told(found.mean)
    return f"{told(found.mean)} ± {found.std:,.{places(found.mean)}f}"


def told(mean: float) -> str:
    return f"{mean:,.{places(mean)}f}"


def places(mean: float) -> int:
    """A decimal for small returns, for which published ones are told as they were."""
    return 1 if abs(mean) < SMALL else 0


def control(name: str, label: str, env: str, steps: int) -> str:
    found = curves(row for row in records(name) if (row["algo"], row["env"]) == (label, env))
    late = np.array([returns[x > 0.95 * steps].mean() for x, returns in found])
    return f"{spread(late)} ({len(late)})" if found else ""


def taken(group: str, env: str) -> tuple[str, str]:
    """Minutes of this many steps on two idle cores, ours and theirs with its defaults."""
    if group == "ppo":
        pairs = [row for row in records("ppo_vs_sb3.csv")
                 if (row["env"], row["steps"], row["set"]) == (env, "1000000", "")
                 and row["sb3_s"]]  # fmt: skip
        found = [median(float(row[side]) for row in pairs) for side in ("rlflame_s", "sb3_s")]
        return f"{found[0] / 60:.1f}", f"{found[1] / 60:.1f}"
    # Learning begins after 10,000 of the steps, and what comes before takes next to nothing.
    rows = [row for row in records("sac_pace.csv") if row["env"] == env]
    found = [
        [float(row["steps_per_s"]) for row in rows if row["side"] == side]
        for side in ("rlflame", "sb3 1 env")
    ]
    ours, theirs = (
        f"{(STEPS[group] - 10_000) / median(rates) / 60:.0f}" if rates else "" for rates in found
    )
    return ours, theirs


def peer(row: dict[str, str]) -> str:
    rounded = str if places(float(row["mean"])) else whole
    deviation = f" ± {rounded(row['deviation'])}" if row["deviation"] else ""
    seeds = f"{row['seeds']} seeds" if row["seeds"] != "1" else "1 run"
    measure = "" if row["measure"] in ("final", "there") else f"{row['measure']}, "
    _, _, version = row["environment"].partition("-")
    return f"{row['project']} {rounded(row['mean'])}{deviation} ({measure}{version}, {seeds})"


def whole(number: str) -> str:
    """As one rounds by hand."""
    return f"{Decimal(number).quantize(Decimal(1), ROUND_HALF_UP):,}"


if __name__ == "__main__":
    ended(main)
