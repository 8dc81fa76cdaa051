"""Makes the tables of docs/results.md and README.md.

Every number comes from a record in docs/results. `write_tables.py` writes the tables into the
pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from statistics import mean, median

import numpy as np
from learning import LONG, PPO, SAC, SPACES, UNTUNED, WIDE, Study
from records import (
    SMALL,
    Curve,
    Row,
    format_iqm,
    format_list,
    format_mean,
    format_minutes,
    format_return,
    format_table,
    group_curves,
    read_records,
    read_study,
)

from rlflame.statistics import compute_mean_std, compute_tail_mean, find_best_mean

MUJOCO = ("hopper", "halfcheetah", "walker2d", "ant")
ENV_IDS = {
    id.partition("-")[0].lower(): id
    for id in ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5", "Swimmer-v5",
               "CartPole-v1", "Pendulum-v1", "LunarLander-v3", "MountainCarContinuous-v0",
               "Acrobot-v1", "Reacher-v5", "Pusher-v5", "BipedalWalker-v3", "FrozenLake-v1",
               "Taxi-v4", "CliffWalking-v1", "Blackjack-v1")
}  # fmt: skip
ENV_IDS["doorkey"] = "MiniGrid-DoorKey-5x5-v0"
#: The record of each stable-baselines3 control, and the name of the runs in the record.
CONTROLS = {"ppo": ("ppo_control.csv", "ppo-sb3"), "sac": ("sac_control.csv", "sac-sb3")}
ZOO_CONTROL = ("ppo_zoo_control.csv", "ppo-zoo-sb3")
#: The lengths of the PPO runs that were timed.
TIMED_STEPS = (100_000, 1_000_000)
#: The steps before SAC starts to learn, where they differ from 10,000.
LEARN_AFTER = {"sac-pendulum-20k": {"rlflame": 1_000, "sb3 1 env": 100}}


@dataclass(frozen=True)
class Group:
    """The studies of one table and their records."""

    record: str
    studies: list[Study]
    timed: str | None = None
    #: The options of `rlflame train` in the timed runs.
    options: str = ""
    #: Whether stable-baselines3 was also run with the settings of RL Baselines3 Zoo.
    has_zoo: bool = False
    is_peer_timed: bool = True


def select(studies: list[Study], *names: str) -> list[Study]:
    by_name = {study.name: study for study in studies}
    return [by_name[name] for name in names]


GROUPS = {
    "ppo": Group(
        "ppo.csv",
        select(PPO, *(f"ppo-{env}-1m" for env in MUJOCO)),
        "ppo_vs_sb3.csv",
        has_zoo=True,
    ),
    "elsewhere": Group(
        "ppo.csv",
        select(
            PPO,
            *(f"ppo-{env}-100k" for env in ("cartpole", "pendulum", "mountaincarcontinuous")),
            *("ppo-lunarlander-500k", "ppo-lunarlander-1m", "ppo-swimmer-1m"),
        ),
        "minutes.csv",
    ),
    "wide": Group("wide.csv", WIDE, "minutes.csv", "--preset {preset}"),
    "sac": Group(
        "sac.csv",
        select(
            SAC,
            "sac-pendulum-20k",
            *(f"sac-{env}-300k" for env in ("halfcheetah", "hopper", "ant", "walker2d")),
        ),
        "sac_pace.csv",
    ),
    "reinforce": Group(
        "reinforce_long.csv", LONG, "minutes.csv", "--algo reinforce", is_peer_timed=False
    ),
    "untuned": Group("untuned.csv", UNTUNED),
    "spaces": Group("spaces.csv", SPACES),
}


def make_summary() -> str:
    """Returns of PPO and SAC, compared with stable-baselines3."""
    rows = []
    for name, control in CONTROLS.items():
        group = GROUPS[name]
        for study in group.studies:
            tails = compute_tails(group.record, study)
            row = (get_env(study), f"{study.algo.upper()}, {format_steps(study)}")
            theirs = compute_control(control, study)
            rows.append((*row, format_mean_of_seeds(tails), format_mean_of_seeds(theirs)))
    head = ("environment", "algorithm, steps", "return, rlflame (seeds)",
            "return, stable-baselines3 (seeds)")  # fmt: skip
    return format_table(head, rows)


def make_findings() -> str:
    """One sentence for each finding."""
    studies = GROUPS["ppo"].studies
    ratios = [
        np.mean(compute_tails("ppo.csv", study)) / np.mean(compute_control(CONTROLS["ppo"], study))
        for study in studies
    ]
    reached = [compute_time_to_return(get_env(study)) for study in studies]
    steps, sooner = [row[2] for row in reached], [row[-1] for row in reached]
    clear = [
        get_name(study)
        for study in GROUPS["sac"].studies
        if min(read_ends("sac.csv", study)) > max(compute_control(CONTROLS["sac"], study))
    ]
    higher, total = list_better_peers()
    return "\n".join((
        f"- **PPO:** after 1,000,000 steps, rlflame's mean return is {min(ratios):.1f} to "
        f"{max(ratios):.1f} times the mean return of stable-baselines3.",
        f"- **Training time:** rlflame's PPO needs {round(min(steps), -3):,} to "
        f"{round(max(steps), -3):,} steps to reach the best mean return of stable-baselines3, and "
        f"reaches it {min(sooner):.0f} to {max(sooner):.0f} times faster.",
        f"- **SAC:** on {format_list(clear)}, every seed of rlflame ends with a higher return than "
        "every seed of stable-baselines3.",
        f"- **Published results:** in {len(higher)} of {total} comparisons, the best published "
        f"mean return is higher than the mean return of rlflame: {format_list(higher)}.",
    ))  # fmt: skip


def list_better_peers() -> tuple[list[str], int]:
    """The presets below the best published mean, and the number of comparisons.

    The runs of `mujoco-ppo` on environments without a preset are left out.
    """
    higher, total = [], 0
    for group in GROUPS.values():
        for study in group.studies:
            peer = find_best_peer(study)
            if peer is None or study.preset == "mujoco-ppo":
                continue
            total += 1
            if np.mean(compute_tails(group.record, study)) < float(peer["mean"]):
                higher.append(f"{get_name(study)} (`{get_preset(group, study)}`)")
    return higher, total


def make_readme_table() -> str:
    """Minutes and returns of PPO on MuJoCo."""
    group = GROUPS["ppo"]
    rows = []
    for study in group.studies:
        minutes = measure_minutes(group, study, "")
        tails = compute_tails(group.record, study)
        theirs = format_mean_of_seeds(compute_control(CONTROLS["ppo"], study))
        rows.append((get_env(study), minutes[0], format_mean_of_seeds(tails), minutes[1], theirs))
    head = ("PPO, 1,000,000 steps", "rlflame, minutes", "rlflame, return (seeds)",
            "stable-baselines3, minutes", "stable-baselines3, return (seeds)")  # fmt: skip
    return format_table(head, rows)


def make_group_table(name: str) -> str:
    """Make a table with one row per study: returns and minutes, also of peers."""
    group = GROUPS[name]
    head = [
        "environment, steps",
        "preset",
        "IQM [95% interval]",
        "worst seed",
        "mean of last evaluations",
    ]
    head += ["minutes", *["minutes, stable-baselines3"] * group.is_peer_timed]
    head += [*["stable-baselines3 with Zoo settings (seeds)"] * group.has_zoo]
    head += ["best published result"]
    rows = []
    for study in group.studies:
        ends = read_ends(group.record, study)
        preset = get_preset(group, study)
        zoo = [format_mean_of_seeds(compute_control(ZOO_CONTROL, study))] if group.has_zoo else []
        minutes = measure_minutes(group, study, preset)
        peer = find_best_peer(study)
        rows.append([
            f"{get_env(study)}, {format_steps(study)}",
            f"`{preset}`",
            format_iqm(np.array(ends)),
            format_return(min(ends)),
            format_mean(compute_mean_std(np.array(compute_tails(group.record, study)))),
            *minutes,
            *zoo,
            format_peer(peer) if peer else "",
        ])  # fmt: skip
    return format_table(head, rows)


def make_untuned_table() -> str:
    """Returns of `default-ppo` and `mujoco-ppo` on environments without tuning."""
    group = GROUPS["untuned"]
    cells: dict[str, dict[str, str]] = {}
    for study in group.studies:
        row = cells.setdefault(f"{get_env(study)}, {format_steps(study)}", {})
        tails = compute_tails(group.record, study)
        row[str(study.preset)] = format_mean_of_seeds(tails)
        if peer := find_best_peer(study):
            row["peer"] = format_peer(peer)
    columns = ("default-ppo", "mujoco-ppo", "peer")
    head = ("environment, steps", "`default-ppo` (seeds)", "`mujoco-ppo` (seeds)",
            "best published result")  # fmt: skip
    return format_table(
        head, [(name, *(row.get(column, "") for column in columns)) for name, row in cells.items()]
    )


def make_spaces_table() -> str:
    """Final returns of the default preset on environments with choices."""
    group = GROUPS["spaces"]
    records = [row for row in read_records(group.record) if row["final"] == "1"]
    rows = []
    for study in group.studies:
        finals = [row for row in records if row["study"] == study.name]
        returns = [float(row["return_mean"]) for row in finals]
        seconds = mean(float(row["train_seconds"]) for row in finals)
        rows.append([
            f"{get_env(study)}, {format_steps(study)}",
            f"`{finals[0]['preset']}`",
            f"{mean(returns):.3g} ({len(returns)})",
            f"{min(returns):.3g}",
            f"{study.floor:g}",
            f"{int(finals[0]['episodes']):,}",
            format_minutes(seconds),
        ])  # fmt: skip
    head = ("environment, steps", "preset", "mean return (seeds)", "worst seed", "goal",
            "evaluation episodes", "minutes")  # fmt: skip
    return format_table(head, rows)


def make_time_to_return_table() -> str:
    """The time until PPO stays above the best mean return of stable-baselines3."""
    rows = []
    for env in MUJOCO:
        peer, their_step, step, their_s, our_s, ratio = compute_time_to_return(ENV_IDS[env])
        theirs = (f"{their_step:,}", f"{their_s / 60:.1f} min")
        ours = (f"{step:,}", f"{our_s:.0f} s")
        rows.append((ENV_IDS[env], format_return(peer), *theirs, *ours, f"{ratio:.0f}"))
    head = ("environment", "return", "stable-baselines3, steps", "stable-baselines3, time",
            "rlflame, steps", "rlflame, time", "speed-up")  # fmt: skip
    return format_table(head, rows)


def make_classic_table() -> str:
    """Returns of the default preset of REINFORCE, compared with `reinforce-classic`."""
    rows = read_records("reinforce.csv")
    lines = []
    for env, steps in (("cartpole", "200k"), ("hopper", "300k"), ("ant", "300k")):
        cells = [f"{ENV_IDS[env]}, {steps}"]
        for kind in ("default", "classic"):
            ends = sorted(
                (row for row in rows if (row["study"], row["final"]) == (f"{kind}-{env}", "1")),
                key=lambda row: int(row["seed"]),
            )
            exploring = mean(float(row["exploring_return"]) for row in ends)
            returns = np.array([float(row["return_mean"]) for row in ends])
            cells += [format_return(exploring), format_iqm(returns)]
        lines.append(cells)
    head = ("environment, steps", "training return, default", "IQM, default",
            "training return, `reinforce-classic`", "IQM, `reinforce-classic`")  # fmt: skip
    return format_table(head, lines)


def compute_tails(record: str, study: Study) -> list[float]:
    """For each seed, the mean of the last 5% of the evaluations."""
    return [compute_tail_mean(y) for _, y in read_study(record, study.name)[0]]


def read_ends(record: str, study: Study) -> list[float]:
    """The final return of each seed."""
    return [*read_study(record, study.name)[1].values()]


def read_control(control: tuple[str, str], study: Study) -> list[Curve]:
    """The evaluations of stable-baselines3."""
    record, label = control
    env = get_env(study)
    rows = read_records(record)
    return group_curves(row for row in rows if (row["algo"], row["env"]) == (label, env))


def compute_control(control: tuple[str, str], study: Study) -> list[float]:
    """The mean of the evaluations after 95% of the steps, for each control seed."""
    curves = read_control(control, study)
    return [float(y[x > 0.95 * study.steps].mean()) for x, y in curves]


def format_mean_of_seeds(values: list[float]) -> str:
    """Mean and standard deviation over seeds, and the number of seeds."""
    return f"{format_mean(compute_mean_std(np.array(values)))} ({len(values)})"


def compute_time_to_return(env: str) -> tuple[float, int, int, float, float, float]:
    """stable-baselines3's best mean return, and the steps and seconds to reach it.

    rlflame reaches this return at the first evaluation from which its mean is never lower.
    """
    name = env.partition("-")[0].lower()
    study = GROUPS["ppo"].studies[MUJOCO.index(name)]
    theirs = read_control(CONTROLS["ppo"], study)
    ours, _ = read_study("ppo.csv", study.name)
    best_mean = find_best_mean(theirs)
    if best_mean is None or not ours:
        raise ValueError(f"{env} has no evaluations on record")
    their_step, best = best_mean
    step = find_lasting_step(ours, best.mean)
    their_s = interpolate(measure_pairs(env, "sb3_s"), their_step)
    our_s = interpolate(measure_pairs(env, "rlflame_s"), step)
    return best.mean, their_step, step, their_s, our_s, their_s / our_s


def find_lasting_step(curves: list[Curve], level: float) -> int:
    """The first step from which the mean over seeds is never below the level."""
    steps, _ = curves[0]
    if any(not np.array_equal(x, steps) for x, _ in curves):
        raise ValueError("the seeds of one study were evaluated at different steps")
    below = np.flatnonzero(np.mean([y for _, y in curves], axis=0) < level)
    first = int(below[-1]) + 1 if len(below) else 0
    if first == len(steps):
        raise ValueError(f"the mean return does not stay at {level:,.0f}")
    return int(steps[first])


def measure_pairs(env: str, side: str) -> list[float]:
    """The median seconds of one side, for each of `TIMED_STEPS`."""
    rows = [row for row in read_records("ppo_vs_sb3.csv") if row["env"] == env and row["sb3_s"]]
    return [
        median(float(row[side]) for row in rows if (row["steps"], row["set"]) == (str(steps), ""))
        for steps in TIMED_STEPS
    ]


def interpolate(seconds: list[float], steps: int) -> float:
    """The seconds of a number of steps, on the line through the `TIMED_STEPS`."""
    (x0, x1), (y0, y1) = TIMED_STEPS, seconds
    return y0 + (y1 - y0) * (steps - x0) / (x1 - x0)


def measure_minutes(group: Group, study: Study, preset: str) -> list[str]:
    """Minutes of rlflame on two idle cores, and of stable-baselines3 if it was timed."""
    rows = [row for row in read_records(str(group.timed)) if row["env"] == get_env(study)]
    if group.timed == "sac_pace.csv":
        return [measure_pace(rows, study, side) for side in ("rlflame", "sb3 1 env")]
    options = group.options.format(preset=preset)
    ours = [row for row in rows if row["set"] == options]
    minutes = [extend_minutes(ours, "rlflame_s", study.steps)]
    if group.is_peer_timed:
        theirs = [row for row in rows if row["sb3_s"]]
        minutes.append(extend_minutes(theirs, "sb3_s", study.steps))
    return minutes


def measure_pace(rows: list[Row], study: Study, side: str) -> str:
    """Minutes of the steps in which this side learns, at its median rate."""
    steps = study.steps - LEARN_AFTER.get(study.name, {}).get(side, 10_000)
    rate = median(float(row["steps_per_s"]) for row in rows if row["side"] == side)
    return format_minutes(steps / rate)


def extend_minutes(rows: list[Row], side: str, steps: int) -> str:
    """Minutes of a number of steps, on a line through the shortest and longest runs.

    If all runs have the same length, the minutes are proportional to the steps.
    """
    times: dict[int, list[float]] = {}
    for row in rows:
        times.setdefault(int(row["steps"]), []).append(float(row[side]))
    if not times:
        return ""
    if steps in times:
        return format_minutes(median(times[steps]))
    longest, shortest = max(times), min(times)
    seconds = median(times[longest])
    if longest == shortest:
        return format_minutes(seconds * steps / longest)
    slope = (seconds - median(times[shortest])) / (longest - shortest)
    return format_minutes(seconds + slope * (steps - longest))


def find_best_peer(study: Study) -> Row | None:
    """The published result with the highest mean in `peers.csv`."""
    rows = [row for row in read_records("peers.csv") if row["study"] == study.name]
    return max(rows, key=lambda row: float(row["mean"]), default=None)


def format_peer(row: Row) -> str:
    """A published result: project, mean, deviation, environment version and seeds."""
    is_small = abs(float(row["mean"])) < SMALL
    values = [row["mean"], row["deviation"]]
    numbers = [value if is_small else round_half_up(value) for value in values if value]
    seeds = {"": "", "1": ", 1 seed"}.get(row["seeds"], f", {row['seeds']} seeds")
    _, _, version = row["environment"].partition("-")
    return f"{row['project']} {' ± '.join(numbers)} ({version}{seeds})"


def round_half_up(number: str) -> str:
    return f"{Decimal(number).quantize(Decimal(1), ROUND_HALF_UP):,}"


def get_env(study: Study) -> str:
    return ENV_IDS[study.name.split("-")[1]]


def get_name(study: Study) -> str:
    return get_env(study).partition("-")[0]


def get_preset(group: Group, study: Study) -> str:
    rows = read_records(group.record)
    return next(row["preset"] for row in rows if row["study"] == study.name)


def format_steps(study: Study) -> str:
    millions = study.steps // 1_000_000
    return f"{millions}M" if millions else f"{study.steps // 1000}k"
