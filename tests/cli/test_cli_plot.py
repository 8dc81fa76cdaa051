"""`rlflame plot` and `train --plot`: charts, and messages if there is no chart."""

from __future__ import annotations

import errno
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from commands import TINY_REINFORCE, rlflame
from run_files import make

from rlflame.analysis import curves
from rlflame.analysis.plots import matplotlib_backend, terminal_backend
from rlflame.analysis.plots.chart import Bars, Chart, Panels, Series, format_compact, make_ticks
from rlflame.analysis.plots.speedup import make_speedup_chart
from rlflame.storage import run_reader

WORDS = ("train", *TINY_REINFORCE, "--algo", "reinforce", "--iterations", "15", "--plot")
MISSING = "matplotlib is not installed"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs(tmp_path):
    """Three seeds of one recipe and two of another."""
    for seed in range(3):
        evaluations = [(s, s / 10 + seed) for s in (100, 200, 300)]
        make(tmp_path / f"runs/ppo-{seed}", seed=seed, evaluations=evaluations)
    for seed in range(2):
        evaluations = [(s, s / 20 + seed) for s in (100, 200, 300)]
        make(tmp_path / f"runs/re-{seed}", seed=seed, algorithm="reinforce",
             evaluations=evaluations)  # fmt: skip
    return tmp_path / "runs"


@pytest.fixture
def no_matplotlib(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def drawn(*folders, **given):
    return matplotlib_backend.make_figure(
        curves.make_chart([run_reader.read_run(f) for f in folders], **given)
    ).axes[0]


# train --plot


def test_what_a_run_s_own_picture_shows(tmp_path):
    from matplotlib.colors import to_rgb

    returns = [float(x) for x in range(60)]
    folder = make(tmp_path / "a", episodes=[(x, 1) for x in returns])
    axes = drawn(folder, metric="episode_return")
    every, average = axes.lines
    assert list(every.get_ydata()) == returns
    assert list(every.get_xdata()) == list(range(1, 61))
    assert every.get_alpha() == 0.6
    assert list(average.get_xdata()) == list(range(1, 61))
    # The mean of the 25 points before a point, the point itself and the 24 points after it.
    assert list(average.get_ydata())[25:36] == [24.5 + k for k in range(11)]
    assert average.get_ydata()[0] == sum(range(25)) / 50
    assert to_rgb(average.get_color()) == (1.0, 0.0, 0.0)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Training episodes", "Return")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["Episode", "Mean over 50 episodes"]
    assert axes.xaxis.get_gridlines()[0].get_visible()


def test_a_run_leaves_a_picture_of_all_its_episodes(tmp_path):
    spoken = rlflame(*WORDS)
    assert spoken.code == 0, spoken.err
    out = tmp_path / "runs/cartpole-reinforce-0"
    assert (out / "returns.png").read_bytes().startswith(b"\x89PNG")
    assert len(run_reader.read_run(out).read_episodes()[0]) == 15 * 4
    assert "runs/cartpole-reinforce-0/returns.png" in spoken.err


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_there_is_a_sentence_and_the_run_itself(tmp_path):
    spoken = rlflame(*WORDS)
    assert spoken.code == 0
    assert spoken.err == (
        "matplotlib is not installed, so there will be no plot. pip install 'rlflame[plot]'\n"
    )
    out = tmp_path / "runs/cartpole-reinforce-0"
    assert (out / "result.json").exists()
    assert not (out / "returns.png").exists()


# plot


def test_seeds_become_one_line_with_a_band_and_a_legend(runs):
    chart = curves.make_chart([run_reader.read_run(f) for f in sorted(runs.iterdir())])
    axes = matplotlib_backend.make_figure(chart).axes[0]
    assert len(axes.lines) == 2
    # Seeds 0, 1, 2 are added to the value, so the interquartile mean is the value plus 1.
    assert list(axes.lines[0].get_ydata()) == pytest.approx([11.0, 21.0, 31.0])
    assert len(axes.collections) == 2
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "PPO, 3 seeds",
        "REINFORCE, 2 seeds",
    ]
    assert axes.get_title(loc="left") == "CartPole-v1"
    assert len({line.get_color() for line in axes.lines}) == 2


