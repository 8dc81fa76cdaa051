"""The numbers in Flame's READMEs and in the report on its example."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, ClassVar

from rlflame.analysis.report.document import Block, Section, format_value, make_table
from rlflame.bench.result import BenchResult, Side, compute_speedup
from rlflame.bench.runner import BenchSession
from rlflame.bench.scaling import ScalingBenchmark
from rlflame.errors import ConfigError
from rlflame.rollout.machine import describe_machine
from rlflame.terminal_text import format_count


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A published run: its duration, and the mean reward of its last iteration."""

    seconds: float
    reward: float


@dataclass(frozen=True, slots=True)
class PublishedComparison:
    """A published comparison of two programs, with one run of each."""

    source: str
    hardware: str
    environment: str
    iterations: int
    episodes_per_iteration: int
    local: PublishedRun
    flame: PublishedRun

    @property
    def episodes(self) -> int:
        return self.iterations * self.episodes_per_iteration


REPORT = (
    "the report on Flame's RL example",
    "Apple M4, 8 cores; Podman with 5 virtual processors and 8 GB; 3 executor managers",
)
COMPARISONS = {
    "flame-readme-ant": PublishedComparison(
        "the README of Flame's RL example",
        "not stated",
        "ant", 20, 100, PublishedRun(106.45, -91.6), PublishedRun(85.23, -122.4),
    ),
    "flame-report-ant": PublishedComparison(
        *REPORT, "ant", 100, 100, PublishedRun(481.70, -166.1), PublishedRun(335.71, -252.6)
    ),
    "flame-report-cartpole": PublishedComparison(
        *REPORT, "cartpole", 100, 100, PublishedRun(1230.12, 193.4), PublishedRun(517.94, 499.8)
    ),
}  # fmt: skip
#: Transitions per second of Flame's replay buffer example. Its hardware is not stated.
REPLAY_SOURCE, REPLAY_ENVIRONMENT = "the README of Flame's replay buffer example", "CartPole-v1"
REPLAY_RATES = {
    "local, one process": 223_376.4,
    "Flame, incremental reads": 76_016.1,
    "Flame, forced full reads": 6_959.5,
}
#: Published speed-ups at 100 episodes per iteration, by number of executors.
SPEEDUPS = {1: "1x", 5: "~4x", 10: "7-8x", 20: "12-15x"}
#: The published benefit of distribution, from a number of milliseconds per episode on.
BENEFITS = (
    (1000.0, "essential"),
    (100.0, "near-linear"),
    (50.0, "from 50 episodes on"),
    (15.0, "marginal"),
    (0.0, "overhead dominates"),
)
#: Published milliseconds per episode.
EPISODE_MS = {"CartPole-v1": 1.0, "Hopper-v5": 15.0, "HalfCheetah-v5": 20.0, "Ant-v5": 50.0}
#: Published milliseconds of overhead per task on Flame.
TASK_MS = 100.0

RUNS = (
    "run",
    "hardware",
    ("seconds", "seconds", ",.2f"),
    ("episodes/s", "episodes_per_s", ",.1f"),
    ("last mean reward", "reward", ",.1f"),
)


def find_benefit(episode_ms: float) -> str:
    """The published benefit of distribution for episodes of this length."""
    return next(text for least, text in BENEFITS if episode_ms >= least)


@dataclass
class FlameComparison:
    """A repetition of a published comparison, with the published numbers below."""

    published: PublishedComparison
    scaling: ScalingBenchmark
    name: ClassVar[str] = "scaling"

    @property
    def fleets(self) -> Sequence[str]:
        return self.scaling.fleets

    @property
    def sides(self) -> Sequence[Side]:
        return self.scaling.sides

    def measure(self, session: BenchSession) -> Generator[None, None, None]:
        return self.scaling.measure(session)

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        result = self.scaling.make_result(sides)
        blocks = [*result.blocks, *self._make_blocks(result.facts)]
        facts = {**result.facts, "published": asdict(self.published)}
        return replace(result, facts=facts, blocks=blocks)

    def _make_blocks(self, facts: dict[str, Any]) -> list[Block]:
        published, machine = self.published, describe_machine()
        rows = [
            {
                "run": f"{published.source}, {side}",
                "hardware": published.hardware,
                "seconds": run.seconds,
                "episodes_per_s": published.episodes / run.seconds,
                "reward": run.reward,
            }
            for side, run in (("local", published.local), ("Flame", published.flame))
        ]
        cores = format_count(machine["usable_cores"], "core")
        for cell in facts["cells"]:
            seconds = median(run["seconds"] for run in cell["repetitions"])
            last, workers = cell["repetitions"][-1], format_count(cell["workers"], "worker")
            rows.append(
                {
                    "run": f"rlflame, {cell['fleet']}, {workers}",
                    "hardware": f"{machine['processor']}, {cores}",
                    "seconds": seconds,
                    "episodes_per_s": last["episodes"] / seconds,
                    "reward": last["final_return"],
                }
            )
        (case,) = self.scaling.cases
        gain = 100.0 * (published.local.seconds / published.flame.seconds - 1.0)
        blocks: list[Block] = [
            f"{published.environment}, {published.iterations} iterations of "
            f"{published.episodes_per_iteration} episodes of REINFORCE. rlflame uses the published "
            "hyperparameters, unless --set changes them. The hardware differs, so do not compare "
            "seconds. The two published runs are one run each of two different programs.",
            make_table(rows, RUNS, 2),
            f"The published gain in throughput, (distributed - local) / local, is {gain:+.1f}%. "
            "The gain of rlflame is in the table above, if both fleets ran.",
        ]
        if case.iterations < published.iterations:
            blocks.append(f"rlflame ran {format_count(case.iterations, 'iteration')} only.")
        return blocks


