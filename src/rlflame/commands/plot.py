"""`rlflame plot`. Must not know: how curves are made or drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.commands.options import Debug

if TYPE_CHECKING:
    from rlflame.plot import Drawing


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
    from rlflame.display.mouth import say, say_aside
    from rlflame.files import tensor_file
    from rlflame.history import curves, recorded
    from rlflame.plot import picture
    from rlflame.plot.speedup import speedup
    from rlflame.seeds import is_job

    if out is not None and str(out) != "-":
        picture.check_suffix(out)
    drawing: Drawing
    if any(_is_table(one) for one in runs):
        _check_table(runs, {"-x": axis, "--smooth": smooth, "--metric": metric})
        drawing, where = speedup(runs[0]), runs[0].with_suffix(".png")
    else:
        found, notes = recorded.read_all(runs)
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
        picture.check_available()
    except picture.PlotUnavailable:
        draw_here(drawing)
        if out is not None:
            raise
        say_aside("matplotlib is not installed: pip install 'rlflame[plot]' for a picture.")
        return
    where = out or where
    tensor_file.write_atomically(where, picture.image(drawing, where))
    if drawing.remark:
        say_aside(drawing.remark)
    say(str(where))


def _is_table(path: Path) -> bool:
    return path.suffix == ".csv" or bool(_tables(path))


def _tables(path: Path) -> list[Path]:
    """Those of a benchmark, beside the JSON named or in the folder named, where no run is."""
    if path.suffix == ".json":
        return [table] if (table := path.with_suffix(".csv")).is_file() else []
    known = ("scaling", "learners", "dppo", "dsac")
    found = [path / f"{name}.csv" for name in known if (path / f"{name}.json").is_file()]
    return [table for table in found if table.is_file()]


def _check_table(given: list[Path], options: dict[str, object]) -> None:
    """One table of run times, and nothing that is for curves."""
    from rlflame.errors import ConfigError, shell

    tables = [table for one in given for table in ([one] if one.suffix == ".csv" else _tables(one))]
    if len(given) > 1 or given[0].suffix != ".csv":
        named = ", ".join(map(str, given))
        raise ConfigError(
            f"{named}: a picture of run times is of one .csv.",
            shell("rlflame", "plot", tables[0]),
        )
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value}, which is for curves of runs, and {given[0]} has run times.",
                shell("rlflame", "plot", given[0]),
            )


def draw_here(drawing: Drawing) -> None:
    import shutil

    from rlflame.display.mouth import say, takes
    from rlflame.plot import terminal

    width = min(120, max(20, shutil.get_terminal_size().columns))
    say(terminal.text(drawing, width, braille=takes(terminal.SYMBOLS)))
