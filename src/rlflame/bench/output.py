"""A benchmark's files: JSON, a table for `rlflame plot`, Markdown, and the picture of it.

Must not know: how anything was timed, or what the numbers mean.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflame.analysis.plots import matplotlib_backend
from rlflame.analysis.plots.chart import Plot
from rlflame.analysis.plots.speedup import make_speedup_chart
from rlflame.analysis.report.document import Document, to_markdown
from rlflame.console.output import as_json_text
from rlflame.errors import ConfigError, RlflameError, format_shell
from rlflame.storage.safetensors_file import write_atomically


class ResultFolder:
    """Where results go; each file is whole or absent, whenever one looks."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        if os.path.lexists(path) and not path.is_dir():
            raise ConfigError(
                f"{path} is no folder, and results go into one.",
                format_shell("-o", find_free_name(path)),
            )
        json_path = self._make_path("json")
        if json_path.exists():
            raise ConfigError(
                f"{json_path} is there already, and stays as it is.",
                format_shell("-o", find_free_name(path)),
            )
        # Tried before anything is measured; where nothing comes to be, nothing is left.
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise RlflameError(
                f"{path} cannot be written: {error.strerror or error}.", "another folder: -o DIR"
            ) from error
        with contextlib.suppress(OSError):
            for folder in new:
                folder.rmdir()

    def write(
        self,
        facts: dict[str, Any],
        document: Document,
        table: Sequence[Sequence[object]] = (),
    ) -> list[Path]:
        """The files written; `to_table` begins with its head."""
        contents = {
            "json": as_json_text(facts, indent=1) + "\n",
            "md": to_markdown(document),
        }
        if table:
            contents["csv"] = _format_csv(table)
        self._path.mkdir(parents=True, exist_ok=True)
        for suffix, text in contents.items():
            write_atomically(self._make_path(suffix), text.encode())
        return [self._make_path(suffix) for suffix in contents]

    def draw_table(self) -> Path:
        """The picture of the table; PlotUnavailable where there is nothing to draw with."""
        matplotlib_backend.check_available()
        out = self._make_path("png")
        write_atomically(
            out, matplotlib_backend.render_image(make_speedup_chart(self._make_path("csv")), out)
        )
        return out

    def draw_curves(self, drawing: Plot) -> Path:
        """A second picture, beside that of the table."""
        out = self._make_path("curves.png")
        write_atomically(out, matplotlib_backend.render_image(drawing, out))
        return out

    def _make_path(self, suffix: str) -> Path:
        return self._path / f"{self._name}.{suffix}"


def find_free_name(path: Path) -> Path:
    """A name that is free beside it, also where it is the folder one is in."""
    resolved = path.resolve()
    names = (resolved.with_name(f"{resolved.name}-{number}") for number in itertools.count(2))
    free = next(name for name in names if not name.exists())
    return Path(os.path.relpath(free)) if not path.is_absolute() else free


def _format_csv(table: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()
