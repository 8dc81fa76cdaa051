"""Charts as text for terminals of any width: no long lines, and no lost text."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rlflame.analysis.plots import terminal_backend
from rlflame.analysis.plots.chart import Bars, Chart, Panels, Series

WIDTHS = (20, 33, 40, 80, 120)


def chart(title="CartPole-v1: PPO, clip_range 0.3, 12 seeds", top=123_456.0) -> Chart:
    x = np.linspace(0.0, 1_234_567.0, 40)
    lines = tuple(
        Series(f"PPO, gae_lambda 0.{k}, clip_range 0.3, 3 seeds", x, np.linspace(-top, top, 40) * k)
        for k in (1, 2)
    )
    remark = "runs/one-of-a-long-name has no eval_return_mean yet. This run is skipped."
    return Chart(title, "Environment steps", "Evaluation return", lines, ("Line: mean.", remark))


BARS = Bars(
    "Speed-up: scaling",
    "Workers",
    "Times as fast as 1 worker",
    ("1", "16"),
    ("local, hopper-heavy", "flame, hopper-heavy"),
    np.array([[1.0, 12.34], [0.5, 9.0]]),
    np.array([1.0, 16.0]),
    ("Medians of repetitions, beside the fastest with 1 worker.",),
)


def words(text):
    return re.findall(r"[^\s\u2800-\u28ff]+", text)


@pytest.mark.parametrize("braille", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "drawing", [chart(), Panels((chart("A"), chart("B")), ("Line: mean.",)), BARS]
)
def test_no_line_is_longer_than_the_terminal_is_wide(drawing, width, braille):
    text = terminal_backend.render_text(drawing, width, braille=braille)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_all_text_is_shown_at_every_width(width):
    text = terminal_backend.render_text(chart(), width)
    for part in ("Evaluation return", "Environment steps", *chart().title.split(), "Line: mean."):
        assert all(word in words(text) for word in part.split())
    # The long name is wrapped and complete.
    assert "".join(chart().notes).replace(" ", "") in "".join(text.split())
    for series in chart().series:
        assert series.label.replace(" ", "") in "".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_on_the_axes_do_not_run_into_each_other(width):
    # Only the lines with numbers. The axis of returns has a bar next to it.
    rows = [line for line in terminal_backend.render_text(chart(), width).splitlines()
            if line.strip() and set(line) <= set("0123456789.kM -")]  # fmt: skip
    (under,) = rows
    steps = [float(word[:-1]) * {"k": 1e3, "M": 1e6}[word[-1]] if word != "0" else 0.0
             for word in under.split()]  # fmt: skip
    assert len(steps) >= 2
    assert steps == sorted(steps)
    assert len(set(np.round(np.diff(steps)))) == 1
    assert steps[-1] < 1_234_567.0


@pytest.mark.parametrize("width", WIDTHS)
def test_bars_are_as_long_as_their_numbers_at_every_width(width):
    lines = [
        line
        for line in terminal_backend.render_text(BARS, width).splitlines()
        if line.startswith("  ") and "█" in line
    ]
    lengths = [line.count("█") for line in lines]
    assert len(lengths) == 4
    by_height = sorted(range(4), key=lambda i: BARS.heights.T.flat[i])
    assert [lengths[i] for i in by_height] == sorted(lengths)
    # The mark is at 16, and the bar ends at 12.34. The distance is correct to half a character.
    ideal = lines[2].index("┊") - lines[2].index("█")
    assert lengths[2] == pytest.approx(ideal * 12.34 / 16.0, abs=1.0)