def test_a_png_is_1200_pixels_wide_and_an_svg_has_its_text_as_text(runs):
    spoken = rlflame("plot", runs)
    assert (spoken.code, spoken.out) == (0, "plot.png\n"), spoken.err
    data = (runs.parent / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 1200
    assert rlflame("plot", runs, "-o", "p.svg").code == 0
    texts = "".join(ElementTree.parse(runs.parent / "p.svg").getroot().itertext())
    assert "REINFORCE, 2 seeds" in texts
    assert "Environment steps" in texts


def test_one_run_has_its_picture_in_its_folder(runs):
    assert rlflame("plot", runs / "ppo-0").out == f"{runs}/ppo-0/plot.png\n"
    assert (runs / "ppo-0/plot.png").exists()


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("absent",), 1, "absent does not exist"),
        (("runs/ppo-0", "-o", "p.gif"), 2, ".png, .svg or .pdf file, not as 'p.gif'"),
        (("runs/ppo-0", "-o", "nowhere/p.png"), 1, "nowhere/p.png could not be written"),
        (("runs/ppo-0", "-x", "time"), 2, "There is no x axis 'time'"),
        (("runs/ppo-0", "--metric", "loss"), 1, "has no loss yet"),
        (("times.csv",), 1, "times.csv cannot be read"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence_and_a_next_command(runs, words, code, sentence):
    spoken = rlflame("plot", *words)
    assert spoken.code == code
    assert sentence in spoken.err
    assert "  hint: " in spoken.err
    assert "Traceback" not in spoken.err


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("metrics.jsonl", '{"steps": Infinity, "loss": 1.0}'),
        ("metrics.jsonl", '{"steps": "100", "loss": 1.0}'),
        ("config.toml", '[learning]\nseed = "one"'),
    ],
)
def test_a_damaged_run_is_named(runs, name, lines):
    (runs / "ppo-0" / name).write_text(lines + "\n")
    spoken = rlflame("plot", runs / "ppo-0")
    assert spoken.code == 1
    assert f"ppo-0/{name} is" in spoken.err
    assert "Internal error in rlflame (" not in spoken.err


def test_what_is_no_number_is_no_point(tmp_path):
    values = [(100, 1.0), (200, math.nan), (300, 3.0), (400, math.inf)]
    episodes = [(1.0, 100), (math.nan, 100), (3.0, 100)]
    folder = make(tmp_path / "a", iterations=values, episodes=episodes)
    (line,) = curves.make_chart([run_reader.read_run(folder)], smooth=2).series
    assert line.x.tolist() == [100.0, 300.0]
    assert line.y.tolist() == [1.0, 2.0]
    assert run_reader.read_run(folder).read_episodes()[0].tolist() == [1.0, 3.0]
    assert rlflame("plot", folder, "-o", "-").code == 0


