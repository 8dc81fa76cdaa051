"""Makes the tables of docs/benchmarks.md and of GPU times in guides/learners.md.

Every number comes from a record in docs/results. `write_tables.py` writes the tables into the
pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from published_figures import COMPARISONS
from records import RESULTS, Row, format_range, format_table, read_records

from rlflame.bench.case import Case, make_sleeping_cases
from rlflame.bench.result import Side
from rlflame.bench.scaling import fit_overheads
from rlflame.config import preset_catalog

MUJOCO = ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5")
ROLLOUT_ENVS = ("hopper", "halfcheetah", "walker2d", "ant", "lunarlander", "bipedalwalker")
EXAMPLE = "example --local"
REINFORCE_SIDES = {
    EXAMPLE: "Flame's example, `--local`",
    "default-reinforce": "`default-reinforce`",
    "reinforce-classic": "`reinforce-classic`",
}
SCALING_WORKERS = (1, 2, 4, 8)


def make_summary() -> str:
    """One row for each comparison: rlflame, the other program and the speed-up."""
    rows = []
    for env in MUJOCO:
        ours, theirs, ratios = read_pairs(env, 1_000_000)
        name, peer = f"PPO, 1,000,000 steps of {env}", f"stable-baselines3: {median(theirs):.1f} s"
        rows.append((name, f"{median(ours):.1f} s", peer, format_range(ratios, 1)))
    for env in ("hopper", "halfcheetah"):
        id, rate, peer_rate, _ = read_sac_rates(env)
        rates = (f"{rate:.0f} updates/s", f"stable-baselines3: {peer_rate:.0f} updates/s")
        rows.append((f"SAC on {id}, 2 threads", *rates, f"{rate / peer_rate:.1f}"))
    classic, example = (read_reinforce_rates(side)[0] for side in ("reinforce-classic", EXAMPLE))
    ratios = [ours / theirs for ours, theirs in zip(classic, example, strict=True)]
    rows.append(("REINFORCE on Hopper-v5", f"{median(classic):.0f} episodes/s",
                 f"Flame's example: {median(example):.1f} episodes/s",
                 format_range(ratios, 1)))  # fmt: skip
    return format_table(("benchmark", "rlflame", "other program", "speed-up"), rows)


def make_findings() -> str:
    """One sentence for each finding."""
    starts = [float(row["first_rollout_s"]) for row in read_records("start.csv")]
    gain = read_json("learners.json")["sides"][1]["speedup_learning"]
    alone = read_records("ppo_alone.csv")
    busy = [
        median(float(row["rlflame_all_busy"]) for row in alone if row["env"] == env)
        for env in MUJOCO
    ]
    return "\n".join((
        f"- **Start:** `rlflame train --env hopper` starts its first rollout after "
        f"{format_range(starts, 2)} s.",
        f"- **CPU usage:** during a PPO run on MuJoCo, both cores are busy at the same time for "
        f"{min(busy):.0%} to {max(busy):.0%} of the run.",
        "- **MuJoCo rollouts:** two processes that only run rollouts reach "
        f"{format_shares('inline', ROLLOUT_ENVS[:4])} times the speed of bare `mj_step` calls. If "
        "the driver, the process that collects the results, runs on the same two cores, two "
        f"workers reach {format_shares('local', ROLLOUT_ENVS[:4])} times the speed of bare "
        "`mj_step` calls.",
        "- **Box2D rollouts:** two workers reach "
        f"{format_shares('local', ROLLOUT_ENVS[4:])} times the speed of bare Gymnasium.",
        "- **Learners:** two processes compute PPO's gradients "
        f"{gain['value']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}] times as fast as one "
        "process, for 256x256 networks and minibatches of 8,192 samples.",
        "- **Flame:** on a single machine, Flame is slower than local workers in every measured "
        "case.",
    ))  # fmt: skip


def format_shares(fleet: str, envs: Sequence[str]) -> str:
    """The lowest and the highest speed of two workers, relative to bare stepping."""
    shares = [read_rollouts(fleet, env)[1]["shares"] for env in envs]
    limits = [median(share.get("mj_step", share["gymnasium"])) for share in shares]
    return f"{min(limits):.2f} to {max(limits):.2f}"


def make_ppo_table() -> str:
    """Pairs of PPO runs of rlflame and stable-baselines3."""
    rows = []
    for steps in (1_000_000, 100_000):
        for env in MUJOCO:
            pairs = select_pairs(env, steps)
            ours, theirs, ratios = read_pairs(env, steps)
            rows.append((
                f"{env}, {steps:,}",
                f"{median(ours):.1f} s",
                f"{median(theirs):.1f} s",
                format_range(ratios, 1),
                f"{median(float(row['rlflame_busy']) for row in pairs):.0%}",
                f"{max(int(row['rlflame_pss_mb']) for row in pairs)} MB",
                *(f"{median(float(row[f'{side}_return']) for row in pairs):,.0f}"
                  for side in ("rlflame", "sb3")),
            ))  # fmt: skip
    head = ("environment, steps", "rlflame", "stable-baselines3", "speed-up", "CPU usage, rlflame",
            "memory, rlflame", "return, rlflame", "return, stable-baselines3")  # fmt: skip
    return format_table(head, rows)


def select_pairs(env: str, steps: int) -> list[Row]:
    return [
        row
        for row in read_records("ppo_vs_sb3.csv")
        if (row["env"], row["steps"], row["set"]) == (env, str(steps), "") and row["sb3_s"]
    ]


def read_pairs(env: str, steps: int) -> tuple[list[float], list[float], list[float]]:
    """The seconds of rlflame and of stable-baselines3, and the ratio of each pair."""
    ours, theirs = (
        [float(row[side]) for row in select_pairs(env, steps)] for side in ("rlflame_s", "sb3_s")
    )
    return ours, theirs, [slow / fast for fast, slow in zip(ours, theirs, strict=True)]


def make_sac_table() -> str:
    """Updates per second with `mujoco-sac`, and steps per second with the presets."""
    rows = []
    for env in ("hopper", "halfcheetah"):
        id, ours, theirs, limit = read_sac_rates(env)
        rows.append((f"{id}, `mujoco-sac`", f"{ours:.0f} updates/s", f"{theirs:.0f}",
                     f"{ours / theirs:.2f}", f"{ours / limit:.0%}"))  # fmt: skip
    rates: dict[str, dict[str, list[float]]] = {}
    for row in read_records("sac_pace.csv"):
        sides = rates.setdefault(row["env"], {})
        sides.setdefault(row["side"], []).append(float(row["steps_per_s"]))
    for id, sides in rates.items():
        ours, theirs = median(sides["rlflame"]), median(sides["sb3 1 env"])
        preset = preset_catalog.choose_preset(id, "sac")
        rows.append((f"{id}, `{preset}`", f"{ours:.0f} steps/s", f"{theirs:.0f}",
                     f"{ours / theirs:.2f}", ""))  # fmt: skip
    head = ("environment, preset", "rlflame", "stable-baselines3", "speed-up",
            "share of the upper limit")  # fmt: skip
    return format_table(head, rows)


def read_sac_rates(env: str) -> tuple[str, float, float, float]:
    """The environment, and the updates per second of both libraries and the limit."""
    records = read_records(f"sac_vs_sb3_{env}.csv")
    rates: dict[str, list[float]] = {}
    for row in records:
        rates.setdefault(row["side"], []).append(float(row["updates_per_s"]))
    theirs = max(median(rates[side]) for side in ("sb3 1 env", "sb3 8 envs"))
    return records[0]["env"], median(rates["rlflame"]), theirs, median(rates["limit"])


def make_reinforce_table() -> str:
    """REINFORCE, compared with Flame's example."""
    example = read_reinforce_rates(EXAMPLE)
    rows = []
    for side, name in REINFORCE_SIDES.items():
        cells = [name]
        for rates, others, places in zip(read_reinforce_rates(side), example, (1, 0), strict=True):
            ratios = [ours / other for ours, other in zip(rates, others, strict=True)]
            cells += [f"{median(rates):,.{places}f}",
                      "" if side == EXAMPLE else format_range(ratios, 1)]  # fmt: skip
        rows.append(cells)
    head = ("program or preset", "episodes/s", "speed-up, episodes", "steps/s",
            "speed-up, steps")  # fmt: skip
    return format_table(head, rows)


