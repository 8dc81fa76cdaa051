"""Repeat published results, or print them next to results of rlflame.

    python benchmarks/published.py flame flame-report-cartpole --compare local,flame -o folder
    python benchmarks/published.py race dppo --learners 1,2 -o dppo
    python benchmarks/published.py compare scaling/scaling.json

`flame` runs a comparison from Flame's REINFORCE example and prints the published numbers below its
result. The README of the example has 20 x 100 episodes of Ant; the report on the example has 100 x
100 episodes of Ant and of CartPole. `race` trains the two set-ups of an article on distributed PPO
and SAC with several learners, and with stable-baselines3 if it is installed. `compare` reads a
result of `rlflame bench scaling`, `rollouts` or `replay` and prints the numbers in Flame's READMEs.
The published numbers come from other hardware, so do not compare seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import ended, positive

from rlflame.cli.bench import parse_counts, parse_fleets
from rlflame.errors import ConfigError
from rlflame.rollout.blas import limit_threads

if TYPE_CHECKING:
    from rlflame.bench.runner import Benchmark

FLAME = ("flame-readme-ant", "flame-report-ant", "flame-report-cartpole")
RACES = ("dppo", "dsac")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    flame = commands.add_parser("flame", help="repeat a comparison from Flame's REINFORCE example")
    flame.add_argument("name", choices=FLAME)
    flame.add_argument("--workers", metavar="N,N,...", help="numbers of workers or executors")
    flame.add_argument("--compare", metavar="NAME,...", help="local, flame, inline")
    flame.add_argument("--iterations", type=positive, help="default: as published")
    flame.set_defaults(run=run_flame)
    race = commands.add_parser("race", help="compare distributed PPO or SAC with stable-baselines3")
    race.add_argument("name", choices=RACES)
    race.add_argument("--learners", metavar="N,N,...", help="numbers of learners (1,2,4,8)")
    race.add_argument("--steps", type=positive, help="steps of each training")
    race.add_argument("--compare", metavar="NAME", default="local", help="local, flame or inline")
    race.set_defaults(run=run_race)
    for command in (flame, race):
        command.add_argument("--repeat", type=positive, default=1)
        command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
        command.add_argument(
            "-o", "--out", type=Path, help="folder for the JSON, Markdown, CSV and image files"
        )
        command.add_argument("--json", action="store_true")
        command.add_argument("--debug", action="store_true")
    compare = commands.add_parser("compare", help="print published numbers next to a result")
    compare.add_argument("file", type=Path, help="JSON file of `rlflame bench`")
    compare.set_defaults(run=run_compare)
    options = parser.parse_args(arguments)
    limit_threads(1)  # before numpy is loaded
    options.run(options)


def run_flame(options: argparse.Namespace) -> None:
    from published_figures import COMPARISONS, FlameComparison

    from rlflame.bench.case import make_env_case
    from rlflame.bench.scaling import ScalingBenchmark
    from rlflame.rollout import machine

    published = COMPARISONS[options.name]
    case, runtime = make_env_case(
        published.environment,
        algorithm="reinforce",
        preset="reinforce-classic",
        episodes=published.episodes_per_iteration,
        iterations=options.iterations or published.iterations,
        sets=options.set,
    )
    counts = parse_counts(options.workers or str(machine.count_usable_cores()))
    scaling = ScalingBenchmark([case], parse_fleets(options.compare), counts, options.repeat)
    run(FlameComparison(published, scaling), runtime, options)


def run_race(options: argparse.Namespace) -> None:
    from race import RaceBenchmark
    from race_recipes import SETUPS, make_variants

    fleet, *others = parse_fleets(options.compare)
    if others:
        raise ConfigError(f"{options.name} runs on one fleet only.", f"--compare {fleet}")
    counts = parse_counts(options.learners or "1,2,4,8", "--learners")
    variants = make_variants(SETUPS[options.name], counts, steps=options.steps, sets=options.set)
    benchmark = RaceBenchmark(options.name, variants, fleet, options.repeat)
    run(benchmark, variants[0].config.runtime, options)
    if options.out is not None:
        benchmark.draw_curves(options.out / f"{options.name}.curves.png")


def run(benchmark: Benchmark, runtime: Any, options: argparse.Namespace) -> None:
    from rlflame.bench.runner import BenchRunner

    BenchRunner(benchmark, runtime, options.out, as_json=options.json, debug=options.debug).run()


def run_compare(options: argparse.Namespace) -> None:
    from published_figures import make_section

    from rlflame.analysis.report.document import Document, to_markdown
    from rlflame.console.output import print_result_lines

    section = make_section(json.loads(options.file.read_text("utf-8")))
    document = Document("Comparison with published results", (section,))
    print_result_lines(to_markdown(document).rstrip())


if __name__ == "__main__":
    ended(main)
