"""Makes the tables of docs/experiments.md: tested settings and their returns.

`docs/results/experiments.csv` has a row for each study, with the setting and the decision. The
returns come from `docs/results/tuning.csv`, which has only the evaluations that the tables read. A
study without a name was stopped early, and experiments.csv contains the last return. In the name of
a study, `{env}` stands for several environments, with one column for each environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from statistics import mean

import numpy as np
from records import Curve, format_return, format_table, group_curves, read_records, read_study
from result_tables import ENV_IDS

from rlflame.storage.sweep_folder import format_seeds

#: The environments of each table in which study names contain `{env}`.
MATRICES = {
    "first": ("hopper", "walker2d", "halfcheetah"),
    "parts": ("halfcheetah", "hopper"),
    "default-discrete": ("cartpole", "lunarlander"),
    "default-continuous": ("pendulum", "hopper", "halfcheetah", "walker2d",
                           "lunarlandercontinuous"),
}  # fmt: skip
#: Tables of evaluations during training: the steps of the early column and of the last column.
CURVES = {"pendulum": (20_000, 100_000), "mountaincar": (20_000, 100_000)}
#: Tables that show the last evaluations during training instead of the final evaluation.
TAILS = ("falls",)
#: The share of the steps of a training that these evaluations cover.
TAIL = 0.05
RESAMPLES = 20_000


@cache
def read_tuning() -> dict[str, tuple[list[Curve], dict[int, float]]]:
    """The evaluations during training and the final returns of each study."""
    groups: dict[str, list[dict[str, str]]] = {}
    for row in read_records("tuning.csv"):
        groups.setdefault(row["study"], []).append(row)
    return {
        study: (
            group_curves(row for row in rows if row["final"] == "0"),
            {int(row["seed"]): float(row["return_mean"]) for row in rows if row["final"] == "1"},
        )
        for study, rows in groups.items()
    }


def make_table(name: str) -> str:
    rows = [row for row in read_records("experiments.csv") if row["table"] == name]
    if name in MATRICES:
        return make_matrix(name, rows)
    if name in CURVES:
        return make_curve_table(name, rows)
    lines = []
    for row in rows:
        study, setting, decision = row["study"], row["setting"], row["decision"]
        if study not in read_tuning():
            env, seeds = row["runs"].split(", ")
            lines.append([env, seeds, setting, f"{row['result']} (stopped)", decision])
            continue
        curves, ends = read_tuning()[study]
        returns = [compute_tail(curve) for curve in curves] if name in TAILS else [*ends.values()]
        seeds = format_seeds(sorted(ends)).replace(",", ", ")
        lines.append([f"`{study}`", seeds, setting, format_result(returns), decision])
    head = ("study", "seeds", "setting", "return", "decision or observation")
    return format_table(head, lines)


def make_curve_table(name: str, rows: list[dict[str, str]]) -> str:
    """Mean returns at an early step and at the last step."""
    early, last = CURVES[name]
    lines = []
    for row in rows:
        curves, _ = read_tuning()[row["study"]]
        returns = [find_return(curve, last) for curve in curves]
        results = (format_return(mean(find_return(curve, early) for curve in curves)),
                   format_result(returns))  # fmt: skip
        label = row["study"].split("-", 2)[2]
        lines.append([f"`{label}`", row["setting"], *results, row["decision"]])
    head = ("study", "setting", f"return at step {early:,}", f"return at step {last:,}",
            "decision or observation")  # fmt: skip
    return format_table(head, lines)


def make_matrix(name: str, rows: list[dict[str, str]]) -> str:
    """One row for each setting and one column for each environment."""
    lines = []
    for row in rows:
        cells = []
        for env in MATRICES[name]:
            study = row["study"].format(env=env)
            if study not in read_tuning():
                cells.append("")
                continue
            curves, ends = read_tuning()[study]
            is_final = name.startswith("default")
            returns = [*ends.values()] if is_final else [float(y[-1]) for _, y in curves]
            cells.append(format_result(returns))
        label = row["study"].split("{env}-")[1]
        lines.append([f"`{label}`", row["setting"], *cells, row["decision"]])
    names = [get_name(env) for env in MATRICES[name]]
    return format_table(["study", "setting", *names, "decision or observation"], lines)


def make_walker2d_comparison() -> str:
    """Returns of `walker2d-ppo` compared with `mujoco-ppo`, paired by seed."""
    before, after = (
        np.concatenate([compute_tails(*study) for study in studies])
        for studies in (
            (("ppo_earlier.csv", "ppo-walker2d-1m-steady"), ("tuning.csv", "walker2d-today")),
            (("ppo.csv", "ppo-walker2d-1m"), ("tuning.csv", "walker2d-late300")),
        )
    )
    count = len(after)
    resamples = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    measures: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "mean": lambda returns: returns.mean(axis=1),
        "mean of the worst quarter": lambda y: np.sort(y)[:, : count // 4].mean(axis=1),
        "standard deviation": lambda returns: returns.std(axis=1, ddof=1),
    }
    rows = []
    for name, compute in measures.items():
        old, new = (compute(side[None])[0] for side in (before, after))
        low, high = np.quantile(compute(after[resamples]) - compute(before[resamples]),
                                (0.025, 0.975))  # fmt: skip
        interval = f"{new - old:,.0f} [{low:,.0f}, {high:,.0f}]"
        rows.append((name, format_return(old), format_return(new), interval))
    head = (f"statistic over {count} seeds", "`mujoco-ppo`", "`walker2d-ppo`",
            "difference [95% interval]")  # fmt: skip
    return format_table(head, rows)


def compute_tails(record: str, study: str) -> np.ndarray:
    return np.array([compute_tail(curve) for curve in read_study(record, study)[0]])


def compute_tail(curve: Curve) -> float:
    """Return the mean of the last evaluations, which may be the only recorded ones."""
    steps, returns = curve
    return float(returns[steps > (1.0 - TAIL) * steps[-1]].mean())


def format_result(returns: Sequence[float]) -> str:
    """Format the mean over seeds, with the worst seed in parentheses."""
    worst = f" ({format_return(min(returns))})" if len(returns) > 1 else ""
    return format_return(mean(returns)) + worst


def find_return(curve: Curve, step: int) -> float:
    """The return of the evaluation nearest to a step."""
    steps, returns = curve
    return float(returns[np.abs(steps - step).argmin()])


def get_name(env: str) -> str:
    """The name of an environment without its version."""
    if env == "lunarlandercontinuous":
        return "LunarLander with continuous actions"
    return ENV_IDS.get(env, env).partition("-")[0]


def list_studies() -> set[str]:
    """The studies of `tuning.csv` that appear in the tables."""
    studies = set()
    for row in read_records("experiments.csv"):
        for env in MATRICES.get(row["table"], ("",)):
            studies.add(re.sub(r"\{env\}", env, row["study"]))
    return studies & {*read_tuning()}
