"""`plot` of runs in several environments: one panel for each."""

from __future__ import annotations

import numpy as np
import pytest
from commands import rlflame
from run_files import make

from rlflame.analysis import curves
from rlflame.analysis.plots import matplotlib_backend
from rlflame.analysis.plots.chart import Chart, Panels, Series
from rlflame.storage import run_reader


@pytest.fixture
def two_environments(tmp_path, monkeypatch):
    """Runs of PPO and REINFORCE in one environment, and of PPO in another one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    for seed in range(3):
        make(folder / f"ppo-{seed}", seed=seed, seconds=[(300, 30.0)],
             evaluations=[(s, s / 10 + seed) for s in (100, 200, 300)])  # fmt: skip
        make(folder / f"z-{seed}", seed=seed, environment="Hopper-v5", seconds=[(3000, 7200.0)],
             evaluations=[(s, s * 100 + seed) for s in (1000, 2000, 3000)])  # fmt: skip
    for seed in range(2):
        make(folder / f"re-{seed}", seed=seed, algorithm="reinforce", seconds=[(300, 30.0)],
             evaluations=[(s, s / 20 + seed) for s in (100, 200, 300)])  # fmt: skip
    return folder


def read(folder):
    return [run_reader.read_run(run) for run in sorted(folder.iterdir())]


def names_in(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_each_environment_has_axes_limits_and_a_legend_of_its_own(two_environments):
    found = read(two_environments)
    cartpole, hopper = matplotlib_backend.make_figure(curves.make_figure(found)).axes
    assert [axes.get_title(loc="left") for axes in (cartpole, hopper)] == [
        "CartPole-v1",
        "Hopper-v5",
    ]
    # The largest evaluations are 300 / 10 + 2 and 3,000 * 100 + 2.
    assert 32 <= cartpole.get_ylim()[1] < 50
    assert 300_002 <= hopper.get_ylim()[1] < 400_000
    assert hopper.get_ylim()[0] > cartpole.get_ylim()[1]
    assert cartpole.get_xlim()[1] < hopper.get_xlim()[0]
    assert names_in(cartpole) == ["PPO, 3 seeds", "REINFORCE, 2 seeds"]
    assert names_in(hopper) == ["PPO, 3 seeds"]
    assert list(hopper.lines[0].get_ydata()) == pytest.approx([100_001, 200_001, 300_001])
    # Side by side.
    left, right = cartpole.get_subplotspec(), hopper.get_subplotspec()
    assert (left.rowspan, left.colspan) == (range(1), range(1))
    assert (right.rowspan, right.colspan) == (range(1), range(1, 2))


def test_what_is_called_alike_has_one_colour_in_all_panels(two_environments):
    # PPO is first in Hopper and second in CartPole.
    names = ("z-0", "z-1", "z-2", "re-0", "re-1", "ppo-0", "ppo-1", "ppo-2")
    found = [run_reader.read_run(two_environments / name) for name in names]
    hopper, cartpole = matplotlib_backend.make_figure(curves.make_figure(found)).axes
    colours = {line.get_label(): line.get_color() for line in cartpole.lines}
    assert hopper.lines[0].get_color() == colours["PPO, 3 seeds"]
    assert len(set(colours.values())) == 2


def test_a_name_that_a_panel_has_twice_is_two_lines():
    here = np.zeros(1)
    twice = Chart("", "", "", (Series("a", here, here), Series("a", here, here)))
    other = Chart("", "", "", (Series("b", here, here), Series("a", here, here)))
    assert Panels((twice, other)).number_lines() == [[0, 1], [2, 0]]


def test_labelled_runs_keep_one_style_in_every_panel(two_environments):
    """A seed with two runs gives two lines. The other seed keeps its style."""
    found = [run_reader.read_run(two_environments / name) for name in ("z-0", "z-1", "ppo-1")]
    hopper, cartpole = matplotlib_backend.make_figure(curves.make_figure([found[0], *found])).axes
    colours = {line.get_label(): line.get_color() for line in hopper.lines}
    assert len({line.get_color() for line in hopper.lines}) == 3
    (alone,) = cartpole.lines
    assert alone.get_color() == colours[alone.get_label()]


def test_panels_are_drawn_as_asked_and_the_lines_are_explained_once(two_environments):
    found = read(two_environments)
    panels = curves.make_figure(found, "wall", "eval_return_mean", 2)
    assert isinstance(panels, Panels)
    # 30 seconds in one environment, two hours in the other.
    labels = ["Wall-clock time (s)", "Wall-clock time (h)"]
    assert [chart.x_label for chart in panels.parts] == labels
    for chart in panels.parts:
        assert chart.y_label == "Evaluation return, mean of 2"
    # Seed 1 is the median: 100,001 and 200,001 have the mean 150,001.
    assert panels.parts[1].series[0].y[1] == pytest.approx(150_001)
    texts = matplotlib_backend.make_figure(panels).findobj(
        lambda artist: hasattr(artist, "get_text")
    )
    assert sum("interquartile" in text.get_text() for text in texts) == 1


def test_runs_of_one_environment_are_one_chart(two_environments):
    chart = curves.make_figure(read(two_environments)[:5])
    assert isinstance(chart, Chart)
    assert chart.title == "CartPole-v1"
    assert len(matplotlib_backend.make_figure(chart).axes) == 1


def test_in_the_terminal_panels_are_below_each_other(two_environments):
    spoken = rlflame("plot", two_environments, "-o", "-")
    assert spoken.code == 0, spoken.err
    first, second = spoken.out.split("Hopper-v5\n")
    assert first.startswith("CartPole-v1\n")
    assert "  A  PPO, 3 seeds\n  B  REINFORCE, 2 seeds\n" in first
    assert "  A  PPO, 3 seeds\n" in second
    assert "  B  " not in second
    assert "300k" in second
    assert "300k" not in first
    assert spoken.out.count("interquartile") == 1


def test_a_picture_of_panels_is_as_wide_and_grows_by_rows(two_environments):
    for number in range(3):
        make(two_environments / f"y-{number}", environment=f"Other-v{number}",
             evaluations=[(s, s) for s in (1, 2, 3)])  # fmt: skip
    assert rlflame("plot", two_environments).code == 0
    sizes = (two_environments.parent / "plot.png").read_bytes()[16:24]
    assert int.from_bytes(sizes[:4], "big") == 1200
    assert int.from_bytes(sizes[4:], "big") > 1200  # five panels need three rows


@pytest.mark.parametrize(
    ("labels", "columns"),
    [(["PPO"], 2), (["a name far too long for half of the sheet"], 1), (["middling name"] * 20, 1)],
)
def test_panels_with_much_to_say_are_in_rows_as_wide_as_the_sheet(labels, columns):
    here = np.arange(2.0)
    chart = Chart("", "", "", tuple(Series(label, here, here) for label in labels))
    figure = matplotlib_backend.make_figure(Panels((chart, chart)))
    assert {axes.get_subplotspec().get_gridspec().ncols for axes in figure.axes} == {columns}
    figure.draw_without_rendering()
    assert all(axes.get_position().width > 0.35 for axes in figure.axes)


def test_episodes_too_few_for_a_line_have_their_name_in_the_legend(tmp_path):
    for name in ("CartPole-v1", "Hopper-v5"):
        make(tmp_path / name, algorithm="reinforce", environment=name, episodes=[(1.0, 9)] * 3)
    for axes in matplotlib_backend.make_figure(curves.make_figure(read(tmp_path))).axes:
        assert names_in(axes) == ["REINFORCE, seed 0"]
