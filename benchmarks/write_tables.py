"""Write the tables of the documentation from docs/results and the source.

    python benchmarks/write_tables.py                      # print all tables
    python benchmarks/write_tables.py results-ppo          # print one table
    python benchmarks/write_tables.py --write              # write all tables into the pages

In a page, each table is between the markers `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import environment_tables
import experiment_tables
import reference_tables
import result_tables
import scaling_tables
import source_tree
import speed_tables
from records import ROOT
from script import read_block, write_block

README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
EXPERIMENTS = ROOT / "docs" / "experiments.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
REFERENCE = ROOT / "docs" / "reference"
SCALING = ROOT / "docs" / "scaling.md"
LEARNERS = ROOT / "docs" / "guides" / "learners.md"
ENVIRONMENTS = ROOT / "docs" / "guides" / "environments.md"

#: The page of each block, and the function that makes its text.
BLOCKS: dict[str, tuple[Path, Callable[[], str]]] = {
    "readme-table": (README, result_tables.make_readme_table),
    "results-summary": (RESULTS, result_tables.make_summary),
    "results-findings": (RESULTS, result_tables.make_findings),
    **{
        f"results-{name}": (RESULTS, partial(result_tables.make_group_table, name))
        for name in ("ppo", "elsewhere", "wide", "sac", "reinforce")
    },
    "results-time-to-return": (RESULTS, result_tables.make_time_to_return_table),
    "results-untuned": (RESULTS, result_tables.make_untuned_table),
    "results-spaces": (RESULTS, result_tables.make_spaces_table),
    "results-classic": (RESULTS, result_tables.make_classic_table),
    "speed-summary": (BENCHMARKS, speed_tables.make_summary),
    "speed-findings": (BENCHMARKS, speed_tables.make_findings),
    "speed-ppo": (BENCHMARKS, speed_tables.make_ppo_table),
    "speed-sac": (BENCHMARKS, speed_tables.make_sac_table),
    "speed-reinforce": (BENCHMARKS, speed_tables.make_reinforce_table),
    "speed-update": (BENCHMARKS, speed_tables.make_update_table),
    "speed-kernels": (BENCHMARKS, speed_tables.make_kernels_table),
    "speed-rollouts": (BENCHMARKS, speed_tables.make_rollouts_table),
    "speed-flame": (BENCHMARKS, partial(speed_tables.make_text_table, "flame_overhead.csv")),
    "robustness": (BENCHMARKS, partial(speed_tables.make_text_table, "robustness.csv")),
    "speed-scaling": (BENCHMARKS, speed_tables.make_scaling_table),
    "speed-scaling-costs": (BENCHMARKS, speed_tables.make_scaling_costs),
    "speed-published": (BENCHMARKS, speed_tables.make_published_table),
    **{
        f"experiments-{name}": (EXPERIMENTS, partial(experiment_tables.make_table, name))
        for name in ("mujoco", "falls", "first", "parts", "pendulum", "mountaincar", "swimmer",
                     "cliffwalking", "sac", "wide", "default-discrete", "default-continuous")
    },
    "experiments-walker2d": (EXPERIMENTS, experiment_tables.make_walker2d_comparison),
    "reference-settings": (REFERENCE / "settings.md", reference_tables.make_settings),
    "reference-commands": (REFERENCE / "commands.md", reference_tables.make_commands),
    "source-tree": (ARCHITECTURE, source_tree.make_table),
    "scaling-machine": (SCALING, scaling_tables.make_machine),
    "scaling-workers": (
        SCALING, partial(scaling_tables.make_run_table, "workers", "preset and workers"),
    ),
    "scaling-learners": (
        SCALING, partial(scaling_tables.make_run_table, "learners", "preset and learners"),
    ),
    "scaling-driver": (SCALING, scaling_tables.make_driver_table),
    "scaling-worker": (SCALING, scaling_tables.make_worker_text),
    "scaling-shards": (SCALING, scaling_tables.make_shard_table),
    "scaling-engines": (SCALING, scaling_tables.make_engine_table),
    "scaling-profile": (SCALING, scaling_tables.make_profile_table),
    "scaling-bits": (
        SCALING, partial(scaling_tables.make_check_table, "bits", ("run", "learners")),
    ),
    "scaling-kills": (
        SCALING, partial(scaling_tables.make_check_table, "kills", ("learners", "fault")),
    ),
    "scaling-earlier": (SCALING, scaling_tables.make_earlier_table),
    "card": (LEARNERS, speed_tables.make_card_table),
    "environments-packages": (ENVIRONMENTS, environment_tables.make_package_table),
    "environments": (ENVIRONMENTS, environment_tables.make_table),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of blocks (default: all)")
    parser.add_argument("--write", action="store_true", help="write the blocks into the pages")
    options = parser.parse_args()
    if unknown := {*options.names} - {*BLOCKS}:
        parser.error(f"no block is named {', '.join(unknown)}; the blocks are {', '.join(BLOCKS)}")
    for name in options.names or BLOCKS:
        page, make_block = BLOCKS[name]
        text = make_block()
        if not options.write:
            print(f"{name}\n{text}\n")
        elif text != read_block(page, name):
            write_block(page, name, text)
            print(f"wrote {name} into {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