def read_reinforce_rates(side: str) -> tuple[list[float], list[float]]:
    """Episodes per second and steps per second in each round."""
    rows = [row for row in read_records("reinforce_vs_flame.csv") if row["side"] == side]
    episodes, steps = (
        [float(row[name]) for row in rows] for name in ("episodes_per_s", "steps_per_s")
    )
    return episodes, steps


def make_update_table() -> str:
    """The time of a PPO update, of its matrix products alone, and of torch."""
    rows = []
    for row in read_records("ppo_update.csv"):
        update, products, autograd = (
            float(row[part]) for part in ("update_us", "products_us", "autograd_us")
        )
        rows.append((
            f"{preset_catalog.resolve_env_id(row['env'])}, {row['minibatch']}",
            *(f"{time:,.0f}" for time in (update, products, autograd)),
            f"{products / update:.0%}",
            f"{autograd / update:.1f}",
        ))  # fmt: skip
    head = ("environment, minibatch size", "rlflame, µs", "matrix products, µs",
            "torch autograd, µs", "share of matrix products", "speed-up over torch")  # fmt: skip
    return format_table(head, rows)


def make_kernels_table() -> str:
    """The time of training runs with numpy alone and with the compiled kernels."""
    groups: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    for row in read_records("kernels.csv"):
        sides = groups.setdefault((row["env"], row["algo"], row["steps"]), {"off": [], "on": []})
        sides[row["kernels"]].append(row)
    rows = []
    for (env, algo, steps), sides in groups.items():
        seconds, learning = (
            [[float(row[name]) for row in sides[kernels]] for kernels in ("off", "on")]
            for name in ("seconds", "learn_seconds")
        )
        rows.append((
            f"{algo.upper()}, {int(steps):,} steps of {preset_catalog.resolve_env_id(env)}",
            *(f"{median(values):.1f}" for values in seconds),
            *(format_range([off / on for off, on in zip(*values, strict=True)], 2)
              for values in (seconds, learning)),
        ))  # fmt: skip
    head = ("run", "numpy, s", "kernels, s", "speed-up", "speed-up of updates")
    return format_table(head, rows)


