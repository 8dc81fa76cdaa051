"""Draw learning curves from docs/results, with a panel for each environment.

    python benchmarks/curves.py docs/results/sac.csv docs/results/sac_control.csv \
        --envs halfcheetah,hopper -o docs/images/sac.svg

A line shows the interquartile mean over the seeds of a study. For three or more seeds, a band shows
the 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
from script import ended

from rlflame.analysis import curves
from rlflame.analysis.curves import make_mean_series
from rlflame.analysis.plots import matplotlib_backend
from rlflame.analysis.plots.chart import Chart, Panels, Series
from rlflame.config import preset_catalog
from rlflame.statistics import FEWEST_SEEDS
from rlflame.storage.safetensors_file import write_atomically

PEERS = {"-zoo-sb3": "stable-baselines3 with Zoo settings", "-sb3": "stable-baselines3"}

BAND_NOTE = "Band: 95% bootstrap interval over seeds, for three or more seeds."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csvs", nargs="+", type=Path)
    parser.add_argument("--envs", required=True, help="comma-separated names, one panel each")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    for path in options.csvs:
        if not path.is_file():
            parser.error(f"{path} does not exist")
    rows = [row for path in options.csvs for row in read(path)]
    # A preset is labelled as rlflame's only if the picture also shows another library.
    ours = "rlflame, " if any(peer(row) for row in rows) else ""
    ids = [preset_catalog.resolve_env_id(name) for name in options.envs.split(",")]
    charts = tuple(panel(rows, id, ours) for id in ids)
    panels = Panels(charts, (curves.LINE_NOTE, BAND_NOTE))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, matplotlib_backend.render_image(panels, options.out))


def read(path: Path) -> list[dict[str, str]]:
    """The evaluations during training. The final evaluation repeats a step."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("final") != "1"]


def panel(rows: list[dict[str, str]], id: str, ours: str) -> Chart:
    mine = [row for row in rows if preset_catalog.resolve_env_id(row["env"]) == id]
    if not mine:
        raise SystemExit(f"None of these files contains {id}.")
    lines: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in mine:
        label = peer(row) or f"{ours}{row['preset']}"
        lines.setdefault((label, row.get("study", "")), []).append(row)
    labels = [label for label, _ in lines]
    drawn = tuple(
        # The end of a study's name, its steps, distinguishes two studies of the same preset.
        series(label if labels.count(label) == 1 else f"{label}, {study.split('-')[-1]}", found)
        for (label, study), found in lines.items()
    )
    return Chart(id, curves.AXES["steps"], "Evaluation return", drawn)


def peer(row: dict[str, str]) -> str | None:
    """The other library of a row, or None for rlflame."""
    return next((name for end, name in PEERS.items() if row["algo"].endswith(end)), None)


def series(name: str, rows: list[dict[str, str]]) -> Series:
    found = [curve(rows, seed) for seed in sorted({int(row["seed"]) for row in rows})]
    title = f"{name} ({len(found)} seed{'s' if len(found) > 1 else ''})"
    line = make_mean_series(title, found) if len(found) > 1 else replace(found[0], label=title)
    if line is None:
        raise SystemExit(f"The seeds of {name} have no steps in common.")
    # With fewer seeds, a bootstrap interval is meaningless.
    return line if len(found) >= FEWEST_SEEDS else replace(line, low=None, high=None)


def curve(rows: list[dict[str, str]], seed: int) -> Series:
    mine = [row for row in rows if int(row["seed"]) == seed]
    return Series(
        "",
        np.array([float(row["step"]) for row in mine]),
        np.array([float(row["return_mean"]) for row in mine]),
    )


if __name__ == "__main__":
    ended(main)