def test_a_picture_that_cannot_be_written_leaves_the_old_one(runs, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for words in (("plot", "runs/ppo-0", "-o", "a.png"), ("report", "runs/ppo-0", "-o", "a.md")):
        out = Path(words[-1])
        out.write_text("as it was")
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            spoken = rlflame(*words)
        assert spoken.code == 1
        assert f"{out} could not be written: No space left" in spoken.err
        assert out.read_text() == "as it was"
    assert not [*Path().glob(".a.*")]


def test_without_matplotlib_runs_are_drawn_in_the_terminal(runs):
    code = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
sys.meta_path.insert(0, Forbid())
sys.modules["matplotlib"] = None
from rlflame.__main__ import main
main()
"""

    def plot(*words, **environment):
        return subprocess.run(
            [sys.executable, "-c", code, "plot", "runs", *words], capture_output=True,
            encoding="utf-8", timeout=60, env={**__import__("os").environ, **environment},
        )  # fmt: skip

    spoken = plot(PYTHONIOENCODING="utf-8")
    assert spoken.returncode == 0
    assert "A  PPO, 3 seeds" in spoken.stdout
    assert "B  REINFORCE, 2 seeds" in spoken.stdout
    assert any(0x2800 < ord(c) < 0x2900 for c in spoken.stdout)
    assert f"{MISSING}. To save an image: pip install 'rlflame[plot]'" in spoken.stderr
    # Without matplotlib, a requested file is an error. Without Braille, the chart uses letters.
    asked = plot("-o", "p.png", PYTHONIOENCODING="ascii")
    assert asked.returncode == 1
    assert f"{MISSING}, so there will be no plot" in asked.stderr
    assert asked.stdout.isascii()
    assert asked.stdout.count("A") > 10


# In characters


def steps_of(chart, **given):
    return terminal_backend.render_text(chart, 60, 8, **given).splitlines()


def test_a_rising_line_rises_from_corner_to_corner():
    line = Series("up", np.array([0.0, 10.0]), np.array([0.0, 100.0]))
    lines = steps_of(Chart("T", "steps", "return", (line,)), braille=False)
    assert lines[0] == "T"
    plot = [text[10:] for text in lines[3:11]]
    assert plot[0].endswith("A")
    assert plot[-1].startswith("A")
    starts = [len(row) - len(row.lstrip()) for row in plot]
    assert starts == sorted(starts, reverse=True)
    assert "100" in lines[3]
    assert lines[-1] == "  A  up"
    assert all(len(text) <= 60 for text in lines)


def test_braille_dots_lie_where_the_numbers_are():
    line = Series("flat", np.array([0.0, 1.0]), np.array([0.0, 0.0]))
    other = Series("top", np.array([0.0, 1.0]), np.array([1.0, 1.0]))
    lines = steps_of(Chart("T", "x", "y", (line, other)))
    # Dots 7 and 8 are the lowest of the last row, and dots 1 and 4 the highest of the first.
    assert set(lines[10][10:]) == {"\u28c0", "A"}
    assert set(lines[3][10:]) == {"\u2809", "B"}
    assert all(not text[10:].strip() for text in lines[4:10])


def test_episodes_too_few_for_an_average_are_dots():
    empty = np.zeros(0)
    dots = (np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    lines = steps_of(Chart("T", "x", "y", (Series("few", empty, empty, dots=dots, average_of=50),)))
    assert sum(c.isprintable() and ord(c) > 0x2800 for text in lines for c in text) == 2
    assert lines[-1] == "  A  few, every episode"


def test_round_ticks():
    assert make_ticks(0.0, 500.0, 5) == [0, 100, 200, 300, 400, 500]
    assert make_ticks(-3.0, 12.0, 3) == [0, 5, 10]
    assert make_ticks(0.11, 0.52, 5) == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert [format_compact(x) for x in (0.0, 20000.0, 1.5e6, -0.25)] == [
        "0",
        "20k",
        "1.5M",
        "-0.25",
    ]


# Speed-up


def table(tmp_path, *rows):
    path = tmp_path / "scaling.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_speed_up_is_beside_the_fastest_at_the_fewest_workers(tmp_path):
    path = table(
        tmp_path, "workers,backend,seconds", "1,local,12", "1,local,8", "1,local,10", "1,flame,20",
        "4,local,4", "4,flame,5",
    )  # fmt: skip
    bars = make_speedup_chart(path)
    assert bars.groups == ("1", "4")
    assert bars.names == ("local", "flame")
    # The speed-up is relative to the median of 8, 10 and 12; flame with 1 took twice as long.
    assert bars.heights.tolist() == [[1.0, 2.5], [0.5, 2.0]]
    assert bars.ideal.tolist() == [1.0, 4.0]
    axes = matplotlib_backend.make_figure(bars).axes[0]
    assert {"2.50×", "0.50×"} <= {text.get_text() for text in axes.texts}
    assert rlflame("plot", path).out == f"{path.with_suffix('.png')}\n"
    assert "4 flame" in terminal_backend.render_text(bars, 60)


def test_speed_up_is_per_step_where_steps_differ(tmp_path):
    path = table(tmp_path, "workers,backend,seconds,steps", "1,local,10,1000", "2,local,10,1500")
    assert make_speedup_chart(path).heights.tolist() == [[1.0, 1.5]]


def test_more_backends_than_colours(tmp_path):
    path = table(tmp_path, "workers,backend,seconds", *(f"1,b{i},10" for i in range(9)))
    assert rlflame("plot", path, "-o", "p.png").code == 0
    patches = matplotlib_backend.make_figure(make_speedup_chart(path)).axes[0].patches
    assert len({(patch.get_facecolor(), patch.get_hatch()) for patch in patches}) == 9


def test_cases_have_plots_and_bases_of_their_own_and_one_height(tmp_path):
    path = table(
        tmp_path, "case,workers,backend,seconds", "1 ms,1,local,1", "1 ms,1,flame,2",
        "1 ms,4,local,0.5", "9 ms,1,local,8", "9 ms,4,local,2", "9 ms,4,flame,4", "9 ms,8,local,1",
    )  # fmt: skip
    cases = make_speedup_chart(path)
    assert isinstance(cases, Panels)
    assert [bars.title for bars in cases.parts] == ["1 ms", "9 ms"]
    assert [bars.names for bars in cases.parts] == [("local", "flame")] * 2
    assert cases.parts[0].heights[0].tolist() == [1.0, 2.0]
    assert cases.parts[0].heights[1, 0] == 0.5
    assert cases.parts[1].heights[0].tolist() == [1.0, 4.0, 8.0]
    assert cases.notes == (
        "Medians of repetitions, relative to the fastest result with the fewest workers.",
    )
    axes = matplotlib_backend.make_figure(cases).axes
    assert len({one.get_ylim() for one in axes}) == 1
    for one in axes:
        labels = [text.get_text() for text in one.get_legend().get_texts()]
        assert labels == ["Ideal", "local", "flame"]
        assert len({patch.get_facecolor() for patch in one.patches}) == 2
    assert len({one.patches[0].get_facecolor() for one in axes}) == 1
    shown = terminal_backend.render_text(cases, 60)
    assert shown.index("1 ms") < shown.index("4 local") < shown.index("9 ms")
    assert shown.count("Medians of repetitions") == 1


def test_cases_with_other_fewest_workers_say_each_what_is_one(tmp_path):
    path = table(
        tmp_path,
        "case,workers,backend,seconds",
        "a,1,local,4",
        "a,2,local,2",
        "b,2,local,2",
        "b,4,local,1",
    )
    assert [bars.y_label for bars in make_speedup_chart(path).parts] == [
        "Speed-up over 1 worker", "Speed-up over 2 workers",
    ]  # fmt: skip


def test_a_backend_has_one_colour_in_all_plots(tmp_path):
    path = table(
        tmp_path, "case,workers,backend,seconds", "a,1,local,2", "a,1,flame,4", "b,1,flame,2",
        "b,2,flame,1", "c,1,flame,2", "c,1,local,4",
    )  # fmt: skip
    colours = [
        {bars.get_label(): bars[0].get_facecolor() for bars in axes.containers}
        for axes in matplotlib_backend.make_figure(make_speedup_chart(path)).axes
    ]
    assert len(colours) == 3
    assert all(one == colours[0] for one in colours)
    assert (
        "1 local"
        not in terminal_backend.render_text(make_speedup_chart(path), 60)
        .split("\nb\n")[1]
        .split("\nc\n")[0]
    )


def test_figures_above_bars_do_not_overlap(tmp_path):
    for fleets, workers in ((2, 4), (3, 5), (1, 3), (1, 8)):
        rows = [
            f"{case} ms,{2**n},b{fleet},10"
            for case in range(4)
            for fleet in range(fleets)
            for n in range(workers)
        ]
        cases = make_speedup_chart(table(tmp_path, "case,workers,backend,seconds", *rows))
        figure = matplotlib_backend.make_figure(cases)
        figure.draw_without_rendering()
        for axes in figure.axes:
            boxes = sorted(
                (text.get_window_extent() for text in axes.texts if text.get_text()),
                key=lambda box: box.x0,
            )
            assert len(boxes) == fleets * workers
            for left, right in itertools.pairwise(boxes):
                assert left.x1 <= right.x0 + 0.5


def test_a_backend_without_a_measurement_has_no_bar(tmp_path):
    path = table(tmp_path, "workers,backend,seconds", "1,local,10", "2,flame,5")
    bars = make_speedup_chart(path)
    assert np.isnan(bars.heights).tolist() == [[False, True], [True, False]]
    assert isinstance(bars, Bars)
    assert "2 local" not in terminal_backend.render_text(bars, 60)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            ("workers,seconds", "1,2"),
            "columns are workers (1 to 1,000,000), fleet (a name) and seconds",
        ),
        (("workers,backend,seconds",), "has no rows"),
        (("workers,backend,seconds", "one,local,2"), "Line 2 of "),
        (
            ("learners,recipe,seconds", "1000001,a,2"),
            "the columns are learners (1 to 1,000,000), recipe",
        ),
        (("learners,recipe,seconds", "0,a,2"), "Line 2 of "),
        (("workers,backend,seconds", "1,local,2", "1,local,-2"), "Line 3 of "),
        (("workers,backend,seconds", "1,local,nan"), "Line 2 of "),
        (("workers,backend,seconds", "", "1,local"), "Line 3 of "),
        (("workers,backend,seconds", "1,local,2,3"), "Line 2 of "),
        (("workers,backend,seconds", "1,,2"), "Line 2 of "),
        (("workers,backend,seconds,steps", "1,a,2,9", "2,a,2,"), "Line 3 of "),
        (("workers,backend,seconds,steps", "1,a,2,0"), "Line 2 of "),
        (("case,workers,backend,seconds", "x,1,a,2", ",2,a,2"), "Line 3 of "),
        (("workers;backend;seconds", "1;a;2"), "Line 2 of "),
        (("workers,backend,seconds,steps", "1,a,5e-324,1e300"), "Line 2 of "),
        (("workers,backend,seconds", "1,a,1e308"), "Line 2 of "),
        (("workers,backend,seconds", "1,a\x00b,2"), "Line 2 of "),
    ],
)
def test_a_table_that_is_none(tmp_path, rows, sentence):
    """The error names the line and its contents."""
    spoken = rlflame("plot", table(tmp_path, *rows))
    assert spoken.code == 1
    assert sentence in spoken.err
    assert "  hint: " in spoken.err


def test_a_table_that_is_no_text(tmp_path):
    path = tmp_path / "scaling.csv"
    path.write_bytes(b"workers,backend,seconds\n1,\xff\xfe,2\n")
    assert "is not UTF-8 text" in rlflame("plot", path).err
    # As a spreadsheet program saves it, with a byte order mark.
    path.write_bytes(b"\xef\xbb\xbfworkers,backend,seconds\r\n1,local,2\r\n")
    assert make_speedup_chart(path).names == ("local",)


def test_what_is_for_curves_does_not_count_for_a_table(tmp_path):
    path = table(tmp_path, "workers,backend,seconds", "1,local,2")
    for words in (("-x", "wall"), ("--smooth", "3"), ("--metric", "loss")):
        spoken = rlflame("plot", path, *words)
        assert spoken.code == 2
        assert "a chart of run times needs one .csv file, without -x" in spoken.err
        assert f"  hint: rlflame plot {path}" in spoken.err


@pytest.mark.parametrize("named", ["json", "two"])
def test_of_a_benchmark_the_table_is_named(tmp_path, named):
    path = table(tmp_path, "workers,backend,seconds", "1,local,2")
    (tmp_path / "scaling.json").write_text("{}")
    (tmp_path / "other.csv").write_text(path.read_text())
    given = {
        "json": [tmp_path / "scaling.json"],
        "two": [path, tmp_path / "other.csv"],
    }
    spoken = rlflame("plot", *given[named])
    assert spoken.code == 2
    assert "a chart of run times needs one .csv file" in spoken.err
    assert f"  hint: rlflame plot {path}" in spoken.err


def test_a_backend_that_begins_with_a_line_is_in_the_legend(tmp_path):
    path = table(tmp_path, "workers,backend,seconds", "1,_mine,2", "1,yours,3")
    (axes,) = matplotlib_backend.make_figure(make_speedup_chart(path)).axes
    labels = [text.get_text().strip() for text in axes.get_legend().get_texts()]
    assert labels == ["Ideal", "_mine", "yours"]


def test_names_are_names_and_no_formulas(tmp_path):
    path = tmp_path / "a$^{$.csv"
    rows = (f"{case},{n},{name},{n}" for case in ("$\\bad{$", "b") for name in ("$^{$", "x_$1$")
            for n in (1, 2))  # fmt: skip
    path.write_text("\n".join(["case,workers,backend,seconds", *rows]) + "\n")
    spoken = rlflame("plot", path, "-o", tmp_path / "p.svg")
    assert spoken.code == 0, spoken.err
    drawn = (tmp_path / "p.svg").read_text()
    for name in ("$\\bad{$", "$^{$", "x_$1$", "Speed-up: a$^{$"):
        assert f">{name}<" in drawn


def test_where_there_is_no_room_there_are_no_figures(tmp_path):
    rows = [f"{2**n},b{fleet},10" for fleet in range(6) for n in range(12)]
    (axes,) = matplotlib_backend.make_figure(
        make_speedup_chart(table(tmp_path, "workers,backend,seconds", *rows))
    ).axes
    assert not axes.texts


@pytest.mark.parametrize("words", [(), ("-o", "x.png")])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_opens_the_image_unless_its_file_is_chosen(
    runs, monkeypatch, words, is_terminal
):
    images: list[Path] = []
    monkeypatch.setattr("rlflame.rendering.image_window.open_image", images.append)
    monkeypatch.setattr("rlflame.cli.plot.is_interactive", lambda stream: is_terminal)
    spoken = rlflame("plot", "runs/ppo-0", *words)
    assert spoken.code == 0, spoken.err
    assert spoken.lines == [str(Path(words[-1] if words else "runs/ppo-0/plot.png"))]
    assert images == ([Path("runs/ppo-0/plot.png")] if is_terminal and not words else [])


@pytest.mark.parametrize("display", ["--plain", "--json", "--quiet"])
def test_a_run_opens_its_plot_only_if_a_person_reads_its_output(monkeypatch, display):
    images: list[Path] = []
    monkeypatch.setattr("rlflame.rendering.image_window.open_image", images.append)
    monkeypatch.setattr("rlflame.cli.train.is_interactive", lambda stream: True)
    spoken = rlflame(*WORDS, display, "--out", "run")
    assert spoken.code == 0, spoken.err
    assert images == ([Path("run/returns.png")] if display == "--plain" else [])