def make_section(facts: dict[str, Any]) -> Section:
    """Make the section with the published numbers for a result."""
    makers = {"scaling": compare_scaling, "rollouts": compare_rollouts, "replay": compare_replay}
    if (name := facts.get("benchmark")) not in makers:
        raise ConfigError(
            f"There are no published numbers for a result of {name!r}.",
            "pass scaling.json, rollouts.json or replay.json of `rlflame bench`",
        )
    return Section(f"Comparison with Flame's README: {name}", tuple(makers[name](facts)))


def compare_scaling(facts: dict[str, Any]) -> list[Block]:
    speedups = [
        {**row, "speedup": f"{row['speedup']['value']:.2f}x", "published": SPEEDUPS[row["workers"]]}
        for row in facts["rows"]
        if row["workers"] in SPEEDUPS
    ]
    benefits = [
        {"case": case["name"], "published": find_benefit(case["episode_ms"])}
        for case in facts["cases"]
        if case["episode_ms"] is not None
    ]
    names = ("case", "fleet", "workers")
    columns = [*((name, name, "") for name in names), ("speed-up", "speedup", "")]
    blocks: list[Block] = []
    if speedups:
        blocks.append("Speed-up by number of executors, at 100 episodes per iteration.")
        blocks.append(make_table(speedups, [*columns, ("Flame's README", "published", "")], 2))
    if benefits:
        blocks.append("Benefit of distribution for episodes of this length.")
        blocks.append(make_table(benefits, ["case", ("Flame's README", "published", "")], 2))
    costs = [f"{1000.0 * o['task_s']:.2f} ms on {o['fleet']}" for o in facts["overheads"]]
    if costs:
        text = f"Overhead per task: {TASK_MS:.0f} ms in Flame's README, here {', '.join(costs)}."
        blocks.append(text)
    return blocks


def compare_rollouts(facts: dict[str, Any]) -> list[Block]:
    quoted = EPISODE_MS.get(facts["environment"])
    rows = [{**rate, "published": quoted} for rate in facts["rates"]]
    columns = [
        "fleet",
        "workers",
        ("ms per episode", "ms_per_episode", ",.2f"),
        ("Flame's README", "published", ",.0f"),
    ]
    return [f"Duration of an episode of {facts['environment']}.", make_table(rows, columns)]


def compare_replay(facts: dict[str, Any]) -> list[Block]:
    machine = facts["machine"]
    rows: list[dict[str, Any]] = [
        {"source": REPLAY_SOURCE, "run": mode, "environment": REPLAY_ENVIRONMENT,
         "hardware": "not stated", "rate": rate}
        for mode, rate in REPLAY_RATES.items()
    ]  # fmt: skip
    cores = format_count(machine["usable_cores"], "core")
    rows += [
        {"source": "rlflame", "run": f"{f['fleet']}, {format_count(f['workers'], 'worker')}",
         "environment": facts["environment"], "hardware": f"{machine['processor']}, {cores}",
         "rate": median(fill["transitions_per_s"] for fill in f["fills"])}
        for f in facts["fillings"]
    ]  # fmt: skip
    columns = [(name, name, "") for name in ("source", "run", "environment", "hardware")]
    share = REPLAY_RATES["Flame, incremental reads"] / REPLAY_RATES["local, one process"]
    return [
        "The environments and the hardware differ (SAC needs continuous actions), so compare only "
        "the rates from the same source.",
        make_table(rows, [*columns, ("transitions/s", "rate", ",.0f")], 4),
        f"Flame's example with incremental reads reaches {share:.2f} of its local rate.",
        *relate_fleets(facts["fillings"]),
    ]


def relate_fleets(fillings: list[dict[str, Any]]) -> list[str]:
    """Compare the filling rate on Flame with the local rate of as many workers."""
    seconds = {
        (f["fleet"], f["workers"]): [
            fill["transitions"] / fill["transitions_per_s"] for fill in f["fills"]
        ]
        for f in fillings
    }
    lines = []
    for (fleet, workers), own_s in seconds.items():
        base_s = seconds.get(("local", workers))
        if fleet == "flame" and base_s is not None:
            share = format_value(compute_speedup(base_s, own_s), ".2f", len(own_s))
            lines.append(f"rlflame with {workers} workers: {share}.")
    return lines