def make_rollouts_table() -> str:
    """The speed of two workers, and of two processes without a driver."""
    rows = []
    for env in ROLLOUT_ENVS:
        cells = [preset_catalog.resolve_env_id(env)]
        for fleet in ("local", "inline"):
            rate = read_rollouts(fleet, env)[1]
            cells.append(f"{median(rate['steps_per_s']):,.0f}")
            cells += [
                format_range(rate["shares"][limit], 2) if limit in rate["shares"] else ""
                for limit in ("gymnasium", "mj_step")
            ]
        rows.append(cells)
    head = ["environment"]
    for side in ("2 workers", "2 processes"):
        head += [f"{side}, steps/s", f"{side}, relative to Gymnasium",
                 f"{side}, relative to `mj_step`"]  # fmt: skip
    return format_table(head, rows)


def read_rollouts(fleet: str, env: str) -> list[dict[str, Any]]:
    """The rates of one worker and of two workers."""
    rates: list[dict[str, Any]] = read_json(f"rollouts/{env}_{fleet}.json")["rates"]
    return rates


def make_scaling_table() -> str:
    """Seconds that the same work takes on local workers and on executors of Flame."""
    rows = []
    for case in ("1 ms", "15 ms", "50 ms", "100 ms"):
        seconds = {
            (fleet, workers): median(
                float(row["seconds"])
                for row in read_records("scaling.csv")
                if (row["case"], row["backend"], row["workers"]) == (case, fleet, str(workers))
            )
            for fleet in ("local", "flame")
            for workers in SCALING_WORKERS
        }
        fastest = min(seconds["local", 1], seconds["flame", 1])
        rows.append((
            case,
            *(f"{seconds['local', n]:.2f}, {seconds['flame', n]:.2f}" for n in SCALING_WORKERS),
            *(f"{fastest / seconds[fleet, 8]:.2f}" for fleet in ("local", "flame")),
        ))  # fmt: skip
    head = ("episode length", "1 worker: local, Flame", "2 workers", "4 workers", "8 workers",
            "speed-up, 8 local workers", "speed-up, 8 executors")  # fmt: skip
    return format_table(head, rows)


