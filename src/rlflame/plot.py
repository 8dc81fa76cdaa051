"""The picture of a run: every episode's return, and their moving average.

matplotlib is an extra; without it there is a sentence instead of a picture. Must not know:
training, terminals.
"""

from __future__ import annotations

import csv
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlflame.errors import RlflameError
from rlflame.rollout.spec import Float64

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW_EPISODES = 50


class PlotUnavailable(RlflameError):
    """matplotlib is not installed."""


def check_available() -> None:
    try:
        missing = importlib.util.find_spec("matplotlib") is None
    except ValueError:  # somebody has put something else in its place
        missing = True
    if missing:
        raise PlotUnavailable(
            "matplotlib is not installed, so there will be no plot.", "pip install 'rlflame[plot]'"
        )


def draw_returns(episodes: Path, out: Path, title: str) -> None:
    """Draw an episodes.csv into an image file."""
    check_available()
    figure = picture(read_returns(episodes), title)
    try:
        figure.savefig(out, dpi=120)
    except OSError as error:
        raise RlflameError(
            f"{out} cannot be written: {error.strerror or error}.", "make room or check its folder"
        ) from error


def picture(returns: Float64, title: str) -> Figure:
    """Every episode, and over it the moving average."""
    # It would log where it keeps its caches; a Figure needs no display and no global state.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(returns) + 1), returns, alpha=0.6, label="Episode")
    if len(returns) >= WINDOW_EPISODES:
        axes.plot(
            np.arange(WINDOW_EPISODES, len(returns) + 1),
            moving_average(returns, WINDOW_EPISODES),
            color="red",
            label=f"Mean of the last {WINDOW_EPISODES}",
        )
    axes.set_title(title)
    axes.set_xlabel("Episode")
    axes.set_ylabel("Return")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    return figure


def read_returns(episodes: Path) -> Float64:
    """The returns in an episodes.csv, in the order in which they were collected."""
    with episodes.open(newline="", encoding="utf-8") as file:
        return np.array([float(row["r"]) for row in csv.DictReader(file)], np.float64)


def moving_average(values: Float64, window: int) -> Float64:
    """Element i is the mean of `window` values, the last of them values[i + window - 1]."""
    if len(values) < window:
        return np.zeros(0)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    averages: Float64 = (sums[window:] - sums[:-window]) / window
    return averages
