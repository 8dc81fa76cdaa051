"""`train --plot`: every episode's return, and a sentence where matplotlib is missing."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from commands import TINY_REINFORCE, rlflame

from rlflame import plot

WORDS = ("train", *TINY_REINFORCE, "--algo", "reinforce", "--iterations", "15", "--plot")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_average_is_of_the_last_fifty_and_no_others():
    values = np.arange(60.0)
    averages = plot.moving_average(values, 50)
    # Of 0..49, 1..50, ..., 10..59: their middles.
    assert averages.tolist() == [24.5 + k for k in range(11)]
    assert plot.moving_average(np.ones(49), 50).size == 0


def test_what_is_drawn(tmp_path):
    from matplotlib.colors import to_rgb

    returns = [float(x) for x in range(60)]
    file = tmp_path / "episodes.csv"
    file.write_text("r,l\n" + "".join(f"{x!r},1\n" for x in returns))
    axes = plot.picture(plot.read_returns(file), "A title").axes[0]
    every, average = axes.lines
    assert list(every.get_ydata()) == returns
    assert list(every.get_xdata()) == list(range(1, 61))
    assert every.get_alpha() == 0.6
    assert list(average.get_xdata()) == list(range(50, 61))
    assert list(average.get_ydata()) == [24.5 + k for k in range(11)]
    assert to_rgb(average.get_color()) == (1.0, 0.0, 0.0)
    assert axes.get_title() == "A title"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Episode", "Return")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["Episode", "Mean of the last 50"]
    assert axes.xaxis.get_gridlines()[0].get_visible()


def test_a_run_leaves_a_picture_of_all_its_episodes(tmp_path):
    spoken = rlflame(*WORDS)
    assert spoken.code == 0, spoken.err
    out = tmp_path / "runs/cartpole-reinforce-0"
    data = (out / "returns.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(plot.read_returns(out / "episodes.csv")) == 15 * 4
    assert "runs/cartpole-reinforce-0/returns.png" in spoken.err


def test_without_matplotlib_there_is_a_sentence_and_the_run_itself(tmp_path, monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    spoken = rlflame(*WORDS)
    assert spoken.code == 0
    assert spoken.err == (
        "matplotlib is not installed, so there will be no plot. pip install 'rlflame[plot]'\n"
    )
    out = tmp_path / "runs/cartpole-reinforce-0"
    assert (out / "result.json").exists()
    assert not (out / "returns.png").exists()


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path):
    file = tmp_path / "episodes.csv"
    file.write_text("r,l\n1.0,1\n")
    with pytest.raises(plot.RlflameError, match="cannot be written"):
        plot.draw_returns(file, tmp_path / "absent" / "x.png", "A title")
