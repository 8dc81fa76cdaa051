"""`rlflame plot`. Must not know: how curves are made or drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug

if TYPE_CHECKING:
    from rlflame.analysis.plots.chart import Drawing


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, folders of them, or one .csv of workers,backend,seconds.",
        ),
    ],
    axis: Annotated[
        str | None,
        typer.Option(
            "-x",
            "--x",
            metavar="AXIS",
            help="steps, total-steps, wall, cpu or episodes. [default: steps]",
        ),
    ] = None,
    smooth: Annotated[
        int | None,
        typer.Option(metavar="N", help="Mean of each point and the N - 1 before it. [default: 1]"),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A name of metrics.jsonl, or episode_return. [default: the evaluations if there "
            "are three, else the training return]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="A .png, .svg or .pdf file; - draws in the terminal. [default: RUN/plot.png, of "
            "several runs plot.png]",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw runs; those that differ in the seed alone become one line with its interval.

    Each environment has a panel of its own.
    Without matplotlib they are drawn in the terminal.
    """
    del debug
    from rlflame.analysis import curves
    from rlflame.analysis.plots import matplotlib_backend
    from rlflame.analysis.plots.speedup import speedup
    from rlflame.console.output import say, say_aside
    from rlflame.storage import run_reader, safetensors_file
    from rlflame.storage.sweep_dir import is_job

    if out is not None and str(out) != "-":
        matplotlib_backend.check_suffix(out)
    drawing: Drawing
    if any(one.suffix == ".csv" or _results(one) for one in runs):
        _check_table(runs, {"-x": axis, "--smooth": smooth, "--metric": metric})
        drawing, where = speedup(runs[0]), runs[0].with_suffix(".png")
    else:
        found, notes = run_reader.read_all(runs)
        for note in notes:
            say_aside(note)
        drawing = curves.picture(found, axis, metric, 1 if smooth is None else smooth)
        where = Path("plot.png")
        if len(found) == 1 or (len(runs) == 1 and is_job(runs[0])):
            where = (found[0].folder if len(found) == 1 else runs[0]) / "plot.png"
    if str(out) == "-":
        draw_here(drawing)
        return
    try:
        matplotlib_backend.check_available()
    except matplotlib_backend.PlotUnavailable:
        draw_here(drawing)
        if out is not None:
            raise
        say_aside("matplotlib is not installed: pip install 'rlflame[plot]' for a picture.")
        return
    where = out or where
    safetensors_file.write_atomically(where, matplotlib_backend.image(drawing, where))
    if drawing.remark:
        say_aside(drawing.remark)
    say(str(where))


def _results(path: Path) -> Path | None:
    """The results of a benchmark that are named, themselves or by their folder."""
    from rlflame.analysis.report import bench_comparison

    return path if path.suffix == ".json" and path.is_file() else bench_comparison.meant(path)


def _check_table(given: list[Path], options: dict[str, object]) -> None:
    """One table of run times, and nothing that is for curves."""
    from rlflame.errors import ConfigError, typed

    if len(given) > 1 or given[0].suffix != ".csv":
        named = ", ".join(map(str, given))
        beside = [(found := _results(path)) and found.with_suffix(".csv") for path in given]
        tables = [table for table in (*given, *beside) if table and table.suffix == ".csv"]
        there = next((table for table in tables if table.is_file()), None)
        if there is None:
            file = next(filter(None, map(_results, given)))
            raise ConfigError(
                f"{named}: of these results of a benchmark there is no picture.",
                typed("report", file),
            )
        raise ConfigError(f"{named}: a picture of run times is of one .csv.", typed("plot", there))
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value!r}, which is for curves of runs, and {given[0]} has run times.",
                typed("plot", given[0]),
            )


def draw_here(drawing: Drawing) -> None:
    import shutil

    from rlflame.analysis.plots import terminal_backend
    from rlflame.console.output import say_lines, takes

    width = min(120, max(20, shutil.get_terminal_size().columns))
    say_lines(terminal_backend.text(drawing, width, braille=takes(terminal_backend.SYMBOLS)))
