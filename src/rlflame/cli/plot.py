"""The `rlflame plot` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug
from rlflame.console.output import (
    can_encode,
    is_interactive,
    print_note,
    print_result,
    print_result_lines,
)
from rlflame.errors import ConfigError, format_command

if TYPE_CHECKING:
    from rlflame.analysis.plots.chart import Plot

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="Run folders, folders that contain them, or one .csv file with run times.",
    ),
]
_AXIS_HELP = (
    "x-axis: steps (per learner), total-steps (of all learners), wall (time), cpu (time) or "
    "episodes. [default: steps]"
)
Axis = Annotated[str | None, typer.Option("-x", "--x", metavar="AXIS", help=_AXIS_HELP)]
Smooth = Annotated[
    int | None,
    typer.Option(metavar="N", help="Average the N points around each point. [default: 1]"),
]
_METRIC_HELP = (
    "Metric: a name in metrics.jsonl, or episode_return. [default: evaluation returns if each run "
    "has at least three, otherwise training returns]"
)
Metric = Annotated[str | None, typer.Option(metavar="NAME", help=_METRIC_HELP)]
_OUT_HELP = (
    "Output file (.png, .svg or .pdf), or - to draw in the terminal. [default: RUN/plot.png; "
    "plot.png for several runs]"
)
Out = Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help=_OUT_HELP)]


def plot(
    runs: Runs,
    axis: Axis = None,
    smooth: Smooth = None,
    metric: Metric = None,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Plot the learning curves of runs.

    Each environment has a separate panel. Runs that differ only in the seed become one curve with a
    95% confidence interval. Without --out, a terminal with a display also opens the image in a
    window. Without matplotlib, the plot is drawn in the terminal.
    """
    from rlflame.analysis.plots import matplotlib_backend
    from rlflame.analysis.plots.speedup import make_speedup_chart
    from rlflame.rendering.image_window import open_image
    from rlflame.storage import safetensors_file

    if out is not None and str(out) != "-":
        matplotlib_backend.check_suffix(out)
    drawing: Plot
    if any(path.suffix in (".csv", ".json") for path in runs):
        _check_table(runs, axis, smooth, metric)
        drawing, target = make_speedup_chart(runs[0]), runs[0].with_suffix(".png")
    else:
        drawing, target = _draw_runs(runs, axis, metric, 1 if smooth is None else smooth)
    if str(out) == "-":
        draw_in_terminal(drawing)
        return
    try:
        matplotlib_backend.check_available()
    except matplotlib_backend.PlotUnavailableError:
        draw_in_terminal(drawing)
        if out is not None:
            raise
        print_note("matplotlib is not installed. To save an image: pip install 'rlflame[plot]'")
        return
    target = out or target
    safetensors_file.write_atomically(target, matplotlib_backend.render_image(drawing, target))
    print_result(str(target))
    if out is None and is_interactive(sys.stdout):
        open_image(target)


def _draw_runs(
    paths: list[Path], axis: str | None, metric: str | None, smooth: int
) -> tuple[Plot, Path]:
    """Return the chart of the runs, and the default path of its image."""
    from rlflame.analysis import curves
    from rlflame.storage import run_reader
    from rlflame.storage.sweep_folder import is_sweep

    runs, notes = run_reader.read_runs(paths)
    for note in notes:
        print_note(note)
    drawing = curves.make_figure(runs, axis, metric, smooth)
    if len(runs) == 1:
        return drawing, runs[0].folder / "plot.png"
    return drawing, (paths[0] if len(paths) == 1 and is_sweep(paths[0]) else Path()) / "plot.png"


def _check_table(paths: list[Path], *options: object) -> None:
    """Raise ConfigError unless there is one .csv file and no option for curves."""
    if len(paths) > 1 or paths[0].suffix != ".csv" or any(option is not None for option in options):
        raise ConfigError(
            f"{', '.join(map(str, paths))}: a chart of run times needs one .csv file, without -x, "
            "--smooth or --metric.",
            format_command("plot", paths[0].with_suffix(".csv")),
        )


def draw_in_terminal(drawing: Plot) -> None:
    import shutil

    from rlflame.analysis.plots import terminal_backend

    width = min(120, max(20, shutil.get_terminal_size().columns))
    print_result_lines(
        terminal_backend.render_text(drawing, width, braille=can_encode(terminal_backend.SYMBOLS))
    )