def make_scaling_costs() -> str:
    """The overhead of a task and of an iteration, fitted to the record."""
    local, flame = fit_overheads(*read_scaling_cases())
    return (
        f"A least-squares fit gives an overhead of {1e3 * local['task_s']:.1f} ms per task on "
        f"local workers and {1e3 * flame['task_s']:.1f} ms on executors. The overhead per "
        f"iteration is {1e3 * local['iteration_s']:.0f} ms on local workers and "
        f"{1e3 * flame['iteration_s']:.0f} ms on executors."
    )


def read_scaling_cases() -> tuple[list[Case], list[Side]]:
    """Read the record as cases and sides of the scaling benchmark."""
    cases: dict[str, Case] = {}
    sides: dict[tuple[str, str, int], Side] = {}
    for row in read_records("scaling.csv"):
        name, fleet, workers = row["case"], row["backend"], int(row["workers"])
        if name not in cases:
            episode_ms = [float(name.split()[0])]
            (cases[name],), _ = make_sleeping_cases(episode_ms, 8, episodes=int(row["episodes"]))
        labels = {"case": name, "fleet": fleet, "workers": workers, "capacity": workers}
        side = sides.setdefault((name, fleet, workers), Side("", labels))
        side.repetitions.append({part: float(row[part]) for part in ("seconds", "learn_s")})
    return [*cases.values()], [*sides.values()]


def make_published_table() -> str:
    """Published runs of Flame's example, and runs of rlflame with equal settings."""
    rows = []
    for name, published in COMPARISONS.items():
        result = read_json(f"published/{name}.json")
        sides = [side["repetitions"] for side in result["cells"]]
        source = "README" if "README" in published.source else "report"
        rows.append((
            f"{preset_catalog.resolve_env_id(published.environment)}, {published.iterations} x "
            f"{published.episodes_per_iteration} ({source})",
            f"{published.local.seconds:,.1f}, {published.flame.seconds:,.1f}",
            f"{published.local.reward:.1f}, {published.flame.reward:.1f}",
            ", ".join(f"{median(run['seconds'] for run in side):.1f}" for side in sides),
            f"{sides[0][0]['final_return']:.1f}",
        ))  # fmt: skip
    head = ("environment, iterations x episodes (source)", "published seconds: local, Flame",
            "published return: local, Flame", "rlflame, seconds: local, Flame",
            "rlflame, return")  # fmt: skip
    return format_table(head, rows)


def make_text_table(record: str) -> str:
    """A table of a record that contains the text of the cells."""
    rows = read_records(record)
    return format_table([*rows[0]], [[*row.values()] for row in rows])


def make_card_table() -> str:
    """Milliseconds of a PPO minibatch on the CPU and on a GPU."""
    records = read_records("card.csv")
    (threads,) = {row["threads"] for row in records}
    rows = []
    for row in records:
        times = [float(row[name]) for name in ("one_thread_ms", "threads_ms", "card_ms")]
        size = f"{row['width']}, {int(row['minibatch']):,}"
        rows.append((size, *(f"{time:.1f}" for time in times)))
    return format_table(
        ("hidden units, minibatch size", "one thread", f"{threads} threads", "GPU"), rows
    )


def read_json(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return result
