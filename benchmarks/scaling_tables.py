"""Makes the tables of docs/scaling.md from docs/results/cores.csv."""

from __future__ import annotations

from records import Row, format_table, read_records

RECORD = "cores.csv"
ALONE = "steps/s, learning alone"
#: The previous design's speed on 16 cores of an Intel Xeon, in steps per second.
EARLIER = (
    ("`mujoco-ppo`, 2 workers", "14,600"),
    ("`mujoco-ppo`, 15 workers", "20,700"),
    ("`mujoco-ppo-wide`, 15 workers", "45,300"),
    ("`mujoco-ppo-wide`, 12 workers, 4 learners over gloo", "21,300"),
)


def make_machine() -> str:
    """A sentence about the machine of the record."""
    row = read_records(RECORD)[0]
    card = f" and an {row['card']}" if row["card"] else " and no GPU"
    name = row["processor"].removesuffix(" Processor")
    return f"The machine has {row['cores']} cores of an {name} processor{card}."


def make_run_table(part: str, head: str) -> str:
    """Steps per second of whole runs, and of learning alone, relative to the first variant."""
    rates: dict[tuple[str, str], dict[str, float]] = {}
    for row in select(part):
        cells = rates.setdefault((row["case"], row["variant"]), {})
        cells[row["unit"]] = float(row["value"])
    first: dict[str, dict[str, float]] = {}
    rows = []
    for (case, variant), cells in rates.items():
        base = first.setdefault(case, cells)
        preset, comma, shards = case.partition(",")
        rows.append((
            f"`{preset}`{comma}{shards}, {variant}",
            *(f"{cells[unit]:,.0f}" for unit in ("steps/s", ALONE)),
            *(f"{cells[unit] / base[unit]:.2f}" for unit in ("steps/s", ALONE)),
        ))  # fmt: skip
    names = ("run, steps/s", "learning alone, steps/s", "speed-up of the run",
             "speed-up of learning")  # fmt: skip
    return format_table((head, *names), rows)


def make_driver_table() -> str:
    """The driver's processor time for a step."""
    rows = []
    for row in select("driver"):
        time_us = float(row["value"])
        rows.append(
            (f"`{row['case']}`, {row['variant']}", f"{time_us:.2f}", f"{1 / time_us:.1f} million")
        )
    return format_table(("preset and workers", "driver, µs per step", "limit, steps/s"), rows)


def make_shard_table() -> str:
    """The time of a minibatch by the number of shards, relative to one shard."""
    times: dict[str, list[float]] = {}
    for row in select("shards"):
        times.setdefault(row["case"], []).append(float(row["value"]))
    rows = [
        (case, f"{values[0]:,.0f} µs", *(f"{value / values[0]:.2f}" for value in values[1:]))
        for case, values in times.items()
    ]
    return format_table(("minibatch", "1 shard", "2 shards", "4 shards", "8 shards"), rows)


def make_worker_text() -> str:
    """How a worker spends the time of a step."""
    step_us, policy_us = (float(row["value"]) for row in select("worker"))
    return (
        f"A step takes {step_us:.0f} µs in a worker. The policy (the forward pass for eight "
        f"environments, the noise and the log-densities) takes {policy_us:.1f} µs of it, and the "
        "physics most of the rest."
    )


def make_engine_table() -> str:
    """The time of an update by engine."""
    engines = [*dict.fromkeys(row["variant"] for row in select("engines"))]
    cases = {row["case"]: row["unit"] for row in select("engines")}
    values = {(row["case"], row["variant"]): float(row["value"]) for row in select("engines")}
    rows = [
        (f"{case} ({unit.replace('us', 'µs')})",
         *(f"{values[case, engine]:,.0f}" for engine in engines))
        for case, unit in cases.items()
    ]  # fmt: skip
    return format_table(("update", *engines), rows)


def make_profile_table() -> str:
    """The parts of an update, with numpy alone and with the kernels."""
    times: dict[str, dict[str, str]] = {}
    for row in select("profile"):
        times.setdefault(row["case"], {})[row["variant"]] = f"{float(row['value']):,.0f}"
    engines = list(next(iter(times.values())))
    rows = []
    for case, values in times.items():
        update, _, part = case.partition(": ")
        rows.append((update, part, *(values[engine] for engine in engines)))
    return format_table(("update", "part", *(f"{engine}, µs" for engine in engines)), rows)


def make_check_table(part: str, head: tuple[str, str]) -> str:
    """The result of each check."""
    cases: dict[str, dict[str, str]] = {}
    for row in select(part):
        cases.setdefault(row["case"], {})[row["variant"]] = row["value"]
    variants = [*dict.fromkeys(name for results in cases.values() for name in results)]
    rows = [
        (case, *(results.get(name, "") for name in variants)) for case, results in cases.items()
    ]
    return format_table((f"{head[0]} / {head[1]}", *variants), rows)


def make_earlier_table() -> str:
    """Speeds of the previous design on a larger machine."""
    return format_table(("run on HalfCheetah", "steps/s"), EARLIER)


def select(part: str) -> list[Row]:
    return [row for row in read_records(RECORD) if row["part"] == part]
